"""Tensors and schemes as what kernels take: flat arrays, factors of blocks, tables of codes."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ...formats import CodebookFormat, IntFormat
from ...formats.torch_dtypes import format_of
from ...layout import packing
from ...ops import reference
from ...ops.registry import Params
from ...params.arithmetic import effective_scale, load_scale
from ...params.codes import decode as decode_reference
from ...schemes import Granularity, Scheme
from . import layout as k
from .intrinsics import LINE
from .layout import Layout
from .layout import ScaleRule as Rule
from .lowering import KINDS, View, given_rule, rule_of, rule_refusal, view_of

NO_FLOATS = np.zeros(1, np.float32)
NO_BYTES = np.zeros(1, np.uint8)
"""Stand for arrays that a kernel does not use."""


def view_of_tensor(scheme: Scheme, x: torch.Tensor) -> View:
    """Return ``x`` as rows; the backend has refused what cannot be seen so."""
    view = view_of(scheme, tuple(x.shape), x.dtype)
    assert isinstance(view, View)
    return view


def row_view(x: torch.Tensor, granularity: Granularity) -> tuple[View, int]:
    """Return ``x`` as rows with blocks of the granularity's last extent, and the number of blocks a row."""
    shape = tuple(x.shape)
    cols = shape[-1] if shape else 1
    block = min(granularity.block_shape(shape)[-1], cols) if shape else 1
    width = -(-cols // block)
    layout = Layout(
        cols=np.uint64(cols), block=np.uint64(block), row_blocks=np.uint64(width), row_bytes=np.uint64(0),
        bits=np.uint64(8), kind=KINDS[x.dtype], row_div=np.uint64(1), row_mod=np.uint64(1),
    )  # fmt: skip
    return View(rows=math.prod(shape[:-1]), layout=layout), width


def flat_array(x: torch.Tensor) -> Any:
    """Return the elements as a flat numpy array: float32, uint16 bits of bfloat16, int16 bits of float16.

    The kernels tell the 16-bit encodings apart by the array's dtype where speed matters.
    """
    dense = x.detach().contiguous().reshape(-1)
    if x.dtype == torch.float32:
        return dense.numpy()
    bits = dense.view(torch.int16).numpy()
    return bits.view(np.uint16) if x.dtype == torch.bfloat16 else bits


def packed_like(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return uninitialized memory for the packed codes of ``x``."""
    length = packing.packed_length(packing.row_length(tuple(x.shape)), scheme.bits)
    return aligned_empty((*x.shape[:-1], length), torch.uint8)


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized memory, aligned to a cache line.

    NumPy asks for huge pages, without which page faults outlast the kernels.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    raw = np.empty(size + LINE, np.uint8)
    first = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[first : first + size]).view(dtype).reshape(shape)


def code_step(scheme: Scheme) -> Fraction:
    """Return the step of integer codes, which the kernels' factors include."""
    return scheme.element_step if isinstance(scheme.element, IntFormat) else Fraction(1)


def has_sign(scheme: Scheme) -> bool:
    """Return whether codes stand for negative numbers too."""
    return not isinstance(scheme.element, IntFormat) or scheme.element.signed


def block_factors(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype, *, dividing: bool
) -> tuple[Any, Any]:
    """Return one float32 factor a block, the element's step included, and zero points as float32.

    dividing: whether a zero scale becomes Inf, by which every value divides to zero.
    """
    scales, zero_point = params
    scale = effective_scale(scheme, scales, shape, dtype)
    if scale is None:
        factors = torch.ones(1)
    else:
        factors = scale.to(torch.float32)
        if dividing and len(scales) > 1:
            factors = torch.where(factors == 0, torch.inf, factors)
    if isinstance(scheme.element, IntFormat) and scheme.element.fraction_bits:
        factors = factors * float(scheme.element_step)
    zeros = NO_FLOATS if zero_point is None else zero_point.to(torch.float32).contiguous().numpy().reshape(-1)
    return factors.contiguous().numpy().reshape(-1), zeros


def stored_factors(
    scheme: Scheme, params: Params, shape: tuple[int, ...], own_dtype: torch.dtype
) -> tuple[Rule, Any, Any, Any]:
    """Return how stored scales are read: bytes in the kernel where it knows them, else as factors."""
    scales, zero_point = params
    known = len(scales) > 0 and rule_refusal(scheme, own_dtype) is None
    rule = rule_of(scheme, own_dtype) if known else given_rule()
    if known and rule.how in (k.POWER, k.MINIFLOAT):
        if len(scales) > 1:
            fmt = scheme.scales[1].format_for(format_of(own_dtype))
            rule = rule._replace(
                coarse=np.float32(load_scale(scales[1], fmt, torch.float32).reshape(-1)[0].item())
            )
        return rule, NO_FLOATS, scales[0].contiguous().view(torch.uint8).numpy().reshape(-1), NO_FLOATS
    factors, zeros = block_factors(scheme, (scales, zero_point), shape, own_dtype, dividing=False)
    return given_rule(), factors, NO_BYTES, zeros


@functools.lru_cache(maxsize=256)
def code_order(scheme: Scheme) -> Any:
    """Return the code of each rank of a codebook, or the identity."""
    order = np.arange(k.THRESHOLDS + 1, dtype=np.uint8)
    if isinstance(scheme.element, CodebookFormat):
        order[: len(scheme.element.order)] = scheme.element.order
    return order


@functools.lru_cache(maxsize=256)
def value_table(scheme: Scheme) -> Any:
    """Return the values of all codes as 256 float32, of integers in units of their step."""
    table = np.zeros(256, np.float32)
    fmt = scheme.element
    count = 1 << fmt.bits
    codes = np.arange(count, dtype=np.int32)
    if isinstance(fmt, IntFormat):
        table[:count] = codes - (codes >> (fmt.bits - 1) << fmt.bits) if fmt.signed else codes
    else:
        table[:count] = decode_reference(torch.from_numpy(codes), fmt, torch.float32).numpy()
    return table


def value_bounds(scheme: Scheme) -> tuple[np.float32, np.float32, np.float32]:
    """Return (low, high, closed) of scaled values that are not clipped; 0 for integers, which need none."""
    low, high, closed = (
        (0.0, 0.0, True) if isinstance(scheme.element, IntFormat) else reference.float_bounds(scheme)
    )
    return np.float32(low), np.float32(high), np.float32(closed)
