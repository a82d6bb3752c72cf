"""A block type of ggml, whichever: its scheme, and its bit layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout.bit_places import Struct, field_size
from ..ops.library import kernel
from ..ops.registry import Op, Request
from ..params import QuantizationParams
from ..schemes import Scheme
from ..tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of ggml.

    Args:
        scheme: what its blocks mean.
        struct: where the numbers of a block lie.
    """

    scheme: Scheme
    struct: Struct

    @property
    def block(self) -> int:
        """Values in a block."""
        return field_size(self.struct.codes)

    def decode(
        self, lines: torch.Tensor, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedTensor:
        """Return rows of blocks, uint8 (rows, bytes), in codes and levels."""
        wanted = _request(Op.SPLIT_BLOCKS, lines, scheme, shape, dtype)
        data, stored = kernel(wanted).run(self.struct, lines)
        params = QuantizationParams.of(scheme, shape, dtype, stored)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def encode(self, q: QuantizedTensor) -> torch.Tensor:
        """Return a matrix's blocks, uint8 (rows, bytes): inverse of :meth:`decode`."""
        wanted = _request(Op.JOIN_BLOCKS, q.data, q.scheme, q.shape, q.dtype)
        lines: torch.Tensor = kernel(wanted).run(self.struct, q.data, q.params.levels)
        return lines


def _request(
    op: Op, stored: torch.Tensor, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> Request:
    return Request(op=op, scheme=scheme, shape=shape, dtype=dtype, own_dtype=dtype, device=stored.device)
