"""Linear layers on integer codes: what a call is, the reference, and where a kernel for it is found.

    y[m, n] = (sum over groups g of (sum over k in g of a[m, k] * w[n, k]) * t[n, g]) * s[m] + bias[n]

a: codes of the input less their zero points; w: codes of the weight; t, s: their scales. The sums of codes
are exact, and what is left is rounding in float32.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from ..formats import IntFormat
from ..formats.torch_dtypes import wide_dtype
from ..layout import packing
from ..params.arithmetic import effective_scale
from ..schemes import Scheme, ZeroPoint
from . import reference
from .registry import Params

KERNELS, VALUE_KERNELS = "zeropoint.kernels.cpu.prepared.linear", "zeropoint.kernels.cpu.prepared.values"
LONGEST = (1 << 31) // (255 * 128)
"""Products of 8-bit codes that an int32 holds the sum of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCall:
    """A linear layer without its tensors.

    weight: scheme of the weight, whose ``shape`` is (out_features, in_features), in ``weight_dtype``.
    source: scheme of the input, None where it is not quantized. given: whether the input's parameters are
    given, or chosen by each input.
    dtype: of the input and the output.
    """

    weight: Scheme
    shape: tuple[int, int]
    weight_dtype: torch.dtype
    source: Scheme | None
    given: bool
    dtype: torch.dtype


Linear = Callable[[torch.Tensor, Params | None], torch.Tensor]
"""From an input (..., in_features) and its given parameters to the output."""
Kernel = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None], Linear]
"""From a packed weight, its scales and a bias, in whose memory it goes on to look, to the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCall:
    """A linear layer whose weight is read as values: scheme, (out_features, in_features), own dtype."""

    weight: Scheme
    shape: tuple[int, int]
    weight_dtype: torch.dtype


Values = Callable[[torch.Tensor], torch.Tensor]
"""From a float32 input (..., in_features) to the output."""
ValueKernel = Callable[[torch.Tensor, Params, torch.Tensor | None], Values]
"""From packed codes, their parameters and a bias, in whose memory it goes on to look, to the layer."""


@functools.lru_cache(maxsize=1024)
def value_kernel(call: ValueCall) -> ValueKernel | str:
    """Return the kernel for ``call`` on tensors in the memory of the host, or why there is none."""
    made: ValueKernel | str = _prepared(VALUE_KERNELS, call)
    return made


def refusal(call: LinearCall) -> str | None:
    """Return why the layer is not a product of integer codes that a kernel knows, or None."""
    return _weight_refusal(call) or _source_refusal(call)


def _weight_refusal(call: LinearCall) -> str | None:
    scheme, (rows, cols) = call.weight, call.shape
    element = scheme.element
    if not isinstance(element, IntFormat) or element.bits not in (4, 8) or element.fraction_bits:
        return f"{scheme} is not int8 or int4"
    if scheme.zero_point is not ZeroPoint.NONE or (element.bits == 8 and not element.signed):
        return f"{scheme} is not symmetric"
    heights, group = scheme.granularity.block_shape(call.shape)
    if heights != 1 and heights < rows:
        return f"rows of {scheme} share scales in blocks"
    if group < cols and (heights != 1 or cols % group or group % 16):
        return f"groups of {group} in rows of {cols} are not a multiple of 16"
    if not 0 < cols <= LONGEST:
        return f"sums of {cols} products are not those of 1 to {LONGEST}, which fit 32 bits"
    return None


def _source_refusal(call: LinearCall) -> str | None:
    scheme, cols = call.source, call.shape[1]
    if scheme is None:
        return f"rows of {cols} are not a multiple of 16" if cols % 16 else None
    element = scheme.element
    if not isinstance(element, IntFormat) or element.bits != 8 or element.fraction_bits:
        return f"{scheme} is not int8 or uint8"
    if scheme.zero_point is ZeroPoint.REAL:
        return f"zero points of {scheme} are not integers"
    block = scheme.granularity.block_shape((2, cols))
    if call.given:
        return None if block == (2, cols) else f"{scheme} does not have one scale for the tensor"
    return None if block == (1, cols) else f"{scheme} does not have one scale a token"


@functools.lru_cache(maxsize=1024)
def linear_call(
    source: str,
    weight: str,
    shape: tuple[int, int],
    weight_dtype: torch.dtype,
    given: bool,
    dtype: torch.dtype,
) -> LinearCall:
    """Return the call for schemes by their text; raises UnsupportedError where :func:`refusal` has a reason.

    >>> linear_call("int8:token", "int8:token", (8, 64), torch.float32, False, torch.float32).given
    False
    """
    call = LinearCall(
        weight=Scheme.parse(weight),
        shape=shape,
        weight_dtype=weight_dtype,
        source=Scheme.parse(source) if source else None,
        given=given,
        dtype=dtype,
    )
    reason = refusal(call)
    if reason is not None:
        raise UnsupportedError(f"linear cannot run on integer codes: {reason}; dequantize the weight")
    return call


@functools.lru_cache(maxsize=1024)
def linear_kernel(call: LinearCall) -> Kernel | str:
    """Return the kernel for ``call`` on tensors in the memory of the host, or why there is none."""
    made: Kernel | str = _prepared(KERNELS, call)
    return made


def _prepared(module: str, call: LinearCall | ValueCall) -> Any:
    if importlib.util.find_spec("numba") is None:
        return "needs the package numba, which is not installed"
    return importlib.import_module(module).prepare(call)


def reference_linear(
    call: LinearCall,
    x: torch.Tensor,
    params: Params | None,
    weight: tuple[torch.Tensor, tuple[torch.Tensor, ...]],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the layer's output in plain torch, on any device: sums in float64, which holds them exactly.

    weight: packed codes and scales.
    """
    (rows, cols), (data, levels) = call.shape, weight
    flat = x.reshape(-1, cols)
    codes, scale = _coded(call.source, flat, params)
    factors = effective_scale(call.weight, levels, call.shape, call.weight_dtype)
    assert factors is not None
    factors = factors.double().expand(rows, -1)
    grouped = (-1, factors.shape[1], cols // factors.shape[1])
    parts = _numbers(data, call.weight, cols).reshape(grouped)
    y = torch.einsum("mgk,ngk,ng->mn", codes.reshape(grouped), parts, factors) * scale
    y = y if bias is None else y + bias.double()
    return y.to(wide_dtype(x.dtype)).to(x.dtype).reshape(*x.shape[:-1], rows)


def _coded(
    scheme: Scheme | None, x: torch.Tensor, params: Params | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes less their zero points, and their scale, both float64; an input as it is has scale 1."""
    if scheme is None:
        return x.double(), torch.ones((), dtype=torch.float64, device=x.device)
    scales, zero = reference.choose_params(x, scheme) if params is None else _spread(params)
    codes = _numbers(reference.quantize(x, scheme, scales, zero), scheme, x.shape[1])
    scale = effective_scale(scheme, scales, tuple(x.shape), x.dtype)
    assert scale is not None
    return codes if zero is None else codes - zero, scale.double()


def _spread(params: Params) -> Params:
    """Return the parameters of one block on the grid of a matrix."""
    scales, zero = params
    return tuple(s.reshape(1, 1) for s in scales), None if zero is None else zero.reshape(1, 1)


def _numbers(data: torch.Tensor, scheme: Scheme, cols: int) -> torch.Tensor:
    """Return packed integer codes as the numbers they stand for, float64."""
    return packing.as_values(packing.unpack(data, scheme.bits, cols), scheme.element).double()
