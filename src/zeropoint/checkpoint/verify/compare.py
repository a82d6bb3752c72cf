"""Comparison of two checkpoints' decoded values in bounded memory.

Every tensor of either side is compared, or named with the reason. Errors are of B against A.
"""

from __future__ import annotations

import contextlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...columns import MadeSequence, PackedBytes
from ...errors import CheckpointError, count, printable
from ...progress import Progress
from ...results import PROBLEMS, Result
from ..measure.equality import Equality, apart
from ..measure.tensor_error import TensorError
from ..measure.tiles import Scratch
from ..measure.workers import done_tasks
from ..plan.limits import Limits
from ..read.problems import Problem, listed
from ..read.source import CONFIG, Source, open_source
from ..read.storage import OpenFiles, Place, shown
from .comparisons import configuration_differences
from .documents import comparison_document
from .matching import LABELS, Pair, Pairs, Side, side_of
from .proofs import Check

_TEMPORARY_BYTES = 16
"""Memory for each value of a tile besides what was read: both values in the dtype of the comparison."""
_ALIGNED = 64
"""The second side's values begin in the buffer at a multiple of it."""
_EQUALITY = struct.Struct("=3q")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared:
    """Result for one pair of tensors."""

    pair: Pair
    equality: Equality
    error: TensorError

    def __repr__(self) -> str:
        return f"{self.pair.name}: {self.error}"

    @property
    def counts(self) -> bool:
        """Whether it counts in the total error: quantized or different floats.

        Integers and floats that both sides kept have no error, and their squares would hide others' errors.
        """
        a, b = self.pair.held_by
        quantized = a != b and any(w.layer is not None for w in (self.pair.a, self.pair.b))
        return self.pair.dtype is not torch.int64 and (quantized or self.equality.unequal > 0)


class AllCompared(MadeSequence[Compared]):
    """Results of pairs by number, each made on request."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._packed = PackedBytes(len(pairs))

    def keep(self, number: int, equality: Equality, error: TensorError) -> None:
        """Keep what was found of the pair of a number."""
        counts = _EQUALITY.pack(equality.values, equality.unequal, equality.signs)
        self._packed[number] = counts + error.pack()

    def __len__(self) -> int:
        return len(self._pairs)

    def made(self, number: int) -> Compared:
        """Unpack equality and error of a pair."""
        return Compared(pair=self._pairs[number], equality=self._equality(number), error=self._error(number))

    def _equality(self, number: int) -> Equality:
        values, unequal, signs = _EQUALITY.unpack_from(self._packed[number])
        return Equality(values=values, unequal=unequal, signs=signs)

    def _error(self, number: int) -> TensorError:
        return TensorError.unpack(self._packed[number][_EQUALITY.size :])

    @property
    def equality(self) -> Equality:
        """Joint equality of all tensors."""
        return Equality.merge(self._equality(number) for number in range(len(self)))

    @property
    def measured(self) -> Iterator[Compared]:
        """The tensors that count (:attr:`Compared.counts`)."""
        return (found for found in self if found.counts)

    @property
    def counted(self) -> Counted:
        """The tensors that count (:attr:`Compared.counts`), taken as one."""
        numbers = [number for number, found in enumerate(self) if found.counts]
        return Counted(tensors=len(numbers), error=TensorError.merge(map(self._error, numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Number of tensors in the error of a comparison, and that error."""

    tensors: int
    error: TensorError


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Result):
    """The outcome of :func:`compare`: B against A.

    tensors: what was compared. counted: tensors that have a part in the error. problems: what could not
    be compared. notes: differences of the configurations, and tensors that one side alone has and need not
    have.
    """

    sources: tuple[Source, Source]
    tensors: AllCompared
    counted: Counted
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything could be compared."""
        return not self.problems

    @property
    def equality(self) -> Equality:
        """Joint equality of all tensors."""
        return self.tensors.equality

    @property
    def error(self) -> TensorError:
        """The joint error of all floats that differ or were quantized."""
        return self.counted.error

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines about the compared tensors, and the verdict."""
        found = self.equality
        missing = f", {count(len(self.problems), 'problem')}" if self.problems else ""
        compared = f"{count(len(self.tensors), 'tensor')} compared ({count(found.values, 'value')}){missing}"
        if found.of_bits:
            return compared, "all values are equal bit for bit"
        if not found.unequal:
            return compared, f"all values are equal but for the sign of {count(found.signs, 'zero')}"
        differ = f"{count(found.unequal, 'value')} of these differ"
        if not self.counted.tensors:
            return compared, f"{differ}, all of them integers"
        counted = count(self.counted.tensors, "tensor of floats that is", "tensors of floats that are")
        return compared, f"{differ}; {self.error} over {counted} quantized or changed"

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (*map(str, self.problems[:PROBLEMS]), *self.summary)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return comparison_document(self)


