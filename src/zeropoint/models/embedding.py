"""QuantizedEmbedding: a table of packed rows."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedError
from .packed_weight import PackedWeight


class QuantizedEmbedding(nn.Module):
    """A table of packed rows; only the rows that are asked for are dequantized.

    weight: (num_embeddings, embedding_dim). Raises UnsupportedError for schemes in which rows share blocks.
    """

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        if not weight.rows_are_apart:
            raise UnsupportedError(
                f"an embedding needs parameters by rows, which {weight.scheme} does not have"
            )
        self.weight = weight
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``index``, whole numbers of any shape: (..., embedding_dim)."""
        return self.weight.rows(index.reshape(-1)).reshape(*index.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
