"""Codec and scheme requests in words, with checks of their intent."""

from __future__ import annotations

from ...codecs.layer_schemes import layer_scheme, preset_layers
from ...codecs.model_format import WEIGHTED
from ...codecs.protocol import Codec
from ...codecs.registry import CODECS, DEFAULT, get_codec
from ...errors import SchemeError, ZeropointError
from ...formats import IntFormat
from ...schemes import PRESETS, Scheme
from ...schemes.text import overridden, words


def codec_for(name: str | None, to: object = None) -> Codec:
    """Return the codec called ``name``, or the one for a scheme.

    For None, the only codec that holds the scheme, or the default codec. to: a scheme, a preset or a mixture,
    or None. ``q4_k_m`` is of one layout, which need not be named.

    >>> codec_for(None, "q4_k_m") is DEFAULT, codec_for(None, "w4a16") is DEFAULT
    (False, True)
    """
    if name is not None:
        return get_codec(name)
    if isinstance(to, str):
        head = to.strip().partition(":")[0].lower()
        owners = [
            codec
            for codec in CODECS.values()
            if head in codec.presets or head.removesuffix(WEIGHTED) in codec.model_format.mixtures
        ]
        if len(owners) == 1 and not _holds(DEFAULT, to):
            return owners[0]
    return DEFAULT


_GROUP, _FEW_BITS = "g128", 8
"""The granularity of presets of integers, and the bits up to which one scale for a weight is hardly meant."""


def require_blocks(text: str, codec: Codec) -> None:
    """Raise SchemeError for few-bit integers with an implicit tensor scale.

    ``int4`` alone most likely means groups; ``int4:tensor`` is one scale by intent. The message has a scheme
    with groups and the closest preset, and names what the layout of ``codec`` holds alone: signed integers in
    place of ``uint4``. Raises what :func:`layer_scheme` raises.
    """
    asked, head = text.strip(), text.strip().partition(":")[0].lower()
    if head in codec.presets or head in PRESETS or "granularity" in words(text):
        layer_scheme(text, codec)
        return
    try:
        weight = Scheme.parse(asked)
    except ZeropointError:
        layer_scheme(text, codec)  # knows presets, too, and says which is close
        raise
    if not isinstance(weight.element, IntFormat) or weight.bits > _FEW_BITS or weight.granularity.extents:
        layer_scheme(text, codec)
        return
    weights_alone = (layer for layer in preset_layers(codec) if layer.input is None)
    near = sorted(
        weights_alone,
        key=lambda layer: (
            layer.weight.element != weight.element,
            layer.weight.zero_point != weight.zero_point,
            abs(layer.weight.bits - weight.bits),
        ),
    )
    signed = asked if weight.element.signed else asked[1:]  # uint4 to int4
    groups, whole = ([overridden(each, blocks) for each in (asked, signed)] for blocks in (_GROUP, "tensor"))
    others = [next((each for each in groups if _holds(codec, each)), None), *(each.name for each in near[:1])]
    offered = " or ".join(each for each in others if each is not None)
    alone = f", or {whole[0]} where one scale is meant" if _holds(codec, whole[0]) else ""
    raise SchemeError(
        f"{asked} has one scale for a whole weight, which leaves little of it; write {offered}{alone}"
    )


def _holds(codec: Codec, text: str) -> bool:
    """Return whether a layout holds a scheme."""
    try:
        layer_scheme(text, codec)
    except ZeropointError:
        return False
    return True
