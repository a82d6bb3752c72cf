"""Chains of blocks, run in turn on cached outputs.

The previous block returns its cached output, earlier ones return NaN, which shows where a model is no chain.
A run of the model ends as soon as its block has run.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..errors import CalibrationError, UnsupportedError
from ..methods.channels import ChannelFold
from .calibrate import run_model
from .part_memo import MarkedOutput
from .tensor_files import TensorLike, append_tensor, read_tensor, scratch_folder
from .unfuse import replace_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Blocks and settings of :func:`calibrate_sequential`.

    Args:
        blocks: names of the blocks in the order in which they run; if empty, the children of the longest
            ModuleList or Sequential, in a model of transformers those with the embeddings of tokens.
        quantized_inputs: whether a block is calibrated on the outputs of the quantized blocks before it;
            layers outside of blocks stay as they are.
        folder: where outputs of blocks are kept, in a temporary folder inside; in memory if None.
        spill: where vectors and sums of experts are kept until they are solved; as ``folder`` if None.
        dtype: floats are kept in this dtype, which may round them; in their own if None.
        loaded: takes the name of a block and returns a context in which it has its weights; outside of it
            they are not read.
        deployed: returns a context in which a block runs with its solved weights, as it will be deployed.
        workers: threads, each of which runs other batches, where weights are solved.
        memo: bytes of cached outputs of parts of a block, until the block is solved.
        at_once: takes the bytes that rounding the weights of a block together takes, and the bytes of each
            window besides; returns how many run at the same time, and raises where none fits. As many
            as there are workers if None.
        storable: takes channel folds by parameter, and returns whether the files of the model have a place
            for each; inputs whose folds have none are not rescaled. All of them have one if None.

    Raises:
        CalibrationError: for a dtype that is not one of floats.
    """

    blocks: tuple[str, ...] = ()
    quantized_inputs: bool = False
    folder: Path | None = None
    spill: Path | None = None
    dtype: torch.dtype | None = None
    loaded: Callable[[str], AbstractContextManager[Any]] = nullcontext
    deployed: Callable[[], AbstractContextManager[None]] = nullcontext
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memo: int = 1 << 30
    at_once: Callable[[int, int], int] | None = None
    storable: Callable[[Mapping[str, ChannelFold]], bool] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise CalibrationError(f"dtype (={self.dtype}) must be one of floats, such as torch.bfloat16")


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
        """Return whether it observes something that is inside none of ``blocks``."""


