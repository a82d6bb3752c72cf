"""The host side of llama.cpp's searches: tensors to arrays, threads over super-blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....ops.ggml import block_types, super_blocks
from ....ops.ggml.block_columns import SUPER
from ....ops.ggml.searches import IMPORTANT
from ....ops.reference import require_finite
from ....ops.registry import Request
from ....ops.threads import share
from ....params.tensors import Params, parameter_tensors
from ..entries import search_minima, search_signed
from ..search.minima import CLAMPED, NIBBLES, OVERLAID
from .arrays import NO_FLOATS, flat_array, packed_like

_MINIMA = {
    "q2_k": (super_blocks.Q2_K, NIBBLES), "q4_k": (super_blocks.Q4_K, OVERLAID),
    "q5_k": (super_blocks.Q5_K, CLAMPED),
}  # fmt: skip
_SIGNED = ("q3_k", "q6_k")
Call = tuple[Callable[..., int], tuple[Any, ...]]


def refusal(request: Request) -> str | None:
    """Return why the kernels do not search the request's codes, or None."""
    reason = block_types.refusal(request.scheme, request.shape)
    if reason is None and block_types.type_of(request.scheme) not in (*_MINIMA, *_SIGNED):
        return f"{block_types.type_of(request.scheme)} is searched by the reference"
    return reason


class SearchKernel:
    """Codes and parameters as llama.cpp has them."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def run(self, x: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, Params]:
        """See :class:`zeropoint.ops.registry.Op`."""
        scheme, shape = self._request.scheme, self._request.shape
        require_finite(x)
        data = packed_like(x, scheme)
        params = [torch.empty(grid, dtype=dtype) for grid, dtype in parameter_tensors(scheme, shape, x.dtype)]
        if x.numel():
            weights = NO_FLOATS if importance is None else flat_array(importance.to(torch.float32))
            kernel, options = self._call(weighted=importance is not None)
            outputs = flat_array(data), *map(_integers, params)
            values = flat_array(x.detach().to(torch.float32))
            share(kernel, (values, weights, *options, *outputs), x.numel() // SUPER, x.numel())
        block_types.require_finite_scales(params, scheme)
        return data, params

    def _call(self, *, weighted: bool) -> Call:
        """Return the kernel for the type, and its options."""
        name = block_types.type_of(self._request.scheme)
        assert name is not None
        columns, bits = self._request.shape[-1], self._request.scheme.bits
        if name in _SIGNED:
            return search_signed, (np.array((bits, columns, weighted), np.uint64),)
        kind, stored = _MINIMA[name]
        line = IMPORTANT._replace(top=kind.line.top) if weighted else kind.line
        numbers = np.array([line.top, line.first, line.step, kind.top, kind.factor], np.float32)
        sizes = line.steps, line.magnitudes, kind.size, int(stored), columns, weighted, bits
        return search_minima, (numbers, np.array(sizes, np.uint64))


def _integers(levels: torch.Tensor) -> Any:
    """Return the numbers of a level as an array of bytes, or of the bits of float16."""
    array = flat_array(levels)
    return array.view(np.uint16) if levels.dtype is torch.float16 else array
