"""Lossless conversion of a quantized weight to another scheme, or an error.

    dequantize(codes of the result) = dequantize(codes of the weight), number for number in float32

Codes and parameters are taken as they are where both schemes store the same numbers. Otherwise the parameters
of the result follow from the weight's parameters:

    one level of scales     the scale of the block that holds each block of the result, if its format has it
    zero points             the weight's, moved as the code range is; mirrored under a negative scale;
                            real ones from integers alone
    an offset               the value of the smallest code, rounded to its format
    floats under two        float8 scales under one float32: a block of a power-of-two format takes the scale
                            2 ** (floor(log2 amax) - emax), the least that its codes allow, so that MXFP4
                            becomes NVFP4 wherever the largest magnitudes of its blocks span at most 17
                            binades (e4m3 has the powers of two from 2 ** -9 to 2 ** 8)

and codes follow from the values under them. The result is decoded and compared in every case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..errors import ShapeError, UnsupportedError
from ..formats import Format, IntFormat, format_name, get_format
from ..formats.codes import decode
from ..formats.torch_dtypes import format_of
from ..functional import quantize, row_errors
from ..layout.blocks import reduce_blocks, spread_grid
from ..method_names import LOSSLESS
from ..ops.row_errors import RowErrors
from ..params import QuantizationParams
from ..params.powers_of_two import scale_exponent
from ..params.stored import round_to, store
from ..schemes import Granularity, RangeRule, Rounding, ScaleLevel, Scheme, ZeroPoint
from ..schemes.dialects import ZEROPOINT
from ..schemes.scale_rules import FLOOR, LINEAR, SIGNED, Linear, Pick
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .method import NO_DATA, LayerData, LayerResult, Method, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless(Method):
    """Conversion of a quantized weight to equal values, under its own scales."""

    name: ClassVar[str] = LOSSLESS
    formula: ClassVar[str] = "dequantize(result) = dequantize(codes of the weight)"
    source: ClassVar[str] = "the equation of both schemes; proven for each weight by decoding"

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002
        """Rows: codes are read in rows."""
        return Scope.ROWS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse every scheme, since a recipe is about weights in floats."""
        return f"method {self.name} gives {scheme} to codes alone, not to floats; use zeropoint convert"

    def value_bytes(self, scheme: Scheme) -> int:  # noqa: ARG002
        """Return the memory of both float32 values, and codes in bytes."""
        return _VALUE_BYTES

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return the codes of ``data.codes``, which ``weight`` was decoded from, under ``scheme``.

        Raises UnsupportedError where it cannot hold these values.
        """
        if data.codes is None:
            raise UnsupportedError(str(self.refusal(scheme)))
        found = recoded(data.codes, weight, scheme, data.extremes)
        errors = row_errors(weight, replace(found, dtype=weight.dtype))
        different = difference(weight, found, errors)
        if different is not None:
            raise UnsupportedError(f"{scheme} does not hold the values of {data.codes.scheme}: {different}")
        return LayerResult(q=found, errors=errors)


METHOD = Lossless()
_VALUE_BYTES = 12


def difference(values: torch.Tensor, q: QuantizedTensor, errors: RowErrors | None = None) -> str | None:
    """Return the first difference of decoded values, in words, or None.

    Zeros are equal whatever their sign. errors: how far they are apart, where that is known.
    """
    q = replace(q, dtype=values.dtype)
    found = errors or row_errors(values, q)  # fused with decoding; Inf and NaN may have no error
    if not (found.errors.any() or found.largest.any()):
        return None
    decoded = q.dequantize()
    other = decoded != values
    if not bool(other.any()):
        return None
    place = tuple(torch.nonzero(other)[0].tolist())
    return (
        f"{int(other.sum())} of {values.numel()} values differ, the first at {list(place)}, "
        f"{float(values[place])!r} and {float(decoded[place])!r}"
    )


def is_exact_reciprocal(scale: torch.Tensor, blocks: Format) -> bool:
    """Return whether products with ``scale`` equal quotients by its reciprocal, float32.

    For float8_e4m3fn it is with 18 % of all float32 scales. For the rest, no neighbor of the reciprocal gives
    these products, either (all 2 ** 23 mantissas were tried, with neighbors up to 3 steps away; one has one).
    """
    numbers = decode(torch.arange(blocks.code_count, dtype=torch.uint8), blocks, torch.float32)
    numbers = numbers[torch.isfinite(numbers)]
    return torch.equal(numbers * scale, numbers / (1 / scale))


def recoded(
    q: QuantizedTensor, values: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None, *,
    rounded: bool = False,
) -> QuantizedTensor:  # fmt: skip
    """Return ``q`` under ``scheme``, with parameters that keep its values.

    values: ``q``, decoded. extremes: of the whole tensor, where ``q`` is a part of one. rounded: whether
    scales that the format of ``scheme`` lacks are rounded. Raises UnsupportedError for schemes whose
    parameters do not follow from the parameters of ``q``, and for such scales.
    """
    *have, inverse = stored_numbers(q.scheme, q.dtype)
    *wanted, inverted = stored_numbers(scheme, q.dtype)
    if have == wanted:
        stored = list(q.params.stored)
        if inverse != inverted:
            stored[-1] = 1 / stored[-1]
        params = QuantizationParams.of(scheme, q.shape, q.dtype, stored)
        return QuantizedTensor(data=q.data, params=params, shape=q.shape, dtype=q.dtype)
    reason = unrelated(q.scheme, scheme)
    if reason is not None:
        raise UnsupportedError(reason)
    if len(scheme.scales) == 1:
        more = [_offsets(q, scheme)] if scheme.offsets else []
        real = scheme.zero_point is ZeroPoint.REAL
        zeros = [] if scheme.zero_point is ZeroPoint.NONE else [_zero_points(q, scheme)]
        more += [each.float() for each in zeros] if real else zeros
        params = QuantizationParams.of(
            scheme, q.shape, q.dtype, [_scales(q, values, scheme, rounded=rounded), *more]
        )
    else:
        levels = _under_tensor_scale(values, scheme, (q, extremes), rounded=rounded)
        params = QuantizationParams.of(scheme, q.shape, q.dtype, levels)
    # Rules are about numbers between two codes, about codes that are not chosen, and about other scales.
    dialect = scheme.dialect if inverted else ZEROPOINT
    # Kernels take nonnegative scales alone.
    negative = any(bool((each.float() < 0).any()) for each in params.scales)
    scales = tuple(_without_choice(level, negative) for level in scheme.scales)
    plain = replace(scheme, scales=scales, dialect=dialect, rounding=Rounding(), range_rule=RangeRule.FULL)
    data = quantize(values, replace(params, scheme=plain)).data
    return QuantizedTensor(data=data, params=params, shape=q.shape, dtype=q.dtype)


def unrelated(source: Scheme, target: Scheme) -> str | None:
    """Return the reason why target parameters do not follow, or None.

    Both store other numbers than each other. What the numbers themselves forbid shows when they are read.
    """
    found = f"the parameters of {target} do not follow from those of {source}"
    integers = source.element.is_integer and target.element.is_integer
    offset = integers and len(target.scales) == 1 and [s.granularity for s in target.scales]
    if source.offsets or (target.offsets and [s.granularity for s in target.offsets] != offset):
        return found
    if source.zero_point is ZeroPoint.REAL or (target.zero_point is ZeroPoint.REAL and not integers):
        return found
    for scheme in (source, target):
        if not scheme.scales or scheme.center:
            return found
        if not all(level.holds_floats for level in scheme.scales):
            return found
    if len(target.scales) == 1:
        return None
    tensor = target.scales[-1].granularity == Granularity.tensor()
    exponents = all(
        level.format is not None and level.format.exponents is not None for level in source.scales
    )
    floats = source.element == target.element and source.element.is_float
    return None if len(target.scales) == 2 and tensor and exponents and floats else found


def _scales(q: QuantizedTensor, values: torch.Tensor, scheme: Scheme, *, rounded: bool) -> torch.Tensor:
    """Return the scale of each block from ``q``; any for zeros."""
    found, level = q.params.effective_scale(), scheme.scales[0]
    assert found is not None
    scale = _spread(found, q, scheme)
    if scheme.zero_point is not ZeroPoint.NONE:
        scale = scale.abs()  # and codes are mirrored, as zero points are
    kind = level.format_for(format_of(q.dtype))
    kept = round_to(scale.abs(), kind, up=False)
    if _takes_a_sign(scheme):
        kept = kept.copysign(scale)
    lost = kept != scale
    if not rounded and bool(lost.any()):
        lost &= reduce_blocks(values.abs(), level.granularity, "amax", 0.0) > 0
    if rounded:
        scale = kept
    elif bool(lost.any()):
        place = tuple(torch.nonzero(lost)[0].tolist())
        number = float(scale[place])
        negative = number < 0 and float(kept[place]) > 0
        why = f"is not representable in {format_name(kind)}, the scales of {scheme}"
        why = f"is negative, unlike the scales of {scheme}" if negative else why
        raise UnsupportedError(f"scale {number!r} of block {list(place)} {why}")
    return store(scale.where((kept == scale) & (scale != 0), 1.0), kind)


def _without_choice(level: ScaleLevel, negative: bool) -> ScaleLevel:
    """Return a level for given scales, signed if some are negative."""
    if not isinstance(level.rule, Linear):
        return level
    return replace(level, rule=SIGNED if negative and level.picks(Pick.SIGNED) else LINEAR)


def _takes_a_sign(scheme: Scheme) -> bool:
    """Return whether scales of ``scheme`` may be negative."""
    return bool(scheme.offsets) or scheme.scales[0].picks(Pick.SIGNED)


def _spread(numbers: torch.Tensor, q: QuantizedTensor, scheme: Scheme) -> torch.Tensor:
    """Return a number for each block of ``scheme`` from ``q``'s blocks."""
    try:
        return spread_grid(numbers, q.scheme.granularity, scheme.granularity, q.shape)
    except ShapeError as error:
        raise UnsupportedError(f"{scheme} has one scale where {q.scheme} has several: {error}") from error


