"""Compact column stores for millions of items, built on access.

A Python object with a few fields takes hundreds of bytes, and a checkpoint may have a million tensors. What
is kept of each lies in columns of numbers; the object is made where it is looked at, and forgotten.
"""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class MadeSequence(Sequence[T]):
    """A sequence whose items are made on access, by number."""

    __slots__ = ()

    @abstractmethod
    def made(self, number: int) -> T:
        """Return an item; number: from 0 on, below the length."""

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...

    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        numbers = range(len(self))
        return tuple(map(self.made, numbers[at])) if isinstance(at, slice) else self.made(numbers[at])

    def __iter__(self) -> Iterator[T]:
        return map(self.made, range(len(self)))


class LazySequence(MadeSequence[T]):
    """A lazy sequence of ``count`` items, built by ``make`` on access.

    >>> squares = LazySequence(4, lambda n: n * n)
    >>> list(squares), squares[-1], squares[1:3]
    ([0, 1, 4, 9], 9, (1, 4))
    """

    __slots__ = ("_count", "_make")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def made(self, number: int) -> T:
        """Return an item."""
        return self._make(number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<{len(self)} items, such as {self[0]!r}>" if len(self) else "<no items>"


class StringTable(Sequence[str]):
    """A table of numbered unique texts, about 30 extra bytes each.

    >>> names = StringTable()
    >>> names.add("a"), names.add("b"), names.add("a"), names.number("b"), names.number("c"), names[1]
    (0, 1, None, 1, None, 'b')
    """

    __slots__ = ("_ends", "_hashes", "_slots", "_text")

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])
        self._hashes = array("q")
        self._slots = array("i", [-1]) * 16

    @property
    def memory(self) -> int:
        """Bytes that it takes."""
        columns = (self._ends, self._hashes, self._slots)
        return len(self._text) + sum(column.itemsize * len(column) for column in columns)

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...

    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        return self._text[self._ends[at] : self._ends[at + 1]].decode("utf-8", "surrogatepass")

    def number(self, name: str) -> int | None:
        """Return a text's number, or None."""
        found = self._slots[self._slot(name.encode("utf-8", "surrogatepass"), hash(name))]
        return None if found < 0 else found

    def numbered(self, name: str) -> int:
        """Return the number of a text that is there; raises KeyError otherwise."""
        found = self.number(name)
        if found is None:
            raise KeyError(name)
        return found

    def add(self, name: str) -> int | None:
        """Add a text and return its number; None where it was there."""
        text, hashed = name.encode("utf-8", "surrogatepass"), hash(name)
        slot = self._slot(text, hashed)
        if self._slots[slot] >= 0:
            return None
        return self._put(slot, text, hashed)

    def extend(self, others: StringTable) -> list[int]:
        """Add other texts; return the numbers of known ones, left out."""
        if not len(self):
            self._text, self._ends = others._text[:], others._ends[:]
            self._hashes, self._slots = others._hashes[:], others._slots[:]
            return []
        known = []
        for number, hashed in enumerate(others._hashes):
            text = bytes(others._text[others._ends[number] : others._ends[number + 1]])
            slot = self._slot(text, hashed)
            if self._slots[slot] >= 0:
                known.append(number)
            else:
                self._put(slot, text, hashed)
        return known

    def _put(self, slot: int, text: bytes, hashed: int) -> int:
        number = self._slots[slot] = len(self._hashes)
        self._text += text
        self._ends.append(len(self._text))
        self._hashes.append(hashed)
        if 3 * number > 2 * len(self._slots):
            self._grow()
        return number

    def _slot(self, text: bytes, hashed: int) -> int:
        """Return a text's slot, or its free one, by linear probing."""
        slots, hashes, ends, mask = self._slots, self._hashes, self._ends, len(self._slots) - 1
        slot = hashed & mask
        while (number := slots[slot]) >= 0:
            if hashes[number] == hashed and self._text[ends[number] : ends[number + 1]] == text:
                break
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        slots = array("i", [-1]) * (2 * len(self._slots))
        mask = len(slots) - 1
        for number, hashed in enumerate(self._hashes):
            slot = hashed & mask
            while slots[slot] >= 0:
                slot = (slot + 1) & mask
            slots[slot] = number
        self._slots = slots


_PIECE = 1 << 18
"""Bytes in one buffer of :class:`PackedBytes`; a single growing buffer would be copied, and held twice."""


class PackedBytes(MutableMapping[int, bytes]):
    """Packed bytes by number below ``count``, with 12 bytes of overhead.

    What is replaced or removed is forgotten, but its memory is not used again.

    >>> blobs = PackedBytes(3)
    >>> blobs[2] = b"abc"
    >>> list(blobs), blobs[2], 1 in blobs
    ([2], b'abc', False)
    """

    __slots__ = ("_begins", "_filled", "_pieces", "_sizes")

    def __init__(self, count: int) -> None:
        self._begins = array("q", [-1]) * count
        self._sizes = array("I", [0]) * count
        self._pieces = [bytearray()]
        self._filled = 0

    def __getitem__(self, number: int) -> bytes:
        if not 0 <= number < len(self._begins) or self._begins[number] < 0:
            raise KeyError(number)
        piece, begin = divmod(self._begins[number], _PIECE)
        return bytes(self._pieces[piece][begin : begin + self._sizes[number]])

    def __setitem__(self, number: int, data: bytes) -> None:
        if not 0 <= number < len(self._begins):
            raise KeyError(number)
        self._filled += self._begins[number] < 0
        if len(self._pieces[-1]) + len(data) >= _PIECE:
            self._pieces.append(bytearray())
        self._begins[number] = (len(self._pieces) - 1) * _PIECE + len(self._pieces[-1])
        self._sizes[number] = len(data)
        self._pieces[-1] += data

    def __delitem__(self, number: int) -> None:
        if number not in self:
            raise KeyError(number)
        self._begins[number] = -1
        self._filled -= 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._begins) and self._begins[number] >= 0

    def __iter__(self) -> Iterator[int]:
        return (number for number, begin in enumerate(self._begins) if begin >= 0)

    def __len__(self) -> int:
        return self._filled


_RUN = 1 << 13
"""Indices whose sort keys are in memory at the same time."""


def ordered(numbers: Iterable[int], key: Callable[[int], Any]) -> array[int]:
    """Return indices sorted by keys, each computed twice, few in memory.

    >>> list(ordered(range(4), ["d", "a", "c", "a"].__getitem__))
    [1, 3, 2, 0]
    """
    left = iter(numbers)
    runs: list[array[int]] = []
    while run := array("I", itertools.islice(left, _RUN)):
        runs.append(array("I", sorted(run, key=key)))
    return runs[0] if len(runs) == 1 else array("I", heapq.merge(*runs, key=key))


class Interned:
    """Interned values, each with a number.

    >>> kinds = Interned()
    >>> kinds.number("x"), kinds.number("y"), kinds.number("x"), kinds[1]
    (0, 1, 0, 'y')
    """

    __slots__ = ("_numbers", "_values")

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def number(self, value: Any) -> int:
        """Return a value's number, a new one if unknown."""
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number
