"""Input and cache scales, and biases of experts, in a conversion.

Scales are single numbers next to the codes, under names and in shapes that each layout has of its own
(codecs/data_scales.py). They become the tensors of another layout, number for number. Where experts become
single matrices, so do their biases, which are rows of the tensor that holds all. This module reads scales and
no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.known import ACTIVATION_SCALES, CACHE_SCALES, has_float8_cache
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.registry import CODECS, claiming
from ...errors import CheckpointError, UnsupportedError, count, option, printable
from ...formats.torch_dtypes import format_of
from ...methods.lossless import is_exact_reciprocal
from ...recipes import Activation
from ...schemes.structure import stored_numbers
from ..read.source import Source
from ..read.storage import opened, read_bytes, shown
from ..read.tensor_entries import TensorEntry
from .converted_layers import same_inputs
from .decisions import TensorDecision
from .float_view import Floats
from .row_changes import Strided
from .row_reader import NewTensor, RowReader, StoredFloats
from .selection import is_fused_experts, module_of
from .tensor_matrices import WeightMatrix, matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """Tensors that replace tensors of a source instead of copies.

    added: what is written. gone: what is not copied, with the reason. notes: sentences about that. cache:
    whether scales of a cache are written.
    """

    added: tuple[RowReader, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cache: bool = False

    def __or__(self, other: Replacements) -> Replacements:
        """Return both."""
        return Replacements(
            added=self.added + other.added,
            gone={**self.gone, **other.gone},
            notes=self.notes + other.notes,
            cache=self.cache or other.cache,
        )


NOTHING = Replacements()
_OF_CACHE = re.compile(r"(.+?)(?:\.[kv]_proj)?\.([kv]_scale)", re.DOTALL)


def replacements(
    floats: Floats, decisions: Sequence[TensorDecision], codec: Codec, *, requantize: bool
) -> Replacements:
    """Return all that goes with the layers that ``decisions`` convert to ``codec``.

    requantize: whether numbers may be rounded that have another form there. Raises what
    :func:`input_scales` raises.
    """
    return (
        cache_scales(floats, codec)
        | input_scales(floats, decisions, requantize=requantize)
        | split_biases(floats, decisions)
    )


def cache_scales(floats: Floats, codec: Codec) -> Replacements:
    """Return the float8 cache scales in the layout of ``codec``.

    They are left out where the layout has no place for them, or for the cache format in the configuration; a
    layout keeps its own.
    """
    entries, config = floats.source.entries, floats.config or {}
    found = [entry for entry in entries.values() if entry.name.rpartition(".")[2] in CACHE_SCALES]
    place, float8 = codec.cache, has_float8_cache(config)
    pairs = all(_OF_CACHE.fullmatch(entry.name) for entry in found)
    if not found or (not (float8 and pairs) and claiming(config) == codec):
        return NOTHING
    gone = {entry.name: f"as {codec.title} have it" for entry in found}
    if place is None or not float8 or not pairs:
        said = "" if place is None else ", as the configuration of the source has them"
        example = printable(found[0].name)
        note = (
            f"{count(len(found), 'scale')} of a cache left out, such as {example}, which have no place in "
            f"{codec.title}{said}"
        )
        return Replacements(gone=dict.fromkeys(gone, "left out"), notes=(note,))
    added = []
    for entry in found:
        match = _OF_CACHE.fullmatch(entry.name)
        assert match is not None
        own = place.key if match[2] == "k_scale" else place.value
        number = _number(entry)
        number = number.to(place.dtype or number.dtype).reshape(place.shape)
        added.append(NewTensor(f"{match[1]}.{own}", entry, number).reader)
    return Replacements(added=tuple(added), gone=gone, cache=True)


def without_cache(floats: Floats) -> Replacements:
    """Return cache scales as left out, where a checkpoint's codes become floats.

    A checkpoint of floats has no place for them.
    """
    found = _cache_scales(floats.source) if floats.readers else []
    if not found:
        return NOTHING
    note = (
        f"{count(len(found), 'scale')} of a cache left out, such as {printable(found[0])}; "
        f"{option('kv_scales', True)} learns them anew where the floats are quantized"
    )
    return Replacements(gone=dict.fromkeys(found, "left out"), notes=(note,))


def _cache_scales(source: Source) -> list[str]:
    return [name for name in source.entries if name.rpartition(".")[2] in CACHE_SCALES]


def require_cache_place(source: Source, codec: Codec) -> None:
    """Raise an error where learned scales of a cache cannot be added.

    That is an UnsupportedError for a layout without a place for them, and a CheckpointError for a checkpoint
    that has some.
    """
    if codec.cache is None:
        places = ", ".join(name for name, other in CODECS.items() if other.cache is not None)
        raise UnsupportedError(f"scales of a cache have no place in {codec.title}; use one of {places}")
    old = _cache_scales(source)
    if old:
        raise CheckpointError(
            f"{shown(source.root)} has scales of a cache already, such as {printable(old[0])}; pass the "
            "checkpoint that they were added to"
        )


def split_biases(floats: Floats, decisions: Sequence[TensorDecision]) -> Replacements:
    """Return the biases of fused experts, split as ``decisions`` split the weights."""
    added: list[RowReader] = []
    gone: dict[str, str] = {}
    for decision in decisions:
        layer, entry = decision.layer, decision.entry
        if layer is None or not is_fused_experts(entry) or layer.codec.fused_experts:
            continue
        bias = floats.source.entries.get(f"{module_of(entry.name)}_bias")
        if bias is not None:
            added += _biases(bias, entry)
            gone[bias.name] = "split as its experts are"
    return Replacements(added=tuple(added), gone=gone)


def _biases(bias: TensorEntry, weight: TensorEntry) -> Iterator[RowReader]:
    """Yield the bias of each matrix of fused experts."""
    assert weight.stack is not None
    item, stack = bias.nbytes // math.prod(bias.shape), weight.stack._replace(transposed=False)
    for matrix in matrices(replace(weight, shape=(*bias.shape, 1), stack=stack)):
        count = matrix.shape[0]
        entry = replace(
            bias,
            name=f"{matrix.module}.bias",
            shape=(count,),
            begin=bias.begin + matrix.first * item,
            nbytes=count * item,
        )
        stored = StoredFloats(entry=entry)
        step = matrix.step
        yield stored if step == 1 else Strided(entry=entry, of=stored, step=step, count=count)


def input_scales(floats: Floats, decisions: Sequence[TensorDecision], *, requantize: bool) -> Replacements:
    """Return the static input parameters of converted layers in their codecs' layouts.

    requantize: whether a reciprocal may be rounded.

    Raises CheckpointError for a layer without them, UnsupportedError for a scale whose reciprocal, which is
    stored in its place, gives other products.
    """
    added: list[RowReader] = []
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
            reader = floats.readers[name]
            for matrix in matrices(decision.entry, fused=decision.layer.codec.fused_experts):
                added += scales_of_matrix(reader, matrix, given, decision.layer, rounded=requantize)
    return Replacements(added=tuple(added), notes=tuple(_changed_inputs(changed)))


def _changed_inputs(changed: Sequence[tuple[str, Activation, Activation | None]]) -> Iterator[str]:
    """Yield a sentence for layers whose inputs change their quantization."""
    if changed:
        name, given, wanted = changed[0]
        now = "are not quantized" if wanted is None else f"are quantized to {wanted}"
        what = count(len(changed), "layer")
        yield f"inputs of {what} {now}, and were to {given} in the source, such as those of {printable(name)}"


def scales_of_matrix(
    reader: RowReader, matrix: WeightMatrix, given: Activation, layer: LayerScheme, *, rounded: bool
) -> Iterator[RowReader]:
    """Yield the static input parameters of a matrix for ``layer``.

    given: how the inputs were quantized in the source. reader: of the tensor in which the matrix lies: fused
    experts have a scale each, or one together. The rest is as for :func:`input_scales`.
    """
    names, wanted, stored = layer.codec.input_names, layer.input, reader.layer
    assert names is not None
    assert wanted is not None
    assert stored is not None
    parts: dict[str, TensorEntry] = {}
    for entry in reader.input_scales:
        what, kind = _kind_of(entry.name)
        if what != "output":
            parts.setdefault(kind, entry)
    scale = parts.get("global_scale", parts.get("scale")) if given.local else parts.get("scale")
    if scale is None:
        raise CheckpointError(
            f"{printable(stored.module)} has no scale of its inputs, which are {given}; pass {option('to')} "
            "with a scheme without static inputs"
        )
    expert = None if stored.experts is None else matrix.first // stored.shape[0]
    number = _number(scale, stored.experts, expert).float()
    if not 0 < float(number) < math.inf:
        raise CheckpointError(
            f"{printable(scale.name)} is {float(number)!r}, but a scale must be finite and positive; the "
            "file is damaged"
        )
    if stored_numbers(given.scheme)[-1] != stored_numbers(wanted.scheme)[-1]:
        fine = given.scheme.scales[-2].format_for(format_of(number.dtype))
        if not rounded and not is_exact_reciprocal(number, fine):
            raise UnsupportedError(
                f"{printable(scale.name)} is {float(number)!r}, and {layer.codec.title} would store its "
                f"reciprocal, which is rounded; pass {option('to')} with a scheme without static inputs, or "
                f"{option('allow_requantize', True)} to round it"
            )
        number = 1 / number
    suffix = names.needed(wanted)
    yield NewTensor(f"{matrix.module}.{suffix}", reader.entry, number.reshape(names.shape)).reader
    if "zero_point" in parts:
        zero = _number(parts["zero_point"], stored.experts, expert).reshape(names.shape)
        yield NewTensor(f"{matrix.module}.{names.zero_point}", reader.entry, zero).reader


def _kind_of(name: str) -> tuple[str, str]:
    """Return the owner and the kind of an input or output parameter.

    >>> _kind_of("a.input_scale"), _kind_of("a.experts.down_proj_activation_scale")
    (('input', 'scale'), ('activation', 'scale'))
    """
    end = next(end for end in ACTIVATION_SCALES if name.endswith((f".{end}", f"_{end}")))
    what, _, kind = end.partition("_")
    return what, kind


def _number(entry: TensorEntry, experts: int | None = None, expert: int | None = None) -> torch.Tensor:
    """Return a tensor's only number, or an expert's number.

    Raises CheckpointError where it holds another count.
    """
    dtype, numbers = TORCH_DTYPES.get(entry.dtype), math.prod(entry.shape)
    if dtype is None or numbers not in (1, experts):
        wanted = "one number" if experts is None else f"one number, or one for each of {experts} experts"
        raise CheckpointError(
            f"{printable(entry.name)} is {entry.dtype} of shape {list(entry.shape)}, but must be {wanted}; "
            f"correct the file, or pass {option('to')} with a scheme without static inputs"
        )
    with opened(entry.file) as file:
        found = torch.frombuffer(read_bytes(file, entry.begin, entry.nbytes), dtype=dtype)
    return found if numbers == 1 or expert is None else found[expert : expert + 1].clone()