def compare(
    a: Place | str, b: Place | str, *, limits: Limits | None = None, on_progress: Progress | None = None
) -> Comparison:
    """Compare the decoded values of two checkpoints in any layouts.

    Args:
        a: a checkpoint's directory, file or URL; errors are relative to it.
        b: the other checkpoint.
        limits: bounds of memory and threads.
        on_progress: called with bytes done, bytes in all and a tensor's name.

    Returns:
        Equality and error of each tensor, and what could not be compared and why.

    Raises:
        CheckpointError: when files are damaged, both are one checkpoint, they have no tensor in common, or
            ``limits`` are too small.
        UnsupportedError: when a layout is not read here.
    """
    limits = limits or Limits.default()
    first, second = open_source(a), open_source(b)
    if first.given == second.given:
        raise CheckpointError(f"A and B are one checkpoint, {shown(first.given)}; pass two")
    sides = side_of(first, second), side_of(second, first)
    limits = limits.reserve(*(side.source.entries for side in sides), *(side.entries for side in sides))
    pairs = Pairs(*sides)
    if not len(pairs):
        raise CheckpointError(_nothing_common(sides, pairs.problems))
    with OpenFiles() as files:
        found = _run(pairs, limits, files, on_progress)
    for side in sides:
        side.source.check_unchanged()
    notes = [f"{LABELS[at]}: {note}" for at, side in enumerate(sides) for note in side.source.notes]
    return Comparison(
        sources=(sides[0].source, sides[1].source),
        tensors=found,
        counted=found.counted,
        problems=tuple(pairs.problems),
        notes=(*notes, *_configurations(sides), *pairs.notes),
    )


def _nothing_common(sides: tuple[Side, Side], problems: Sequence[Problem]) -> str:
    """Return the error sentence for checkpoints without a comparable tensor."""
    names = [next((printable(name) for name in side.entries), "no tensor") for side in sides]
    example = f"such as {problems[0]}" if problems else f"A begins with {names[0]}, B with {names[1]}"
    places = " and ".join(shown(side.source.given) for side in sides)
    return f"no tensor of {places} can be compared, {example}; pass two checkpoints of one model"


def _configurations(sides: tuple[Side, Side]) -> list[str]:
    """Return in what config.json describes other models, a sentence for each key."""
    found = configuration_differences(sides[0].source, sides[1].source)
    notes = [
        f"{CONFIG}: {d.key} is {d.ours or 'absent'} in A and {d.theirs or 'absent'} in B"
        for d in found
        if not d.is_default
    ]
    loose = listed([d.key for d in found if d.is_default])
    return [*notes, f"{CONFIG}: only one side has {loose}"] if loose else notes


class _Part(Check):
    """Compare some rows of a pair, one of ``of`` parts."""

    def __init__(self, number: int, pair: Pair, rows: range, of: int, files: OpenFiles) -> None:
        super().__init__(pair.name, sum(_nbytes(pair, len(rows))))
        self.number, self.pair, self.rows, self.of = number, pair, rows, of
        self.files = {file: files[file] for w in (pair.a, pair.b) for file in w.files}
        self.found: tuple[Equality, TensorError] | None = None

    def run(self, scratch: Scratch) -> None:
        buffer, begin, values = memoryview(scratch.buffer), 0, []
        for weight, nbytes in zip(
            (self.pair.a, self.pair.b), _nbytes(self.pair, len(self.rows)), strict=True
        ):
            view = buffer[begin : begin + nbytes]
            x = (
                weight.read(self.files, self.rows.start, len(self.rows), view)
                if nbytes
                else torch.empty(0, 1)
            )
            values.append(x.to(self.pair.dtype))
            begin += nbytes + -nbytes % _ALIGNED
        self.found = apart(values[0], values[1])


def _nbytes(pair: Pair, rows: int) -> tuple[int, ...]:
    """Return the bytes of some rows of each side."""
    return tuple(rows * weight.row_bytes for weight in (pair.a, pair.b))


def _step(pair: Pair, limits: Limits) -> int:
    """Return the rows of a part; raises CheckpointError below one."""
    height, columns = pair.shape
    alignment = max(1, min(height, max(weight.alignment for weight in (pair.a, pair.b))))
    cost = sum(weight.value_bytes for weight in (pair.a, pair.b)) + _TEMPORARY_BYTES
    return limits.rows(columns, alignment, cost)


def _parts(pairs: Pairs, limits: Limits, files: OpenFiles) -> Iterator[_Part]:
    for number, pair in enumerate(pairs):
        height, step = pair.shape[0], _step(pair, limits)
        starts = range(0, max(1, height), step)
        for start in starts:
            yield _Part(number, pair, range(start, min(start + step, height)), len(starts), files)


def _run(pairs: Pairs, limits: Limits, files: OpenFiles, on_progress: Progress | None) -> AllCompared:
    """Compare all pairs and return what was found."""
    found, begun = AllCompared(pairs), defaultdict[int, list[_Part]](list)
    done, total = 0, sum(sum(_nbytes(pair, pair.shape[0])) for pair in pairs)
    buffer = max(sum(_nbytes(pair, min(pair.shape[0], _step(pair, limits)))) for pair in pairs) + _ALIGNED
    tasks = done_tasks(_parts(pairs, limits, files), workers=limits.workers, buffer_bytes=buffer)
    with contextlib.closing(tasks) as finished:
        for part in finished:
            done += part.nbytes
            begun[part.number].append(part)
            if len(begun[part.number]) == part.of:
                results = [p.found for p in begun.pop(part.number) if p.found is not None]
                equalities, errors = zip(*results, strict=True)
                found.keep(part.number, Equality.merge(equalities), TensorError.merge(errors))
            if on_progress is not None:
                on_progress(done, total, part.name)
    return found
