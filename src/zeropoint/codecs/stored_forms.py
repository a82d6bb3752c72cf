"""Stored forms of tensors in files with other names and orders.

Tensors have their model names everywhere but in headers of files. A form says what a file has in
their place: another name, another shape, rows or columns in another order, other values that follow from
the model's, float32, one tensor for all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import CheckpointError

Shape = tuple[int, ...]


class RowOrder(NamedTuple):
    """An order of rows or columns with interleaved runs of groups.

    ``runs`` of a group that follow each other in the model alternate. A run is some units, and a file has the
    first unit of every run, then the second of every run. Two runs of units of one row are the halves of a
    head that llama.cpp interleaves. group: rows of a group. runs: how many runs it has. unit: rows that stay
    together. first: rows before the first group, which lie as in the model.
    """

    group: int
    runs: int
    unit: int = 1
    first: int = 0

    def model_rows(self, at: torch.Tensor) -> torch.Tensor:
        """Return the rows of the model at some places of the file.

        >>> RowOrder(group=6, runs=2).model_rows(torch.arange(6)).tolist()
        [0, 3, 1, 4, 2, 5]
        """
        return self._moved(at, self.runs, self.group // self.runs)

    def file_rows(self, at: torch.Tensor) -> torch.Tensor:
        """Return the file positions of model rows: inverse of model_rows."""
        return self._moved(at, self.group // self.runs // self.unit, self.runs * self.unit)

    def _moved(self, at: torch.Tensor, runs: int, distance: int) -> torch.Tensor:
        """Return the places of units after ``runs`` alternate; distance: between them afterwards."""
        place = (at - self.first) % self.group
        unit, inside = place // self.unit, place % self.unit
        moved = at - place + unit % runs * distance + unit // runs * self.unit + inside
        return torch.where(at < self.first, at, moved)

    @property
    def alignment(self) -> int:
        """Row multiple for parts that read few other rows."""
        return self.group if self.unit == 1 else self.unit

    def fits(self, rows: int) -> bool:
        """Return whether so many rows are whole groups of whole runs."""
        whole = self.unit > 0 and self.runs > 0 and self.group > 0 and self.first <= rows
        return whole and (rows - self.first) % self.group == 0 and self.group % (self.runs * self.unit) == 0


class StoredForm(NamedTuple):
    """Stored form of a tensor in a file.

    Args:
        name: its name there.
        rows: the order of its rows there, or None for the model's order.
        columns: likewise for columns.
        plus: what is added to each value.
        negated_exp: whether each value x is -exp(x) there.
        float32: whether it is stored in float32 where it is not quantized.
        float16: whether float16 stays so all the same.
        part: of one tensor that holds several, one after the other along a first axis: which of them it is,
            from 0 on, and how many there are.
        shapes: the shape in the model, and that in the file of the same values in the same order.
    """

    name: str
    rows: RowOrder | None = None
    columns: RowOrder | None = None
    plus: float = 0.0
    negated_exp: bool = False
    float32: bool = False
    part: tuple[int, int] | None = None
    shapes: tuple[Shape, Shape] | None = None
    float16: bool = False

    def file_shape(self, shape: Shape) -> Shape:
        """Return the file shape of a model tensor.

        >>> StoredForm("blk.0.ffn_up_exps.weight", part=(3, 8)).file_shape((96, 64))
        (8, 96, 64)
        """
        if self.part is not None:
            return (self.part[1], *shape)
        return shape if self.shapes is None else self.shapes[1]

    def model_shape(self, shape: Shape) -> Shape:
        """Return the model shape of a file tensor: inverse of file_shape."""
        if self.part is not None:
            return shape[1:]
        return shape if self.shapes is None else self.shapes[0]

    def same_values(self, other: StoredForm) -> bool:
        """Return whether two forms hold the same values in the same order."""
        return self._values == other._values

    @property
    def _values(self) -> tuple[object, ...]:
        return self.rows, self.columns, self.plus, self.negated_exp

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Return values of the model as the file has them.

        x: (rows, columns) of the model, in any float dtype.
        """
        # In float64, whose last bits, that differ between processors, float32 does not have.
        x = -torch.exp(x.double()).to(x.dtype) if self.negated_exp else x
        return x + self.plus if self.plus else x

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """Return file values as the model's: the inverse of :meth:`stored`.

        x: (rows, columns) of the file, in any float dtype.
        """
        x = torch.log(-x.double()).to(x.dtype) if self.negated_exp else x
        return x - self.plus if self.plus else x

    def require_whole(self, rows: int, columns: int, place: str) -> None:
        """Raise CheckpointError where a tensor is not made of whole heads.

        rows: how many rows it has. columns: how many columns it has. place: what it is called, for the
        message.
        """
        for order, extent, what in ((self.rows, rows, "rows"), (self.columns, columns, "columns")):
            if order is not None and not order.fits(extent):
                raise CheckpointError(
                    f"{place} has {extent} {what}, which are not whole heads of {order.group}; correct "
                    "config.json"
                )


def places(at: torch.Tensor, source: RowOrder | None, wanted: RowOrder | None) -> torch.Tensor:
    """Return source positions of rows in the wanted order."""
    at = at if wanted is None else wanted.model_rows(at)
    return at if source is None else source.file_rows(at)


class Reshaped(NamedTuple):
    """Shapes of a tensor in a file and in the model."""

    to_file: Callable[[Shape], Shape]
    to_model: Callable[[Shape], Shape]


OMITTED = StoredForm("")
"""Form of a tensor that files omit."""
MODEL_FORM = StoredForm("")
"""Form of unchanged values."""
