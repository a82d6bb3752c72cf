"""Sequential solving: layers are quantized on inputs from quantized layers.

Blocks run one at a time, as in :mod:`.sequential`, on two streams: the float model, and the model as it will
be deployed. In each block the sites (:mod:`.sites`) of one stage are observed on all batches, the weights
that read them are quantized and replaced by their decoded values, and the next stage sees the difference.
Memory holds one block, the Gram matrices of one stage, and the values between blocks. Where a method says so,
the weights of a block are rounded once more, all together (:mod:`.block_rounding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ..errors import ZeropointError
from ..methods import LayerData, LayerResult, Loss
from ..methods.chain import rounding_of, start_of, without_rescalings
from ..methods.channels import ChannelFold, rescalings_of
from ..methods.method import CROSS, SUMS
from ..methods.rescaling import ChannelReader
from ..methods.signround import Sides
from ..progress import counted
from .absorbers import BlockProbe
from .block_chain import BlockChain, Steps, in_threads, keeping
from .block_rounding import BegunWeight, of_block, rounded_together
from .block_training import OnOutputs
from .calibrate import evaluating
from .layer import on_inputs
from .model_blocks import blocks_of
from .narrow_products import narrow_products
from .part_memo import PartMemo
from .rescale import (
    Absorbers,
    QuantizedReader,
    RescaledBlock,
    folded,
    require_same_outputs,
    rescalable,
    rescale,
    stored,
    two_sided,
)
from .site_inputs import EVERY, Shelf, SiteInputs, is_held, kin_of, loss_on
from .sites import Site, sites_of
from .solutions import Solutions, WeightTask, by_block, without_data
from .stage_inputs import StageInputs, sites_like

See = Callable[[str, torch.Tensor], None]
"""Takes the name and the input of a layer that is about to run."""


def solve(
    root: nn.Module, batches: Sequence[Any], tasks: Iterable[WeightTask], steps: Steps,
    solutions: Solutions, *, progress: bool = False,
) -> None:  # fmt: skip
    """Quantize a model's weights in the order in which they run.

    Args:
        root: the model, with fused weights as they are to be quantized; unchanged afterwards.
        batches: at least one; of eight and more, every eighth is held out.
        tasks: the weights.
        steps: blocks, and how they run.
        solutions: takes each result, in order, and has earlier results.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: for blocks that are not in the model, and statistics that no method can use.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with (
        evaluating(root),
        narrow_products(),
        keeping(steps.folder, steps.dtype) as floats,
        keeping(steps.folder, steps.dtype) as deployed,
    ):
        blocks = blocks_of(root, steps.blocks)
        of_float, of_deployed = BlockChain(root, blocks, floats), BlockChain(root, blocks, deployed)
        groups = by_block(tasks, [name for name, _ in blocks])
        absorbers = Absorbers()
        for step in counted(range(len(blocks) + bool(groups[-1])), "Solving blocks", shown=progress):
            name = blocks[step][0] if step < len(blocks) else ""
            with ExitStack() as stack:
                if name:
                    stack.enter_context(steps.loaded(name))
                pairs = any(_takes_pairs(task) for group in groups[step:] for task in group)
                place = of_float, of_deployed, step
                block = _Block(root, batches, groups[step], place, steps, pairs=pairs)
                stack.enter_context(block.restoring())
                stack.enter_context(block.rescaled(solutions, absorbers))
                block.solve(solutions)


def _takes_pairs(task: WeightTask) -> bool:
    return of_block(task) or not task.method.takes.keys().isdisjoint((CROSS, SUMS))


class _StopError(Exception):
    """Ends a block's run when a stage's sites have been seen."""


