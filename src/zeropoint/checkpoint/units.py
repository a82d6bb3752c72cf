"""The units of a run: what is done, hashed, journaled and, where it must be, done again as one.

A unit is some whole rows of one weight with every line that they give, codes and scales alike, or a range of
bytes that is copied. The cut follows from the plan alone, never from memory or threads, so the units of a
plan have the same numbers, hashes and order everywhere. This module knows where a unit's bytes lie; doing one
is work.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .plan import Kept, Placed, Plan, Restored, Weight
from .quantize import needs_extremes
from .storage import Place

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
class Rows(_OfRows):
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
        if spec.lines:
            line = placed.nbytes // spec.shape[0]
            begin = self.start // spec.rows * spec.lines * line
            if self.start + self.rows < self.weight.shape[0]:
                end = (self.start + self.rows) // spec.rows * spec.lines * line
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


Unit = Rows | Restore | Copy


def units(plan: Plan) -> tuple[Unit, ...]:
    """Return all units of a plan, numbered in the order of the source's bytes; companions come last."""
    shard = {name: number for number, name in enumerate(plan.source.shards)}
    placed: list[tuple[int, int, int, Weight | Restored | Kept]] = [
        *((shard[name], at, w.first, w) for w in plan.weights for name, at in (w.origin.place,)),
        *((shard[name], at, 0, r) for r in plan.restored for name, at in (r.origin.place,)),
        *((shard[k.source.file.name], k.source.begin, 0, k) for k in plan.kept),
    ]
    found: list[Unit] = []
    for _, _, _, item in sorted(placed, key=lambda each: each[:3]):
        if isinstance(item, Weight):
            found += [
                Rows(number=len(found) + count, weight=item, start=start, rows=rows)
                for count, (start, rows) in enumerate(_cuts(item))
            ]
        elif isinstance(item, Restored):
            found += [
                Restore(number=len(found) + count, weight=item, start=start, rows=rows)
                for count, (start, rows) in enumerate(_cuts(item))
            ]
        else:
            target = Span(
                file=item.placed.shard, tensor=item.placed.name, begin=item.placed.begin,
                size=item.placed.nbytes,
            )  # fmt: skip
            found += _copies(item.source.file, item.source.begin, target, len(found))
    for path, size in plan.companions.items():
        target = Span(file=str(path), tensor=None, begin=0, size=size)
        found += _copies(plan.source.root / path, 0, target, len(found))
    return tuple(found)


def groups(all_units: Sequence[Unit]) -> dict[str, tuple[Rows, ...]]:
    """Return, by name, the units of each set of weights that must be scanned before it is quantized."""
    found: dict[str, list[Rows]] = {}
    for unit in all_units:
        if isinstance(unit, Rows) and unit.group is not None:
            found.setdefault(unit.group, []).append(unit)
    return {name: tuple(members) for name, members in found.items()}


def _cuts(weight: Weight | Restored) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each unit."""
    height, columns = weight.shape
    rows = max(weight.alignment, UNIT_VALUES // max(1, columns) // weight.alignment * weight.alignment)
    return [(start, min(rows, height - start)) for start in range(0, height, rows)]


def _copies(source: Place, begin: int, target: Span, number: int) -> list[Unit]:
    cuts = range(0, target.size, UNIT_BYTES)
    return [
        Copy(
            number=number + count, source=source, begin=begin + cut,
            target=replace(target, begin=target.begin + cut, size=min(UNIT_BYTES, target.size - cut)),
        )
        for count, cut in enumerate(cuts)
    ]  # fmt: skip
