"""How a block of ggml holds its numbers: where each bit lies, and blocks taken apart and put together.

A block is a struct of bytes. A field of it, the codes of its elements or the numbers of one level of scales
or offsets, is spread over runs of bytes: byte j of a run of ``run`` bytes holds, from bit ``shifts[s]`` on,
``width`` bits of number ``s * run + j``. Types differ in these places alone, so that they are one table
(:mod:`zeropoint.codecs.gguf`), and reading is writing backwards. This module knows no type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..layout import packing
from ..params import QuantizationParams
from ..params.tensors import parameter_tensors
from ..schemes import Scheme
from ..tensor import QuantizedTensor


class Bits(NamedTuple):
    """Some bits of some numbers of a field.

    Args:
        at: the first byte of the block that holds them.
        size: how many bytes do.
        run: how many bytes hold numbers that follow one another.
        width: how many bits of a number are here.
        shifts: at which bits of a byte, for each run of numbers; all that there are unless given.
        low: the lowest of these bits in the number.
        first: the first number.
    """

    at: int
    size: int
    run: int
    width: int = 8
    shifts: tuple[int, ...] = ()
    low: int = 0
    first: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        """At which bits of a byte numbers lie."""
        return self.shifts or tuple(range(0, 8, self.width))

    @property
    def held(self) -> int:
        """How many numbers have bits here."""
        return self.size * len(self.places)

    def read(self, block: torch.Tensor, numbers: torch.Tensor) -> None:
        """Set these bits of ``numbers``, uint8 (..., count), to those of ``block``, uint8 (..., bytes)."""
        runs = block[..., self.at : self.at + self.size].reshape(*block.shape[:-1], -1, 1, self.run)
        shifts = torch.tensor(self.places, dtype=torch.uint8)[:, None]
        fields = (runs >> shifts) & ((1 << self.width) - 1)
        numbers[..., self.first : self.first + self.held] |= fields.flatten(-3) << self.low

    def write(self, numbers: torch.Tensor, block: torch.Tensor) -> None:
        """Set the bits of ``block`` to those of ``numbers``; the inverse of :meth:`read`."""
        fields = (numbers[..., self.first : self.first + self.held] >> self.low) & ((1 << self.width) - 1)
        runs = fields.reshape(*fields.shape[:-1], -1, len(self.places), self.run)
        target = block[..., self.at : self.at + self.size]
        for place, shift in enumerate(self.places):
            target |= (runs[..., place, :] << shift).flatten(-2)


class Field(NamedTuple):
    """Numbers of a block.

    Args:
        bits: where they lie.
        flip: bits of each number that are stored as their opposite: a number in offset binary, which is
            stored with half its range added, or one that is stored negated.
    """

    bits: tuple[Bits, ...]
    flip: int = 0

    @property
    def size(self) -> int:
        """How many bytes the numbers take, taken apart."""
        return max(part.first + part.held for part in self.bits)

    def read(self, block: torch.Tensor) -> torch.Tensor:
        """Return the numbers of blocks, uint8 (..., count): whole bytes, low ones first."""
        numbers = block.new_zeros((*block.shape[:-1], self.size))
        for part in self.bits:
            part.read(block, numbers)
        return self._flipped(numbers)

    def write(self, numbers: torch.Tensor, block: torch.Tensor) -> None:
        """Put numbers, uint8 (..., count), into blocks that are 0 there."""
        stored = self._flipped(numbers)
        for part in self.bits:
            part.write(stored, block)

    def _flipped(self, numbers: torch.Tensor) -> torch.Tensor:
        if not self.flip:
            return numbers
        low, high = self.flip & 0xFF, self.flip >> 8
        mask = torch.tensor([low, high] if high else [low], dtype=torch.uint8)
        return numbers ^ mask.repeat(self.size // len(mask))


def whole(at: int, size: int, flip: int = 0) -> Field:
    """Return a field of whole bytes: float16 numbers, or numbers of eight bits."""
    return Field((Bits(at, size, size),), flip)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of ggml.

    Args:
        block: values in a block.
        nbytes: bytes that they take.
        scheme: what its blocks mean.
        codes: those of the elements.
        levels: those of scales and offsets, in the order of :attr:`Scheme.levels`.
    """

    block: int
    nbytes: int
    scheme: Scheme
    codes: Field
    levels: tuple[Field, ...]

    def decode(
        self, lines: torch.Tensor, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedTensor:
        """Return rows of blocks, uint8 (rows, bytes), in codes and levels."""
        blocks = lines.view(shape[0], shape[1] // self.block, self.nbytes)
        levels = zip(self.levels, parameter_tensors(scheme, shape, dtype), strict=True)
        stored = [field.read(blocks).view(kind).view(grid) for field, (grid, kind) in levels]
        params = QuantizationParams.of(scheme, shape, dtype, stored)
        data = packing.pack(self.codes.read(blocks).view(shape), scheme.bits)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def encode(self, q: QuantizedTensor) -> torch.Tensor:
        """Return the rows of blocks of a matrix, uint8 (rows, bytes); the inverse of :meth:`decode`."""
        rows, columns = q.shape
        blocks = q.data.new_zeros((rows, columns // self.block, self.nbytes))
        numbers = [packing.unpack(q.data, q.scheme.bits, columns), *q.params.levels]
        for field, each in zip((self.codes, *self.levels), numbers, strict=True):
            stored = each.contiguous().view(torch.uint8)
            field.write(stored.view(*blocks.shape[:2], field.size), blocks)
        return blocks.view(rows, -1)
