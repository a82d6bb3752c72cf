"""Carry out a plan: read, quantize, measure and write in tiles, on all cores, in bounded memory.

Each tile is some rows of a weight: its bytes are read into the thread's buffer, quantized, measured while in
cache, and each output tensor's lines are written at the offset that the plan gives. Files appear under their
names at the very end. Neither the number of threads nor the size of tiles changes a byte or a digit of the
error table.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..codecs.compressed_tensors import encode_constants, encode_part
from ..errors import NonFiniteError, ZeropointError, printable
from .documents import WEIGHTS_ONLY_CONFIG
from .measure import ErrorSum, TensorError
from .output import COPY_CHUNK, OutputDirectory, copy_range, write_at
from .plan import Kept, Placed, Plan, Weight, slab_rows
from .quantize import Extremes, Scratch, needs_extremes, quantize_part, sentinel_rows
from .source import CONFIG
from .storage import OpenFile, Place, open_file, shown
from .workers import Progress, Stopped, Task, run_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one weight: its module, and the error that quantization made."""

    weight: Weight
    error: TensorError

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were written for it."""
        return sum(placed.nbytes for placed in self.weight.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run wrote, and the error of each weight, in the order of the plan."""

    path: Path
    plan: Plan
    outcomes: tuple[Outcome, ...]

    @property
    def error(self) -> TensorError:
        """The error of all quantized weights taken as one."""
        return TensorError.merge([outcome.error for outcome in self.outcomes])


def run(
    plan: Plan, out: Path | str, *, overwrite: bool = False, on_progress: Progress | None = None
) -> RunResult:
    """Write the checkpoint that ``plan`` describes to the directory ``out``: all of it, or nothing.

    overwrite: whether ``out`` may hold files; those with other names stay. on_progress: called in this
    thread. Raises NonFiniteError naming tensor, file and first index; RangeError when a scale fits no format;
    CheckpointError for everything about files. Nothing is left behind then, nor after Ctrl-C.
    """
    path = Path(out)
    names = [*(s.name for s in plan.shards), *plan.texts, *map(str, plan.companions)]
    with (
        OutputDirectory(
            path, plan.source.root, names, needed=plan.output_bytes, overwrite=overwrite
        ) as directory,
        contextlib.ExitStack() as stack,
    ):
        files = _Files(plan, directory, stack)
        sums = [ErrorSum(*weight.shape) for weight in plan.weights]
        tasks = _tasks(plan, files, sums)
        longest = max((_tile_bytes(w, slab_rows(w, plan.limits)) for w in plan.weights), default=0)
        run_tasks(tasks, workers=plan.limits.workers, buffer_bytes=longest, on_progress=on_progress)
        _write_rest(plan, directory)
        plan.source.check_unchanged()
        index = next(name for name in plan.texts if name not in (CONFIG, WEIGHTS_ONLY_CONFIG))
        directory.publish([index, *(name for name in plan.texts if name != index)])
    outcomes = []
    for weight, error in zip(plan.weights, sums, strict=True):
        assert error.total is not None
        outcomes.append(Outcome(weight=weight, error=error.total))
    return RunResult(path=directory.path, plan=plan, outcomes=tuple(outcomes))


