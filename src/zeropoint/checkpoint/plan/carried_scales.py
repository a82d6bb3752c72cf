"""Scales from data that a converted checkpoint keeps: those of static inputs, and of a cache.

They are single numbers next to the codes, under names and in shapes that each layout has of its own
(codecs/data_scales.py). Here they become the tensors of another layout, number for number. This module reads
these numbers and no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...codecs.known import CACHE_PAIR, CACHE_SCALES, has_float8_cache
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.registry import claiming
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CheckpointError, UnsupportedError, count, printable
from ...formats.torch_dtypes import format_of
from ...methods.lossless import is_exact_reciprocal
from ...recipes import Activation
from ...schemes.structure import stored_numbers
from ..choose.converted_layers import same_inputs
from ..choose.decisions import TensorDecision
from ..choose.selection import module_of
from ..read.storage import open_file
from ..read.tensor_entries import TensorEntry
from .origin import Floats, NewTensor, Origin


class Carried(NamedTuple):
    """What is written for some tensors of a source that are not copied, and sentences about it."""

    added: tuple[NewTensor, ...]
    gone: frozenset[str]
    notes: tuple[str, ...]


NOTHING = Carried((), frozenset(), ())
_OF_CACHE = re.compile(r"(.+?)(?:\.[kv]_proj)?\.([kv]_scale)", re.DOTALL)


def cache_scales(floats: Floats, codec: Codec) -> Carried:
    """Return the scales of a cache in float8 as ``codec`` has them.

    Where it has no place for those of ``floats``, or for what the configuration says of them, they are left
    out; a layout keeps its own.
    """
    entries, config = floats.source.entries, floats.config or {}
    found = [entry for entry in entries.values() if entry.name.rpartition(".")[2] in CACHE_SCALES]
    place, float8 = codec.cache, has_float8_cache(config)
    pairs = all(entry.name.rpartition(".")[2] in CACHE_PAIR for entry in found)
    if not found or (not (float8 and pairs) and claiming(config) == codec):
        return NOTHING
    gone = frozenset(entry.name for entry in found)
    if place is None or not float8 or not pairs:
        said = "" if place is None else ", as the configuration of the source has them"
        example = printable(found[0].name)
        note = (
            f"{count(len(found), 'scale')} of a cache left out, such as {example}, which have no place in "
            f"{codec.title}{said}"
        )
        return Carried((), gone, (note,))
    added = []
    for entry in found:
        match = _OF_CACHE.fullmatch(entry.name)
        assert match is not None
        own = place.key if match[2] == "k_scale" else place.value
        number = _number(entry)
        added.append(
            NewTensor(f"{match[1]}.{own}", entry, number.to(place.dtype or number.dtype).reshape(place.shape))
        )
    return Carried(tuple(added), gone, ())


def input_scales(floats: Floats, decisions: Sequence[TensorDecision], *, requantize: bool) -> Carried:
    """Return the parameters of static inputs of the layers that are converted, as their codecs have them.

    requantize: whether a reciprocal may be rounded.

    Raises CheckpointError for a layer without them, UnsupportedError for a scale whose reciprocal, which is
    stored in its place, gives other products.
    """
    added: list[NewTensor] = []
    changed: list[tuple[str, Activation, Activation | None]] = []
    for decision in decisions:
        name = decision.entry.name
        found = None if decision.layer is None else floats.quantized(name)
        if decision.layer is None or found is None:
            continue
        given, wanted = found[1], decision.layer.input
        kept = given is not None and wanted is not None and same_inputs(given, wanted)
        if given is not None and not kept:
            changed.append((name, given, wanted))
        if wanted is not None and not wanted.dynamic:
            if given is None or not kept:
                raise UnsupportedError(
                    f"{printable(name)}: inputs {wanted} have scales from data, and the source has none of "
                    "them; convert to a scheme with dynamic inputs, or without"
                )
            added += scales_of_layer(floats.origins[name], given, decision.layer, rounded=requantize)
    return Carried(tuple(added), frozenset(), tuple(_said(changed)))


def _said(changed: Sequence[tuple[str, Activation, Activation | None]]) -> Iterator[str]:
    """Yield a sentence for layers whose inputs are quantized otherwise than in the source, or not at all."""
    if changed:
        name, given, wanted = changed[0]
        now = "are not quantized" if wanted is None else f"are quantized to {wanted}"
        what = count(len(changed), "layer")
        yield f"inputs of {what} {now}, and were to {given} in the source, such as those of {printable(name)}"


def scales_of_layer(
    origin: Origin, given: Activation, layer: LayerScheme, *, rounded: bool
) -> Iterator[NewTensor]:
    """Yield the parameters of static inputs that were quantized as ``given`` says, as ``layer`` has them.

    origin: of the layer's weight. The rest is that of :func:`input_scales`.
    """
    names, wanted = layer.codec.input_names, layer.input
    assert names is not None
    assert wanted is not None
    module = module_of(origin.entry.name)
    parts: dict[str, TensorEntry] = {}
    for entry in origin.input_scales:
        what, _, kind = entry.name.rpartition(".")[2].partition("_")
        if what != "output":
            parts.setdefault(kind, entry)
    scale = parts.get("global_scale", parts.get("scale")) if given.local else parts.get("scale")
    if scale is None:
        raise CheckpointError(
            f"{printable(module)} has no scale of its inputs, which are {given}; pass --to with a scheme "
            "without static inputs"
        )
    number = _number(scale).float()
    if stored_numbers(given.scheme)[-1] != stored_numbers(wanted.scheme)[-1]:
        fine = given.scheme.scales[-2].format_for(format_of(number.dtype))
        if not rounded and not is_exact_reciprocal(number, fine):
            raise UnsupportedError(
                f"{printable(scale.name)} is {float(number)!r}, and {layer.codec.title} would store its "
                "reciprocal, which is rounded; pass --to with a scheme without static inputs, or "
                "--allow-requantize to round it"
            )
        number = 1 / number
    yield NewTensor(f"{module}.{names.needed(wanted)}", origin.entry, number.reshape(names.shape))
    if "zero_point" in parts:
        zero = _number(parts["zero_point"]).reshape(names.shape)
        yield NewTensor(f"{module}.{names.zero_point}", origin.entry, zero)


def _number(entry: TensorEntry) -> torch.Tensor:
    """Return the one number of a tensor; raises CheckpointError where it holds another count."""
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None or math.prod(entry.shape) != 1:
        raise CheckpointError(
            f"{printable(entry.name)} is {entry.dtype} of shape {list(entry.shape)}, but must be one number; "
            "correct the file, or pass --to with a scheme without static inputs"
        )
    file, buffer = open_file(entry.file), bytearray(entry.nbytes)
    try:
        file.read_into(memoryview(buffer), entry.begin)
    finally:
        file.close()
    return torch.frombuffer(buffer, dtype=dtype)
