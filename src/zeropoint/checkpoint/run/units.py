"""The units of a run: what is done, hashed, journaled and, where it must be, done again as one.

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

from ...columns import Made, Names
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.placement import KeptTensor, Placed, Restored, Weight
from ..read.storage import Place
from .tiles import needs_extremes

UNIT_VALUES = 1 << 23
"""Numbers in a unit of a weight: a tenth of a second's work, so little is lost, and few journal records."""
UNIT_BYTES = 1 << 25
"""Bytes in a unit that is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of an output file that one unit writes: ``size`` of them from the absolute offset ``begin``.

    tensor: whose they are; None in a file that holds no tensors.
    """

    file: str
    tensor: str | None
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRows:
    """A unit of ``rows`` rows from row ``start``."""

    number: int
    weight: Weight | Restored
    start: int
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of the rows as floats, which progress counts."""
        return self.rows * self.weight.row_bytes

    @property
    def sources(self) -> tuple[Place, ...]:
        """The files that it is read from."""
        return self.weight.origin.files

    @property
    def stamps(self) -> tuple[str, ...]:
        """The names under which the states of these files are kept."""
        return tuple(place.name for place in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRows(_OfRows):
    """A unit of a weight that is quantized."""

    weight: Weight

    @property
    def name(self) -> str:
        """What progress calls it."""
        return self.weight.module

    @property
    def group(self) -> str | None:
        """The set of weights that must be scanned before it can be quantized, or None."""
        weight = self.weight
        return (weight.share or weight.module) if needs_extremes(weight.layer.weight) else None

    @property
    def file(self) -> str:
        """The file that it writes to."""
        return self.weight.outputs[0].shard

    @property
    def spans(self) -> tuple[Span, ...]:
        """What it writes, in the order of the weight's outputs."""
        return tuple(span for placed in self.weight.outputs if (span := self.span(placed)) is not None)

    def span(self, placed: Placed) -> Span | None:
        """Return what it writes of one output; None of a constant, which the first rows write."""
        spec, begin, end = placed.spec, 0, placed.nbytes
        if spec.axis is not None:
            line = placed.nbytes // spec.shape[0]
            begin = self.start // spec.per * spec.lines * line
            if self.start + self.rows < self.weight.extent:
                end = (self.start + self.rows) // spec.per * spec.lines * line
        elif self.start:
            return None
        return Span(file=placed.shard, tensor=placed.name, begin=placed.begin + begin, size=end - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(_OfRows):
    """A unit of a tensor that is written as floats."""

    weight: Restored

    @property
    def name(self) -> str:
        """What progress calls it."""
        return self.weight.placed.name

    @property
    def group(self) -> None:
        """Nothing needs to be scanned before."""
        return

    @property
    def file(self) -> str:
        """The file that it writes to."""
        return self.weight.placed.shard

    @property
    def spans(self) -> tuple[Span, ...]:
        """What it writes."""
        placed = self.weight.placed
        begin = placed.begin + self.start * self.weight.row_bytes
        return (Span(file=placed.shard, tensor=placed.name, begin=begin, size=self.nbytes),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A unit that is copied: the bytes of ``source`` from ``begin`` on become ``target``."""

    number: int
    source: Place
    begin: int
    target: Span

    @property
    def name(self) -> str:
        """What progress calls it."""
        return self.target.tensor or self.target.file

    @property
    def nbytes(self) -> int:
        """Bytes of the source that it takes."""
        return self.target.size

    @property
    def sources(self) -> tuple[Place, ...]:
        """The files that it is read from."""
        return (self.source,)

    @property
    def stamps(self) -> tuple[str, ...]:
        """The names under which the states of these files are kept."""
        return (self.source.name if self.target.tensor is not None else self.target.file,)

    @property
    def group(self) -> None:
        """Nothing needs to be scanned before a copy."""
        return

    @property
    def file(self) -> str:
        """The file that it writes to."""
        return self.target.file

    @property
    def spans(self) -> tuple[Span, ...]:
        """What it writes."""
        return (self.target,)


Unit = QuantizeRows | Restore | Copy


class Units(Sequence[Unit]):
    """All units of a plan, numbered in the order of the source's bytes; companions come last.

    nbytes: bytes of each, by number. What is kept of one is what it is about, where it begins, and how much
    of it there is.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._companions = tuple(plan.companions)
        self._kind, self._item = array("B"), array("I")
        self._begins, self._counts = array("q"), array("I")
        self.nbytes = array("q")
        counts = (len(plan.weights), len(plan.restored), len(plan.kept), len(plan.companions))
        self._first = [array("q", [0]) * count for count in counts]
        for kind, number in self._order():
            self._add(kind, number, (plan.weights, plan.restored, plan.kept)[kind][number])
        for number, size in enumerate(plan.companions.values()):
            self._cut(_COMPANION, number, range(0, size, UNIT_BYTES), size, 1)

    def of(self, kind: str, number: int) -> range:
        """Return the numbers of the units of an item, one of "weights", "restored", "kept", "companions"."""
        found = _KINDS.index(kind)
        begin = end = self._first[found][number]
        while end < len(self) and (self._kind[end], self._item[end]) == (found, number):
            end += 1
        return range(begin, end)

    def of_weight(self, number: int) -> range:
        """Return the numbers of the units of the weight of a number."""
        return self.of("weights", number)

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, at: int) -> Unit: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Unit, ...]: ...

    def __getitem__(self, at: int | slice) -> Unit | tuple[Unit, ...]:
        numbers = range(len(self))
        return tuple(map(self._made, numbers[at])) if isinstance(at, slice) else self._made(numbers[at])

    def __iter__(self) -> Iterator[Unit]:
        return map(self._made, range(len(self)))

    def _order(self) -> list[tuple[int, int]]:
        """Return (kind, number) of all that lies in shards, in the order of the source's bytes."""
        plan = self._plan
        shard = {name: number for number, name in enumerate(plan.source.shards)}
        keys: list[tuple[int, int, int, int, int]] = []
        for number, weight in enumerate(plan.weights):
            name, at = weight.origin.place
            keys.append((shard[name], at, weight.first, _ROWS, number))
        for number, restored in enumerate(plan.restored):
            name, at = restored.origin.place
            keys.append((shard[name], at, 0, _RESTORE, number))
        for number, kept in enumerate(plan.kept):
            keys.append((shard[kept.source.file.name], kept.source.begin, 0, _KEPT, number))
        keys.sort(key=lambda key: key[:3])
        return [(kind, number) for _, _, _, kind, number in keys]

    def _add(self, kind: int, number: int, item: Weight | Restored | KeptTensor) -> None:
        if isinstance(item, KeptTensor):
            size = item.placed.nbytes
            self._cut(kind, number, range(0, size, UNIT_BYTES), size, 1)
        else:
            height, step = item.extent, _rows(item)
            self._cut(kind, number, range(0, height, step), height, item.row_bytes)

    def _cut(self, kind: int, number: int, cuts: range, end: int, each: int) -> None:
        self._first[kind][number] = len(self)
        for begin in cuts:
            count = min(cuts.step, end - begin)
            self._kind.append(kind)
            self._item.append(number)
            self._begins.append(begin)
            self._counts.append(count)
            self.nbytes.append(count * each)

    def _made(self, number: int) -> Unit:
        kind, item = self._kind[number], self._item[number]
        begin, count = self._begins[number], self._counts[number]
        if kind == _ROWS:
            return QuantizeRows(number=number, weight=self._plan.weights[item], start=begin, rows=count)
        if kind == _RESTORE:
            return Restore(number=number, weight=self._plan.restored[item], start=begin, rows=count)
        if kind == _KEPT:
            kept = self._plan.kept[item]
            placed, source, at = kept.placed, kept.source.file, kept.source.begin
            target = Span(
                file=placed.shard, tensor=placed.name, begin=placed.begin + begin, size=count
            )  # fmt: skip
            return Copy(number=number, source=source, begin=at + begin, target=target)
        path = self._companions[item]
        target = Span(file=str(path), tensor=None, begin=begin, size=count)
        return Copy(number=number, source=self._plan.source.root / path, begin=begin, target=target)


