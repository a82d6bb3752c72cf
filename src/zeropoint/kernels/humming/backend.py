"""Weights in the order of humming-kernels, and its products with them.

A layer holds its weight twice, as codes and in this order, which is made again when a tensor has changed. The
package compiles its kernels with ``--use_fast_math``, which takes subnormal float32 for zero, for each shape
and some numbers of tokens, seconds each. So its rank is below that of Triton's kernels, and it runs where
these are absent, or where it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from ...formats import FloatFormat, Format, IntFormat
from ...formats.torch_dtypes import dtype_of, format_of
from ...layout import packing
from ...ops.linear import Layer
from ...ops.preparation import FunctionKernel
from ...ops.registry import Kernel, Op, Request
from ...params.effective import over_reciprocal
from ...params.tensors import Params
from ...schemes import Granularity, ZeroPoint

ROWS, COLS = 64, 64
"""Rows and columns of a tile, which the package pads and we do not."""
LOCKS = 2048
"""Numbers with which its programs of one layer wait for each other."""
_SCALES = {torch.float8_e8m0fnu: "float8e8m0", torch.float8_e4m3fn: "float8e4m3"}


class HummingBackend:
    """The package's kernels for 16-bit inputs and symmetric weights of 2 to 8 bits."""

    name = "humming"
    rank = 4

    def refusal(self, request: Request) -> str | None:
        """See :class:`zeropoint.ops.registry.Backend`."""
        if request.device.type != "cuda":
            return f"the data is on {request.device}"
        if request.op is not Op.LINEAR_VALUES:
            return "it multiplies values of a weight, and nothing else"
        return _absence() or _scheme_refusal(request) or _shape_refusal(request)

    def prepare(self, request: Request) -> Kernel:
        """See :class:`zeropoint.ops.registry.Backend`."""
        return FunctionKernel(self.name, request, functools.partial(_layer, request))


@functools.cache
def _absence() -> str | None:
    if importlib.util.find_spec("humming") is None:
        return "needs the package humming-kernels, which is not installed"
    home = importlib.import_module("torch.utils.cpp_extension").CUDA_HOME  # takes long to import
    return None if home else "needs nvcc, which is not installed"


def _element(fmt: Format) -> str | None:
    """Return the package's name of a format of elements."""
    if isinstance(fmt, IntFormat) and fmt.is_whole and fmt.signed and 2 <= fmt.bits <= 8:
        return f"uint{fmt.bits}"
    if isinstance(fmt, FloatFormat) and fmt.signed and 4 <= fmt.bits <= 8:
        exponent = fmt.bits - 1 - fmt.mantissa_bits
        plain = fmt.bits < 8 or dtype_of(fmt) in (torch.float8_e4m3fn, torch.float8_e5m2)
        return f"float{fmt.bits}e{exponent}m{fmt.mantissa_bits}" if plain else None
    return None


def _scheme_refusal(request: Request) -> str | None:
    scheme, own = request.scheme, format_of(request.own_dtype)
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"inputs of {request.dtype} are no 16-bit floats"
    if _element(scheme.element) is None or scheme.zero_point is not ZeroPoint.NONE:
        return f"{scheme} is none of its symmetric formats"
    if scheme.chained is not None or scheme.offsets or scheme.center is not None:
        return f"{scheme} has more than factors"
    if not 1 <= len(scheme.scales) <= 2:
        return f"{scheme} has no scales, or more than two levels"
    finest = dtype_of(scheme.scales[0].format_for(own))
    if finest not in (*_SCALES, request.dtype):
        return f"scales of {scheme.scales[0]} are no numbers of 8 bits, nor of {request.dtype}"
    if len(scheme.scales) == 2:
        coarse = scheme.scales[1]
        if (
            coarse.granularity != Granularity.tensor()
            or dtype_of(coarse.format_for(own)) is not torch.float32
        ):
            return f"scales of {coarse} are not one float32 factor"
    return None


def _shape_refusal(request: Request) -> str | None:
    rows, cols = request.shape
    height, group = request.scheme.granularity.block_shape(request.shape)
    if rows % ROWS or cols % COLS or not rows or not cols:
        return f"{rows} rows of {cols} are not whole times {ROWS} by {COLS}"
    if height != 1:
        return f"rows of {request.scheme} share scales"
    if group < cols and (group % 16 or cols % group):
        return f"groups of {group} are not whole times 16 in rows of {cols}"
    if group >= cols and len(request.scheme.scales) == 2:
        return "two levels of scales need groups"
    return None


def _tensors(request: Request, weight: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
    """Return codes and scales as the package takes them: integers count from the lowest.

    A reciprocal of the coarse scale is rounded, by less than sums are.
    """
    (rows, cols), scheme = request.shape, request.scheme
    data = weight
    if isinstance(scheme.element, IntFormat):
        data = packing.pack(packing.unpack(weight, scheme.bits, cols) ^ (1 << (scheme.bits - 1)), scheme.bits)
    finest = dtype_of(scheme.scales[0].format_for(format_of(request.own_dtype)))
    assert finest is not None
    found = {"weight": data.contiguous().view(torch.int32)}
    found["weight_scale"] = params[0].view(finest).reshape(rows, -1).contiguous()
    if len(scheme.scales) == 2:
        factor = params[1].reshape(1).float()
        found["weight_scale_2"] = factor.reciprocal() if over_reciprocal(scheme, 0) else factor
    return found


def _ordered(
    request: Request, weight: torch.Tensor, params: Params, bias: torch.Tensor | None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the package's description of a layer, and the layer's tensors in its order."""
    schemas, transform = (importlib.import_module(f"humming.{name}") for name in ("schema", "transform"))
    (rows, cols), scheme = request.shape, request.scheme
    group = scheme.granularity.block_shape(request.shape)[1]
    finest = dtype_of(scheme.scales[0].format_for(format_of(request.own_dtype)))
    schema = schemas.HummingWeightSchema(
        b_dtype=_element(scheme.element), bs_dtype=None if finest is None else _SCALES.get(finest),
        weight_scale_group_size=group if group < cols else 0,
        weight_scale_2_type="tensor" if len(scheme.scales) == 2 else None,
    )  # fmt: skip
    tensors = _tensors(request, weight, params)
    if bias is not None:
        tensors["bias"] = bias.detach().to(request.dtype)
    made: tuple[Any, dict[str, torch.Tensor]] = transform.prepare_and_transform_humming_tensors(
        tensors, rows, cols, schema, has_bias=bias is not None, torch_dtype=request.dtype,
        device=weight.device,
    )  # fmt: skip
    return made


def _layer(request: Request, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
    """Return the layer, which orders these tensors again where they have changed since its last call."""
    sources: Sequence[torch.Tensor] = [weight, *params, *([] if bias is None else [bias])]
    forward = importlib.import_module("humming.forward").humming_forward
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=weight.device)
    held: dict[tuple[int, ...], tuple[Any, dict[str, torch.Tensor]]] = {}

    def layer(x: torch.Tensor, _: Params | None) -> torch.Tensor:
        rows, cols = request.shape
        if not x.numel():
            return x.new_empty((*x.shape[:-1], rows))
        with torch.cuda.device(x.device):
            versions = tuple(0 if each.is_inference() else each._version for each in sources)
            if versions not in held:
                held.clear()
                held[versions] = _ordered(request, weight, params, bias)
            config, tensors = held[versions]
            found: torch.Tensor = forward(config, x.reshape(-1, cols).contiguous(), locks=locks, **tensors)
        return found.reshape(*x.shape[:-1], rows)

    return layer


BACKEND = HummingBackend()
