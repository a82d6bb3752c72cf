"""Rotations and norm weights folded into a matrix, in pieces.

    W' = A^T W diag(g) B

B rotates what the matrix reads and A what it writes, block Hadamard matrices with random signs both
(:mod:`zeropoint.ops.rotation`); g is the weight of the norm before it. Computed in float64, and rounded at
the end. A piece holds whole blocks of both sides, so no bit depends on how a matrix is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from ...methods.channels import ChannelFold
from ...ops.rotation import Rotation
from ..read.storage import Files, Place
from .row_reader import Buffer, RowReader, by_expert

_PIECE = 1 << 18
"""Numbers that are worked on at once, where blocks are not larger."""


class RotatedSide(NamedTuple):
    """Rotation of one side of a matrix; signs repeat after ``width`` numbers."""

    rotation: Rotation
    width: int

    def of(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Rotate the last axis of ``x``, whole blocks from ``first`` on."""
        places = torch.arange(first, first + x.shape[-1]) % self.width
        return self.rotation.rotate(x, self.rotation.signs(self.width)[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRotation:
    """Rotations and a norm folded into a matrix; see the module.

    inputs, outputs: the rotations of its sides. norm: the reader of the weight of the norm before it. one:
    what that norm adds to its weight.
    """

    action: ClassVar[str] = "rotated"

    inputs: RotatedSide | None = None
    outputs: RotatedSide | None = None
    norm: RowReader | None = None
    one: float = 0.0

    @property
    def block_rows(self) -> int:
        """Rows of which a part holds a multiple."""
        return 1 if self.outputs is None else self.outputs.rotation.size

    def fill(self, out: torch.Tensor, x: torch.Tensor, first: int, weight: torch.Tensor | None) -> None:
        """Write the folded ``x`` into ``out``, which may be the same memory.

        x: (rows, columns), whole blocks of rows from row ``first`` on. weight: of the norm, (columns, 1).
        """
        gain = None if weight is None else weight.flatten().double() + self.one
        high, wide = self.block_rows, 1 if self.inputs is None else self.inputs.rotation.size
        width = min(x.shape[1], max(wide, _PIECE // high // wide * wide))
        height = max(high, _PIECE // width // high * high)
        for row in range(0, x.shape[0], height):
            for column in range(0, x.shape[1], width):
                rows, columns = slice(row, row + height), slice(column, column + width)
                y = x[rows, columns].double()
                if gain is not None:
                    y *= gain[columns]
                if self.inputs is not None:
                    y = self.inputs.of(y, column)
                if self.outputs is not None:
                    y = self.outputs.of(y.t(), first + row).t()
                out[rows, columns] = y


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm:
    """Norm weight after folding: all ones, less the norm's own ``one``."""

    action: ClassVar[str] = "folded into what reads it"
    block_rows: ClassVar[int] = 1
    norm: ClassVar[RowReader | None] = None

    one: float = 0.0

    def fill(self, out: torch.Tensor, x: torch.Tensor, first: int, weight: torch.Tensor | None) -> None:
        """Write into ``out`` what is left of ``x``; see :meth:`FoldedRotation.fill`."""
        out.fill_(1 - self.one)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedChannels:
    """Rescaled channels of a tensor of one or all experts.

    matrices: of each matrix, in order. height: rows of each.
    """

    action: ClassVar[str] = "its channels are rescaled"
    block_rows: ClassVar[int] = 1
    norm: ClassVar[RowReader | None] = None

    matrices: tuple[ChannelFold | None, ...]
    height: int

    def fill(self, out: torch.Tensor, x: torch.Tensor, first: int, weight: torch.Tensor | None) -> None:
        """Write the rescaled rows ``x`` into ``out``; see :meth:`FoldedRotation.fill`."""
        for number, row, part in by_expert(first, x, self.height):
            fold, at = self.matrices[number], number * self.height + row - first
            out[at : at + len(part)] = part if fold is None else fold.of(part, row)


Fold: TypeAlias = FoldedRotation | FoldedNorm | FoldedChannels


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded(RowReader):
    """Rows with a rotation, a norm or factors of channels folded in.

    Rounded to the dtype of ``entry``, so that a second fold starts from the stored values of the first.
    """

    of: RowReader
    fold: Fold

    @property
    def files(self) -> tuple[Place, ...]:
        norm = () if self.fold.norm is None else self.fold.norm.files
        return tuple(dict.fromkeys((*self.of.files, *norm)))

    @property
    def block_rows(self) -> int:
        return math.lcm(self.fold.block_rows, self.of.block_rows)

    @property
    def alignment(self) -> int:
        return math.lcm(self.fold.block_rows, self.of.alignment)

    @property
    def copies(self) -> tuple[int, int]:
        copies, beneath = self.of.copies
        return copies if self.entry == self.of.entry else 3 * copies, beneath

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out, norm = self.view(buffer, rows), self.fold.norm
        same = self.of.dtype == self.dtype
        space = buffer if same else bytearray(out.numel() * self.of.dtype.itemsize)
        x = self.of.read(files, start, rows, space)
        weight = None if norm is None else norm.read(files, 0, self.columns, bytearray(norm.entry.nbytes))
        self.fold.fill(out, x, start, weight)
        return out
