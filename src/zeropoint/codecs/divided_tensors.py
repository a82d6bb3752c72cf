"""Model tensors that files divide into several pieces.

A piece has some rows of the whole tensor, in its own order: one expert, or queries, keys or values. Pieces
are cut where a file is written, and joined where it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .stored_forms import Shape


class RowRun(NamedTuple):
    """Consecutive rows of a piece in the whole, last axis fastest.

    >>> RowRun(1, (2, 3), (10, 2)).at().tolist()
    [1, 3, 5, 11, 13, 15]
    """

    first: int
    sizes: Shape
    strides: Shape

    def at(self) -> torch.Tensor:
        """Return the row indices."""
        found = torch.tensor(self.first)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = found[..., None] + torch.arange(size) * stride
        return found.flatten()


class TensorPiece(NamedTuple):
    """A piece of a tensor.

    name: as if it were a tensor of the model. shape: its own. rows: rows of the whole tensor, run after run:
    of a matrix, of all matrices of a stack, or values of a vector. transposed: whether each matrix of the
    piece has these rows as columns. single: whether rows are single values of the whole tensor.
    """

    name: str
    shape: Shape
    rows: tuple[RowRun, ...]
    transposed: bool = False
    single: bool = False


class Whole(NamedTuple):
    """A model tensor in pieces; transposed: whether matrices are (in, out)."""

    name: str
    shape: Shape
    pieces: Sequence[TensorPiece]
    transposed: bool = False


@functools.lru_cache(maxsize=4)
def places_in_pieces(rows: tuple[tuple[RowRun, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the piece and row for each row of a whole tensor.

    rows: of each piece.
    """
    found = [torch.cat([run.at() for run in runs]) for runs in rows]
    count = sum(map(len, found))
    piece, row = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
    for number, at in enumerate(found):
        piece[at], row[at] = number, torch.arange(len(at))
    return piece, row


@functools.lru_cache(maxsize=16)
def rows_of_piece(rows: tuple[RowRun, ...]) -> torch.Tensor:
    """Return the rows of the whole tensor that a piece has."""
    return torch.cat([run.at() for run in rows])
