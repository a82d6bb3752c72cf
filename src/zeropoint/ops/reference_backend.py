"""The reference backend: plain torch for every request on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..layout import word_lines
from ..params.module_buffers import bytes_of
from ..params.tensors import Params
from . import in_place, reference, structs
from . import linear as layers
from .ggml import block_types
from .preparation import FunctionKernel
from .registry import REFERENCE, HeldKernel, Kernel, Op, Request
from .row_errors import RowErrors, row_errors
from .threads import gradual_underflow


def filled(
    out: tuple[torch.Tensor, Params], data: torch.Tensor, params: Params
) -> tuple[torch.Tensor, Params]:
    """Copy codes and parameters into ``out`` and return it."""
    target, stored = out
    target.copy_(data)
    for mine, theirs in zip(stored, params, strict=True):
        bytes_of(mine).copy_(bytes_of(theirs))
    return out


class ReferenceKernel(FunctionKernel):
    """A function of the reference; held, some take no temporary tensors."""

    def hold(self, params: Params | None) -> HeldKernel:
        """See :class:`zeropoint.ops.registry.PlanKernel`."""
        reason = None if params is None else in_place.refusal(self.request)
        if params is None or reason is not None:
            return self.in_temporaries(params, reason)
        kernel = in_place.InPlace(self.request, params)
        return HeldKernel(
            run=kernel.runner(self.request.op),
            workspace_bytes=kernel.workspace_bytes,
            parameter_bytes=kernel.parameter_bytes,
        )


class Reference:
    """Plain torch; refuses only what has no meaning."""

    name = REFERENCE
    rank = 0

    def refusal(self, request: Request) -> str | None:
        """See :class:`zeropoint.ops.registry.Backend`."""
        if request.op is Op.SEARCH:
            return block_types.refusal(request.scheme, request.shape)
        return layers.refusal(request) if request.op is Op.LINEAR else None

    def prepare(self, request: Request) -> Kernel:
        """See :class:`zeropoint.ops.registry.Backend`."""
        return ReferenceKernel(self.name, request, _FUNCTIONS[request.op](request))


def _choose_params(request: Request) -> Callable[..., Params]:
    def run(x: torch.Tensor, extremes: tuple[float, float] | None = None) -> Params:
        return reference.choose_params(x, request.scheme, extremes)

    return run


def _quantize_dynamic(request: Request) -> Callable[..., tuple[torch.Tensor, Params]]:
    scheme = request.scheme

    def run(
        x: torch.Tensor,
        out: tuple[torch.Tensor, Params] | None = None,
        extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:
        data, params = reference.quantize_dynamic(x, scheme, extremes)
        return (data, params) if out is None else filled(out, data, params)

    return run


def _search_params(request: Request) -> Callable[..., Params]:
    def run(x: torch.Tensor, params: Params, importance: torch.Tensor | None = None) -> Params:
        return reference.search_params(x, request.scheme, params, importance)

    return run


def _quantize(request: Request) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        data = reference.quantize(x, request.scheme, params, request.code_range)
        return data if out is None else out.copy_(data)

    return run


def _dequantize(request: Request) -> Callable[..., torch.Tensor]:
    scheme, shape = request.scheme, request.shape
    dtype, own = request.dtype, request.own_dtype

    def run(data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        values = reference.dequantize(data, scheme, params, shape=shape, dtype=dtype, own_dtype=own)
        return values if out is None else out.copy_(values)

    return run


def _fake_quantize(request: Request) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        values = reference.fake_quantize(x, request.scheme, params, request.code_range)
        return values if out is None else out.copy_(values)

    return run


def _backward(request: Request) -> Callable[..., torch.Tensor]:
    def run(
        grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        inside = reference.inside(x, request.scheme, params, request.code_range)
        gradient = torch.where(inside, grad, torch.copysign(torch.zeros_like(grad), grad))
        return gradient if out is None else out.copy_(gradient)

    return run


def _search(request: Request) -> Callable[..., tuple[torch.Tensor, Params]]:
    def run(x: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, Params]:
        return block_types.search(x, request.scheme, importance)

    return run


def _join_blocks(request: Request) -> Callable[..., torch.Tensor]:
    return partial(structs.join_blocks, request)


def _split_blocks(request: Request) -> Callable[..., tuple[torch.Tensor, Params]]:
    return partial(structs.split_blocks, request)


def _to_lines(_: Request) -> Callable[..., torch.Tensor]:
    return lambda order, data: word_lines.to_lines(data, order)


def _from_lines(_: Request) -> Callable[..., torch.Tensor]:
    return lambda order, lines: word_lines.from_lines(lines, order)


def _measure(request: Request) -> Callable[..., RowErrors]:
    scheme = request.scheme

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> RowErrors:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        decoded = reference.dequantize(
            data, scheme, params, shape=tuple(x.shape), dtype=wide, own_dtype=x.dtype
        )
        return row_errors(x, decoded, scheme, params)

    return run


def _linear(request: Request) -> Callable[..., layers.Layer]:
    def run(weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> layers.Layer:
        def layer(x: torch.Tensor, given: Params | None) -> torch.Tensor:
            with gradual_underflow():
                return layers.reference_linear(request, x, given, (weight, params), bias)

        return layer

    return run


def _linear_values(request: Request) -> Callable[..., layers.Layer]:
    return layers.of_values(_dequantize(request))


_FUNCTIONS: dict[Op, Callable[[Request], Callable[..., Any]]] = {
    Op.CHOOSE_PARAMS: _choose_params,
    Op.QUANTIZE_DYNAMIC: _quantize_dynamic,
    Op.QUANTIZE: _quantize,
    Op.DEQUANTIZE: _dequantize,
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
    Op.SEARCH: _search,
    Op.SEARCH_PARAMS: _search_params,
    Op.JOIN_BLOCKS: _join_blocks,
    Op.SPLIT_BLOCKS: _split_blocks,
    Op.TO_LINES: _to_lines,
    Op.FROM_LINES: _from_lines,
    Op.MEASURE: _measure,
    Op.LINEAR: _linear,
    Op.LINEAR_VALUES: _linear_values,
}

BACKEND = Reference()
