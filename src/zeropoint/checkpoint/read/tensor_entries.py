"""Places of tensors, one by one and in a compact table."""

from __future__ import annotations

import operator
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import NamedTuple

from zeropoint.checkpoint.read.storage import Place
from zeropoint.codecs.containers.protocol import Use
from zeropoint.codecs.stored_forms import StoredForm
from zeropoint.columns import Interned, MadeSequence, StringTable, ordered


class Stack(NamedTuple):
    """Layout of all experts' matrices in one tensor, experts first.

    holder: the module that experts are numbered in. parts: what a matrix holds, in the order of its rows.
    transposed: whether it is (in, out). interleaved: whether the rows of the parts alternate; otherwise those
    of the first come first. problem: why it cannot be taken apart, or None. stays: whether files hold
    it in one tensor again, next to any biases.
    """

    holder: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    problem: str | None = None
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The place of a tensor: `nbytes` bytes of `file` from `begin`.

    `form`: stored order, if it differs from the model's. `use`: what the graph of its file
    says of it, or None where files have none. `stack`: the experts that it holds, or None for a matrix.
    `inputs_first`: whether a matrix is (in, out), as in transformers' Conv1D.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    file: Place
    form: StoredForm | None = None
    use: Use | None = None
    stack: Stack | None = None
    inputs_first: bool = False


_MOVING = frozenset((
    "Cast", "Concat", "Expand", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice",
    "Split", "Squeeze", "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators of ONNX that move numbers and compute nothing with them."""


def code_operators(entry: TensorEntry) -> str:
    """Return the graph operators that consume undecodable codes, or "".

    Codes are matrices of at most 8 bits, of which the graph does not say how they are decoded.
    """
    use = entry.use
    if (
        use is None
        or use.part is not None
        or len(entry.shape) < 2
        or not re.match("[IUF]_?[248]", entry.dtype)
    ):
        return ""
    return " and ".join(sorted(set(use.operators) - _MOVING))


def _kept(form: StoredForm | None) -> StoredForm | None:
    """Return a form without its name and part, for sharing."""
    return None if form is None else form._replace(name="", part=None)


class Entries(Mapping[str, TensorEntry]):
    """Tensors by name in insertion order, in about 60 bytes each."""

    __slots__ = ("_begins", "_columns", "_kinds", "_names", "_of", "_sizes", "_stacks")

    def __init__(self, entries: Iterable[TensorEntry] = ()) -> None:
        self._names = StringTable()
        self._begins, self._sizes, self._of = array("q"), array("q"), array("I")
        self._kinds = Interned()
        self._stacks: tuple[int, dict[tuple[str, str], str]] = 0, {}
        self._columns: tuple[tuple[int, re.Pattern[str] | None], Counter[int]] = (0, None), Counter()
        for entry in entries:
            self.add(entry)

    def add(self, entry: TensorEntry) -> bool:
        """Add a tensor; return whether no other has its name."""
        new = self._names.add(entry.name) is not None
        if new:
            self._begins.append(entry.begin)
            self._sizes.append(entry.nbytes)
            order = _kept(entry.form), entry.inputs_first
            kind = (entry.dtype, entry.shape, entry.file, *order, entry.use, entry.stack)
            self._of.append(self._kinds.number(kind))
        return new

    def extend(self, others: Entries) -> list[TensorEntry]:
        """Add tensors of another table; return those with known names."""
        known = set(self._names.extend(others._names))
        kinds = [self._kinds.number(others._kinds[n]) for n in range(len(others._kinds))]
        for number in range(len(others)):
            if number not in known:
                self._begins.append(others._begins[number])
                self._sizes.append(others._sizes[number])
                self._of.append(kinds[others._of[number]])
        return [others.at(number) for number in sorted(known)]

    def number(self, name: str) -> int | None:
        """Return the number of the tensor of this name, or None."""
        return self._names.number(name)

    def numbered(self, name: str) -> int:
        """Return the number of the tensor of this name, which is there."""
        return self._names.numbered(name)

    def name(self, number: int) -> str:
        """Return the name of the tensor of a number."""
        return self._names[number]

    def at(self, number: int) -> TensorEntry:
        """Return the tensor of a number."""
        dtype, shape, file, form, inputs_first, use, stack = self._kinds[self._of[number]]
        return TensorEntry(
            name=self._names[number], dtype=dtype, shape=shape, begin=self._begins[number],
            nbytes=self._sizes[number], file=file, form=form, use=use, stack=stack, inputs_first=inputs_first,
        )  # fmt: skip

    def in_file_order(self) -> Entries:
        """Return the tensors in file order, empty ones first at an offset."""
        order = ordered(range(len(self)), lambda number: (self._begins[number], self._sizes[number]))
        return self if all(map(operator.eq, order, range(len(self)))) else Entries(map(self.at, order))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self._sizes)

    @property
    def stacks(self) -> Mapping[tuple[str, str], str]:
        """Tensor names by the holder and part of their experts."""
        if self._stacks[0] != len(self):
            kinds = [self._kinds[number][-1] for number in range(len(self._kinds))]
            found = ((self._names[at], kinds[kind]) for at, kind in enumerate(self._of) if kinds[kind])
            self._stacks = (
                len(self),
                {(stack.holder, part): name for name, stack in found for part in stack.parts},
            )
        return self._stacks[1]

    @property
    def ranks(self) -> set[int]:
        """The numbers of axes that tensors have."""
        return {len(self._kinds[number][1]) for number in range(len(self._kinds))}

    def columns_but(self, names: re.Pattern[str]) -> Counter[int]:
        """Count matrices by columns, except names that ``names`` finds."""
        if self._columns[0] != (len(self), names):
            found = Counter[int]()
            for number, kind in enumerate(self._of):
                shape = self._kinds[kind][1]
                if len(shape) == 2 and not names.search(self._names[number]):
                    found[shape[1]] += 1
            self._columns = (len(self), names), found
        return self._columns[1]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.number(name) is not None

    def __getitem__(self, name: str) -> TensorEntry:
        number = self.number(name)
        if number is None:
            raise KeyError(name)
        return self.at(number)

    def values(self) -> EntryValues:
        """Return the tensors, in order."""
        return EntryValues(self)


class EntryValues(MadeSequence[TensorEntry], ValuesView[TensorEntry]):
    """Tensors of a table in order, each made on request."""

    _mapping: Entries

    def made(self, number: int) -> TensorEntry:
        """Return a tensor."""
        return self._mapping.at(number)