def _zero_points(q: QuantizedTensor, scheme: Scheme) -> torch.Tensor:
    """Return zero points of ``q``, or 0, moved with the smallest code.

    Under a negative scale zero points are mirrored, so that ``(z - q) * -s`` takes the place of ``(q - z) *
    s``.
    """
    found, scale = _zeros(q)
    mirrored = sum(_ends(q.scheme)) - found
    moved = _ends(scheme)[0] - _ends(q.scheme)[0]
    return (_spread(mirrored.where(scale < 0, found), q, scheme) + moved).contiguous()


def _offsets(q: QuantizedTensor, scheme: Scheme) -> torch.Tensor:
    """Return the smallest code's value per block, rounded to offsets."""
    found, scale = _zeros(q)
    level = scheme.offsets[0]
    smallest = (_ends(q.scheme)[0] - found) * scale
    kind = level.format_for(format_of(q.dtype))
    return store(round_to(_spread(smallest, q, scheme), kind, up=False), kind)


def _zeros(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the zero points of ``q``, 0 if none, and its scales."""
    scale = q.params.effective_scale()
    assert scale is not None
    return torch.zeros_like(scale, dtype=torch.int32) if q.zero_point is None else q.zero_point, scale


def _ends(scheme: Scheme) -> tuple[int, int]:
    """Return the smallest and the largest code of an integer scheme."""
    element = scheme.element
    assert isinstance(element, IntFormat)
    return element.qmin, element.qmax


def _under_tensor_scale(
    values: torch.Tensor,
    scheme: Scheme,
    of: tuple[QuantizedTensor, tuple[float, float] | None],
    *,
    rounded: bool,
) -> list[torch.Tensor]:
    """Return float8 scales for power-of-two scales, and the tensor's scale."""
    q, extremes = of
    (fine, coarse), kinds = scheme.scales, [level.format_for(format_of(q.dtype)) for level in scheme.scales]
    blocks = replace(fine, format=get_format("e8m0"), rule=FLOOR)
    plain = Scheme(element=scheme.element, scales=(blocks,))
    most = values.abs().amax() if extremes is None else torch.tensor(max(-extremes[0], extremes[1]))
    whole = scale_exponent(most.to(values), plain, FLOOR).double() - math.frexp(float(kinds[0].max))[1] + 1
    whole = whole.where(most > 0, 0.0)
    # There are 256 scales that blocks may have, which is less to round than all blocks.
    octets = quantize(values, plain).scales[0].view(torch.uint8)
    there, codes = torch.bincount(octets.reshape(-1), minlength=_CODES) > 0, octets.int()
    every = torch.exp2(torch.arange(_CODES) - _BIAS - whole)
    kept = round_to(every, kinds[0], up=False)
    right = kept == every
    if bool(there[0]):  # of zeros, or of less than the least of these scales
        zero = _are_zero(values, fine.granularity, octets == 0)
        there[0] = bool(((codes == 0) & ~zero).any())
        codes, kept = codes.masked_fill(zero, _CODES), torch.cat((kept, torch.ones(1, dtype=kept.dtype)))
    if rounded:
        kept = kept.clamp(min=float(kinds[0].smallest))
    elif bool((there & ~right).any()):
        least = float(values.abs().where(values != 0, torch.inf).amin())
        raise UnsupportedError(
            f"its values, up to {float(most)!r} and down to {least!r}, have scales that are too far apart "
            f"for those of {scheme}"
        )
    stored = store(kept, kinds[0])
    numbers = stored.view(torch.uint8) if stored.itemsize == 1 else stored
    scale = numbers.index_select(0, codes.reshape(-1)).view(stored.dtype).view(codes.shape)
    tensor = torch.exp2(-whole if stored_numbers(scheme)[-1] else whole)
    return [scale, store(tensor.reshape(coarse.granularity.grid(q.shape)), kinds[1])]


def _are_zero(values: torch.Tensor, granularity: Granularity, some: torch.Tensor) -> torch.Tensor:
    """Return the mask of zero blocks among ``some``, bool on the grid."""
    height, width = granularity.block_shape(tuple(values.shape))
    if height > 1 or values.shape[1] % width:
        return some & (reduce_blocks(values.abs(), granularity, "amax", 0.0) == 0)
    empty = (values.view(*some.shape, width)[some] == 0).all(-1)
    return some.masked_scatter(some, empty)


_CODES = 256
_BIAS = 127
"""Of the exponents that float8_e8m0fnu holds."""
