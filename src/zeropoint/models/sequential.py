"""Calibration block by block: activations of one block at a time, however deep the model.

Each block of a chain is run over all batches before the next one is. What came out of it is kept, one result
a batch, in memory or on disk, and the model is started again for the next block, so that masks, positions and
whatever else it computes on the way are computed as ever. The block before is stood in for by what was kept,
those before that one by NaN, which shows where a model is no chain. The run ends as soon as the block has.
"""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import CalibrationError, UnsupportedError, near_misses
from ..progress import counted
from ..recipes import Recipe, Rule
from ..stats import StatisticFor
from .calibrate import Calibration, Watch, evaluating, require_batches, run_model
from .convert import quantize_model
from .recipe_layers import require_model
from .unfuse import replace_modules, unfused


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How :func:`calibrate_sequential` goes through a model.

    Args:
        blocks: names of the blocks in the order in which they run; if empty, the children of the longest
            ModuleList or Sequential.
        quantized_inputs: whether a block is calibrated on what the quantized blocks before it give; layers
            outside of blocks stay as they are.
        folder: where what comes out of blocks is kept, in a temporary folder inside; in memory if None.
        dtype: floats are kept in this dtype, which may round them; in their own if None.
        loaded: takes the name of a block and returns a context in which it has its weights; outside of it
            they are not read.
        workers: threads, each of which runs other batches, where weights are solved.
        memo: bytes of what parts of a block give that are kept until it is solved, not computed again.

    Raises:
        CalibrationError: for a dtype that is not one of floats.
    """

    blocks: tuple[str, ...] = ()
    quantized_inputs: bool = False
    folder: Path | None = None
    dtype: torch.dtype | None = None
    loaded: Callable[[str], AbstractContextManager[Any]] = nullcontext
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memo: int = 1 << 30

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise CalibrationError(f"dtype (={self.dtype}) must be one of floats, such as torch.bfloat16")


def calibrate_sequential(
    model: nn.Module,
    recipe: Recipe | str,
    data: Iterable[Any],
    *,
    statistic: StatisticFor | str = "minmax",
    steps: Steps | None = None,
    progress: bool = False,
) -> Calibration:
    """Return what :func:`~zeropoint.models.calibrate` returns, having run one block of ``model`` at a time.

    The parameters are the same, bit for bit, unless ``steps`` asks for quantized inputs or for another dtype.

    Args:
        model: a model with a list of blocks that run one after the other.
        recipe: rules, or the name of a preset for all Linear layers.
        data: batches; a list or tuple is read again for each block, anything else is kept as a list.
        statistic: as for :func:`calibrate`.
        steps: blocks, and how they run.
        progress: whether to show a progress bar, on a terminal.

    Raises:
        ZeropointError: what ``calibrate`` raises.
        CalibrationError: for blocks that are not in the model and a folder that does not exist.
        UnsupportedError: for blocks that do not run once each, in order, for every batch; each names the
            block.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> data = [torch.randn(2, 8) for _ in range(3)]
        >>> from zeropoint.models import calibrate
        >>> calibrate_sequential(model, "w8a8_static", data) == calibrate(model, "w8a8_static", data)
        True
    """
    chosen = Steps() if steps is None else steps
    require_model(model)
    require_batches(data)
    batches = data if isinstance(data, (list, tuple)) else list(data)
    if not batches:
        raise CalibrationError("calibration data are empty; pass at least one batch")
    with unfused(model) as root:
        watch = Watch(root, recipe, statistic)
        deployed = functools.partial(_quantized, watch) if chosen.quantized_inputs else None
        observe_blocks(root, batches, watch, chosen, deployed=deployed, progress=progress)
        return watch.calibration(len(batches))


class Watching(Protocol):
    """What observes a model while it runs, such as :class:`~zeropoint.models.calibrate.Watch`.

    Args:
        enabled: whether it sees what passes.
        examine: called with tensors that may hold what is not finite, with their place.
    """

    enabled: bool
    examine: Callable[[str, torch.Tensor], None] | None

    def hooked(self) -> AbstractContextManager[None]:
        """Return a context in which it observes."""

    def outside(self, blocks: Iterable[nn.Module]) -> bool:
        """Return whether it observes something that is inside none of ``blocks``.

        Args:
            blocks: of the model.
        """


def observe_blocks(
    root: nn.Module,
    batches: Sequence[Any],
    watch: Watching,
    steps: Steps,
    *,
    deployed: Callable[[str, nn.Module], nn.Module] | None = None,
    progress: bool = False,
) -> None:
    """Run a model on all batches under ``watch``, one block at a time.

    Args:
        root: the model; fused weights as they are to be observed.
        batches: at least one.
        watch: what observes it.
        steps: blocks, and how they run.
        deployed: given a block and its name, returns what computes the next inputs in its place.
        progress: whether to show a progress bar, on a terminal.

    Raises:
        CalibrationError: for blocks that are not in the model and a folder that does not exist.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with evaluating(root), kept(steps) as values:
        chain = Chain(root, blocks_of(root, steps.blocks), values)
        for step in counted(range(len(chain.blocks)), "Calibrating blocks", shown=progress):
            # Two runs where the observed block and the one that computes the next inputs differ.
            with steps.loaded(chain.blocks[step][0]):
                chain.observe(step, batches, watch, keep=deployed is None)
                if deployed is not None:
                    chain.run(step, batches, deployed(*chain.blocks[step]))
        # One batch, at least, shows that the last block does not run again.
        rest = batches if watch.outside(block for _, block in chain.blocks) else batches[:1]
        chain.observe(len(chain.blocks), rest, watch)


