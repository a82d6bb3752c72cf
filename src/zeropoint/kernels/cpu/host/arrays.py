"""Kernel arguments: flat arrays of tensors, block factors, code tables."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from ....errors import DtypeError
from ....formats import CodebookFormat, IntFormat
from ....formats.torch_dtypes import format_of, storage_dtype, wide_dtype
from ....layout import packing
from ....layout.blocks import blocks_of_blocks
from ....ops import reference
from ....ops.lowering import HELD, HeldAs
from ....ops.row_errors import code_extent
from ....ops.threads import share
from ....params.effective import effective_offset, effective_scale, over_reciprocal
from ....params.stored import IEEE, load_scale
from ....params.tensors import Params, require_parameters, zero_point_of
from ....schemes import Granularity, ScaleLevel, Scheme, ZeroPoint
from ..decode.fake import GradientBounds
from ..decode.level_products import POWERS, TABLE, TWO_VALUES, LevelPairKinds, level_products
from ..machine.descriptor import Descriptor, RowLayout
from ..machine.named_records import pack
from ..statistics.error_sums import ClipExtent
from . import memory
from .views import KINDS, stored_rule

NO_FLOATS = np.zeros(1, np.float32)
NO_BYTES = np.zeros(1, np.uint8)
"""Placeholders for arrays that a kernel does not use."""
LEVEL_PAIR = 2
"""How numbers of levels are kept that are no bytes."""


class Rows(NamedTuple):
    """A tensor as rows of ``width`` blocks, with its layout's descriptor."""

    rows: int
    width: int
    descriptor: Any