class _Files:
    """The open files of a run: shards to read, and shards to write with their headers in place."""

    def __init__(self, plan: Plan, directory: OutputDirectory, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.sources: dict[Place, OpenFile] = {}
        for entry in plan.source.entries.values():
            if entry.file not in self.sources:
                self.sources[entry.file] = open_file(entry.file)
                stack.callback(self.sources[entry.file].close)
        self.outputs: dict[str, int] = {}
        for shard in plan.shards:
            self.outputs[shard.name] = directory.create(shard.name, shard.size)
            self.write(shard.name, memoryview(shard.header), 0)

    def write(self, shard: str, data: memoryview, offset: int) -> None:
        """Write bytes into an output shard."""
        with self.directory.io(shard):
            write_at(self.outputs[shard], data, offset)


def _tasks(plan: Plan, files: _Files, sums: Sequence[ErrorSum]) -> list[Task]:
    """Return all work in the order of the source's bytes; ``sums`` take the error of each weight.

    The extremes of a weight are gathered before the weight ahead of it is quantized, so that no thread waits
    for another.
    """
    members: dict[str, list[Weight]] = {}
    for weight in plan.weights:
        members.setdefault(weight.share or weight.module, []).append(weight)
    sets: dict[str, Extremes] = {}
    tasks: list[Task] = []
    ahead: list[Task] = []
    for weight, error in zip(plan.weights, sums, strict=True):
        name = weight.share or weight.module
        if needs_extremes(weight.layer.weight) and name not in sets:
            cuts = [(w, start, rows) for w in members[name] for start, rows in _cuts(w, plan)]
            sets[name] = Extremes(pending=len(cuts))
            tasks += [_Scan(w, files, start, rows, sets[name]) for w, start, rows in cuts]
        tasks += ahead
        ahead = [_Quantize(weight, files, cut, (sets.get(name), error)) for cut in _cuts(weight, plan)]
    return tasks + ahead + [task for kept in plan.kept for task in _copies(kept, files)]


def _cuts(weight: Weight, plan: Plan) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each tile."""
    rows = slab_rows(weight, plan.limits)
    return [(start, min(rows, weight.shape[0] - start)) for start in range(0, weight.shape[0], rows)]


def _tile_bytes(weight: Weight, rows: int) -> int:
    return (rows + sentinel_rows(weight.shape[1])) * weight.row_bytes


class _Rows(Task):
    """Work on some rows of a weight."""

    def __init__(self, weight: Weight, files: _Files, start: int, rows: int) -> None:
        super().__init__(weight.module, rows * weight.row_bytes)
        self.rows = rows
        self.weight = weight
        self.files = files
        self.start = start

    def read(self, buffer: bytearray, *, extra: int = 0) -> torch.Tensor:
        """Return the rows in the thread's buffer, with room for ``extra`` more behind them."""
        file = self.files.sources[self.weight.source.file]
        read_rows(self.weight, file, self.start, self.rows, buffer)
        rows, columns = self.rows + extra, self.weight.shape[1]
        return torch.frombuffer(buffer, dtype=self.weight.dtype, count=rows * columns).view(rows, columns)


def read_rows(weight: Weight, file: OpenFile, start: int, rows: int, buffer: bytearray) -> torch.Tensor:
    """Return ``rows`` rows of a weight from row ``start``, read into ``buffer``."""
    size = rows * weight.row_bytes
    offset = weight.begin + start * weight.row_bytes
    file.read_into(memoryview(buffer)[:size], offset)
    return torch.frombuffer(buffer, dtype=weight.dtype, count=rows * weight.shape[1]).view(
        rows, weight.shape[1]
    )


class _Scan(_Rows):
    """Gather the extremes of some rows."""

    def __init__(self, weight: Weight, files: _Files, start: int, rows: int, extremes: Extremes) -> None:
        super().__init__(weight, files, start, rows)
        self.nbytes = 0
        self.extremes = extremes

    def run(self, scratch: Scratch, stop: threading.Event) -> None:  # noqa: ARG002
        """See :class:`Task`."""
        self.extremes.add(self.read(scratch.buffer))


class _Quantize(_Rows):
    """Quantize, measure and write some rows."""

    def __init__(
        self, weight: Weight, files: _Files, cut: tuple[int, int], shared: tuple[Extremes | None, ErrorSum]
    ) -> None:
        super().__init__(weight, files, *cut)
        self.extremes, self.error = shared

    def run(self, scratch: Scratch, stop: threading.Event) -> None:
        """See :class:`Task`."""
        extremes = self._extremes(stop)
        x = self.read(scratch.buffer, extra=0 if extremes is None else sentinel_rows(self.weight.shape[1]))
        try:
            q = quantize_part(x, self.weight.layer.weight, extremes, scratch)
        except ZeropointError as error:
            raise self._named(error, scratch.buffer) from error
        self.error.add(x[: self.rows], q, self.start)
        layout = self.weight.layer.layout
        tensors = encode_part(layout, q)
        if self.start == 0:
            tensors |= encode_constants(layout, q.params, self.weight.shape)
        for placed in self.weight.outputs:
            if placed.spec.suffix in tensors:
                self._write(placed, tensors[placed.spec.suffix])

    def _extremes(self, stop: threading.Event) -> tuple[float, float] | None:
        if self.extremes is None:
            return None
        while not self.extremes.done.wait(timeout=0.1):
            if stop.is_set():
                raise Stopped
        return self.extremes.low, self.extremes.high

    def _write(self, placed: Placed, tensor: torch.Tensor) -> None:
        spec = placed.spec
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        line = placed.nbytes // spec.shape[0]
        first = self.start // spec.rows * spec.lines
        self.files.write(placed.shard, data, placed.begin + first * line)

    def _named(self, error: ZeropointError, buffer: bytearray) -> ZeropointError:
        """Return the error with the tensor's name; the first value that is not finite is looked for."""
        source = self.weight.source
        facts = f"{shown(source.file.name)}, {source.dtype}, shape {list(source.shape)}"
        place = f"tensor {printable(source.name)} ({facts})"
        found = _first_non_finite(self.weight, self.files.sources[source.file], buffer, rows=self.rows)
        if found is None:
            return type(error)(f"{place}: {error}")
        row, column, value, count = found
        where = f"first at row {row}, column {column}"
        if self.weight.begin != source.begin:
            where += f" of {printable(self.weight.module)}"
        return NonFiniteError(
            f"{place} holds {count} values that are not finite, {where} ({value}); replace them, or ignore it"
        )


def _first_non_finite(
    weight: Weight, file: OpenFile, buffer: bytearray, *, rows: int
) -> tuple[int, int, float, int] | None:
    """Return row, column and value of the first NaN or Inf of a weight and the count of all, or None."""
    first: tuple[int, int, float] | None = None
    count = 0
    for start in range(0, weight.shape[0], rows):
        x = read_rows(weight, file, start, min(rows, weight.shape[0] - start), buffer)
        bad = ~torch.isfinite(x)
        here = int(bad.sum())
        if here and first is None:
            row, column = torch.nonzero(bad)[0].tolist()
            first = (start + row, column, float(x[row, column]))
        count += here
    return None if first is None else (*first, count)


class _Copy(Task):
    """Copy some bytes of a kept tensor."""

    def __init__(self, kept: Kept, files: _Files, start: int, size: int) -> None:
        super().__init__(kept.source.name, size)
        self.kept = kept
        self.files = files
        self.start = start

    def run(self, scratch: Scratch, stop: threading.Event) -> None:  # noqa: ARG002
        """See :class:`Task`."""
        source, placed = self.kept.source, self.kept.placed
        with self.files.directory.io(placed.shard):
            copy_range(
                self.files.sources[source.file], self.files.outputs[placed.shard],
                begin=source.begin + self.start, to=placed.begin + self.start,
                size=self.nbytes,
            )  # fmt: skip


def _copies(kept: Kept, files: _Files) -> list[Task]:
    size = kept.source.nbytes
    return [_Copy(kept, files, start, min(COPY_CHUNK, size - start)) for start in range(0, size, COPY_CHUNK)]


def _write_rest(plan: Plan, directory: OutputDirectory) -> None:
    """Write companions, index and configuration."""
    for relative in plan.companions:
        path = plan.source.root / relative
        file = open_file(path)
        try:
            size = file.stamp.size
            target = directory.create(str(relative), size)
            with directory.io(str(relative)):
                copy_range(file, target, begin=0, to=0, size=size)
        finally:
            file.close()
    _write_texts(plan.texts, directory)


def _write_texts(texts: Mapping[str, str], directory: OutputDirectory) -> None:
    for name, text in texts.items():
        data = text.encode("utf-8")
        descriptor = directory.create(name, len(data))
        with directory.io(name):
            write_at(descriptor, memoryview(data), 0)
