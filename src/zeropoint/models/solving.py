"""Weights solved in the order in which they run, each on the inputs that the quantized layers before it give.

Blocks run one at a time, as in :mod:`.sequential`, on two streams: that of the float model, and that of the
model as it will be deployed. In each block the sites (:mod:`.sites`) of one stage are observed on all
batches, the weights that read them are quantized and replaced by what their codes say, and the next stage
sees the difference. Memory is that of one block, of the Gram matrices of one stage, and of what passes
between blocks.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import CalibrationError, ZeropointError
from ..methods import LayerData, LayerResult, Method, Samples
from ..methods.method import CROSS, GRAM
from ..progress import counted
from ..schemes import Scheme
from ..stats import Accumulator, CrossGram, State, Statistics
from .calibrate import evaluating
from .layer import quantized_inputs
from .sequential import Chain, Steps, blocks_of, kept
from .sites import Site, sites_of

EVERY = 8
"""One batch of so many is held out: it says how far steps go, and is measured, but is in no statistics."""
SAMPLED = 1024
"""Most vectors of a site that are kept to measure losses on, of batches that are held out and of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A weight to solve: some rows of a linear layer's weight, or all.

    name: of the weight, for results. number: of the weight among others. layer: of the module in the model.
    rows: numbers of its rows; all if None. dtype: of the weight as it is quantized; that of the module if
    None. share: weights with the same text take one scale of the whole tensor. source: how inputs are
    quantized where the model runs, or None.
    """

    name: str
    number: int = 0
    layer: str
    scheme: Scheme
    method: Method
    rows: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    share: str | None = None
    source: nn.Module | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How far the outputs of a layer are from those in the float model, as a share of their squares.

    vectors: of inputs that were learned from. seen, held_out: the loss on some of these, and on others; None
    where there are none. notes: what the steps of a chain found.
    """

    vectors: int = 0
    seen: float | None = None
    held_out: float | None = None
    notes: tuple[str, ...] = ()


See = Callable[[str, torch.Tensor], None]
"""Takes the name and the input of a layer that is about to run."""


class Solutions(Protocol):
    """What is solved."""

    def known(self, task: Task) -> LayerResult | None:
        """Return the result of a task, or None where it is to be solved."""

    def add(self, task: Task, result: LayerResult, loss: Loss) -> None:
        """Take the result of a task."""


class Solved(dict[str, LayerResult]):
    """What is solved, by the names of tasks, in memory.

    Attributes:
        losses: by the same names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Loss] = {}

    def known(self, task: Task) -> LayerResult | None:
        """Return what is there."""
        return self.get(task.name)

    def add(self, task: Task, result: LayerResult, loss: Loss) -> None:
        """Keep it."""
        self[task.name], self.losses[task.name] = result, loss


def solve(
    root: nn.Module, batches: Sequence[Any], tasks: Iterable[Task], steps: Steps,
    solutions: Solutions, *, progress: bool = False,
) -> None:  # fmt: skip
    """Quantize the weights of a model in the order in which they run.

    Args:
        root: the model, with fused weights as they are to be quantized; unchanged afterwards.
        batches: at least one; of eight and more, every eighth is held out.
        tasks: the weights.
        steps: blocks, and how they run.
        solutions: takes each result, in order, and has those of an earlier run.
        progress: whether to show a progress bar, on a terminal.

    Raises:
        CalibrationError: for blocks that are not in the model, and statistics that no method can use.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with evaluating(root), narrow_products(), kept(steps) as floats, kept(steps) as deployed:
        blocks = blocks_of(root, steps.blocks)
        of_float, of_deployed = Chain(root, blocks, floats), Chain(root, blocks, deployed)
        groups = _by_block(tasks, [name for name, _ in blocks])
        for step in counted(range(len(blocks) + bool(groups[-1])), "Solving blocks", shown=progress):
            name = blocks[step][0] if step < len(blocks) else ""
            with ExitStack() as stack:
                if name:
                    stack.enter_context(steps.loaded(name))
                block = _Block(root, batches, groups[step], (of_float, of_deployed, step), steps)
                stack.enter_context(block.restoring())
                block.solve(solutions)