class _Block:
    """The tasks of one block, or outside of blocks.

    pairs: whether it, or one behind it, compares inputs with the float model's.
    """

    def __init__(
        self, root: nn.Module, batches: Sequence[Any], tasks: Sequence[WeightTask],
        place: tuple[BlockChain, BlockChain, int], steps: Steps, *, pairs: bool,
    ) -> None:  # fmt: skip
        self._root, self._batches, self._tasks, self._steps = root, batches, tasks, steps
        self._float, self._deployed, self._step = place
        blocks = self._deployed.blocks
        self._own = blocks[self._step][1] if self._step < len(blocks) else None
        self._layers = {task.layer: root.get_submodule(task.layer) for task in tasks}
        self._pairs, self._alone = pairs, set[str]()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the layers' float parameters at the end of the block."""
        own = [x.detach() for m in self._layers.values() for x in m.parameters(recurse=False)]
        before = [x.clone() for x in own]
        try:
            yield
        finally:
            for x, value in zip(own, before, strict=True):
                x.copy_(value)

    @contextmanager
    def rescaled(self, solutions: Solutions, absorbers: Absorbers) -> Iterator[None]:
        """Rescale channels where a method asks, inside the context."""
        wanted = self._own is not None and any(rescalings_of(task.method) for task in self._tasks)
        if not wanted:
            yield
            return
        name = self._deployed.blocks[self._step][0]
        found = solutions.known_rescaling(name)
        if found is None:
            found = self._rescaling(f"{name}.", absorbers)
            solutions.add_rescaling(name, found)
        with folded(self._root, found.folds):
            yield

    def _rescaling(self, prefix: str, absorbers: Absorbers) -> RescaledBlock:
        """Return the best rescaling of the block's channels."""
        probe = BlockProbe(self._once, rescalable(self._root, prefix))
        readers = {name: probe.modules[name] for name in two_sided(probe.modules)}
        wanted = {task.layer for task in self._tasks if rescalings_of(task.method)}
        sites = [site for site in sites_of(self._once, readers, ()) if not wanted.isdisjoint(site.readers)]
        known, left = stored(probe, absorbers.of(prefix, probe, sites), self._steps.storable)
        first = [Site(readers=each.readers, stage=0) for each in known]
        with Shelf(self._steps.spill or self._steps.folder) as kept:
            observed = self._observed(first, first, Shelf(None), kept, statistics=False)
            inputs = {
                site.readers[0]: data.seen.inputs
                for site in first
                if (data := observed.data(site.readers[:1])[site.readers[0]]).seen is not None
            }
        quantized = [
            QuantizedReader(
                layer=task.layer, rows=task.rows, steps=rescalings_of(task.method),
                reader=functools.partial(
                    ChannelReader, scheme=task.scheme, method=rounding_of(task.method, task.scheme),
                    source=task.source,
                ),
            )
            for task in self._tasks
        ]  # fmt: skip
        found = replace(rescale(probe, known, quantized, inputs), refused=left)
        return require_same_outputs(probe, found, self._root)

    def _once(self) -> Any:
        """Run the block on the first batch, and return what it gives."""
        given: list[Any] = []

        def act(_: int, *args: Any, **named: Any) -> None:
            assert self._own is not None
            given.append(self._own(*args, **named))

        self._deployed.visit(self._step, self._batches, act, [0])
        return given[0]

    def solve(self, solutions: Solutions) -> None:
        """Solve all tasks, and run both streams through the block."""
        results: dict[str, LayerResult | None] = {task.name: solutions.known(task) for task in self._tasks}
        together = [task.name for task in self._tasks if self._is_trained(task)]
        if any(results[name] is None for name in together):
            # Some of them were kept, and others not, when an earlier run ended.
            results |= dict.fromkeys(together)
        left = {task.layer for task in self._tasks if results[task.name] is None}
        sites = self._sites() if left else ()
        with Shelf(self._steps.folder) as inputs, closing(self._memo(sites)) as memo:
            self._run_floats(sites, inputs)
            with self._rounding():
                extremes, begun = self._extremes(), list[BegunWeight]()
                for stage in sorted({site.stage for site in sites}):
                    own = [site for site in sites if site.stage == stage]
                    begun += self._solve_stage(own, sites, inputs, results, extremes, solutions)
                    memo.finish({name for site in own for name in site.readers})
                for task in self._tasks if not sites else ():
                    self._install(task, cast(LayerResult, results[task.name]))
                if begun:
                    memo.close()  # it holds outputs of other weights
                    self._round_together(begun, solutions)
                if self._own is not None:
                    with self._steps.deployed():
                        self._deployed.run(self._step, self._batches, self._own, workers=self._steps.workers)

    def _solve_stage(
        self, own: Sequence[Site], sites: Sequence[Site], inputs: Shelf,
        results: dict[str, LayerResult | None], extremes: Mapping[str | None, tuple[float, float]],
        solutions: Solutions,
    ) -> list[BegunWeight]:  # fmt: skip
        """Solve one stage's weights; return those to be rounded jointly later."""
        begun, readers = list[BegunWeight](), {name for site in own for name in site.readers}
        with Shelf(self._steps.spill or self._steps.folder) as kept:
            observed = None
            if any(task.method.takes for task in self._tasks if task.layer in readers - self._alone):
                observed = self._observed(own, sites, inputs, kept)
                self._alone |= observed.unreached
                self._tasks = without_data(self._tasks, observed.unreached)
            tasks = [task for task in self._tasks if task.layer in readers]
            todo = [task for task in tasks if results[task.name] is None]
            reached = [task for task in todo if task.layer not in self._alone]
            turns = [reached] if observed is None else observed.turns(reached)
            for turn in ([task for task in todo if task.layer in self._alone], *turns):
                known = [task.layer for task in turn if task.layer not in self._alone]
                data = {} if observed is None else observed.data(known)
                begun += self._solve_turn(turn, data, results, extremes, solutions)
        for task in tasks:
            self._install(task, cast(LayerResult, results[task.name]))
        return begun

    def _solve_turn(
        self,
        turn: Sequence[WeightTask],
        data: Mapping[str, LayerData],
        results: dict[str, LayerResult | None],
        extremes: Mapping[str | None, tuple[float, float]],
        solutions: Solutions,
    ) -> Iterator[BegunWeight]:
        """Solve weights with statistics; yield those to be rounded jointly."""

        def solve_one(task: WeightTask) -> None:
            own = data.get(task.layer, LayerData())
            results[task.name] = self._solved(task, own, extremes.get(task.share))

        # One weight has all threads to itself.
        in_threads(solve_one, turn, min(len(turn), self._steps.workers))
        for task in turn:
            result = cast(LayerResult, results[task.name])
            loss = self._loss(task, data.get(task.layer, LayerData()), result)
            if self._is_trained(task):
                weight = self._layers[task.layer].get_parameter("weight")
                yield BegunWeight(task, weight, Sides(self._matrix(task), result.q), result, loss)
            else:
                solutions.add(task, result, loss)

    def _round_together(self, begun: Sequence[BegunWeight], solutions: Solutions) -> None:
        """Round weights together for the output of the block, and keep them."""
        block = self._own
        assert block is not None

        def run(numbers: Sequence[int], act: OnOutputs, workers: int) -> None:
            def outputs(batch: int, *args: Any, **named: Any) -> None:
                act(batch, functools.partial(block, *args, **named), self._float.result(self._step, batch))

            self._deployed.visit(self._step, self._batches, outputs, numbers, workers=workers)

        for weight, result, loss in rounded_together(begun, run, len(self._batches), self._steps):
            solutions.add(weight.task, result, loss)

    def _sites(self) -> tuple[Site, ...]:
        """Return the block's sites; unreached layers come with their kin, or alone."""
        sites: list[Site] = []
        missing, stages = dict(self._layers), dict[str, int]()
        learned = (n for n in range(len(self._batches)) if not is_held(n, len(self._batches)))
        for batch in learned:
            run = functools.partial(self._visit, [batch])
            for site in sites_of(run, self._layers, self._layers.keys()):
                fresh = tuple(name for name in site.readers if name in missing)
                for name in fresh:
                    del missing[name]
                if fresh:
                    sites.append(replace(site, readers=fresh))
            stages = {kin_of(name): site.stage for site in sites for name in site.readers}
            if not missing:
                return tuple(sites)
            if batch >= EVERY and stages.keys().isdisjoint(map(kin_of, missing)):
                break  # what so many batches do not reach is another part of the model
        self._alone = {name for name in missing if kin_of(name) not in stages}
        self._tasks = without_data(self._tasks, self._alone)
        first = sites[0].stage if sites else 0  # so that others are solved on what these give
        alone = (Site(readers=(name,), stage=first) for name in missing if name in self._alone)
        kin = [name for name in missing if name not in self._alone]
        return (*alone, *sites, *sites_like(sites, kin))

    def _visit(self, numbers: Sequence[int]) -> None:
        """Run the deployed block on some batches, until hooks end it."""

        def act(_: int, *args: Any, **named: Any) -> None:
            if self._own is not None:
                with suppress(_StopError):
                    self._own(*args, **named)

        workers = min(self._steps.workers, len(numbers))
        self._deployed.visit(self._step, self._batches, act, numbers, workers=workers)

    def _run_floats(self, sites: Sequence[Site], inputs: Shelf) -> None:
        """Run the float block, and cache its sites' inputs by batch."""
        read = {name for site in sites for name in site.readers} - self._alone
        if not self._pairs or (self._own is None and not read):
            return

        def see(name: str, x: torch.Tensor) -> None:
            inputs.add((name, self._float.batch), _vectors(x))

        with self._hooked({site.readers[0]: see for site in sites}):
            if self._own is not None:
                self._float.run(self._step, self._batches, self._own, workers=self._steps.workers)
            else:
                self._float.visit(self._step, self._batches, lambda *_: None, workers=self._steps.workers)

    def _observed(
        self,
        own: Sequence[Site],
        sites: Sequence[Site],
        inputs: Shelf,
        kept: Shelf,
        *,
        statistics: bool = True,
    ) -> StageInputs:
        """Return the deployed inputs of a stage: statistics, or vectors alone.

        inputs: of the float model. kept: keeps the vectors of experts.
        """

        def empty(site: Site) -> SiteInputs:
            return SiteInputs.of(
                (task.method for task in self._tasks if statistics and task.layer in site.readers),
                _weight(self._root.get_submodule(site.readers[0])).shape[1],
                len(self._batches),
            )

        found = StageInputs(own, empty, kept, batches=len(self._batches), workers=self._steps.workers)
        later = {name for site in sites if site.stage > own[0].stage for name in site.readers}

        def see(name: str, x: torch.Tensor) -> None:
            if found.see(name, self._deployed.batch, _vectors(x)) and self._own is not None:
                raise _StopError

        def stop(name: str, x: torch.Tensor) -> None:  # noqa: ARG001 (as see)
            raise _StopError

        order = [site.stage for site in sites]
        hooks: dict[str, See] = {site.readers[0]: see for site in own}
        if order == sorted(order) and self._own is not None:
            hooks |= dict.fromkeys(later, stop)
        with self._hooked(hooks):
            for first in range(0, len(self._batches), EVERY):
                together = range(first, min(first + EVERY, len(self._batches)))
                self._visit(together)
                found.add(together, inputs.get)
        found.finish()
        return found

    def _memo(self, sites: Sequence[Site]) -> PartMemo:
        size = self._steps.memo if sites else 0
        return PartMemo(self._own, self._layers, lambda: self._deployed.batch, size)

    @contextmanager
    def _hooked(self, see: Mapping[str, See]) -> Iterator[None]:
        """Call functions with names and inputs of layers before they run."""

        def seen(name: str, x: torch.Tensor) -> torch.Tensor:
            see[name](name, x)
            return x

        with on_inputs((self._root.get_submodule(name), functools.partial(seen, name)) for name in see):
            yield

    def _rounding(self) -> AbstractContextManager[None]:
        """Quantize the inputs of layers as the deployed model does."""
        sources = {task.layer: task.source for task in self._tasks if task.source is not None}
        return on_inputs(((self._layers[name], own) for name, own in sources.items()), prepend=True)

    def _extremes(self) -> dict[str | None, tuple[float, float]]:
        """Return extremes of weights with a common tensor scale, by ``share``."""
        found: dict[str | None, tuple[float, float]] = {}
        for task in self._tasks:
            if task.share is not None:
                low, high = (float(end) for end in torch.aminmax(self._matrix(task)))
                before = found.get(task.share, (low, high))
                found[task.share] = min(low, before[0]), max(high, before[1])
        return found

    def _is_trained(self, task: WeightTask) -> bool:
        """Return whether a weight is rounded jointly, in a block."""
        return self._own is not None and of_block(task)

    def _matrix(self, task: WeightTask) -> torch.Tensor:
        weight = _weight(self._layers[task.layer])
        own = weight if task.rows is None else weight[task.rows]
        return own if task.dtype is None else own.to(task.dtype)

    def _solved(self, task: WeightTask, data: LayerData, extremes: tuple[float, float] | None) -> LayerResult:
        try:
            method = start_of(without_rescalings(task.method))
            return method.quantize(self._matrix(task), task.scheme, replace(data, extremes=extremes))
        except ZeropointError as error:
            raise type(error)(f"{task.name}: {error}") from error

    def _loss(self, task: WeightTask, data: LayerData, result: LayerResult) -> Loss:
        known = next(iter(data.statistics.values()), None)
        weight, values = self._matrix(task).float(), result.dequantize(torch.float32)
        added, notes = result.changes.get("bias"), result.notes
        if self._own is None and of_block(task):
            notes = (*notes, f"outside of all blocks: codes of {start_of(task.method).name}")
        return Loss(
            vectors=0 if known is None else int(known["vectors"]),
            own=data.own,
            seen=loss_on(data.seen, weight, values, added),
            held_out=loss_on(data.held_out, weight, values, added),
            notes=notes,
            outputs=result.outputs,
        )

    def _install(self, task: WeightTask, result: LayerResult) -> None:
        weight = _weight(self._layers[task.layer])
        rows = slice(None) if task.rows is None else task.rows
        weight[rows] = result.on(weight.device).dequantize().to(weight.dtype)
        for name, added in result.changes.items():
            own = self._layers[task.layer].get_parameter(name).detach()
            own[rows] = ChannelFold(added=added.to(own.device)).of(own[rows])


def _weight(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight").detach()


def _vectors(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])
