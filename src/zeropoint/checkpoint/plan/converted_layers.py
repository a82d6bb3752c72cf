"""Schemes of quantized layers in another file layout, values unchanged.

This module looks at schemes and shapes. Whether the numbers of a weight allow it, the method says that reads
them (methods/lossless.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...architectures import expert_layout
from ...codecs.act_order import group_index, out_of_order
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.layer_schemes import named_layer, preset_layers
from ...codecs.protocol import Codec, LayerScheme
from ...errors import FormatError, SchemeError, ShapeError, UnsupportedError, count, option, printable
from ...formats import IntFormat, get_format
from ...formats.rounding import Overflow
from ...formats.torch_dtypes import format_of
from ...layout.blocks import blocks_of_blocks
from ...methods import LOSSLESS, LOSSLESS_OR_NEAREST
from ...methods.lossless import unrelated
from ...recipes import Activation
from ...schemes import Granularity, RangeRule, Rounding, ScaleLevel, Scheme, ZeroPoint
from ...schemes.dialects import ZEROPOINT, get_dialect
from ...schemes.scale_rules import EDGE, LINEAR, MINIMUM, SIGNED, Pick
from ...schemes.scales import INPUT
from ...schemes.structure import stored_numbers
from .decisions import TensorDecision, compact, misfit
from .selection import Why, not_a_weight
from .tensor_matrices import has_one_scale_each

if TYPE_CHECKING:
    from ..read.quantized_layers import StoredLayer
    from .float_view import Floats


def conversions(
    floats: Floats,
    decisions: Sequence[TensorDecision],
    codec: Codec,
    to: LayerScheme | None,
    *,
    requantize: bool,
) -> Sequence[TensorDecision]:
    """Return ``decisions`` with quantized layers converted to ``codec``.

    to: their scheme; by default, the equivalent one of ``codec``. requantize: whether values may change where
    they must.

    Raises UnsupportedError that names layers without an equal.
    """
    refused: list[str] = []
    source = floats.source
    entries, experts = source.entries, expert_layout(source.config or {})

    def converted(decision: TensorDecision) -> TensorDecision:
        found = floats.quantized(decision.entry.name)
        if found is None or decision.why is Why.USER:
            plain = decision.kept_by_default and found is None
            return replace(decision, why=Why.DEFAULT, reason="no codes in the source") if plain else decision
        entry = decision.entry
        one = _of_one_scale(found[0]) if has_one_scale_each(found[0], experts) else found[0]
        layer, reason = _target(one, found[1], TORCH_DTYPES[entry.dtype], codec.used(entry.use), to)
        if layer is not None and not reason and group_index(found[0].layer) is not None:
            layer, reason = _out_of_order(found[0], layer, TORCH_DTYPES[entry.dtype])
        reason = "" if requantize and layer is not None else reason
        said = "quantized already"
        if layer is not None and not reason:
            reason = not_a_weight(entry) or misfit(entry, layer) or ""
            if reason and layer.input is not None:
                # Codes stay as they are where only the inputs do not come in whole groups.
                alone = named_layer(codec, layer.weight, None)
                if misfit(entry, alone) is None:
                    layer, said, reason = alone, f"{said}, its inputs are floats: {reason}", ""
        if layer is None or reason:
            refused.append(f"{printable(entry.name)} ({found[0].weight}): {reason}")
            return decision
        method = LOSSLESS_OR_NEAREST if requantize else LOSSLESS
        return TensorDecision(entry=entry, layer=layer, method=method, why=Why.LINEAR, reason=said)

    made = compact(entries, map(converted, decisions))
    if refused:
        more = "" if requantize else f", and {option('allow_requantize', True)} where values change"
        raise UnsupportedError(
            f"{count(len(refused), 'layer')} cannot be converted to {codec.name}, such as {refused[0]}; pass "
            f"{option('to', metavar='SCHEME')}{more}"
        )
    return made


def _of_one_scale(stored: StoredLayer) -> StoredLayer:
    """Return fused experts with one scale per matrix as single matrices' scheme."""
    (level,) = stored.weight.scales
    weight = replace(stored.weight, scales=(replace(level, granularity=Granularity.tensor()),))
    return replace(stored, layer=replace(stored.layer, weight=weight))