_KINDS = ("weights", "restored", "kept", "companions")
_ROWS, _RESTORE, _KEPT, _COMPANION = range(len(_KINDS))


def units(plan: CheckpointPlan) -> Units:
    """Return all units of a plan."""
    return Units(plan)


class Groups(Mapping[str, tuple[QuantizeRows, ...]]):
    """By name, the units of each set of weights that must be scanned before it is quantized."""

    def __init__(self, all_units: Sequence[Unit]) -> None:
        self._units = all_units
        self._names = Names()
        self._heads, self._tails = array("q"), array("q")
        self._next = array("q", [-1]) * len(all_units)
        for unit in all_units:
            if isinstance(unit, QuantizeRows) and unit.group is not None:
                self._join(unit.number, unit.group)

    def _join(self, number: int, group: str) -> None:
        if self._names.add(group) is not None:
            self._heads.append(number)
            self._tails.append(number)
            return
        at = self._names.numbered(group)
        self._next[self._tails[at]] = number
        self._tails[at] = number

    def __getitem__(self, name: str) -> tuple[QuantizeRows, ...]:
        found, number = [], self._heads[self._names.numbered(name)]
        while number >= 0:
            unit = self._units[number]
            assert isinstance(unit, QuantizeRows)
            found.append(unit)
            number = self._next[number]
        return tuple(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def groups(all_units: Sequence[Unit]) -> Groups:
    """Return the sets of units that must be scanned before they are quantized."""
    return Groups(all_units)


def _rows(weight: Weight | Restored) -> int:
    """Return the rows, or columns, of a unit."""
    values, alignment = weight.line_values, weight.alignment
    return max(alignment, UNIT_VALUES // max(1, values) // alignment * alignment)


def left_of(all_units: Sequence[Unit], done: Collection[int]) -> Sequence[Unit]:
    """Return the units that are not done, in their order."""
    left = array("I", (number for number in range(len(all_units)) if number not in done))
    return Made(len(left), lambda n: all_units[left[n]])
