"""Codes and parameters packed into block structs, and back: plain torch."""

from __future__ import annotations

import math

import torch

from ..layout import code_rows, packing
from ..layout.bit_places import Struct, field_size, read_field, write_field
from ..layout.word_lines import WORD
from ..params.tensors import Params, parameter_tensors
from .registry import Request


def grid_of(struct: Struct, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid of whole blocks along rows."""
    return *shape[:-1], shape[-1] // field_size(struct.codes)


def lines_refusal(request: Request) -> str | None:
    """Return why kernels do not move lines of words, or None."""
    partial = packing.packed_length(request.shape[-1], request.scheme.bits) % (WORD // 8)
    return "rows that end within a word are known to the reference alone" if partial else None


def join_blocks(request: Request, struct: Struct, data: torch.Tensor, params: Params) -> torch.Tensor:
    """See :class:`zeropoint.ops.registry.Op`."""
    scheme, shape = request.scheme, request.shape
    grid = grid_of(struct, shape)
    blocks = data.new_zeros((*grid, struct.nbytes))
    numbers = code_rows.unpack_digits(data, scheme, shape), *params
    for field, each in zip(struct.fields, numbers, strict=True):
        stored = each.contiguous().view(torch.uint8)
        write_field(field, stored.view(*grid, field_size(field)), blocks)
    return blocks.view(*shape[:-1], grid[-1] * struct.nbytes)


def split_blocks(request: Request, struct: Struct, lines: torch.Tensor) -> tuple[torch.Tensor, Params]:
    """See :class:`zeropoint.ops.registry.Op`."""
    scheme, shape = request.scheme, request.shape
    blocks = lines.reshape(*grid_of(struct, shape), struct.nbytes)
    kinds = parameter_tensors(scheme, shape, request.own_dtype)
    params = [
        read_field(field, blocks).view(math.prod(grid), kind.itemsize).view(kind).view(grid)
        for field, (grid, kind) in zip(struct.levels, kinds, strict=True)
    ]
    return code_rows.pack_digits(read_field(struct.codes, blocks).view(shape), scheme), params