@functools.lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], dtype: torch.dtype, granularity: Granularity) -> Rows:
    """Return a tensor as rows with blocks of the granularity's last extent."""
    cols = shape[-1] if shape else 1
    block = min(granularity.block_shape(shape)[-1], cols) if shape else 1
    width = -(-cols // block)
    layout = RowLayout(
        cols=cols, block=block, row_blocks=width, row_bytes=0, bits=8, kind=KINDS[dtype], row_div=1, row_mod=1
    )
    return Rows(rows=math.prod(shape[:-1]), width=width, descriptor=pack(Descriptor(layout)))


_ELEMENTS = {
    torch.float32: np.dtype(np.float32).str,
    torch.bfloat16: np.dtype(np.uint16).str,
    torch.float16: np.dtype(np.int16).str,
}
"""NumPy dtypes of tensors; kernels take the bytes of any other dtype."""
_BYTE = np.dtype(np.uint8).str


class _Memory:
    """Memory of a contiguous tensor for NumPy, which keeps the tensor.

    ``Tensor.numpy`` would forbid ever after that the tensor's storage is resized or freed, as FSDP does.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        kind = _ELEMENTS.get(tensor.dtype)
        size = tensor.nbytes if kind is None else tensor.numel()
        place = tensor.data_ptr()
        if place == 0 and size:
            raise DtypeError(f"tensor (shape {tuple(tensor.shape)}) has no memory: its storage was freed")
        memory = {"data": (place, False), "shape": (size,), "typestr": kind or _BYTE, "version": 3}
        self.__array_interface__ = memory


def flat_array(x: torch.Tensor) -> Any:
    """View the elements as a flat, dense array: float32 or integers.

    uint16 for bfloat16, int16 for float16, bytes for all else: the kernels pack the 16-bit encodings apart by
    the array's dtype where speed matters. Where ``x`` is contiguous, writing to the array writes to ``x``.
    """
    dense = x if x.is_contiguous() else x.detach().contiguous()
    return np.asarray(_Memory(dense.resolve_neg() if dense.is_neg() else dense))


def packed_like(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return uninitialized memory for the packed codes of ``x``."""
    return memory.empty(packing.packed_shape(tuple(x.shape), scheme.bits), torch.uint8)


def code_step(scheme: Scheme) -> Fraction:
    """Return the step of integer codes, which the kernels' factors include."""
    return scheme.element_step if isinstance(scheme.element, IntFormat) else Fraction(1)


def block_factors(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype, *, dividing: bool
) -> tuple[Any, Any]:
    """Float32 factors of blocks, element step included, and zero points.

    dividing: whether a zero scale becomes Inf, by which every value divides to zero.
    """
    if 0 in shape:
        return NO_FLOATS, NO_FLOATS  # nobody reads them, and parameters may belong to a larger tensor
    require_parameters(scheme, params, shape)
    levels, zero_point = len(scheme.scales), zero_point_of(scheme, params)
    plain = levels == 1 and scheme.center is None and params[0].dtype is torch.float32
    plain = plain and params[0].shape == scheme.granularity.grid(shape)
    scale = params[0] if plain else _products(scheme, scheme.scales, params, shape, dtype)
    scale = effective_scale(scheme, params, shape, dtype) if scale is None else scale
    if scale is None:
        factors = torch.ones(1, device="cpu")
    else:
        factors = scale.to(torch.float32)
        if dividing and levels > 1 and not bool(factors.amin() > 0):
            factors = torch.where(factors == 0, torch.inf, factors)
    if isinstance(scheme.element, IntFormat) and scheme.element.fraction_bits:
        factors = factors * float(scheme.element_step)
    zeros = NO_FLOATS if zero_point is None else flat_array(zero_point.to(torch.float32))
    return flat_array(factors), zeros


def block_offsets(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Float32 offset of each block, or None without offsets."""
    if not scheme.offsets or 0 in shape:
        return None
    offset = _products(scheme, scheme.offsets, params[len(scheme.scales) :], shape, dtype)
    offset = effective_offset(scheme, params, shape, dtype) if offset is None else offset
    assert offset is not None
    return offset.to(torch.float32)


class Levels(NamedTuple):
    """Two levels: values of bytes, storage kinds, number of coarse blocks."""

    tables: Any
    kinds: LevelPairKinds
    coarse: int


def levels_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Levels | None:
    """Levels of a scheme of exactly two scale levels, or None."""
    alone = scheme.zero_point is ZeroPoint.NONE and not scheme.offsets and 0 not in shape
    if not alone or len(scheme.scales) != LEVEL_PAIR or stored_rule(scheme, dtype) is not None:
        return None
    return _levels(scheme, scheme.scales, shape, dtype)


def _products(
    scheme: Scheme,
    levels: tuple[ScaleLevel, ...],
    tensors: Params,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Float32 products of two levels per block; None: left to torch."""
    found = _levels(scheme, levels, shape, dtype) if len(levels) == LEVEL_PAIR else None
    if found is None:
        return None
    grid = scheme.granularity.grid(shape)
    out = torch.empty(grid, dtype=torch.float32, device="cpu")
    fine, coarse = (flat_array(tensor).view(np.uint8) for tensor in tensors[:LEVEL_PAIR])
    args = (fine, coarse, found.tables), pack(found.kinds), flat_array(out)
    share(level_products, args, found.coarse, out.numel())
    return out


@functools.lru_cache(maxsize=256)
def _levels(
    scheme: Scheme, levels: tuple[ScaleLevel, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Levels | None:
    """Kernel arguments of two levels; None unless coarse blocks are runs."""
    own, (fine, coarse) = format_of(dtype), levels
    grid = scheme.granularity.grid(shape)
    extents = blocks_of_blocks(coarse.granularity, scheme.granularity, shape).block_shape(grid)
    kept = scheme.center is None and not over_reciprocal(scheme, 0) and wide_dtype(dtype) is torch.float32
    runs = extents == grid or (not set(extents[:-1]) - {1} and grid[-1:] and grid[-1] % extents[-1] == 0)
    if not kept or fine.granularity != scheme.granularity or not grid or not runs:
        return None
    per = math.prod(extents)
    tables = np.full(2 * TABLE, math.nan, np.float32)  # of bytes that are no codes of a table
    kinds = []
    for n, level in enumerate(levels):
        fmt = level.format_for(own)
        native = storage_dtype(fmt)
        if native not in IEEE and native.itemsize == 1:
            count = 1 << fmt.bits if isinstance(fmt, CodebookFormat) else TABLE
            codes = torch.arange(count, dtype=torch.int32, device="cpu").to(torch.uint8).view(native)
            tables[n * TABLE : n * TABLE + len(codes)] = load_scale(codes, fmt, torch.float32).numpy()
            kinds.append(_kind_of_bytes(tables[n * TABLE : (n + 1) * TABLE]))
        elif native not in HELD:
            return None
        else:
            kinds.append(HELD[native])
    fine_kind, coarse_kind = kinds
    pair = LevelPairKinds(fine=fine_kind, coarse=coarse_kind, per=per)
    return Levels(tables=tables, kinds=pair, coarse=math.prod(grid) // per)


def _kind_of_bytes(values: Any) -> int:
    """Kind of a level whose bytes have these 256 values."""
    if np.isnan(values[2:]).all():
        return int(TWO_VALUES)
    powers = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(math.nan))
    return int(POWERS if np.array_equal(values, powers, equal_nan=True) else HeldAs.LADDER)


class Stored(NamedTuple):
    """Scales for dequantizing kernels: float32 factors, or stored bytes.

    zeros: float32 zero points. coarse: the scale of the whole tensor under byte scales, if there is one.
    """

    factors: Any
    codes: Any
    zeros: Any
    coarse: float | None = None


def stored_factors(scheme: Scheme, params: Params, shape: tuple[int, ...], own_dtype: torch.dtype) -> Stored:
    """Load scales for a kernel: bytes where :func:`.views.stored_rule` exists."""
    if 0 in shape or stored_rule(scheme, own_dtype) is None:
        factors, zeros = block_factors(scheme, params, shape, own_dtype, dividing=False)
        return Stored(factors=factors, codes=NO_BYTES, zeros=zeros)
    require_parameters(scheme, params, shape)
    coarse = None
    if len(scheme.scales) > 1:
        fmt = scheme.scales[1].format_for(format_of(own_dtype))
        coarse = load_scale(params[1], fmt, torch.float32).reshape(-1)[0].item()
    codes = flat_array(params[0])
    return Stored(factors=NO_FLOATS, codes=codes, zeros=NO_FLOATS, coarse=coarse)


@functools.lru_cache(maxsize=256)
def value_bounds(scheme: Scheme) -> Any:
    """Packed bounds of unclipped scaled values; 0 for integers, unread."""
    low, high, closed = (
        (0.0, 0.0, True) if isinstance(scheme.element, IntFormat) else reference.float_bounds(scheme)
    )
    return pack(GradientBounds(low=low, high=high, closed=closed))


@functools.lru_cache(maxsize=256)
def clip_extent(scheme: Scheme) -> Any:
    """Packed :func:`zeropoint.ops.row_errors.code_extent`, in steps of codes."""
    middle, reach = (number / float(code_step(scheme)) for number in code_extent(scheme))
    return pack(ClipExtent(middle=middle, reach=reach))
