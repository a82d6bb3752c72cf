"""Weights under the names and rows that transformers gives them.

Of packed codes it makes no other layers, and it drops floats next to them that it joins. So each is written
as what it becomes there, where vLLM does not build the model from the names of the original files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from ...architectures import Config, classes_of
from ...codecs.divided_tensors import RowRun
from ...codecs.engine_records import is_of_vllm
from ...codecs.protocol import LayerScheme
from ...loaded_layers import (
    RowConversion,
    asked_in_any_class,
    asked_layers,
    cannot_decode,
    conversions,
    renamings,
    shared_layers,
    special_layers,
)
from ...loaded_names import joins_models, transformers_names
from .decisions import TensorDecision, compact, misfit
from .float_view import Floats
from .gathered import Gathered, Shapes, gathered_entry, joined, replaced
from .row_reader import RowReader
from .selection import WEIGHT, Why, module_of
from .tensor_matrices import divided_stacks

_CODES = re.compile(r"(.*)\.q?weight")
"""The module of a weight or of its codes."""


def as_saved(floats: Floats) -> Floats:
    """Return a checkpoint with experts stacked as transformers saves them."""
    return joined(floats, divided_stacks(floats.source.entries, floats.source.config or {}))


def as_loaded(floats: Floats, names: Collection[str]) -> Floats:
    """Return a checkpoint with weights under transformers' names, as ``names`` have.

    names: tensors of other files.
    """
    # Asking transformers takes 100 MiB of what a process may have, and with experts twice as much.
    if all(_is_own(name, floats.source.entries) for name in names):
        return floats
    modules = {part[1] for name in names if (part := _CODES.match(name)) is not None}

    def is_made(conversion: RowConversion) -> bool:
        made = {module_of(name) for name in conversion.made}
        return made <= modules and modules.isdisjoint(map(module_of, conversion.sources))

    config = floats.source.config or {}
    stacks = divided_stacks(floats.source.entries, config)
    floats = joined(floats, [whole for whole in stacks if whole.name in names])
    shapes = Shapes(floats.source.entries)
    found = [*conversions(shapes, config), *renamings(shapes, config)]
    return _converted(floats, [each for each in found if is_made(each)])


def _is_own(name: str, entries: Collection[str]) -> bool:
    """Whether ``entries`` have a tensor or the weight of its module."""
    return name in entries or f"{name.rpartition('.')[0]}{WEIGHT}" in entries


def loadable(
    floats: Floats, decisions: Sequence[TensorDecision], *, as_stored: bool
) -> tuple[Floats, Sequence[TensorDecision]]:
    """Return a checkpoint and decisions with weights that transformers loads.

    Unless they stay ``as_stored``, weights become weights of its own layers. Layers stay floats where its
    code asks for their weight while codes alone are there, and where it gives other layers their weight, but
    not their codes. Where it puts layers of its own in the place of others, special classes stay.
    """
    config = floats.source.config or {}
    layers = dict.fromkeys(d.layer for d in decisions if d.layer is not None)
    packed = any(is_packed(layer) for layer in layers)
    if not any(layer.codec.divisible is not None for layer in layers):
        return floats, decisions
    ours = not is_of_vllm(config)
    if ours and not as_stored:
        floats, decisions = _with_its_layers(floats, decisions)
    if len(layers) != 1:  # weights of several schemes are not decoded while they load, which the verdict says
        return floats, decisions
    replaced = packed and not any(layer.codec.divisible for layer in layers)
    undecoded = packed and not replaced and cannot_decode(floats.source.entries, config)
    if replaced and classes_of(config) and (ours or joins_models(config)):
        decisions = _without(floats, decisions, special_layers(config), _SPECIAL)
    if undecoded or (replaced and classes_of(config)):
        decisions = _without(floats, decisions, asked_for(layers, config), _ASKED)
    if not all(layer.codec.replaces_numbered for layer in layers):
        numbered = {
            d.entry.name for d in decisions if d.quantized and is_numbered(module_of(d.entry.name), config)
        }
        decisions = _kept(floats, decisions, numbered, _NUMBERED)
    if ours and classes_of(config) and (undecoded or replaced or not packed):
        decisions = _without(floats, decisions, shared_layers(config), _SHARED)
    return floats, decisions


def is_packed(layer: LayerScheme) -> bool:
    """Return whether transformers finds codes alone and cannot convert them."""
    return (
        layer.codec.divisible is not None
        and layer.layout not in layer.codec.divisible
        and layer.input is None
    )


def asked_for(layers: Collection[LayerScheme], config: Config) -> frozenset[str]:
    """Return the layers whose weight transformers asks for where it finds codes."""
    if not any(map(is_packed, layers)):
        return frozenset()
    if not any(layer.codec.divisible for layer in layers):
        return asked_in_any_class(config) | shared_layers(config)
    return asked_layers(config) if len(layers) == 1 else frozenset()


def _with_its_layers(
    floats: Floats, decisions: Sequence[TensorDecision]
) -> tuple[Floats, Sequence[TensorDecision]]:
    config = floats.source.config or {}
    known = {d.entry.name: d for d in decisions}
    found, made = list[RowConversion](), dict[str, list[TensorDecision]]()
    shapes = Shapes(floats.source.entries)
    renames = {c.sources: c for c in renamings(shapes, config)}
    packed = any(d.layer is not None and is_packed(d.layer) for d in decisions)
    for conversion in (*renames.values(), *(conversions(shapes, config) if packed else ())):
        sources = [known[name] for name in conversion.sources]
        first, layer = sources[0], sources[0].layer
        if any((d.layer, d.method) != (layer, first.method) for d in sources):
            continue
        renames_it = conversion.sources in renames
        if layer is None if renames_it else layer is not None and not is_packed(layer):
            continue
        new = [replace(first, entry=r.entry) for r in _readers(floats, conversion)]
        if layer is None or all(misfit(d.entry, layer) is None for d in new):
            found.append(conversion)
            made |= {name: [] for name in conversion.sources} | {conversion.sources[0]: new}
    if not found:
        return floats, decisions
    floats = _converted(floats, found)
    every = {d.entry.name: d for d in known.values()} | {
        d.entry.name: d for new in made.values() for d in new
    }
    entries = floats.source.entries
    return floats, compact(entries, (every[name] for name in entries))


def _converted(floats: Floats, found: Sequence[RowConversion]) -> Floats:
    made = {c.sources[0]: list(_readers(floats, c)) for c in found}
    return replaced(floats, made, {name for c in found for name in c.sources})


def _readers(floats: Floats, conversion: RowConversion) -> Iterator[RowReader]:
    """Yield the tensors that a conversion makes."""
    sources = tuple(floats.reader(floats.source.entries[name]) for name in conversion.sources)
    for name, rows in conversion.made.items():
        shape = (*rows.shape[:-1], sources[0].entry.shape[-1])
        entry, at = gathered_entry(name, shape, sources[0]), rows.flatten()
        if len(sources) == 1:
            yield Gathered(entry=entry, sources=sources, pieces=(runs_of(at),))
            continue
        places, begin = torch.argsort(at), 0
        pieces = []
        for source in sources:
            height = source.shape[0]
            pieces.append(runs_of(places[begin : begin + height]))
            begin += height
        yield Gathered(entry=entry, sources=sources, pieces=tuple(pieces), whole=True)


def runs_of(rows: torch.Tensor) -> tuple[RowRun, ...]:
    """Return row numbers as runs of equal distances.

    >>> [(run.first, run.sizes, run.strides) for run in runs_of(torch.tensor([0, 2, 4, 5, 6]))]
    [(0, (3,), (2,)), (5, (2,), (1,))]
    """
    found, values, at = list[RowRun](), rows.tolist(), 0
    while at < len(values):
        step = values[at + 1] - values[at] if at + 1 < len(values) else 1
        end = at + 1
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        found.append(RowRun(values[at], (end - at,), (step,)))
        at = end
    return tuple(found)


_ASKED = "transformers' code asks for its weight, where it finds codes alone"
_SPECIAL = "a layer of its own kind to transformers, which puts quantized ones in place of ordinary ones"
_NUMBERED = "optimum, by which transformers reads this layout, replaces no layer that is called by a number"
_SHARED = "transformers gives other layers its weight, and not its codes"


def _without(
    floats: Floats, decisions: Sequence[TensorDecision], layers: frozenset[str], reason: str
) -> Sequence[TensorDecision]:
    """Return decisions that keep layers, by their names in transformers.

    Where most values are in such layers, they stay as they are.
    """
    config = floats.source.config or {}

    def stays(d: TensorDecision) -> bool:
        return d.quantized and not layers.isdisjoint(transformers_names(module_of(d.entry.name), config))

    names = {d.entry.name for d in decisions if stays(d)} if layers else set()
    kept = sum(d.entry.nbytes for d in decisions if d.entry.name in names)
    if 2 * kept > sum(d.entry.nbytes for d in decisions if d.quantized):
        return decisions
    return _kept(floats, decisions, names, reason)


def _kept(
    floats: Floats, decisions: Sequence[TensorDecision], names: Collection[str], reason: str
) -> Sequence[TensorDecision]:
    """Return decisions that keep tensors by name."""
    if not names:
        return decisions
    return compact(
        floats.source.entries,
        (
            replace(d, layer=None, why=Why.UNFIT, reason=reason) if d.entry.name in names else d
            for d in decisions
        ),
    )


def is_numbered(module: str, config: Config) -> bool:
    """Return whether transformers calls a layer by a number."""
    own = transformers_names(module, config)[-1]
    return own.rpartition(".")[2].isdecimal()
