"""The reference backend: plain torch for every request on every device."""

from __future__ import annotations

import torch

from ..layout import word_lines
from ..layout.bit_places import Struct
from ..layout.word_lines import WordLines
from ..params.module_buffers import bytes_of
from ..params.tensors import Params
from . import in_place, reference, structs
from . import linear as layers
from .ggml import block_types
from .registry import REFERENCE, HeldKernel, Kernel, Op, Request, temporaries_of
from .row_errors import RowErrors, row_errors
from .threads import gradual_underflow

Codes = tuple[torch.Tensor, Params]
Ends = tuple[float, float] | None


def filled(out: Codes, data: torch.Tensor, params: Params) -> Codes:
    """Copy codes and parameters into ``out`` and return it."""
    target, stored = out
    target.copy_(data)
    for mine, theirs in zip(stored, params, strict=True):
        bytes_of(mine).copy_(bytes_of(theirs))
    return out


class ReferenceKernel:
    """One request to the reference.

    ``run`` is the method of its operator; :class:`zeropoint.ops.registry.Op` says what that does.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._scheme = request, request.scheme
        self.run = getattr(self, request.op.value)

    def hold(self, params: Params | None) -> HeldKernel | str:
        reason = temporaries_of(REFERENCE) if params is None else in_place.refusal(self._request)
        return reason or in_place.InPlace(self._request, params or []).held()

    def choose_params(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        return reference.choose_params(x, self._scheme, extremes)

    def quantize_dynamic(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        data, params = reference.quantize_dynamic(x, self._scheme, extremes)
        return (data, params) if out is None else filled(out, data, params)

    def quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        data = reference.quantize(x, self._scheme, params, self._request.code_range)
        return data if out is None else out.copy_(data)

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        asked = self._request
        values = reference.dequantize(
            data, self._scheme, params, shape=asked.shape, dtype=asked.dtype, own_dtype=asked.own_dtype
        )
        return values if out is None else out.copy_(values)

    def fake_quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        values = reference.fake_quantize(x, self._scheme, params, self._request.code_range)
        return values if out is None else out.copy_(values)

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        inside = reference.inside(x, self._scheme, params, self._request.code_range)
        gradient = torch.where(inside, grad, torch.copysign(torch.zeros_like(grad), grad))
        return gradient if out is None else out.copy_(gradient)

    def search_params(
        self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None
    ) -> Params:
        return reference.search_params(x, self._scheme, params, importance)

    def search(self, x: torch.Tensor, importance: torch.Tensor | None = None) -> Codes:
        return block_types.search(x, self._scheme, importance)

    def join_blocks(self, struct: Struct, data: torch.Tensor, params: Params) -> torch.Tensor:
        return structs.join_blocks(self._request, struct, data, params)

    def split_blocks(self, struct: Struct, lines: torch.Tensor) -> Codes:
        return structs.split_blocks(self._request, struct, lines)

    def to_lines(self, order: WordLines, data: torch.Tensor) -> torch.Tensor:
        return word_lines.to_lines(data, order)

    def from_lines(self, order: WordLines, lines: torch.Tensor) -> torch.Tensor:
        return word_lines.from_lines(lines, order)

    def measure(self, x: torch.Tensor, data: torch.Tensor, params: Params) -> RowErrors:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        decoded = reference.dequantize(
            data, self._scheme, params, shape=tuple(x.shape), dtype=wide, own_dtype=x.dtype
        )
        return row_errors(x, decoded, self._scheme, params)

    def linear(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> layers.Layer:
        def layer(x: torch.Tensor, given: Params | None) -> torch.Tensor:
            with gradual_underflow():
                return layers.reference_linear(self._request, x, given, (weight, params), bias)

        return layer

    def linear_values(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> layers.Layer:
        return layers.of_values(self.dequantize)(weight, params, bias)


class Reference:
    """Plain torch; refuses only what has no meaning."""

    name = REFERENCE
    rank = 0

    def refusal(self, request: Request) -> str | None:
        if request.op is Op.SEARCH:
            return block_types.refusal(request.scheme, request.shape)
        return layers.refusal(request) if request.op is Op.LINEAR else None

    def prepare(self, request: Request) -> Kernel:
        return ReferenceKernel(request)


BACKEND = Reference()