def run_blocks(
    root: nn.Module, batches: Sequence[Any], steps: Steps, *, start: int = 0, given: Sequence[Any] = (),
    progress: bool = False,
) -> Iterator[list[Any]]:  # fmt: skip
    """Run a model on all batches, one block at a time, and yield what each block gives, one value a batch.

    Args:
        root: the model.
        batches: at least one.
        steps: blocks, and how they run.
        start: the first block that runs.
        given: what the block before ``start`` gave, one value a batch.
        progress: whether to show a progress bar, on a terminal.

    Raises:
        CalibrationError: for blocks that are not in the model and a folder that does not exist.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with kept(steps) as values:
        chain = Chain(root, blocks_of(root, steps.blocks), values)
        for batch, value in enumerate(given):
            values.begin(start, batch, value)
        for step in counted(range(start, len(chain.blocks)), "Running blocks", shown=progress):
            name, block = chain.blocks[step]
            with evaluating(root), steps.loaded(name):
                chain.run(step, batches, block)
            yield [values.get(step, batch) for batch in range(len(batches))]


def run_rest(root: nn.Module, batch: Any, value: Any, steps: Steps) -> Any:
    """Return what a model gives for a batch, given what its last block gave for it.

    Args:
        root: the model; what is inside of blocks is not read.
        batch: what the model is called with.
        value: what the last block gave, see :func:`run_blocks`.
        steps: blocks.
    """

    def pass_on(position: int, *_: Any, **__: Any) -> Any:  # noqa: ARG001 (each block gives the same)
        return tree_map_only(torch.Tensor, torch.clone, value)

    blocks = blocks_of(root, steps.blocks)
    stages = {block: _Stage(block, at, pass_on) for at, (_, block) in enumerate(blocks)}
    replace_modules(root, dict(stages))
    try:
        with evaluating(root):
            return run_model(root, batch)
    finally:
        replace_modules(root, {stage: block for block, stage in stages.items()})


def blocks_of(model: nn.Module, names: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return blocks by name: those in ``names``, else the children of the longest ModuleList or Sequential.

    Raises CalibrationError for a name that is not in the model, inside of another or there twice, for names
    in one text, and where nothing is named and there is no list of at least two.

    >>> [name for name, _ in blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    ['0', '1']
    """
    modules = dict(model.named_modules())
    if not names:
        lists = [n for n, m in modules.items() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        longest = max(lists, key=lambda name: len(list(modules[name].children())), default=None)
        found = [] if longest is None else list(modules[longest].named_children())
        if len(found) < 2:
            raise CalibrationError(
                f"model (a {type(model).__name__}) has no ModuleList or Sequential of at least two blocks; "
                "name its blocks"
            )
        return [(f"{longest}.{key}".lstrip("."), child) for key, child in found]
    if isinstance(names, str):
        raise CalibrationError(f"blocks (={names!r}) must be a tuple of names; put the text in one")
    for name in names:
        if name not in modules or not name:
            raise CalibrationError(f"block {name!r} is not in the model; {near_misses(name, modules)}")
        if list(names).count(name) > 1:
            raise CalibrationError(f"block {name!r} is named {list(names).count(name)} times; name it once")
        inside = next((other for other in names if name.startswith(f"{other}.")), None)
        if inside is not None:
            raise CalibrationError(f"block {name!r} lies inside of block {inside!r}; name either")
    return [(name, modules[name]) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Like:
    """A tensor without its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def unknown(self) -> torch.Tensor:
        """Return NaN in every place, or zeros where there is no NaN."""
        fill = math.nan if self.dtype.is_floating_point else 0
        return torch.full(self.shape, fill, dtype=self.dtype, device=self.device)


class _Kept:
    """What came out of the last block, one value a batch: in a list, or in files of a folder."""

    def __init__(self, folder: Path | None, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype = folder, dtype
        self._values: dict[int, Any] = {}
        self._likes: dict[tuple[int, int], Any] = {}

    def put(self, block: int, batch: int, value: Any) -> None:
        """Keep what a block gave instead of what the one before did: tensors in memory of their own."""

        def own(x: torch.Tensor) -> torch.Tensor:
            narrow = self._dtype is not None and x.is_floating_point()
            return x.detach().to(self._dtype if narrow else x.dtype, copy=True).contiguous()

        self._likes[block, batch] = tree_map_only(
            torch.Tensor, lambda x: _Like(shape=x.shape, dtype=x.dtype, device=x.device), value
        )
        value = tree_map_only(torch.Tensor, own, value)
        if self._folder is None:
            self._values[batch] = value
        else:
            torch.save(value, self._folder / f"{batch}.pt")

    def begin(self, blocks: int, batch: int, value: Any) -> None:
        """Keep what the last of the first ``blocks`` blocks gave; what others gave is taken to be like it."""
        self.put(blocks - 1, batch, value)
        for block in range(blocks - 1):
            self._likes[block, batch] = self._likes[blocks - 1, batch]

    def get(self, block: int, batch: int) -> Any:
        """Return a copy of what was kept, in its own dtypes."""
        if self._folder is None:
            value = self._values[batch]
        else:
            # What a model's own classes of results are is the model's business: our own file, just written.
            value = torch.load(self._folder / f"{batch}.pt", weights_only=False)
        likes = iter(tree_leaves(self._likes[block, batch]))
        return tree_map_only(torch.Tensor, lambda x: x.to(next(likes).dtype, copy=True), value)

    def unknown(self, block: int, batch: int) -> Any:
        """Return what a block gave with NaN for its numbers."""
        return tree_map_only(_Like, _Like.unknown, self._likes[block, batch])


@contextmanager
def kept(steps: Steps) -> Iterator[_Kept]:
    """Return a context that keeps what comes out of blocks.

    Args:
        steps: where, and in which dtype.
    """
    if steps.folder is None:
        yield _Kept(None, steps.dtype)
        return
    if not Path(steps.folder).is_dir():
        raise CalibrationError(
            f"folder (={str(steps.folder)!r}) must be a folder that exists; create it first"
        )
    with tempfile.TemporaryDirectory(prefix="zeropoint-", dir=steps.folder) as folder:
        yield _Kept(Path(folder), steps.dtype)


class _DoneError(Exception):
    """Ends a run of the model once the block has run."""


class _Stage(nn.Module):
    """Stands in the place of a block: has its attributes, and calls a function with its position."""

    def __init__(self, block: nn.Module, position: int, act: Callable[..., Any]) -> None:
        super().__init__()
        self.training = block.training
        self.__dict__["held"] = (
            block,
            position,
            act,
        )  # not a submodule, which would be replaced in here too

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["held"][0], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return what the function does."""
        _, position, act = self.__dict__["held"]
        return act(position, *args, **named)


class Chain:
    """Blocks that run one after another inside a model, and what came out of the last one.

    Args:
        root: the model.
        blocks: name and module of each.
        kept: where what comes out of them is kept, see :func:`kept`.
    """

    def __init__(self, root: nn.Module, blocks: list[tuple[str, nn.Module]], kept: _Kept) -> None:
        self.blocks, self._root, self._kept = blocks, root, kept
        self._now = _Now()

    @property
    def batch(self) -> int:
        """Number of the batch that runs in this thread."""
        return self._now.batch

    def observe(self, step: int, batches: Sequence[Any], watch: Watching, *, keep: bool = True) -> None:
        """Run block ``step``, or the rest after the last block, observed; keep what comes out or not."""

        def act(batch: int, *args: Any, **named: Any) -> None:
            result = self.blocks[step][1](*args, **named)
            if keep:
                self._kept.put(step, batch, result)

        with watch.hooked():
            watch.examine = self._examine
            self._run(step, batches, act, watch)

    def run(self, step: int, batches: Sequence[Any], block: nn.Module, *, workers: int = 1) -> None:
        """Run ``block`` in the place of block ``step`` and keep what comes out."""

        def act(batch: int, *args: Any, **named: Any) -> None:
            self._kept.put(step, batch, block(*args, **named))

        self._run(step, batches, act, None, workers=workers)

    def visit(
        self, step: int, batches: Sequence[Any], act: Callable[..., None],
        numbers: Iterable[int] | None = None, *, workers: int = 1,
    ) -> None:  # fmt: skip
        """Run the model up to block ``step``, where ``act`` takes the number of the batch and the arguments.

        Args:
            step: number of the block, or of blocks for what comes after all of them.
            batches: of the model.
            act: what is done in place of the block.
            numbers: of the batches to run; all if None.
            workers: threads, of which each runs other batches.
        """
        self._run(step, batches, act, None, numbers, workers=workers)

    def _run(
        self, step: int, batches: Sequence[Any], act: Callable[..., None], watch: Watching | None,
        numbers: Iterable[int] | None = None, *, workers: int = 1,
    ) -> None:  # fmt: skip
        """See :meth:`visit`. watch: enabled from the end of the block before to the end of this one."""
        now = self._now

        def stage(position: int, *args: Any, **named: Any) -> Any:
            self._expect(position)
            if position == step:
                for x in tree_leaves((args, named)):
                    self._examine(f"block {self.blocks[step][0]!r}", x)
                act(now.batch, *args, **named)
                raise _DoneError
            if position < step - 1:
                return self._kept.unknown(position, now.batch)
            if watch is not None:
                watch.enabled = True
            return self._kept.get(position, now.batch)

        def one(batch: int) -> None:
            now.batch, now.ran = batch, 0
            # A result that holds NaN itself hides those that mark earlier ones.
            known = step < 2 or _holds_nan(self._kept.get(step - 1, batch))
            now.suspicious = not known
            if watch is not None:
                watch.enabled = step == 0
            with torch.no_grad():
                self._until_done(batch, batches[batch])

        stages = {block: _Stage(block, at, stage) for at, (_, block) in enumerate(self.blocks)}
        replace_modules(self._root, dict(stages))
        try:
            _each(one, range(len(batches)) if numbers is None else numbers, workers)
        finally:
            replace_modules(self._root, {stage: block for block, stage in stages.items()})

    def _examine(self, what: str, x: Any) -> None:
        """Raise UnsupportedError when ``x`` was computed from a block whose result was not kept."""
        if self._now.suspicious and _holds_nan(x):
            raise UnsupportedError(
                f"{what} reads more than what the block before it gives; name blocks that form a chain, or "
                "calibrate the model as a whole"
            )

    def _until_done(self, batch: int, value: Any) -> None:
        try:
            run_model(self._root, value)
        except _DoneError:
            return
        if self._now.ran < len(self.blocks):
            name = self.blocks[self._now.ran][0]
            raise UnsupportedError(
                f"block {name!r} did not run on batch {batch}; name blocks that run once each, or calibrate "
                "the model as a whole"
            )

    def _expect(self, position: int) -> None:
        ran = self._now.ran
        if position != ran:
            name = self.blocks[position][0]
            due = self.blocks[ran][0] if ran < len(self.blocks) else "no other"
            raise UnsupportedError(
                f"block {name!r} ran where {due!r} was due; name blocks that run once each, in their order, "
                "or calibrate the model as a whole"
            )
        self._now.ran += 1


class _Now(threading.local):
    """What a thread is at: its batch, how many blocks have run, and whether NaN means a missing result."""

    batch, ran, suspicious = 0, 0, False


def _each(act: Callable[[int], None], numbers: Iterable[int], workers: int) -> None:
    """Call ``act`` with each number: in this thread, or in several, each with one thread of torch's.

    Threads of one operator on few cores wait for each other; those of different batches do not, and results
    do not depend on how many there are.
    """
    if workers < 2:
        for number in numbers:
            act(number)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(act, numbers):
                pass
    finally:
        torch.set_num_threads(before)


def _holds_nan(value: Any) -> bool:
    """Return whether some number is NaN."""
    tensors = (x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point())
    return any(bool(x.isnan().any()) for x in tensors)


def _quantized(watch: Watch, name: str, block: nn.Module) -> nn.Module:
    """Return a block as it will be deployed, given what has been learned of its layers."""
    inner = set(block.modules())
    rules = tuple(
        Rule(
            name=f"re:{re.escape(_within(name, layer))}",
            types=(decision.subject.type,),
            gives=decision.gives,
            reason=decision.rule.reason,
        )
        for layer, module, decision in watch.decided
        if module in inner
    )
    if all(rule.gives is None for rule in rules):
        return block
    learned = Calibration(
        params={_within(name, at): found for at, found in watch.params(block).items()},
        statistics={_within(name, at): found for at, found in watch.statistics(block).items()},
    )
    return quantize_model(block, Recipe(rules=rules), calibration=learned).model


def _within(name: str, place: str) -> str:
    """Return a place in the model as one in the block called ``name``."""
    return place.removeprefix(name).lstrip(".")
