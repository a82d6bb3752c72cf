"""The plan of a run: each tensor's action, each output byte's place.

A plan is a value: what is quantized and how, what is kept and why, which files come out with which headers
and offsets (output_table.py), how much memory and disk it takes. run/loop.py makes no more decisions.
This module reads no weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.engines import MERGING
from ...codecs.layer_schemes import layer_scheme
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.registry import CODECS, DEFAULT
from ...errors import CheckpointError, UnsupportedError, count, option, size_of
from ...formats import RoundingMode
from ...methods import OF_TABLES, ROTATING, Scope
from ...methods.channels import kept_with_codes
from ...recipes import Recipe
from ...results import Result
from ..read.source import Source
from ..read.storage import shown
from .actions import Actions, configuration_notes, omission_notes, source_notes
from .as_loaded import as_saved, loadable
from .carried_scales import NOTHING, replacements, require_cache_place, without_cache
from .config_and_index import companions, index_and_config
from .converted_layers import conversions
from .decisions import TensorDecision, decide, split_sets
from .float_view import Floats, as_floats, unquantized
from .limits import Limits
from .output_files import OutputShard, SharedScale, model_files
from .output_table import Outputs
from .output_tensors import Output, tile_bytes, tile_shape
from .plan_document import plan_document
from .recipe import KEEP, KEPT, RecipeText, default_layer, one_scheme
from .rescaled import RESCALED, changed_by, folds_text, rescaled_floats
from .rotated import ROTATED, require_unrotated, rotated_floats, rotation_in, rotation_notes, rotation_text
from .selection import FLOATS, DequantizePolicy, Selection, check_patterns, require_model
from .texts import Text
from .tied import tied_copies

if TYPE_CHECKING:  # statistics are loaded where they are needed
    from ...methods import Loss
    from ...methods.channels import ChannelFold
    from ...methods.rotate import ModelRotation
    from ...stats import Statistics


class SolvedWeight(NamedTuple):
    """Codes file of a solved weight, its SHA-256, and the loss."""

    path: Path
    digest: str
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointPlan(Result):
    """Everything that a run does; see the module.

    recipe, selection: what was asked for. texts: name to content of the small files that are written, the
    index and the configuration. companions: path to bytes of the files that are copied. notes: sentences for
    the report. solved: codes of weights, by module. rotation: of the model, or None. folds: what rescaled
    channels mean for tensors, by name. earlier: what an earlier run said of each weight, which is copied, as
    ``[module, record]`` in a line of JSON each. asked: a digest of all that solved weights follow from, known
    before they are; empty where none are solved.
    """

    outputs: Outputs
    recipe: RecipeText
    selection: Selection = field(default_factory=Selection)
    texts: Mapping[str, Text]
    companions: Mapping[Path, int]
    notes: tuple[str, ...]
    limits: Limits
    statistics: Mapping[str, Mapping[str, Statistics]] = field(default_factory=dict)
    solved: Mapping[str, SolvedWeight] = field(default_factory=dict)
    rotation: ModelRotation | None = None
    folds: Mapping[str, ChannelFold] = field(default_factory=dict)
    earlier: Text | None = None
    asked: str = ""

    @property
    def source(self) -> Source:
        """The checkpoint that is read."""
        return self.outputs.source

    @property
    def codec(self) -> Codec:
        """Layout of the files that are written."""
        return self.outputs.codec

    @property
    def decisions(self) -> Sequence[TensorDecision]:
        """Decision about each tensor of the source, with its reason."""
        return self.outputs.actions.decisions

    @property
    def weights(self) -> Sequence[Output]:
        """Outputs that are quantized."""
        return self.outputs.weights

    @property
    def kept(self) -> Sequence[Output]:
        """Outputs that are copied."""
        return self.outputs.kept

    @property
    def restored(self) -> Sequence[Output]:
        """Outputs that are written as floats."""
        return self.outputs.restored

    @property
    def shards(self) -> tuple[OutputShard, ...]:
        """The files of weights."""
        return self.outputs.shards

    @property
    def layers(self) -> tuple[LayerScheme, ...]:
        """The schemes of weights, in the order of their first weight."""
        return self.outputs.layers

    def seen(self, floats: Floats) -> Floats:
        """Return ``floats`` rotated and with rescaled channels, as the plan asks."""
        floats = floats if self.rotation is None else rotated_floats(floats, self.rotation)
        return rescaled_floats(floats, self.folds) if self.folds else floats

    @property
    def processed(self) -> Iterator[Output]:
        """All that is more than copied."""
        return itertools.chain(self.weights, self.restored)

    @property
    def processed_bytes(self) -> int:
        """Bytes of all processed and copied tensors, codes counted as floats."""
        return sum(item.extent * item.line_bytes for item in self.outputs.all)

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return self.source.entries.nbytes

    @property
    def output_bytes(self) -> int:
        """Bytes of all output files except the manifest."""
        return (
            sum(shard.size for shard in self.shards)
            + sum(self.companions.values())
            + sum(text.size for text in self.texts.values())
        )

    @property
    def summary(self) -> tuple[str, ...]:
        """The sizes, bits and memory of the whole, a line each."""
        lines = [f"{size_of(self._read_bytes)} -> {size_of(self.output_bytes)} ({self._change})"]
        if self.weights:
            values = count(self.quantized_values, "value")
            lines.append(f"{values} at {self.bits_per_value:.3f} bits in {self.codec.name}")
        if self.restored:
            values = count(self.restored_values, "value")
            done = "rotated" if self.rotation is not None else changed_by(self.folds) or "decoded"
            lines.append(f"{values} {done} in {count(len(self.restored), 'tensor')}")
        return tuple(lines)

    @property
    def memory(self) -> str:
        """The line about memory."""
        return f"about {size_of(self.peak_memory)} of memory with {count(self.limits.workers, 'worker')}"

    @property
    def _change(self) -> str:
        ratio = self._read_bytes / max(1, self.output_bytes)
        return f"{ratio:.2f}x smaller" if ratio >= 1 else f"{1 / ratio:.2f}x larger"

    @property
    def _read_bytes(self) -> int:
        """Bytes of all source tensors and of the copied files."""
        return self.source_bytes + sum(self.companions.values())

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (*self.summary, self.memory)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`; this is what a plan file holds."""
        return plan_document(self)

    @property
    def quantized_values(self) -> int:
        """Numbers that are quantized."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def restored_values(self) -> int:
        """Numbers that are written as floats, and were codes or other floats."""
        return sum(math.prod(restored.shape) for restored in self.restored)

    @property
    def bits_per_value(self) -> float:
        """Average bits that a quantized number takes, scales and zero points counted."""
        return 8 * self.outputs.weight_bytes / max(1, self.quantized_values)

    @property
    def peak_memory(self) -> int:
        """Estimate of the largest memory of a run, interpreter and libraries included."""
        kinds = kinds_of(self.processed)
        sizes = (tile_bytes(w, self.limits) for w in kinds)
        largest = max(sizes, default=0)
        return self.limits.base_memory + self.limits.workers * largest

    @property
    def shared_scales(self) -> tuple[SharedScale, ...]:
        """The sets of weights that take one tensor scale together."""
        members: dict[str, list[Output]] = {}
        for weight in self.weights:
            if weight.share is not None:
                members.setdefault(weight.share, []).append(weight)
        return tuple(
            SharedScale(
                modules=tuple(weight.module for weight in same),
                shards=tuple(dict.fromkeys(weight.source.file.name for weight in same)),
            )
            for same in members.values()
        )

    @property
    def unfit(self) -> tuple[TensorDecision, ...]:
        """Linear weights that are kept although no option says so."""
        return tuple(d for d in self.decisions if d.kept_by_default)


def kinds_of(items: Iterable[Output]) -> list[Output]:
    """Return one of each kind."""
    found: dict[Hashable, Output] = {}
    for item in items:
        found.setdefault(item.kind, item)
    return list(found.values())


def make_plan(
    source: Source, to: str | RecipeText, *, selection: Selection | None = None, limits: Limits | None = None,
    codec: Codec = DEFAULT, folds: Mapping[str, ChannelFold] | None = None,
) -> CheckpointPlan:  # fmt: skip
    """Return the quantization plan of ``source`` for a scheme or recipe.

    codec: what the files are written in. folds: what rescaled channels mean for tensors, by name.

    Raises CheckpointError when the source is an adapter, has a config.json that cannot be read or is
    quantized already, a pattern matches nothing, two output tensors would have one name, nothing would be
    quantized or (under ``selection.strict``) a linear weight is kept or layers that engines run as one have
    several schemes; RecipeError for a malformed recipe and for a rule without effect; UnsupportedError when
    no layout holds the scheme; CheckpointError when ``limits`` are too small for one part of a weight.
    """
    text = RecipeText.of(to) if isinstance(to, str) else to
    mixture = text.mixture(codec)
    recipe = KEPT if mixture is not None else _parsed(to, codec)
    selection, limits = selection or Selection(), limits or Limits.default()
    _require_source(source, selection, codec)
    _require_streaming(recipe)
    floats = plain = _floats(source, selection)
    rotation = rotation_in(recipe, text)
    if rotation is not None:
        require_unrotated(source)
        floats = rotated_floats(plain, rotation)
    floats = floats.in_pieces(codec, selection.floats)
    floats = as_saved(floats) if selection.dequantize is DequantizePolicy.EVERY else floats
    omitted = floats.omitted(codec)
    floats = floats.without(omitted)
    floats = rescaled_floats(floats, folds) if folds else floats
    check_patterns(selection, floats.source.entries)
    if mixture is not None:
        recipe = _of_mixture(mixture, text, floats.source, codec)
    decisions = decide(floats.source, KEPT if selection.dequantize.converts else recipe, selection, codec)
    floats, decisions = loadable(floats, decisions, as_stored=selection.as_stored)
    more = NOTHING if any(d.quantized for d in decisions) else without_cache(floats)
    if selection.dequantize.converts:
        anew = selection.dequantize is DequantizePolicy.CONVERT
        only = default_layer(recipe, codec)
        decisions = conversions(floats, decisions, codec, only, requantize=anew)
        more = replacements(floats, decisions, codec, requantize=anew)
    merged = mixture is None and not MERGING.isdisjoint(codec.usual)
    split = split_sets(decisions) if merged else []
    if split and selection.strict:
        others = f"; and {count(len(split) - 1, 'more such set')}" if len(split) > 1 else ""
        raise CheckpointError(
            f"{split[0]}{others}; give each set one scheme, or leave out {option('strict', True)}"
        )
    every = selection.dequantize is DequantizePolicy.EVERY
    tied = tied_copies(source) if rotation is None else {}  # what is tied is written apart
    actions = replace(Actions.of(floats, decisions, tied, every=every, more=more), mixture=mixture)
    actions.require_sense(codec, selection.dequantize)
    outputs = Outputs(source, actions, codec)
    limits = limits.reserve(source.entries, outputs.by_name)
    remarks = codec.model_format.remarks(model_files(source, source.shards[0]))
    texts, remarks_of_files = index_and_config(outputs, cache=more.cache or selection.kv_scales)
    notes = list[str]()
    if rotation is not None:
        texts = {**texts, ROTATED: Text.of(rotation_text(rotation))}
        methods = {decision.method for decision in decisions if decision.quantized}
        notes += rotation_notes(floats, plain.source, rotation, methods)
    if folds:
        texts = {**texts, RESCALED: Text.of(folds_text(folds))}
    notes += [*source_notes(floats.source, decisions, omitted), *configuration_notes(texts), *split]
    notes += [*actions.notes(), *remarks, *remarks_of_files, *omission_notes(omitted, codec), *more.notes]
    plan = CheckpointPlan(
        outputs=outputs,
        recipe=text,
        selection=selection,
        texts=texts,
        companions=companions(outputs, texts),
        notes=(*source.notes, *notes),
        limits=limits,
        rotation=rotation,
        folds=folds or {},
    )
    for weight in kinds_of(plan.processed):
        tile_shape(weight, limits)
        weight.require_order()
    return plan


def remade(
    plan: CheckpointPlan, *, folds: Mapping[str, ChannelFold], without_inputs: frozenset[str]
) -> CheckpointPlan:
    """Return the same plan after a run of the model.

    folds, without_inputs: see :func:`make_plan` and :class:`Selection`. Raises what :func:`make_plan` and
    :func:`~.rescaled.rescaled_floats` raise.
    """
    chosen = replace(plan.selection, without_inputs=without_inputs)
    made = make_plan(
        plan.source, plan.recipe, selection=chosen, limits=plan.limits, codec=plan.codec, folds=folds
    )
    made = replace(made, statistics=plan.statistics, solved=plan.solved, asked=plan.asked)
    return replace(made, limits=plan.limits, notes=plan.notes)


def _require_source(source: Source, selection: Selection, codec: Codec) -> None:
    """Raise an error for a source without model or place for scales."""
    require_model(source)
    if selection.kv_scales:
        require_cache_place(source, codec)


def _parsed(to: str | RecipeText, codec: Codec) -> Recipe:
    return one_scheme(layer_scheme(to, codec)) if isinstance(to, str) else to.parse(codec)


def _of_mixture(mixture: str, text: RecipeText, source: Source, codec: Codec) -> Recipe:
    """Return the recipe for the tensor types of a llama.cpp mixture."""
    copies = tied_copies(source)
    shapes = {entry.name: entry.shape for entry in source.entries.values() if entry.name not in copies}
    types = codec.model_format.mixture(mixture, shapes, source.config or {})
    assert types is not None
    return text.of_types(types, codec).parse(codec)


def conversion_plan(
    source: Source, to: str | None, codec: Codec, *, requantize: bool = False, ignore: tuple[str, ...] = (),
    limits: Limits | None = None,
) -> CheckpointPlan:  # fmt: skip
    """Return the plan that converts the codes of ``source`` to another layout.

    Values stay the same. to: a layer preset or weight scheme, by default that which stores what each layer
    does, or a dtype of FLOATS. requantize: whether values may change where ``codec`` cannot hold them. Raises
    what :func:`make_plan` raises; UnsupportedError for layers that cannot be converted.
    """
    floats = FLOATS.get(to or "")
    if floats and codec.use is not None:
        raise UnsupportedError(
            f"{option('format', codec.name)} writes codes into a graph, and no floats; leave it out to write "
            "these in safetensors"
        )
    if source.graph and codec.use is None and not floats:
        known = " or ".join(name for name, other in CODECS.items() if other.use is not None)
        raise UnsupportedError(
            f"{shown(source.given)} is a graph, which cannot be written in {codec.title}; use "
            f"{option('format')} {known}, or {option('to', 'float32')} for its weights alone"
        )
    policy = DequantizePolicy.CONVERT if requantize else DequantizePolicy.LOSSLESS
    what = Selection(ignore=ignore, dequantize=DequantizePolicy.EVERY if floats else policy, floats=floats)
    recipe = KEEP if to is None or floats else RecipeText.of(to)
    return make_plan(source, recipe, selection=what, limits=limits, codec=codec)


def _floats(source: Source, selection: Selection) -> Floats:
    if selection.dequantize is DequantizePolicy.NONE:
        return unquantized(source)
    floats = as_floats(source, dtype=None if selection.floats is None else TORCH_DTYPES[selection.floats])
    if selection.dequantize.converts and not floats.readers:
        raise CheckpointError(f"{shown(source.root)} holds no codes to convert; use zeropoint quantize")
    return floats


def _require_streaming(recipe: Recipe) -> None:
    """Raise UnsupportedError for what weights in parts do not give.

    That is a scheme whose codes would depend on how weights are cut, and a method that refuses the scheme, or
    works on several layers at once.
    """
    for rule in (*recipe.rules, recipe.default):
        weight = None if rule.gives is None else rule.gives.weight
        if rule.gives is None or weight is None:
            continue
        method = rule.gives.weight_method
        refusal = method.refusal(weight)
        if refusal is not None:
            raise UnsupportedError(refusal)
        if method.name in OF_TABLES:
            raise UnsupportedError(
                f"method {method.name} gives each weight a table of its own, which no file layout holds; use "
                "zp.quantize_model, or method nearest"
            )
        kept = kept_with_codes(method)
        if kept is not None:
            raise UnsupportedError(
                f"method {method.name} keeps {kept}, for which no file layout has a place; use "
                "zp.quantize_model, or leave the step out"
            )
        if method.name.startswith(ROTATING):
            raise UnsupportedError(
                f"method {method.name} rotates weights, and transformers runs no transform_config that would "
                "rotate inputs; use zp.quantize_model, or a method without a rotation"
            )
        if method.scope(weight) in (Scope.GROUP, Scope.MODEL):
            raise UnsupportedError(
                f"method {method.name} needs several layers at once, which a checkpoint does not give; use "
                "zp.quantize_model, or method nearest"
            )
        if weight.rounding.mode is RoundingMode.STOCHASTIC:
            raise UnsupportedError(
                f"{weight} draws random bits by the place in a tensor, but weights are quantized in parts; "
                "use half_even"
            )
