"""How tensors of a model lie in a file that has names and an order of rows of its own.

The names of tensors are those of the model everywhere but in heads of files. A form says what a file has in
their place: another name, rows of heads in another order, a norm's weight with 1 added, float32, one tensor
for all experts of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import CheckpointError


class StoredForm(NamedTuple):
    """How a tensor lies in a file.

    Args:
        name: its name there.
        halves: rows of a head whose second half is stored between the rows of its first, or 0.
        plus: what is added to each value.
        float32: whether it is stored in float32 where it is not quantized.
        part: of one tensor that holds several, one after the other along a first axis: which of them it is,
            from 0 on, and how many there are.
        flat: whether its only row is a vector there.
    """

    name: str
    halves: int = 0
    plus: float = 0.0
    float32: bool = False
    part: tuple[int, int] | None = None
    flat: bool = False

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor of a file that holds one of ``shape`` of the model.

        >>> StoredForm("blk.0.ffn_up_exps.weight", part=(3, 8)).file_shape((96, 64))
        (8, 96, 64)
        """
        if self.part is not None:
            return (self.part[1], *shape)
        return shape[1:] if self.flat and len(shape) == 2 else shape

    def model_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the model of what a tensor of ``shape`` holds: the inverse of file_shape."""
        if self.part is not None:
            return shape[1:]
        return (1, *shape) if self.flat and len(shape) == 1 else shape

    def same_values(self, other: StoredForm) -> bool:
        """Return whether two forms hold the same values in the same order."""
        return (self.halves, self.plus) == (other.halves, other.plus)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole heads of rows as the file has them.

        Args:
            x: (rows, columns) of the model, in any float dtype.
        """
        return self._ordered(x, 2) + self.plus if self.plus else self._ordered(x, 2)

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole heads of rows as the model has them: the inverse of :meth:`stored`.

        Args:
            x: (rows, columns) of the file, in any float dtype.
        """
        x = self._ordered(x, self.halves // 2)
        return x - self.plus if self.plus else x

    def _ordered(self, x: torch.Tensor, runs: int) -> torch.Tensor:
        """Return rows of heads, each of which is ``runs`` runs, with the first rows of all runs first."""
        if not self.halves:
            return x
        heads = x.view(-1, runs, self.halves // runs, x.shape[-1])
        return heads.transpose(1, 2).reshape(x.shape)

    def require_whole(self, rows: int, place: str) -> None:
        """Raise CheckpointError where a tensor is not made of whole heads.

        Args:
            rows: how many rows it has.
            place: what it is called, for the message.
        """
        if self.halves and (self.halves % 2 or rows % self.halves):
            raise CheckpointError(
                f"{place} has {rows} rows, which are not whole heads of {self.halves}; correct config.json"
            )


NO_PLACE = StoredForm("")
"""That of a tensor which files leave out."""
APART = StoredForm("")
"""That of a tensor of which files have the parts alone, as the tensor's matrices are quantized."""
AS_MODEL = StoredForm("")
"""That of values as the model has them."""
