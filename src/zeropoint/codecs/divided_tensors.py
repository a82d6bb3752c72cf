"""Tensors of the model of which files have several pieces, each a tensor of its own.

A piece has some rows of the whole in an order of its own. The model's rows of experts, or of queries,
keys and
values, are written apart that an engine wants apart, and made one again where the files are read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .stored_forms import Shape


class RowRun(NamedTuple):
    """Rows of a whole that a piece has next to each other: an index over axes, the last of which runs first.

    >>> RowRun(1, (2, 3), (10, 2)).at().tolist()
    [1, 3, 5, 11, 13, 15]
    """

    first: int
    sizes: Shape
    strides: Shape

    def at(self) -> torch.Tensor:
        """Return the numbers of the rows."""
        found = torch.tensor(self.first)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = found[..., None] + torch.arange(size) * stride
        return found.flatten()


class TensorPiece(NamedTuple):
    """A piece of a tensor.

    Args:
        name: as if it were a tensor of the model.
        shape: its own.
        rows: of the whole, runs of which follow each other; rows are those of a matrix, or numbers of a
            vector, or of all its matrices where the whole has several.
        transposed: whether each matrix of the piece has the rows as columns.
        single: whether rows are single numbers of the whole.
    """

    name: str
    shape: Shape
    rows: tuple[RowRun, ...]
    transposed: bool = False
    single: bool = False


class Whole(NamedTuple):
    """A tensor of the model that files have in pieces; transposed: whether its matrices are (in, out)."""

    name: str
    shape: Shape
    pieces: Sequence[TensorPiece]
    transposed: bool = False


@functools.lru_cache(maxsize=4)
def places_in_pieces(rows: tuple[tuple[RowRun, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row of a whole the number of its piece, and that of its row there.

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
    """Return the row of the whole of each row of a piece."""
    return torch.cat([run.at() for run in rows])
