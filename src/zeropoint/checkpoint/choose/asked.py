"""What a user asks for in words: which codec writes it, and whether it is likely to be meant."""

from __future__ import annotations

from ...codecs.layer_schemes import layer_scheme, preset_layers
from ...codecs.model_format import WEIGHTED
from ...codecs.protocol import Codec
from ...codecs.registry import CODECS, DEFAULT, get_codec
from ...errors import SchemeError, ZeropointError
from ...formats import IntFormat
from ...schemes import PRESETS
from ...schemes.text import overridden, words


def codec_for(name: str | None, to: object = None) -> Codec:
    """Return the codec called ``name``; for None, the only codec that holds the scheme, or the default codec.

    to: a scheme, a preset or a mixture, or None. ``q4_k_m`` is of one layout, which need not be named.

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
        if len(owners) == 1 and not _is_usual(to):
            return owners[0]
    return DEFAULT


def _is_usual(to: str) -> bool:
    """Return whether the usual codec holds what is asked for."""
    try:
        layer_scheme(to, DEFAULT)
    except ZeropointError:
        return False
    return True


_GROUP, _FEW_BITS = "g128", 8
"""The granularity of presets of integers, and the bits up to which one scale for a weight is hardly meant."""


def require_blocks(text: str, codec: Codec) -> None:
    """Raise SchemeError for an integer of few bits that got one scale for a whole weight without a word.

    ``int4`` alone most likely means groups; ``int4:tensor`` is one scale by intent. The message has a scheme
    with groups and the closest preset. Raises what :func:`layer_scheme` raises.
    """
    weight, head = layer_scheme(text, codec).weight, text.strip().partition(":")[0].lower()
    if head in codec.presets or head in PRESETS or "granularity" in words(text):
        return
    if not isinstance(weight.element, IntFormat) or weight.bits > _FEW_BITS or weight.granularity.extents:
        return
    weights_alone = (layer for layer in preset_layers(codec) if layer.input is None)
    near = sorted(
        weights_alone,
        key=lambda layer: (layer.weight.element != weight.element, abs(layer.weight.bits - weight.bits)),
    )
    groups, whole = (overridden(text.strip(), blocks) for blocks in (_GROUP, "tensor"))
    others = " or ".join([groups, *(layer.name for layer in near[:1])])
    raise SchemeError(
        f"{text.strip()} has one scale for a whole weight, which leaves little of it; write {others}, or "
        f"{whole} where one scale is meant"
    )