@contextmanager
def narrow_products() -> Iterator[None]:
    """Let products of float32 matrices round their factors to bfloat16 where the processor multiplies these.

    Sums are float32. It is several times as fast, and what is learned of inputs differs by less than from one
    calibration text to another (docs/methods.md).
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 (it has no types)
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _by_block(tasks: Iterable[Task], blocks: Sequence[str]) -> list[list[Task]]:
    """Return the tasks of each block; those of layers outside of blocks come last."""
    groups: list[list[Task]] = [[] for _ in range(len(blocks) + 1)]
    for task in tasks:
        inside = (n for n, name in enumerate(blocks) if f"{task.layer}.".startswith(f"{name}."))
        groups[next(inside, len(blocks))].append(task)
    return groups


class _StopError(Exception):
    """Ends the run of a block when all sites of a stage have been seen."""


class _Block:
    """The tasks of one block, or those outside of blocks."""

    def __init__(
        self, root: nn.Module, batches: Sequence[Any], tasks: Sequence[Task],
        place: tuple[Chain, Chain, int], steps: Steps,
    ) -> None:  # fmt: skip
        self._root, self._batches, self._tasks, self._steps = root, batches, tasks, steps
        self._float, self._deployed, self._step = place
        blocks = self._deployed.blocks
        self._own = blocks[self._step][1] if self._step < len(blocks) else None
        self._layers = {task.layer: root.get_submodule(task.layer) for task in tasks}
        self._shifts = any(CROSS in task.method.takes for task in tasks)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Give the layers their float weights back at the end of the block."""
        before = {name: _weight(module).clone() for name, module in self._layers.items()}
        try:
            yield
        finally:
            for name, module in self._layers.items():
                _weight(module).copy_(before[name])

    def solve(self, solutions: Solutions) -> None:
        """Solve all tasks, and run both streams to the end of the block."""
        results = {task.name: solutions.known(task) for task in self._tasks}
        left = {task.layer for task in self._tasks if results[task.name] is None}
        sites = self._sites() if left else ()
        with _Shelf(self._steps.folder) as inputs, self._memo(sites) as memo:
            self._run_floats(sites, inputs)
            with self._rounding():
                extremes = self._extremes()
                for stage in sorted({site.stage for site in sites}):
                    own = [site for site in sites if site.stage == stage]
                    readers = {name for site in own for name in site.readers}
                    tasks = [task for task in self._tasks if task.layer in readers]
                    takes = any(task.method.takes for task in tasks if results[task.name] is None)
                    observed = self._observed(own, sites, inputs) if takes else {}
                    for task in tasks:
                        result = results[task.name]
                        if result is None:
                            data = observed.get(task.layer, LayerData())
                            result = self._solved(task, data, extremes.get(task.share))
                            solutions.add(task, result, self._loss(task, data, result))
                        self._install(task, result)
                    memo.finish(readers)
                for task in self._tasks if not sites else ():
                    self._install(task, cast(LayerResult, results[task.name]))
                if self._own is not None:
                    self._deployed.run(self._step, self._batches, self._own, workers=self._steps.workers)

    def _sites(self) -> tuple[Site, ...]:
        """Return the sites of the block; layers that some batches do not reach come with their kin."""
        sites: list[Site] = []
        missing = dict(self._layers)
        for batch in range(len(self._batches)):
            run = functools.partial(self._visit, lambda _: None, [batch])
            for site in sites_of(run, self._layers, self._layers.keys()):
                fresh = tuple(name for name in site.readers if name in missing)
                for name in fresh:
                    del missing[name]
                if fresh:
                    sites.append(replace(site, readers=fresh))
            if not missing:
                return tuple(sites)
        return (*sites, *self._unreached(missing, sites))

    def _unreached(self, missing: Iterable[str], sites: Sequence[Site]) -> Iterator[Site]:
        stages = {_kin(name): site.stage for site in sites for name in site.readers}
        for name in missing:
            if _kin(name) not in stages:
                raise CalibrationError(
                    f"{name} received no calibration data: no batch reached it, or the model uses its weight "
                    "past it; give it another method by a rule, or keep it"
                )
            yield Site(readers=(name,), stage=stages[_kin(name)])

    def _visit(self, after: Callable[[int], None], numbers: Sequence[int]) -> None:
        """Run the block as deployed on the batches with the given numbers, as far as hooks let it.

        after: called with each number when its batch has run.
        """

        def act(batch: int, *args: Any, **named: Any) -> None:
            if self._own is not None:
                with suppress(_StopError):
                    self._own(*args, **named)
            after(batch)

        self._deployed.visit(
            self._step, self._batches, act, numbers, workers=min(self._steps.workers, len(numbers))
        )

    def _run_floats(self, sites: Sequence[Site], inputs: _Shelf) -> None:
        """Run the float block to its end, and keep the inputs of its sites, by first reader and batch."""
        if not self._shifts:
            return

        def see(name: str, x: torch.Tensor) -> None:
            inputs.add((name, self._float.batch), _vectors(x))

        with self._hooked({site.readers[0]: see for site in sites}):
            if self._own is not None:
                self._float.run(self._step, self._batches, self._own, workers=self._steps.workers)
            else:
                self._float.visit(self._step, self._batches, lambda *_: None, workers=self._steps.workers)

    def _observed(self, own: Sequence[Site], sites: Sequence[Site], inputs: _Shelf) -> dict[str, LayerData]:
        """Return what is known of the inputs of each layer of some sites, as the deployed model has them."""
        watched = {
            site.readers[0]: _Inputs.of(site, self._tasks, self._features(site), len(self._batches))
            for site in own
        }
        later = {name for site in sites if site.stage > own[0].stage for name in site.readers}
        passing: dict[tuple[str, int], list[torch.Tensor]] = {}

        def see(name: str, x: torch.Tensor) -> None:
            passing.setdefault((name, self._deployed.batch), []).append(_vectors(x))

        def stop(name: str, x: torch.Tensor) -> None:  # noqa: ARG001 (as see)
            raise _StopError

        order = [site.stage for site in sites]
        hooks: dict[str, See] = dict.fromkeys(watched, see)
        if order == sorted(order) and self._own is not None:
            hooks |= dict.fromkeys(later, stop)
        with self._hooked(hooks):
            for first in range(0, len(self._batches), self._steps.workers):
                together = range(first, min(first + self._steps.workers, len(self._batches)))
                self._visit(lambda _: None, together)
                for batch in together:  # sums are in the order of batches
                    for name, each in watched.items():
                        x = passing.pop((name, batch), ())
                        if x:
                            each.see(torch.cat(x) if len(x) > 1 else x[0], batch, inputs.get((name, batch)))
        found: dict[str, LayerData] = {}
        for site in own:
            kin = [each for name, each in watched.items() if _kin(name) == _kin(site.readers[0])]
            found |= dict.fromkeys(site.readers, watched[site.readers[0]].data(kin if len(kin) > 1 else ()))
        return found

    def _features(self, site: Site) -> int:
        return _weight(self._layers[site.readers[0]]).shape[1]

    @contextmanager
    def _memo(self, sites: Sequence[Site]) -> Iterator[_Memo]:
        memo = _Memo(self._own, self._layers, lambda: self._deployed.batch, self._steps.memo if sites else 0)
        try:
            yield memo
        finally:
            memo.close()

    @contextmanager
    def _hooked(self, see: Mapping[str, See]) -> Iterator[None]:
        """Call functions with the names and inputs of layers that are about to run."""
        handles: list[Any] = []

        def hook(name: str) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                def keep(x: torch.Tensor) -> torch.Tensor:
                    see[name](name, x)
                    return x

                quantized_inputs(module, keep, args, named)

            return before

        try:
            for name in see:
                module = self._layers[name]
                handles.append(module.register_forward_pre_hook(hook(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """Quantize the inputs of layers as the deployed model does."""
        handles: list[Any] = []
        sources = {task.layer: task.source for task in self._tasks if task.source is not None}
        try:
            for name, source in sources.items():
                handles.append(
                    self._layers[name].register_forward_pre_hook(
                        _rounds(source), with_kwargs=True, prepend=True
                    )
                )
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _extremes(self) -> dict[str | None, tuple[float, float]]:
        """Return the extremes of the weights that take one scale together."""
        found: dict[str | None, tuple[float, float]] = {}
        for task in self._tasks:
            if task.share is not None:
                low, high = (float(end) for end in torch.aminmax(self._matrix(task)))
                before = found.get(task.share, (low, high))
                found[task.share] = min(low, before[0]), max(high, before[1])
        return found

    def _matrix(self, task: Task) -> torch.Tensor:
        weight = _weight(self._layers[task.layer])
        own = weight if task.rows is None else weight[task.rows]
        return own if task.dtype is None else own.to(task.dtype)

    def _solved(self, task: Task, data: LayerData, extremes: tuple[float, float] | None) -> LayerResult:
        try:
            return task.method.quantize(self._matrix(task), task.scheme, replace(data, extremes=extremes))
        except ZeropointError as error:
            raise type(error)(f"{task.name}: {error}") from error

    def _loss(self, task: Task, data: LayerData, result: LayerResult) -> Loss:
        gram = data.statistics.get(GRAM)
        weight, values = self._matrix(task).float(), result.dequantize(torch.float32)
        return Loss(
            vectors=0 if gram is None else int(gram["vectors"]), seen=_loss_on(data.seen, weight, values),
            held_out=_loss_on(data.held_out, weight, values), notes=result.notes,
        )  # fmt: skip

    def _install(self, task: Task, result: LayerResult) -> None:
        weight = _weight(self._layers[task.layer])
        values = result.dequantize().to(weight.dtype)
        if task.rows is None:
            weight.copy_(values)
        else:
            weight[task.rows] = values


class _Shelf:
    """Tensors by name and batch, in memory or in files of a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._place = None if folder is None else tempfile.TemporaryDirectory(prefix="zeropoint-", dir=folder)
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def __enter__(self) -> _Shelf:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._place is not None:
            self._place.cleanup()

    def add(self, key: tuple[str, int], x: torch.Tensor) -> None:
        """Keep a copy of vectors behind those that are there."""
        before = self.get(key)
        whole = x.clone() if before is None else torch.cat([before, x])
        if self._place is None:
            self._held[key] = whole
        else:
            self._held[key] = torch.empty(0)
            torch.save(whole, self._path(key))

    def get(self, key: tuple[str, int]) -> torch.Tensor | None:
        """Return what is kept, or None."""
        if self._place is None or key not in self._held:
            return self._held.get(key)
        found: torch.Tensor = torch.load(self._path(key), weights_only=True)
        return found

    def _path(self, key: tuple[str, int]) -> Path:
        assert self._place is not None
        return Path(self._place.name) / f"{key[1]}-{key[0]}.pt"


class _Memo:
    """What the parts of a block gave whose weights are solved, by batch: they are not computed again.

    block: inside of which parts are. layers: those that are solved, by name. batch: returns the number of the
    batch that runs. limit: most bytes that are kept.
    """

    def __init__(
        self, block: nn.Module | None, layers: Mapping[str, nn.Module], batch: Callable[[], int], limit: int
    ) -> None:
        self._block, self._batch, self._left = block, batch, limit
        self._layers = {module: name for name, module in layers.items()}
        self._solved: set[str] = set()
        self._kept: dict[nn.Module, dict[int, _Result]] = {}
        self._again: set[nn.Module] = set()
        self._pass = 0

    def finish(self, readers: Iterable[str]) -> None:
        """Keep from now on what parts give all of whose layers are solved with these."""
        self._solved |= set(readers)
        self._pass += 1
        if self._block is None or self._left <= 0:
            return
        for part in self._parts(self._block):
            for inner in part.modules():
                if inner is not part and self._kept.get(inner) and self._kept.get(part):
                    self._left += sum(result.nbytes for result in self._kept[inner].values())
                    self._kept[inner].clear()
            if part not in self._kept:
                self._kept[part] = {}
                part.forward = functools.partial(self._call, part, part.forward)

    def close(self) -> None:
        """Let all parts compute again."""
        for part in self._kept:
            vars(part).pop("forward", None)
        self._kept.clear()

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost parts inside of a module that hold solved layers and no others."""
        for child in module.children():
            held = {self._layers[m] for m in child.modules() if m in self._layers}
            if held and held <= self._solved:
                yield child
            elif held:
                yield from self._parts(child)

    def _call(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        known, batch = self._kept[part], self._batch()
        found = known.get(batch)
        if found is not None and found.made == self._pass:
            self._again.add(part)  # it runs several times on a batch
        if found is not None and part not in self._again and found.is_unchanged():
            return found.value
        result = _Result(forward(*args, **named), self._pass)
        if found is None and result.nbytes <= self._left:
            self._left -= result.nbytes
            known[batch] = result
        return result.value


class _Result:
    """What a part of a block gave, in the pass of a number."""

    def __init__(self, value: Any, made: int) -> None:
        self.value, self.made = value, made
        self._tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        self._versions = [x._version for x in self._tensors]
        self.nbytes = sum(x.nbytes for x in self._tensors)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written into it since."""
        return [x._version for x in self._tensors] == self._versions


class _Inputs:
    """What is learned of one site: statistics of most batches, and vectors of some to measure losses on.

    accumulators: by the names under which methods ask for them. batches: how many there are.
    """

    def __init__(self, accumulators: Mapping[str, Accumulator], batches: int) -> None:
        self._accumulators, self._batches = accumulators, batches
        self._states = {name: made.start() for name, made in accumulators.items()}
        self._samples: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}

    @staticmethod
    def of(site: Site, tasks: Iterable[Task], features: int, batches: int) -> _Inputs:
        """Return the statistics that the methods of a site's readers take, of no data."""
        takes = [task.method.takes for task in tasks if task.layer in site.readers]
        made = {need: make(features) for own in takes for need, make in own.items()}
        return _Inputs(made, batches)

    def see(self, x: torch.Tensor, batch: int, floats: torch.Tensor | None) -> None:
        """Take the vectors of a batch. floats: those of the float model."""
        # An expert may get other tokens there.
        pair = floats if floats is not None and len(floats) == len(x) else x
        # Few batches are all learned from.
        held = self._batches >= EVERY and batch % EVERY == EVERY - 1
        if held or batch % EVERY == 0:
            self._sample(x, pair, held=held)
        if held:
            return
        for name, made in self._accumulators.items():
            state = self._states[name]
            if isinstance(made, CrossGram):
                self._states[name] = made.update_pair(state, pair, x)
            else:
                self._states[name] = made.update(state, x)

    def _sample(self, x: torch.Tensor, pair: torch.Tensor, *, held: bool) -> None:
        most = max(1, SAMPLED // -(-self._batches // EVERY))
        step = -(-len(x) // most) if len(x) else 1
        x, pair = x[::step].float(), pair[::step].float()
        good = torch.isfinite(x).all(1) & torch.isfinite(pair).all(1)
        self._samples[held].append((x[good], pair[good]))

    def data(self, kin: Sequence[_Inputs]) -> LayerData:
        """Return it as methods take it, drawn toward what was learned of ``kin`` where vectors are few."""
        states = {
            name: _drawn(state, [other._states[name] for other in kin])
            for name, state in self._states.items()
        }
        statistics = {
            name: Statistics(accumulator=self._accumulators[name], state=state)
            for name, state in states.items()
        }
        samples = {held: _joined(kept) for held, kept in self._samples.items()}
        return LayerData(statistics=statistics, seen=samples[False], held_out=samples[True])


def _loss_on(samples: Samples | None, weight: torch.Tensor, values: torch.Tensor) -> float | None:
    if samples is None:
        return None
    step = max(1, len(samples.inputs) // _MEASURED)
    wanted, found = samples.floats[::step] @ weight.T, samples.inputs[::step] @ values.T
    return float((wanted - found).square().sum() / wanted.square().sum().clamp_min(1e-30))


_MEASURED = 256
"""Vectors on which a loss is measured."""


def _joined(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Samples | None:
    if not sum(len(x) for x, _ in kept):
        return None
    return Samples(inputs=torch.cat([x for x, _ in kept]), floats=torch.cat([pair for _, pair in kept]))


_FEW = 0.25
"""Vectors for each feature, as many as which what was learned of kin counts."""


def _drawn(state: State, kin: Sequence[State]) -> State:
    """Return sums over vectors, joined by those of kin as if there had been ``_FEW`` of them a feature.

    Experts of which a router sends few tokens have Gram matrices that are nearly singular, and those without
    any have none: they take that of all experts of their layer.
    """
    pooled = {name: sum(other[name] for other in kin) for name in state} if kin else {}
    if not kin or not int(pooled["vectors"]):
        return state
    features = next(t.shape[-1] for name, t in state.items() if t.ndim)
    share = min(1.0, _FEW * features / int(pooled["vectors"]))
    drawn = {name: t + pooled[name] * share for name, t in state.items() if t.ndim}
    counts = {
        name: t + torch.as_tensor(pooled[name] * share).round().to(t.dtype)
        for name, t in state.items()
        if not t.ndim
    }
    return {**drawn, **counts}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _kin(name: str) -> str:
    """Return what the name of a layer has in common with those of other experts.

    >>> _kin("mlp.experts.7.up_proj")
    'mlp.experts.*.up_proj'
    """
    return _NUMBER.sub("*", name)


def _rounds(source: nn.Module) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def before(
        module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return quantized_inputs(module, source, args, named)

    return before


def _weight(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight").detach()


def _vectors(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])