def _out_of_order(stored: StoredLayer, to: LayerScheme, dtype: torch.dtype) -> tuple[LayerScheme, str]:
    """Return a layer's act-order scheme, or ``to`` and the reason against it."""
    own = out_of_order(to)
    if own is None:
        return to, f"its inputs lie in groups out of order (act-order), which {to.codec.name} does not hold"
    if stored_numbers(stored.weight, stored.dtype)[:-1] != stored_numbers(to.weight, dtype)[:-1]:
        return to, f"its inputs lie in groups out of order (act-order), so {to.weight} must store its numbers"
    return own, ""


def _target(
    stored: StoredLayer, given: Activation | None, dtype: torch.dtype, codec: Codec, to: LayerScheme | None
) -> tuple[LayerScheme | None, str]:
    """Return the target scheme of a layer, or None and the reason."""
    if to is None:
        return equivalent(explicit(stored.weight, stored.dtype), given, dtype, codec)
    to = to if to.codec == codec else replace(to, codec=codec)
    have, wanted = stored_numbers(stored.weight, stored.dtype), stored_numbers(to.weight, dtype)
    if have[:-1] == wanted[:-1]:
        return to, ""
    reason = unrelated(stored.weight, to.weight)
    if reason is None and len(to.weight.scales) == 1:
        try:
            blocks_of_blocks(stored.weight.granularity, to.weight.granularity, stored.shape)
        except ShapeError as error:
            reason = f"{to.weight} has one scale where it has several: {error}"
    return to, reason or ""


def equivalent(
    weight: Scheme, given: Activation | None, dtype: torch.dtype, codec: Codec
) -> tuple[LayerScheme | None, str]:
    """Return the equivalent scheme of ``codec``, or None and the reason.

    weight: with the format of every scale. given: how the layer's inputs are quantized; they are kept where
    the codec has them. dtype: of weights in the result.
    """
    reasons: dict[str, None] = {}
    candidates = dict.fromkeys(_candidates(weight, dtype, codec))
    for own, scheme in itertools.product(dict.fromkeys(_inputs(given, codec)), candidates):
        try:
            return named_layer(codec, scheme, own), ""
        except UnsupportedError as error:
            reasons[str(error)] = None
    return None, next(iter(reasons))


def _inputs(given: Activation | None, codec: Codec) -> Iterator[Activation | None]:
    """Yield equivalent input quantizations: presets', the given one, none."""
    if given is not None and (given.dynamic or codec.input_names is not None):
        for preset in codec.presets.values():
            if preset.input is not None:
                own = Activation.of(preset.input, dynamic=not preset.static)
                if same_inputs(own, given):
                    yield own
        yield given
    yield None


def same_inputs(a: Activation, b: Activation) -> bool:
    """Return whether inputs have equal codes and parameters, engine roundings aside."""
    rules = [
        [level.rule if level.rule.power_of_two else None for level in each.scheme.scales] for each in (a, b)
    ]
    same = stored_numbers(a.scheme)[:-1] == stored_numbers(b.scheme)[:-1]
    return a.dynamic == b.dynamic and same and rules[0] == rules[1]


def _candidates(weight: Scheme, dtype: torch.dtype, codec: Codec) -> Iterator[Scheme]:
    """Yield schemes that hold the values of ``weight``, least changes first."""
    yield from _presets(weight, dtype, codec)
    signed = _signed(weight)
    dialects = (get_dialect(codec.defaults.get("dialect", ZEROPOINT.name)), ZEROPOINT)
    plain = replace(weight, range_rule=RangeRule.FULL, rounding=Rounding(), overflow=Overflow.SATURATE)
    if signed and codec.negative_scales and len(weight.scales) == 1:
        kept = (replace(weight.scales[0], rule=SIGNED),)
        for dialect in dialects:
            with contextlib.suppress(SchemeError):
                yield replace(plain, scales=kept, dialect=dialect)
    # Elsewhere, a negative scale has an equal where there are zero points.
    for zero_point in (weight.zero_point, ZeroPoint.INTEGER)[signed:]:
        for scales, dialect in itertools.product(_formats(weight, dtype, codec), dialects):
            with contextlib.suppress(SchemeError):
                yield replace(plain, scales=scales, zero_point=zero_point, dialect=dialect)
    yield from _with_other_codes(plain, weight, dtype, codec)
    for preset in preset_layers(codec):
        if _holds_parts(preset.weight, weight):
            yield preset.weight
    yield from _with_float_zeros(weight)
    yield weight


def _signed(weight: Scheme) -> bool:
    return any(level.picks(Pick.SIGNED) for level in weight.scales)