class KeptValues:
    """Outputs of the last block by batch, in memory or files."""

    def __init__(self, folder: Path | None, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype = folder, dtype
        self._values: dict[int, list[torch.Tensor]] = {}
        self._files: dict[int, list[TensorLike]] = {}
        self._likes: dict[tuple[int, int], Any] = {}
        self._with_nan: dict[int, bool] = {}

    def put(self, block: int, batch: int, value: Any) -> None:
        """Replace the previous block's output by this block's, in own memory."""

        def own(x: torch.Tensor) -> torch.Tensor:
            narrow = self._dtype is not None and x.is_floating_point()
            return x.detach().to(self._dtype if narrow else x.dtype, copy=self._folder is None).contiguous()

        like, before = tree_map_only(torch.Tensor, TensorLike.of, value), self._likes.get((block - 1, batch))
        self._likes[block, batch] = before if _alike(before, like) else like
        tensors = [own(x) for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        self._with_nan[batch] = holds_nan(tensors)
        if self._folder is None:
            self._values[batch] = tensors
            return
        self._files[batch] = [TensorLike.of(x) for x in tensors]
        for number, x in enumerate(tensors):
            self._path(batch, number).unlink(missing_ok=True)
            append_tensor(self._path(batch, number), x)

    def begin(self, blocks: int, batch: int, value: Any) -> None:
        """Keep the last of ``blocks`` outputs; earlier ones count as alike."""
        self.put(blocks - 1, batch, value)
        for block in range(blocks - 1):
            self._likes[block, batch] = self._likes[blocks - 1, batch]

    def get(self, block: int, batch: int) -> Any:
        """Return a copy of what was kept, in its own dtypes."""
        files, values = self._files.get(batch, ()), self._values.get(batch, ())
        read = (read_tensor(self._path(batch, number), like) for number, like in enumerate(files))
        kept = iter(read if self._folder is not None else (x.clone() for x in values))
        return tree_map_only(TensorLike, lambda like: next(kept).to(like.dtype), self._likes[block, batch])

    def holds_nan(self, batch: int) -> bool:
        """Return whether some number that is kept of a batch is NaN."""
        return self._with_nan[batch]

    def unknown(self, block: int, batch: int, last: MarkedOutput | None) -> MarkedOutput:
        """Return a block's output with NaN for its numbers, or zeros.

        last: returned for another block, and again where this one's output is alike and nothing was written
        into it: filling memory for all blocks takes longer than running one.
        """

        def fill(like: TensorLike) -> torch.Tensor:
            number = math.nan if like.dtype.is_floating_point else 0
            return torch.full(like.shape, number, dtype=like.dtype, device=like.device)

        like = self._likes[block, batch]
        if last is not None and last.mark is like and last.is_unchanged():
            return last
        return MarkedOutput(tree_map_only(TensorLike, fill, like), like)

    def _path(self, batch: int, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{batch}-{number}"


@contextmanager
def keeping(folder: Path | None, dtype: torch.dtype | None) -> Iterator[KeptValues]:
    """Return a context that keeps what comes out of blocks.

    Args:
        folder: holds it, in a temporary folder inside; memory does if None.
        dtype: of floats; their own if None.

    Raises:
        CalibrationError: for a folder that does not exist.
    """
    if folder is None:
        yield KeptValues(None, dtype)
        return
    if not Path(folder).is_dir():
        raise CalibrationError(f"folder (={str(folder)!r}) must be a folder that exists; create it first")
    with scratch_folder(folder) as inside:
        yield KeptValues(Path(inside), dtype)


class InMemory(TorchDispatchMode):
    """Raises UnsupportedError for weights that are read outside of their block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on tensors that have memory."""
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.nbytes > x.untyped_storage().nbytes() == 0:
                raise UnsupportedError(
                    "the model reads weights of blocks before these run, so that it does not run block by "
                    "block; calibrate the model as a whole"
                )
        return func(*args, **(kwargs or {}))


class _DoneError(Exception):
    """Ends a run of the model once the block has run."""


class BlockStage(nn.Module):
    """A block's stand-in: its attributes, and a function of its position."""

    def __init__(self, block: nn.Module, position: int, act: Callable[..., Any]) -> None:
        super().__init__()
        self.training = block.training
        self.__dict__["held"] = (block, position, act)  # not a submodule, which would be replaced in here too

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["held"][0], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the function's result."""
        _, position, act = self.__dict__["held"]
        return act(position, *args, **named)


class BlockChain:
    """A chain of blocks inside a model, and the last block's outputs.

    Args:
        root: the model.
        blocks: name and module of each.
        kept: cache of their outputs, see :func:`keeping`.
    """

    def __init__(self, root: nn.Module, blocks: list[tuple[str, nn.Module]], kept: KeptValues) -> None:
        self.blocks, self._root, self._kept = blocks, root, kept
        self._now = _Now()

    @property
    def batch(self) -> int:
        """Number of the batch that runs in this thread."""
        return self._now.batch

    def observe(self, step: int, batches: Sequence[Any], watch: Watching, *, keep: bool = True) -> None:
        """Run block ``step``, or the rest behind the blocks, observed."""

        def act(batch: int, *args: Any, **named: Any) -> None:
            result = self.blocks[step][1](*args, **named)
            if keep:
                self._kept.put(step, batch, result)

        with watch.hooked():
            watch.examine = self._examine
            self._run(step, batches, act, watch)

    def run(self, step: int, batches: Sequence[Any], block: nn.Module, *, workers: int = 1) -> None:
        """Run ``block`` in place of block ``step``, and cache its outputs."""

        def act(batch: int, *args: Any, **named: Any) -> None:
            self._kept.put(step, batch, block(*args, **named))

        self._run(step, batches, act, None, workers=workers)

    def result(self, step: int, batch: int) -> Any:
        """Return a copy of the last block's output for a batch."""
        return self._kept.get(step, batch)

    def visit(
        self, step: int, batches: Sequence[Any], act: Callable[..., None],
        numbers: Iterable[int] | None = None, *, workers: int = 1,
    ) -> None:  # fmt: skip
        """Run the model up to block ``step``, and call ``act`` there.

        Args:
            step: number of the block, or of blocks for what comes after all of them.
            batches: of the model.
            act: called in place of the block, with the number of the batch and the arguments.
            numbers: of the batches to run; all if None.
            workers: threads, of which each runs other batches.
        """
        self._run(step, batches, act, None, numbers, workers=workers)

    def _run(
        self, step: int, batches: Sequence[Any], act: Callable[..., None], watch: Watching | None,
        numbers: Iterable[int] | None = None, *, workers: int = 1,
    ) -> None:  # fmt: skip
        """See :meth:`visit`. watch: enabled after the previous block."""
        now = self._now

        def stage(position: int, *args: Any, **named: Any) -> Any:
            self._expect(position)
            if position == step:
                for x in tree_leaves((args, named)):
                    self._examine(f"block {self.blocks[step][0]!r}", x)
                act(now.batch, *args, **named)
                raise _DoneError
            if position < step - 1:
                now.unknown = self._kept.unknown(position, now.batch, now.unknown)
                return now.unknown.value
            if watch is not None:
                watch.enabled = True
            return self._kept.get(position, now.batch)

        def one(batch: int) -> None:
            now.batch, now.ran, now.unknown = batch, 0, None
            # A result that holds NaN itself hides those that mark earlier ones.
            known = step < 2 or self._kept.holds_nan(batch)
            now.suspicious = not known
            if watch is not None:
                watch.enabled = step == 0
            # What a model does to all of its blocks, it does when it first runs.
            with torch.no_grad(), InMemory() if step == 0 and batch == 0 else nullcontext():
                self._until_done(batch, batches[batch])

        stages = {block: BlockStage(block, at, stage) for at, (_, block) in enumerate(self.blocks)}
        replace_modules(self._root, dict(stages))
        try:
            in_threads(one, range(len(batches)) if numbers is None else numbers, workers)
        finally:
            replace_modules(self._root, {stage: block for block, stage in stages.items()})

    def _examine(self, what: str, x: Any) -> None:
        """Raise UnsupportedError for numbers computed from a missing block output."""
        if self._now.suspicious and holds_nan(x):
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
    """A thread's batch, completed blocks, and whether NaN means missing.

    unknown: what the last of the earlier blocks returned.
    """

    batch, ran, suspicious = 0, 0, False
    unknown: MarkedOutput | None = None


T = TypeVar("T")


def in_threads(act: Callable[[T], None], items: Iterable[T], workers: int) -> None:
    """Call ``act`` with each item, in threads with one torch thread each.

    One worker is this thread. Threads of one operator on few cores wait for each other; threads of different
    batches do not, and results do not depend on how many there are.

    Args:
        act: raises what this function raises.
        items: taken in order.
        workers: number of threads.
    """
    if workers < 2:
        for item in items:
            act(item)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(act, items):
                pass
    finally:
        torch.set_num_threads(before)


def _alike(a: Any, b: Any) -> bool:
    """Return whether two outputs hold tensors alike, and the same objects besides."""
    (x, structure), (y, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(
        p is q or (type(p) is type(q) is TensorLike and p == q) for p, q in zip(x, y, strict=True)
    )


def holds_nan(value: Any) -> bool:
    """Return whether some number is NaN."""
    tensors = (x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point())
    # Of numbers without NaN, infinities alone have a sum that is NaN, and a sum is soon made.
    return any(bool(x.sum().isnan()) and bool(x.isnan().any()) for x in tensors)
