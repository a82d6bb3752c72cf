"""What the Triton kernels refuse, and their host side."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ...formats import IntFormat, Overflow, RoundingMode
from ...layout import packing
from ...ops import reference
from ...ops.lowering import row_mapping
from ...ops.preparation import FunctionKernel
from ...ops.reference_backend import filled
from ...ops.registry import Kernel, Op, Request
from ...params.arithmetic import multiplies, rounder
from ...params.effective import effective_scale
from ...params.tensors import Params, require_parameters
from ...schemes import Scheme, ZeroPoint

INTERPRETER = "TRITON_INTERPRET"
"""The variable of the environment that has Triton's interpreter run kernels on tensors of the host.

Triton reads it when the kernels are loaded, so that it must be set before the first call.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """Triton kernels for tensors on CUDA devices, or on the host under Triton's interpreter."""

    name = "triton"
    rank = 5

    def refusal(self, request: Request) -> str | None:
        """See :class:`zeropoint.ops.registry.Backend`."""
        interpreted = os.environ.get(INTERPRETER) == "1" and request.device.type == "cpu"
        if request.device.type != "cuda" and not interpreted:
            return f"the data is on {request.device}"
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton, which is not installed"
        if request.op not in _KERNELS:
            return f"{request.op.value} is left to the reference"
        if request.code_range is not None:
            return "a range of codes is left to the reference"
        if request.dtype not in _DTYPES or request.own_dtype not in _DTYPES:
            return f"{request.dtype} is computed in float64"
        return _scheme_refusal(request.scheme, request.own_dtype) or _rows_refusal(request)

    def prepare(self, request: Request) -> Kernel:
        """See :class:`zeropoint.ops.registry.Backend`."""
        return FunctionKernel(self.name, request, _KERNELS[request.op](request))


def _scheme_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    element = scheme.element
    if not isinstance(element, IntFormat) or element.bits != 8 or not element.signed or element.fraction_bits:
        return f"{scheme.element_name} is not int8"
    if scheme.zero_point is not ZeroPoint.NONE:
        return f"{scheme} has zero points"
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN or scheme.overflow is not Overflow.SATURATE:
        return f"{scheme} does not round to nearest even and saturate"
    if scheme.chained is not None:
        return f"{scheme.chained} are known to the reference alone"
    if len(scheme.scales) != 1:
        return f"{scheme} does not have one level of scales"
    if multiplies(scheme) or rounder(scheme, dtype) not in (None, torch.float32):
        return f"quotients of {scheme} are not plain ones of float32"
    return None


def _rows_refusal(request: Request) -> str | None:
    found = _rows_of(request)
    return found if isinstance(found, str) else None


def _rows_of(request: Request) -> tuple[int, int, int] | str:
    """Return (cols, row_div, row_mod) of :mod:`.rows`, or why the blocks are not whole rows."""
    granularity, shape = request.scheme.granularity, request.shape
    grid, extents = granularity.grid(shape) or (1,), granularity.block_shape(shape) or (1,)
    mapping = row_mapping(shape[:-1], extents[:-1], grid[:-1])
    if grid[-1] > 1 or mapping is None:
        return f"blocks of {granularity} in a tensor of shape {shape} are not whole rows"
    return (shape[-1] if shape else 1, *mapping)


class _Launch:
    """What the kernels of a request have in common."""

    def __init__(self, request: Request) -> None:
        rows = _rows_of(request)
        assert isinstance(rows, tuple)
        self._request, self._rows, self._count = request, rows, math.prod(request.shape)
        # Triton takes seconds to import, and is not needed where no tensor is on a GPU.
        from . import rows as kernels

        self._kernels = kernels

    def scales(self, params: Params) -> torch.Tensor:
        """Return the scales as kernels take them."""
        asked = self._request
        require_parameters(asked.scheme, params, asked.shape)
        scale = effective_scale(asked.scheme, params, asked.shape, asked.own_dtype)
        assert scale is not None
        return scale.to(torch.float32).contiguous()

    def _start(self, kernel: Any, device: torch.device, *arguments: Any, **named: float) -> None:
        block = self._kernels.BLOCK
        programs = (-(-self._count // block),)
        with _on(device):
            kernel[programs](
                *arguments, self._count, *self._rows, **named, BLOCK=block, enable_fp_fusion=False
            )

    def quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return codes under given parameters; raises NonFiniteError."""
        scheme = self._request.scheme
        if out is None:
            shape = packing.packed_shape(self._request.shape, scheme.bits)
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        if self._count == 0:
            return out
        bad, codes = torch.zeros(1, dtype=torch.int32, device=x.device), out.view(torch.int8)
        ends = {"low": float(scheme.qmin), "high": float(scheme.qmax)}
        tensors = _bits(x.contiguous()), self.scales(params), codes, bad
        self._start(self._kernels.quantize_rows, x.device, *tensors, **ends)
        if bad.item():
            reference.require_finite(x)
        return out

    def quantize_dynamic(
        self,
        x: torch.Tensor,
        out: tuple[torch.Tensor, Params] | None = None,
        extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:
        """Return codes, and the parameters that plain torch chooses."""
        params = reference.choose_params(x, self._request.scheme, extremes)
        data = self.quantize(x, params)
        return (data, params) if out is None else filled(out, data, params)

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of codes."""
        asked = self._request
        if out is None:
            out = torch.empty(asked.shape, dtype=asked.dtype, device=data.device)
        if self._count > 0:
            codes = data.contiguous().view(torch.int8)
            tensors = codes, self.scales(params), _bits(out)
            self._start(self._kernels.dequantize_rows, data.device, *tensors)
        return out


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels take it: bfloat16 as its bits."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Have kernels started on ``device``, as those of torch are; the interpreter warns of each overflow."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


_KERNELS: dict[Op, Callable[[Request], Callable[..., Any]]] = {
    Op.QUANTIZE: lambda request: _Launch(request).quantize,
    Op.QUANTIZE_DYNAMIC: lambda request: _Launch(request).quantize_dynamic,
    Op.DEQUANTIZE: lambda request: _Launch(request).dequantize,
}

BACKEND = TritonBackend()