def _is_of_integers(weight: Scheme) -> bool:
    """Return whether values are codes, less their zero points, times one scale."""
    return isinstance(weight.element, IntFormat) and len(weight.scales) == 1 and not weight.offsets


def _with_other_codes(plain: Scheme, weight: Scheme, dtype: torch.dtype, codec: Codec) -> Iterator[Scheme]:
    """Yield signed for unsigned integers, and back, with shifted zero points."""
    if not _is_of_integers(weight) or weight.zero_point is ZeroPoint.REAL:
        return
    assert isinstance(weight.element, IntFormat)
    element = get_format(f"{'u' * weight.element.signed}int{weight.element.bits}")
    dialects = (get_dialect(codec.defaults.get("dialect", ZEROPOINT.name)), ZEROPOINT)
    for scales, dialect in itertools.product(_formats(weight, dtype, codec), dialects):
        with contextlib.suppress(SchemeError, FormatError):
            zero_point = ZeroPoint.INTEGER
            yield replace(plain, element=element, scales=scales, zero_point=zero_point, dialect=dialect)


def _with_float_zeros(weight: Scheme) -> Iterator[Scheme]:
    """Yield unsigned integers with offsets, then with float zero points.

    The offset of symmetric integers is a power of two times the scale, so in its format; others need float32.
    """
    if not _is_of_integers(weight):
        return
    wide = get_format("float32")
    rule = EDGE if _signed(weight) else LINEAR
    for fmt in (weight.scales[0].format, wide) if weight.zero_point is ZeroPoint.NONE else (wide,):
        level = replace(weight.scales[0], format=fmt, rule=rule)
        with contextlib.suppress(SchemeError, FormatError):
            element = get_format(f"uint{weight.element.bits}")
            yield Scheme(element=element, scales=(level,), offsets=(replace(level, rule=MINIMUM),))
    for fmt in (weight.scales[0].format, wide):
        level = replace(weight.scales[0], format=fmt, rule=LINEAR)
        with contextlib.suppress(SchemeError, FormatError):
            element = get_format(f"uint{weight.element.bits}")
            yield Scheme(element=element, scales=(level,), zero_point=ZeroPoint.REAL)


def _holds_parts(scheme: Scheme, weight: Scheme) -> bool:
    """Return whether ``scheme`` divides the blocks of ``weight``."""
    if (scheme.element, scheme.zero_point, len(scheme.scales)) != (weight.element, weight.zero_point, 1):
        return False
    if unrelated(weight, scheme) is not None:
        return False
    big, small = (s.granularity.block_shape((_LARGE, _LARGE)) for s in (weight, scheme))
    return all(b % s == 0 for b, s in zip(big, small, strict=True))


_LARGE = 1 << 40
"""Rows and columns that every block divides whose extents are powers of two."""


def _presets(weight: Scheme, dtype: torch.dtype, codec: Codec) -> Iterator[Scheme]:
    """Yield the schemes of the codec's presets that store what ``weight`` does."""
    numbers = stored_numbers(weight, dtype)[:-1]
    for preset in preset_layers(codec):
        if stored_numbers(preset.weight, dtype)[:-1] == numbers:
            yield preset.weight


def _formats(weight: Scheme, dtype: torch.dtype, codec: Codec) -> Iterator[tuple[ScaleLevel, ...]]:
    """Yield the scales of ``weight`` in formats that may hold them.

    These are the weight's own, spelled so; those that they have; that which the codec usually has, in place
    of another one of 16 bits; float32.
    """
    plain = tuple(s if s.rule.power_of_two else replace(s, rule=LINEAR) for s in weight.scales)
    own = format_of(dtype)
    yield tuple(replace(s, format=None) if s.format == own else s for s in plain)
    yield plain
    if len(plain) == 1 and not plain[0].rule.power_of_two:
        usual = codec.defaults.get("scale", INPUT)
        if usual != INPUT and plain[0].format_for(own).bits == _HALF:
            yield (replace(plain[0], format=get_format(usual)),)
        yield (replace(plain[0], format=get_format("float32")),)


def explicit(weight: Scheme, dtype: torch.dtype) -> Scheme:
    """Return a scheme with an explicit format for every scale."""
    own = format_of(dtype)
    return replace(weight, scales=tuple(replace(s, format=s.format_for(own)) for s in weight.scales))


_HALF = 16
"""Bits of float16 and bfloat16, of which one often holds what the other does."""
