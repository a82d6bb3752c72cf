"""Bit layout of structs: fields as runs of bits or digits.

A field, the codes of the elements of a block or the numbers of one level of scales or offsets, is a few
:class:`Bits`, or :class:`Digits` of bytes: byte j of a run of ``run`` bytes holds, from bit ``shifts[s]`` on,
``width`` bits of number ``s * run + j``. Structs differ in these places alone, so that each is one value, and
reading reverses writing: both follow the :class:`Move` list of a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch


class Move(NamedTuple):
    """A bit copy between neighboring bytes of a block and neighboring numbers.

    Byte ``at + j`` from bit ``shift`` on, and byte-sized number ``number + j`` from bit ``low`` on, for each
    j below ``size``: the bits of ``mask``, of which the bits of ``flip`` are inverted in the block.
    """

    at: int
    number: int
    size: int
    shift: int
    low: int
    mask: int
    flip: int


class Bits(NamedTuple):
    """Bits of a field's numbers; two-byte numbers are two, low byte first.

    Args:
        at: the first byte of the block that holds them.
        size: number of these bytes.
        run: bytes that hold consecutive numbers.
        width: how many bits of a number are here.
        shifts: at which bits of a byte, for each run of numbers; every multiple of ``width`` unless given.
        low: the lowest of these bits in the number.
        first: the first number.
        flip: bits that are stored inverted: the highest of a number in offset binary, which is stored with
            half its range added, or the sign of one that is stored negated.
    """

    at: int
    size: int
    run: int
    width: int = 8
    shifts: tuple[int, ...] = ()
    low: int = 0
    first: int = 0
    flip: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        """At which bits of a byte numbers lie."""
        return self.shifts or tuple(range(0, 8, self.width))

    @property
    def end(self) -> int:
        """The number after the last one."""
        return self.first + self.size * len(self.places)

    def moves(self) -> Iterator[Move]:
        """Yield what reads and writes them."""
        number = self.first
        for at in range(self.at, self.at + self.size, self.run):
            for shift in self.places:
                yield Move(at, number, self.run, shift, self.low, (1 << self.width) - 1, self.flip)
                number += self.run


class Digits(NamedTuple):
    """Base-3 digits of bytes, as ggml stores them.

    Digit ``s`` of byte j of a run is number ``s * run + j``. A byte is ``ceil(n * 256 / 243)`` for the number
    n of five digits of base 3, the highest first: times ``3 ** s``, modulo 256, it leaves digit s in the
    integer part of three 256ths. at: the first byte of the block that holds them. run: number of these bytes.
    places: how many digits of a byte are numbers; others are 0. first: the first number.
    """

    at: int
    run: int
    places: int = 5
    first: int = 0

    @property
    def end(self) -> int:
        """The number after the last one."""
        return self.first + self.run * self.places

    def read(self, blocks: torch.Tensor, numbers: torch.Tensor) -> None:
        """Copy the digits of uint8 blocks (..., nbytes) to numbers (..., count)."""
        held = blocks[..., self.at : self.at + self.run].to(torch.int32)
        for place in range(self.places):
            start = self.first + place * self.run
            numbers[..., start : start + self.run] = (held * 3**place & 0xFF) * 3 >> 8

    def write(self, numbers: torch.Tensor, blocks: torch.Tensor) -> None:
        """Put numbers into blocks; the inverse of :meth:`read`."""
        own = numbers[..., self.first : self.end].to(torch.int32)
        own = own.reshape(*own.shape[:-1], self.places, self.run)
        total = sum(
            (own[..., place, :] * 3 ** (4 - place) for place in range(self.places)), own[..., 0, :] * 0
        )
        blocks[..., self.at : self.at + self.run] = (total * 256 + 242) // 243


Field: TypeAlias = tuple[Bits | Digits, ...]
"""Numbers of a block: where all their bits or digits lie."""


def whole(at: int, size: int) -> Field:
    """Return a field of whole bytes: float16 or eight-bit numbers."""
    return (Bits(at, size, size),)


class Struct(NamedTuple):
    """A block struct.

    nbytes: its size. codes: field of the elements' codes. levels: fields of scales and offsets, in the order
    of :attr:`Scheme.levels`.
    """

    nbytes: int
    codes: Field
    levels: tuple[Field, ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        """The codes and the levels."""
        return self.codes, *self.levels


def field_size(field: Field) -> int:
    """Return how many bytes the numbers of a field take, taken apart."""
    return max(part.end for part in field)


def read_field(field: Field, blocks: torch.Tensor) -> torch.Tensor:
    """Return the numbers of blocks, uint8 (..., nbytes), as uint8 (..., count)."""
    numbers = blocks.new_zeros((*blocks.shape[:-1], field_size(field)))
    for digits in _digits(field):
        digits.read(blocks, numbers)
    for at, number, size, shift, low, mask, flip in _moves(field):
        bits = (blocks[..., at : at + size] >> shift & mask) ^ flip
        numbers[..., number : number + size] |= bits << low
    return numbers


def write_field(field: Field, numbers: torch.Tensor, blocks: torch.Tensor) -> None:
    """Put numbers into blocks that are 0 there; the inverse of :func:`read_field`."""
    for digits in _digits(field):
        digits.write(numbers, blocks)
    for at, number, size, shift, low, mask, flip in _moves(field):
        bits = (numbers[..., number : number + size] >> low & mask) ^ flip
        blocks[..., at : at + size] |= bits << shift


def _moves(field: Field) -> Iterator[Move]:
    return (move for part in field if isinstance(part, Bits) for move in part.moves())


def _digits(field: Field) -> Iterator[Digits]:
    return (part for part in field if isinstance(part, Digits))
