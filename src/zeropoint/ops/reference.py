"""Reference operators in plain torch, to which all backends are byte-equal.

quantize     code = encode((x - offset) / S + zero_point),   S = scale_1 * scale_2 * ...
dequantize   value = (decode(code) - zero_point) * S + offset
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import NonFiniteError, RangeError, UnsupportedError, count
from ..formats import FloatFormat, Overflow, RoundingMode
from ..formats.codes import decode, encode, fits, int_patterns, round_steps, second_grid, uniform_noise
from ..formats.torch_dtypes import format_of, wide_dtype
from ..layout import code_rows, packing
from ..layout.blocks import reduce_blocks, signed_largest, spread_blocks, sum_blocks
from ..params import QuantizationParams, arithmetic, chains
from ..params.arithmetic import Ranges, multiplies, rounder
from ..params.effective import effective_offset, effective_scale
from ..params.scale_tables import tables_of
from ..params.stored import load_scale, store, through
from ..params.tensors import Params, zero_point_of
from ..schemes import Arithmetic, Granularity, Scheme
from ..schemes.scale_rules import Pick
from . import block_tables, scale_search

CodeRange = tuple[int, int] | None
CHUNK = 1 << 22
"""Elements that temporaries of the encoder hold at once, so that a large tensor needs little extra memory."""


def require_finite(x: torch.Tensor) -> None:
    """Raise NonFiniteError, with first place and count, unless ``x`` is finite."""
    good = torch.isfinite(x)
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist()) if x.ndim else ()
        number = int((~good).sum())
        raise NonFiniteError(
            f"tensor (shape {tuple(x.shape)}, {x.dtype}) contains {float(x[where])} at {where}; "
            f"{count(number, 'non-finite value')} in total; replace them before quantizing"
        )


def ranges(x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None = None) -> Ranges:
    """Return each level's block extremes of ``x``, in the wide dtype.

    extremes: of the tensor that ``x`` is a part of, when it is one.
    """
    levels = [level.granularity for level in scheme.scales]
    found = [whole_range(x, g, extremes) or _block_range(x, g) for g in levels]
    low, high = tuple(low for low, _ in found), tuple(high for _, high in found)
    largest = None
    if scheme.scales and scheme.scales[0].picks(Pick.SIGNED):
        largest = signed_largest(x, levels[0]).to(wide_dtype(x.dtype))
    return Ranges(minimum=low, maximum=high, dtype=x.dtype, shape=tuple(x.shape), largest=largest)


def _block_range(x: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
    wide = wide_dtype(x.dtype)
    low, high = (
        reduce_blocks(x, granularity, "amin", math.inf),
        reduce_blocks(x, granularity, "amax", -math.inf),
    )
    return low.to(wide), high.to(wide)


def whole_range(
    x: torch.Tensor, granularity: Granularity, extremes: tuple[float, float] | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return given extremes as a whole tensor's block, or None.

    Raises NonFiniteError when they are not finite.
    """
    if extremes is None or granularity != Granularity.tensor():
        return None
    grid, wide = granularity.grid(tuple(x.shape)), wide_dtype(x.dtype)
    low, high = (torch.full(grid, extreme, dtype=wide, device=x.device) for extreme in extremes)
    arithmetic.require_finite_range(low, high)
    return low, high


