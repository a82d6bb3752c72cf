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

from ...columns import LazySequence, MadeSequence, StringTable, ordered
from ..measure.tiles import needs_extremes
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.output_tensors import Output, OutputTensor, unit_lines

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
    """``count`` rows, columns or bytes of an output, from ``start`` on."""

    number: int
    output: Output
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of its source for progress, with codes counted as floats."""
        return self.count * self.output.line_bytes

    @property
    def name(self) -> str:
        """Name in progress reports."""
        return self.output.module

    @property
    def group(self) -> str | None:
        """Set of weights to scan before it can be quantized, or None."""
        of = self.output
        if of.to is None:
            return None
        scanned = needs_extremes(of.to.weight) or of.to.codec.needs_mean(of.to)
        return (of.share or of.module) if scanned else None

    @property
    def file(self) -> str:
        """The file that it writes to."""
        return self.output.tensors[0].shard

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of its tensors, in their order."""
        return tuple(span for tensor in self.output.tensors if (span := self._span(tensor)) is not None)

    def _span(self, tensor: OutputTensor) -> Span | None:
        """Return its span of one output; None for constants, written first."""
        spec, begin, end = tensor.spec, 0, tensor.nbytes
        if self.output.to is None:
            begin = self.start * self.output.line_bytes
            end = begin + self.nbytes
        elif spec.axis is not None:
            line = tensor.nbytes // spec.height
            begin = self.start // spec.per * spec.lines * line
            if self.start + self.count < self.output.extent:
                end = (self.start + self.count) // spec.per * spec.lines * line
        elif self.start:
            return None
        return Span(file=tensor.shard, tensor=tensor.name, begin=tensor.begin + begin, size=end - begin)


class Units(MadeSequence[Unit]):
    """Units of a plan in the order of source bytes; companions last.

    nbytes: bytes of each, by number. What is kept of one is what it is about, where it begins, and how much
    of it there is.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._weights = len(plan.outputs.all) - len(plan.weights)
        self._item, self._begins, self._counts = array("I"), array("q"), array("I")
        self.nbytes = array("q")
        self._files = tuple(plan.companions.items())
        count = len(plan.outputs.all)
        self._first = array("q", [0]) * (count + len(self._files))
        for number in (*self._order(), *range(count, len(self._first))):
            self._cut(number, self._output(number))

    def of(self, number: int) -> range:
        """Return the numbers of the units of an output."""
        begin = end = self._first[number]
        while end < len(self) and self._item[end] == number:
            end += 1
        return range(begin, end)

    def of_weight(self, number: int) -> range:
        """Return the numbers of the units of the weight of a number."""
        return self.of(self._weights + number)

    def __len__(self) -> int:
        return len(self._item)

    def _order(self) -> array[int]:
        """Return the output numbers in shards, in the order of source bytes."""
        shard = {name: number for number, name in enumerate(self._plan.source.shards)}
        columns = files, begins, rows = array("I"), array("q"), array("q")
        for item in self._plan.outputs.all:
            name, begin, first = item.reader.place
            files.append(shard[name])
            begins.append(begin)
            rows.append(first)
        return ordered(range(len(files)), lambda number: tuple(column[number] for column in columns))

    def _cut(self, number: int, item: Output) -> None:
        self._first[number] = len(self)
        step = UNIT_BYTES if item.copied else unit_lines(item)
        for begin in range(0, item.extent, step):
            count = min(step, item.extent - begin)
            self._item.append(number)
            self._begins.append(begin)
            self._counts.append(count)
            self.nbytes.append(count * item.line_bytes)

    def _output(self, number: int) -> Output:
        outputs = self._plan.outputs.all
        if number < len(outputs):
            return outputs[number]
        path, size = self._files[number - len(outputs)]
        return Output.of_file(str(path), self._plan.source.root / path, size)

    def made(self, number: int) -> Unit:
        """Return a unit."""
        return Unit(
            number=number,
            output=self._output(self._item[number]),
            start=self._begins[number],
            count=self._counts[number],
        )


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


def left_of(all_units: Sequence[Unit], done: Collection[int]) -> Sequence[Unit]:
    """Return the units that are not done, in their order."""
    left = array("I", (number for number in range(len(all_units)) if number not in done))
    return LazySequence(len(left), lambda n: all_units[left[n]])
