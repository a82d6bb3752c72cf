"""Units of a run, each processed, hashed and journaled as a whole.

A unit is some whole rows of one weight, or columns where its layout is cut so, with every line that they
give, codes and scales alike, or a range of bytes that is copied. The cut follows from the plan alone, never
from memory or threads, so the units of a plan have the same numbers, hashes and order everywhere. This
module knows where a unit's bytes lie; doing one is work.py's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from ...columns import LazySequence, StringTable, ordered
from ..measure.tiles import needs_extremes
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.cuts import unit_lines
from ..plan.placement import Placed, Placement

UNIT_BYTES = 1 << 25
"""Bytes in a unit that is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A unit's bytes in a file: ``size`` from absolute offset ``begin``.

    tensor: whose they are; a file that holds no tensors is one itself.
    """

    file: str
    tensor: str
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """``count`` rows, columns or bytes of a placement, from ``start`` on."""

    number: int
    placement: Placement
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of its source for progress, with codes counted as floats."""
        return self.count * self.placement.line_bytes

    @property
    def name(self) -> str:
        """Name in progress reports."""
        return self.placement.module

    @property
    def group(self) -> str | None:
        """Set of weights to scan before it can be quantized, or None."""
        of = self.placement
        if of.to is None:
            return None
        scanned = needs_extremes(of.to.weight) or of.to.codec.needs_mean(of.to)
        return (of.share or of.module) if scanned else None

    @property
    def file(self) -> str:
        """The file that it writes to."""
        return self.placement.outputs[0].shard

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of its outputs, in their order."""
        return tuple(span for placed in self.placement.outputs if (span := self._span(placed)) is not None)

    def _span(self, placed: Placed) -> Span | None:
        """Return its span of one output; None for constants, written first."""
        spec, begin, end = placed.spec, 0, placed.nbytes
        if self.placement.to is None:
            begin = self.start * self.placement.line_bytes
            end = begin + self.nbytes
        elif spec.axis is not None:
            line = placed.nbytes // spec.height
            begin = self.start // spec.per * spec.lines * line
            if self.start + self.count < self.placement.extent:
                end = (self.start + self.count) // spec.per * spec.lines * line
        elif self.start:
            return None
        return Span(file=placed.shard, tensor=placed.name, begin=placed.begin + begin, size=end - begin)


class Units(Sequence[Unit]):
    """Units of a plan in the order of source bytes; companions last.

    nbytes: bytes of each, by number. What is kept of one is what it is about, where it begins, and how much
    of it there is.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._weights = len(plan.placements.all) - len(plan.weights)
        self._item, self._begins, self._counts = array("I"), array("q"), array("I")
        self.nbytes = array("q")
        self._files = tuple(plan.companions.items())
        count = len(plan.placements.all)
        self._first = array("q", [0]) * (count + len(self._files))
        for number in (*self._order(), *range(count, len(self._first))):
            self._cut(number, self._placement(number))

    def of(self, number: int) -> range:
        """Return the numbers of a placement's units, by the placement's number."""
        begin = end = self._first[number]
        while end < len(self) and self._item[end] == number:
            end += 1
        return range(begin, end)

    def of_weight(self, number: int) -> range:
        """Return the numbers of the units of the weight of a number."""
        return self.of(self._weights + number)

    def __len__(self) -> int:
        return len(self._item)

    @overload
    def __getitem__(self, at: int) -> Unit: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Unit, ...]: ...

    def __getitem__(self, at: int | slice) -> Unit | tuple[Unit, ...]:
        numbers = range(len(self))
        return tuple(map(self._made, numbers[at])) if isinstance(at, slice) else self._made(numbers[at])

    def __iter__(self) -> Iterator[Unit]:
        return map(self._made, range(len(self)))

    def _order(self) -> array[int]:
        """Return the placement numbers in shards, in the order of source bytes."""
        shard = {name: number for number, name in enumerate(self._plan.source.shards)}
        columns = files, begins, rows = array("I"), array("q"), array("q")
        for item in self._plan.placements.all:
            name, begin, first = item.reader.place
            files.append(shard[name])
            begins.append(begin)
            rows.append(first)
        return ordered(range(len(files)), lambda number: tuple(column[number] for column in columns))

    def _cut(self, number: int, item: Placement) -> None:
        self._first[number] = len(self)
        step = UNIT_BYTES if item.copied else unit_lines(item)
        for begin in range(0, item.extent, step):
            count = min(step, item.extent - begin)
            self._item.append(number)
            self._begins.append(begin)
            self._counts.append(count)
            self.nbytes.append(count * item.line_bytes)

    def _placement(self, number: int) -> Placement:
        placements = self._plan.placements.all
        if number < len(placements):
            return placements[number]
        path, size = self._files[number - len(placements)]
        return Placement.of_file(str(path), self._plan.source.root / path, size)

    def _made(self, number: int) -> Unit:
        return Unit(
            number=number, placement=self._placement(self._item[number]), start=self._begins[number],
            count=self._counts[number],
        )  # fmt: skip


def units(plan: CheckpointPlan) -> Units:
    """Return all units of a plan."""
    return Units(plan)


class Groups(Mapping[str, tuple[Unit, ...]]):
    """Units of each set of weights to scan before quantization, by name."""

    def __init__(self, all_units: Sequence[Unit]) -> None:
        self._units = all_units
        self._names = StringTable()
        self._heads, tails = array("I"), array("I")
        self._next = array("i", [-1]) * len(all_units)
        for unit in all_units:
            if unit.group is None:
                continue
            if self._names.add(unit.group) is not None:
                self._heads.append(unit.number)
                tails.append(unit.number)
                continue
            at = self._names.numbered(unit.group)
            self._next[tails[at]] = tails[at] = unit.number

    def __getitem__(self, name: str) -> tuple[Unit, ...]:
        found, number = [], self._heads[self._names.numbered(name)]
        while number >= 0:
            found.append(self._units[number])
            number = self._next[number]
        return tuple(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def groups(all_units: Sequence[Unit]) -> Groups:
    """Return the sets of units to scan before quantization."""
    return Groups(all_units)


def left_of(all_units: Sequence[Unit], done: Collection[int]) -> Sequence[Unit]:
    """Return the units that are not done, in their order."""
    left = array("I", (number for number in range(len(all_units)) if number not in done))
    return LazySequence(len(left), lambda n: all_units[left[n]])