def choose_params(
    x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the parameters that ``x`` gives; extremes: as :func:`ranges`.

    Raises NonFiniteError for NaN and Inf, RangeError for a scale that its format cannot hold.
    """
    require_finite(x)
    require_whole(scheme, extremes)
    if not scheme.scales and x.numel() > 0:
        arithmetic.require_signs(scheme, *_block_range(x, scheme.granularity))
    found = ranges(x, scheme, extremes)
    if scheme.element.reads_sign:
        return _chosen(x, scheme, found).tensors
    stored = arithmetic.scales_from_ranges(scheme, found)
    return stored if scheme.search is None else tuple(scale_search.chosen(x, scheme, stored, _decoded))


def search_params(
    x: torch.Tensor, scheme: Scheme, start: Params, importance: torch.Tensor | None = None
) -> Params:
    """Return parameters of least squared error, searched from a start.

    For finite ``x``. importance: weights of the errors, float64, broadcast against ``x``; all alike if None.
    """
    if scheme.element.per_scale > 1:
        return block_tables.searched(x, scheme, start, importance, block_tables.fitted_rows)
    params = QuantizationParams.of(scheme, tuple(x.shape), x.dtype, list(start))
    return scale_search.searched(x, params, _decoded, importance=importance).stored


def _decoded(x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Return finite ``x`` quantized and dequantized, in the wide dtype."""
    scheme, shape, wide = params.scheme, tuple(x.shape), wide_dtype(x.dtype)
    data = _packed(x, scheme, params.stored, None)
    return dequantize(data, scheme, params.stored, shape=shape, dtype=wide, own_dtype=x.dtype)


def _chosen(x: torch.Tensor, scheme: Scheme, found: Ranges) -> chains.Chosen:
    """Return the choice of a chained scheme for ``x``."""
    arithmetic.require_chosen(scheme, found)
    chosen = chains.choose(scheme, found)
    return _with_grids(x, scheme, chosen) if scheme.element.reads_sign else chosen


def _with_grids(x: torch.Tensor, scheme: Scheme, chosen: chains.Chosen) -> chains.Chosen:
    """Negate scales of blocks that the other grid fits better.

    It has less squared error there, as in fouroversix's ``select_intfloat`` under its rule mse; equal errors
    keep the floats.
    """
    blocks, errors = scheme.granularity, []
    for scale in (chosen.scale, -chosen.scale):
        spread = spread_blocks(scale, blocks, tuple(x.shape))
        negative = second_grid(spread, scheme.element)
        patterns = _encode(scaled(x, scheme, spread), scheme, None, 0, x.dtype, negative)
        values = decode(patterns, scheme.element, spread.dtype, negative) * spread
        errors.append(sum_blocks((values.double() - x.double()).square(), blocks))
    better = errors[1] < errors[0]
    fmt = scheme.scales[0].format_for(format_of(x.dtype))
    stored = load_scale(chosen.tensors[0], fmt, chosen.scale.dtype)
    stored = store(torch.where(better, -stored, stored), fmt)
    scale = torch.where(better, -chosen.scale, chosen.scale)
    return replace(chosen, tensors=(stored, *chosen.tensors[1:]), scale=scale)


def require_whole(scheme: Scheme, extremes: tuple[float, float] | None) -> None:
    """Raise UnsupportedError for a part whose levels need all blocks."""
    whole = Granularity.tensor()
    if extremes is None or (scheme.chained is None and scheme.search is None):
        return
    for level in scheme.levels if scheme.chained is not None else scheme.scales[:1]:
        if level.granularity == whole:
            raise UnsupportedError(
                f"level {level} of {scheme} follows from all blocks of a tensor, which a part does not have; "
                "quantize the whole tensor, or use smaller blocks"
            )


def quantize_dynamic(
    x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return packed codes and the parameters that ``x`` gives; extremes: as :func:`ranges`."""
    if scheme.chained is None or scheme.element.per_scale > 1:
        params = choose_params(x, scheme, extremes)
        return quantize(x, scheme, params), params
    require_finite(x)
    require_whole(scheme, extremes)
    found = ranges(x, scheme, extremes)
    chosen = _chosen(x, scheme, found)
    numbers = chosen.scale, chosen.zero_point, chosen.offset
    spread = Spread(
        *(None if v is None else spread_blocks(v, scheme.granularity, found.shape) for v in numbers)
    )
    return _joined(_encoded_parts(x, scheme, spread), x, scheme), chosen.tensors


def quantize(x: torch.Tensor, scheme: Scheme, params: Params, codes: CodeRange = None) -> torch.Tensor:
    """Return packed codes of finite ``x``: uint8, rows padded to bytes.

    codes: smallest and largest integer code in use, within the scheme's; None means all.
    """
    require_finite(x)
    return _packed(x, scheme, params, codes)


def _packed(x: torch.Tensor, scheme: Scheme, params: Params, codes: CodeRange) -> torch.Tensor:
    if scheme.element.per_scale > 1:
        return packing.pack(block_tables.encoded(x, scheme, params), scheme.bits)
    spread = spread_parameters(scheme, params, shape=tuple(x.shape), dtype=x.dtype)
    return _joined(_encoded_parts(x, scheme, spread, codes), x, scheme)


def _joined(codes: Iterator[torch.Tensor], x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the packed codes of ``x``, which come in chunks."""
    # A chunk of a vector is a multiple of 8 codes, hence of whole bytes, at any width.
    parts = [packing.pack(part, scheme.bits) for part in codes]
    if not parts:
        shape = code_rows.packed_shape(scheme, tuple(x.shape))
        return torch.empty(shape, dtype=torch.uint8, device=x.device)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _encoded_parts(
    x: torch.Tensor, scheme: Scheme, spread: Spread, codes: CodeRange = None
) -> Iterator[torch.Tensor]:
    """Return the unpacked codes of ``x`` in chunks along its first axis."""
    shape, first = tuple(x.shape), 0
    scale, zero, offset = (None if value is None else value.expand(shape) for value in spread)
    for pick in _chunks(shape, scheme):
        part = x[pick]
        near = part if offset is None else part.to(offset.dtype) - offset[pick]
        factor = None if scale is None else scale[pick]
        ratio, negative = scaled(near, scheme, factor), second_grid(factor, scheme.element)
        found = _encode(ratio, scheme, None if zero is None else zero[pick], first, x.dtype, negative)
        # Clamping to the scheme's codes and then to fewer is clamping to these.
        yield found if codes is None else packing.as_values(found, scheme.element).clamp(*codes)
        first += part.numel()


def chunks(shape: tuple[int, ...], count: int = CHUNK) -> list[slice | tuple[()]]:
    """Return indices of pieces along the first axis, about ``count`` elements each."""
    if not shape:
        return [()]
    rows = max(1, count // max(1, math.prod(shape[1:])))
    return [slice(begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows)]


def _chunks(shape: tuple[int, ...], scheme: Scheme) -> list[slice | tuple[()]]:
    """Return pieces of a tensor; a vector under joint codes is one."""
    return [()] if len(shape) == 1 and scheme.element.per_code > 1 else chunks(shape)


class Spread(NamedTuple):
    """Broadcastable scale, zero point and offset of each element."""

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    offset: torch.Tensor | None


def spread_parameters(
    scheme: Scheme, params: Params, *, shape: tuple[int, ...], dtype: torch.dtype
) -> Spread:
    """Return the parameters of each element of a tensor."""
    blocks = (
        effective_scale(scheme, params, shape, dtype),
        zero_point_of(scheme, params),
        effective_offset(scheme, params, shape, dtype),
    )
    return Spread(*(None if v is None else spread_blocks(v, scheme.granularity, shape) for v in blocks))


def scaled(x: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` over its scale, wide; zero scales give signed zeros."""
    wide = x.to(wide_dtype(x.dtype))
    if scale is None:
        return wide
    kind, lost = scaled_rounder(scheme, x.dtype), (scale == 0) | torch.isinf(scale)
    if multiplies(scheme):
        inverse = through(1.0 / scale, kind)
        ratio = wide * inverse
        lost = lost if kind is None else lost | torch.isinf(inverse)
    else:
        ratio = wide / scale
    # A block whose scale was lost holds zeros, with the signs of its values, or the others under -Inf; a NaN
    # stays one.
    lost = lost & ~torch.isnan(wide)
    zeros = torch.copysign(torch.zeros_like(wide), wide)
    ratio = torch.where(lost, torch.where(scale == -math.inf, -zeros, zeros), ratio)
    return through(ratio, kind)


def scaled_rounder(scheme: Scheme, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that ``x / scale`` is rounded to, or None.

    A scheme with several levels has a float32 tensor scale, to which torch promotes, so nothing is rounded
    there.
    """
    return rounder(scheme, dtype) if len(scheme.scales) == 1 else None


def _encode(
    ratio: torch.Tensor,
    scheme: Scheme,
    zero_point: torch.Tensor | None,
    first: int,
    dtype: torch.dtype,
    negative: torch.Tensor | None,
) -> torch.Tensor:
    noise = None
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        noise = uniform_noise(scheme.rounding.seed, first, ratio.numel(), ratio.device).reshape(ratio.shape)
    element, mode = scheme.element, scheme.rounding.mode
    if element.per_code > 1:
        return code_rows.encoded(ratio, scheme)
    if not element.is_integer:
        patterns = encode(ratio, element, mode, scheme.overflow, noise, negative=negative)
        if element.is_float and element.bits <= scheme.dialect.positive_zero_bits:
            patterns = torch.where(ratio == 0, 0, patterns).to(patterns.dtype)
        return patterns
    steps = integer_steps(ratio, scheme, zero_point, noise, dtype)
    if scheme.overflow is Overflow.ERROR:
        _refuse_overflow(steps, scheme)
    # A NaN takes the lowest code, as in torch.fake_quantize; converting it to an integer would be undefined.
    clamped = steps.clamp(scheme.qmin, scheme.qmax).nan_to_num(nan=float(scheme.qmin))
    return int_patterns(clamped, element)


def _refuse_overflow(steps: torch.Tensor, scheme: Scheme) -> None:
    past = (steps < scheme.qmin) | (steps > scheme.qmax)
    if bool(past.any()):
        raise RangeError(
            f"{int(past.sum())} values exceed the range of {scheme.element_name}; use overflow=saturate"
        )


def integer_steps(
    ratio: torch.Tensor,
    scheme: Scheme,
    zero_point: torch.Tensor | None,
    noise: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return rounded steps plus zero point, float64, before clamping."""
    steps = ratio * float(1 / scheme.element.step)
    if zero_point is None:
        if scheme.dialect.arithmetic is Arithmetic.SUMS and scheme.rounding.mode is RoundingMode.HALF_UP:
            return torch.floor(steps + (0.5 - scheme.qmin)).double() + scheme.qmin
        return round_steps(steps.double(), scheme.rounding.mode, noise)
    if scheme.zero_inside:
        shifted = through(steps + zero_point.to(steps.dtype), scaled_rounder(scheme, dtype))
        return round_steps(shifted.double(), scheme.rounding.mode, noise)
    return round_steps(steps.double(), scheme.rounding.mode, noise) + zero_point.double()


def dequantize(
    data: torch.Tensor,
    scheme: Scheme,
    params: Params,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    own_dtype: torch.dtype,
) -> torch.Tensor:
    """Return packed codes dequantized to ``dtype``; ``own_dtype``: of the quantized tensor."""
    wide = torch.float64 if torch.float64 in (dtype, own_dtype) else torch.float32
    out = torch.empty(shape, dtype=dtype, device=data.device)
    if scheme.element.per_scale > 1:
        tables = tables_of(scheme, params, shape=shape, own_dtype=own_dtype, dtype=wide)
        block_tables.decoded_into(out, code_rows.unpack(data, scheme, shape), scheme, tables)
        return out
    spread = spread_parameters(scheme, params, shape=shape, dtype=own_dtype)
    scale, zero, offset = (None if value is None else value.expand(shape) for value in spread)
    for pick in _chunks(shape, scheme):
        part = out[pick]
        patterns = code_rows.unpack(_bytes_of(data, pick, scheme.bits, shape), scheme, tuple(part.shape))
        factor = None if scale is None else scale[pick]
        values = code_rows.decoded(
            patterns,
            scheme,
            tuple(part.shape),
            torch.float64 if zero is not None else wide,
            second_grid(factor, scheme.element),
        )
        if zero is not None:
            values = (values - zero[pick].double() * float(scheme.element_step)).to(wide)
        if factor is not None:
            values = values * factor.to(wide)
        if offset is not None:
            values = values + offset[pick].to(wide)
        part.copy_(values)
    return out


def _bytes_of(data: torch.Tensor, pick: slice | tuple[()], bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes that hold the codes of a chunk."""
    if not isinstance(pick, slice) or len(shape) > 1:
        return data[pick]
    return data[pick.start * bits // 8 : packing.packed_length(pick.stop, bits)]


def fake_quantize(x: torch.Tensor, scheme: Scheme, params: Params, codes: CodeRange = None) -> torch.Tensor:
    """Return ``dequantize(quantize(x))`` in the dtype of ``x``.

    Training may run into NaN: an integer format makes it the lowest code, as torch does; others pass it on.
    """
    shape = tuple(x.shape)
    data = _packed(x, scheme, params, codes)
    values = dequantize(data, scheme, params, shape=shape, dtype=x.dtype, own_dtype=x.dtype)
    return values if scheme.element.is_integer else torch.where(torch.isnan(x), torch.nan, values)


def inside(x: torch.Tensor, scheme: Scheme, params: Params, codes: CodeRange = None) -> torch.Tensor:
    """Return the mask of ``x`` that rounds without clipping, ends included.

    NaN and Inf are outside.
    """
    shape = tuple(x.shape)
    if scheme.element.per_scale > 1:
        return block_tables.inside(x, scheme, params)
    scale, zero, offset = spread_parameters(scheme, params, shape=shape, dtype=x.dtype)
    near = x if offset is None else x.to(offset.dtype) - offset
    # Where the scale is zero the ratio is zero too, even for Inf.
    ratio = torch.where(torch.isfinite(x), scaled(near, scheme, scale), torch.nan).double()
    element, mode = scheme.element, scheme.rounding.mode
    noise = None
    if mode is RoundingMode.STOCHASTIC:
        noise = uniform_noise(scheme.rounding.seed, 0, x.numel(), x.device).reshape(shape)
    if element.is_integer:
        steps = integer_steps(ratio.to(wide_dtype(x.dtype)), scheme, zero, noise, x.dtype)
        low, high = codes or (scheme.qmin, scheme.qmax)
        return (steps >= low) & (steps <= high)
    return fits(ratio, element, mode, noise)


def float_bounds(scheme: Scheme) -> tuple[float, float, bool]:
    """Return the unclipped interval of scaled values, and whether it is closed.

    A codebook ends at its extremes. A float format ends half a step past its largest value; a tie there
    rounds to that value only when its significand is even, which without mantissa bits it never is. Values
    rounded otherwise than to nearest even are rounded before, and end at the extremes.
    """
    element = scheme.element
    if not isinstance(element, FloatFormat) or scheme.rounding.mode is not RoundingMode.HALF_EVEN:
        return float(element.min), float(element.max), True
    high = float(element.ceiling)
    return (-high if element.signed else 0.0), high, element.mantissa_bits > 0 and element.max_code % 2 == 0
