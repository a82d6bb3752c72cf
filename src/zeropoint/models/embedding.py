"""QuantizedEmbedding and QuantizedEmbeddingBag: tables of packed rows."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedError
from .packed_weight import PackedWeight


class QuantizedEmbedding(nn.Module):
    """An embedding table of packed rows, dequantized on access.

    Args:
        weight: (num_embeddings, embedding_dim).
        output_quantizer: of the rows, or None.
        padding_idx: as ``nn.Embedding`` has it, which matters to gradients alone.

    Raises:
        UnsupportedError: for schemes in which rows share blocks.
    """

    def __init__(
        self,
        weight: PackedWeight,
        output_quantizer: nn.Module | None = None,
        *,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.weight = _by_rows(weight)
        self.output_quantizer = output_quantizer
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (what torch calls it)
        """Return the rows of ``input``, whole numbers of any shape: (..., embedding_dim).

        Args:
            input: row numbers, int32 or int64, of any shape.
        """
        rows = self.weight.rows(input.reshape(-1)).reshape(*input.shape, self.embedding_dim)
        return rows if self.output_quantizer is None else self.output_quantizer(rows)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class QuantizedEmbeddingBag(nn.Module):
    """Sums, means or maxima of packed rows, dequantized on access.

    Args:
        bag: the float layer, which says how rows are reduced; its table is not kept. Others as in
            :class:`QuantizedEmbedding`.
        weight: shape (num_embeddings, embedding_dim).
        output_quantizer: quantizes the output, or None.
    """

    def __init__(
        self, bag: nn.EmbeddingBag, weight: PackedWeight, output_quantizer: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.weight = _by_rows(weight)
        self.output_quantizer = output_quantizer
        self.num_embeddings, self.embedding_dim = weight.shape
        self.mode, self.padding_idx = bag.mode, bag.padding_idx
        self.include_last_offset = bag.include_last_offset

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 (what torch calls it)
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a row per bag, as ``nn.EmbeddingBag`` does: (bags, embedding_dim).

        Args:
            input: row numbers, shape (bags, n), or (n,) with ``offsets``.
            offsets: where each bag starts, shape (bags,).
            per_sample_weights: factors, shape of ``input``.
        """
        flat = input.reshape(-1)
        rows, place = self.weight.rows(flat), torch.arange(flat.numel(), device=flat.device)
        padding = None
        if self.padding_idx is not None:
            # One more row collects those that do not count.
            padding = flat.numel()
            place = torch.where(flat == self.padding_idx, padding, place)
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        joined = nn.functional.embedding_bag(
            place.reshape(input.shape), rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip
        return joined if self.output_quantizer is None else self.output_quantizer(joined)

    def extra_repr(self) -> str:
        """Return sizes and how rows are joined."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


def _by_rows(weight: PackedWeight) -> PackedWeight:
    if not weight.rows_are_apart:
        raise UnsupportedError(f"an embedding needs parameters by rows, which {weight.scheme} does not have")
    return weight
