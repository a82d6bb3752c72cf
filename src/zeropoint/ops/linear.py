"""Linear layers: which are products of integer codes, and the reference.

    y[m, n] = (sum over groups g of (sum over k in g of a[m, k] * w[n, k]) * t[n, g]) * s[m] + bias[n]

a: codes of the input less their zero points; w: codes of the weight; t, s: their scales. The sums of codes
are exact, and what is left is rounding in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..errors import UnsupportedError
from ..formats.torch_dtypes import dtype_of, wide_dtype
from ..layout import packing
from ..params.effective import effective_scale
from ..params.tensors import Params, zero_point_of
from ..schemes import Scheme, ZeroPoint
from . import reference
from .registry import Op, Request
from .threads import gradual_underflow

LONGEST = (1 << 31) // (255 * 128)
"""Products of 8-bit codes that an int32 holds the sum of."""

Layer = Callable[[torch.Tensor, Params | None], torch.Tensor]
"""From an input (..., in_features) and its given parameters, if there are any, to the output."""


def of_values(
    dequantize: Callable[[torch.Tensor, Params], torch.Tensor],
) -> Callable[[torch.Tensor, Params, torch.Tensor | None], Layer]:
    """Return the kernel that dequantizes the whole weight in each call."""

    def bind(weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
        def run(x: torch.Tensor, _: Params | None) -> torch.Tensor:
            with gradual_underflow():
                values = dequantize(weight, params)
            return torch.nn.functional.linear(x, values, bias)

        return run

    return bind


def refusal(request: Request) -> str | None:
    """Return the reason why a layer is no integer product, or None."""
    return _weight_refusal(request) or _source_refusal(request)


def _weight_refusal(request: Request) -> str | None:
    scheme, (rows, cols) = request.scheme, request.shape
    element = scheme.element
    if dtype_of(element) in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (
            f"{scheme} is not int8 or int4, and tensor cores add products of fp8 in fewer bits than float32"
        )
    if not element.is_whole or element.bits not in (4, 8):
        return f"{scheme} is not int8 or int4"
    if scheme.chained is not None:
        return f"{scheme.chained} of {scheme} are not factors of sums"
    if scheme.zero_point is not ZeroPoint.NONE or (element.bits == 8 and not element.signed):
        return f"{scheme} is not symmetric"
    heights, group = scheme.granularity.block_shape(request.shape)
    if heights != 1 and heights < rows:
        return f"rows of {scheme} share scales in blocks"
    if group < cols and (heights != 1 or cols % group or group % 16):
        return f"groups of {group} in rows of {cols} are not a multiple of 16"
    if not 0 < cols <= LONGEST:
        return f"sums of {cols} products are not those of 1 to {LONGEST}, which fit 32 bits"
    return None


def _source_refusal(request: Request) -> str | None:
    scheme, cols = request.source, request.shape[1]
    if scheme is None:
        return f"rows of {cols} are not a multiple of 16" if cols % 16 else None
    element = scheme.element
    if not element.is_whole or element.bits != 8:
        return f"{scheme} is not int8 or uint8"
    if scheme.chained is not None:
        return f"{scheme.chained} of {scheme} are not factors of sums"
    if scheme.zero_point is ZeroPoint.REAL:
        return f"zero points of {scheme} are not integers"
    block = scheme.granularity.block_shape((2, cols))
    if request.given:
        return None if block == (2, cols) else f"{scheme} does not have one scale for the tensor"
    return None if block == (1, cols) else f"{scheme} does not have one scale a token"


@functools.lru_cache(maxsize=1024)
def linear_request(
    source: str, weight: str, shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device, *, given: bool,
) -> Request:  # fmt: skip
    """Return the request of a linear layer, or raise UnsupportedError.

    Schemes are texts. dtypes: of input and output, and of the tensor that became the weight.

    >>> dtypes = torch.float32, torch.float32
    >>> linear_request("", "int8:token", (8, 64), dtypes, torch.device("cpu"), given=False).shape
    (8, 64)
    """
    request = Request(
        op=Op.LINEAR, scheme=Scheme.parse(weight), shape=shape, dtype=dtypes[0], own_dtype=dtypes[1],
        device=device, source=Scheme.parse(source) if source else None, given=given,
    )  # fmt: skip
    reason = refusal(request)
    if reason is not None:
        raise UnsupportedError(f"linear cannot run on integer codes: {reason}; dequantize the weight")
    return request


def refuse_input(request: Request, x: torch.Tensor) -> None:
    """Raise the reference's error for an input that a kernel refused."""
    assert request.source is not None
    if request.given:
        reference.require_finite(x)
    else:
        reference.choose_params(x, request.source)
    raise AssertionError(f"the kernel refused an input of {request.source} that the reference accepts")


def reference_linear(
    request: Request,
    x: torch.Tensor,
    params: Params | None,
    weight: tuple[torch.Tensor, Params],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the layer's output in plain torch, with exact float64 sums.

    weight: packed codes and parameters.
    """
    (rows, cols), (data, scales) = request.shape, weight
    flat = x.reshape(-1, cols)
    codes, scale = _coded(request.source, flat, params)
    factors = effective_scale(request.scheme, scales, request.shape, request.own_dtype)
    assert factors is not None
    factors = factors.double().expand(rows, -1)
    grouped = (-1, factors.shape[1], cols // factors.shape[1])
    parts = _numbers(data, request.scheme, cols).reshape(grouped)
    y = torch.einsum("mgk,ngk,ng->mn", codes.reshape(grouped), parts, factors) * scale
    y = y if bias is None else y + bias.double()
    return y.to(wide_dtype(x.dtype)).to(x.dtype).reshape(*x.shape[:-1], rows)


def _coded(
    scheme: Scheme | None, x: torch.Tensor, params: Params | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 codes less zero points, and their scale.

    An input that is not quantized has scale 1.
    """
    if scheme is None:
        return x.double(), torch.ones((), dtype=torch.float64, device=x.device)
    # Given parameters belong to one block.
    own = reference.choose_params(x, scheme) if params is None else [each.reshape(1, 1) for each in params]
    codes = _numbers(reference.quantize(x, scheme, own), scheme, x.shape[1])
    scale, zero = effective_scale(scheme, own, tuple(x.shape), x.dtype), zero_point_of(scheme, own)
    assert scale is not None
    return codes if zero is None else codes - zero, scale.double()


def _numbers(data: torch.Tensor, scheme: Scheme, cols: int) -> torch.Tensor:
    """Return packed integer codes as the numbers they represent, float64."""
    return packing.as_values(packing.unpack(data, scheme.bits, cols), scheme.element).double()
