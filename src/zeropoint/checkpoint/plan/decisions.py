"""Decisions about tensors under a recipe: quantized or kept, and why.

This module joins the selection by name (selection.py) with what the layout can hold; it places nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...architectures import fused_set
from ...codecs.block_extents import no_matrix, partial_group
from ...codecs.containers.protocol import Use
from ...codecs.engine_records import BUILT_IN_FLOATS, built_in_floats, is_of_vllm
from ...codecs.engines import CONV1D, VLLM, reads
from ...codecs.layer_schemes import layer_of, named_layer
from ...codecs.protocol import Codec, LayerScheme
from ...columns import Interned, LazySequence
from ...errors import CheckpointError, RecipeError, ZeropointError, count, option, printable
from ...methods import NEAREST
from ...recipes import Assignment, Recipe, Rule, Subject
from ...schemes import Scheme
from ...schemes.smaller_groups import SMALLEST, SmallerGroups, group_of, halved, smaller_groups
from ..read.problems import listed
from ..read.source import Source
from ..read.tensor_entries import Entries, TensorEntry
from .selection import (
    EXPERTS_AS_ROWS,
    Selection,
    Why,
    is_embedding,
    is_fused_experts,
    module_of,
    names,
    not_a_weight,
    subject_of,
    why_kept,
)
from .tensor_matrices import matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecision:
    """Decision about a tensor: quantized to ``layer``, or kept if None.

    why: where it comes from. reason: in words. fitted: whether ``layer`` has a smaller group than was asked
    for. no_inputs: whether it would be another one with inputs to learn from.
    """

    entry: TensorEntry
    layer: LayerScheme | None
    method: str = NEAREST
    why: Why
    reason: str
    fitted: bool = False
    no_inputs: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the tensor is quantized."""
        return self.layer is not None

    @property
    def kept_by_default(self) -> bool:
        """Whether it is a linear weight kept without any option."""
        return self.layer is None and self.why in (Why.UNFIT, Why.UNNAMED)


def decide(source: Source, recipe: Recipe, selection: Selection, codec: Codec) -> Sequence[TensorDecision]:
    """Return the decision about every tensor of ``source``, in order.

    The rules of ``recipe`` come before the default rules, which decide about what no rule names and give what
    the recipe gives by default. codec: what the files are written in. Embeddings, and others that have
    no inputs to learn from, get a method without data; others whose inputs need scales are kept.

    Raises RecipeError when a rule has no effect, or gives a scheme to nothing that can be quantized;
    CheckpointError when an include pattern names nothing that can be, or, under strict, when a linear weight
    is kept although no option says so.
    """
    entries, config = source.entries, source.config or {}
    layers, uses, rules = _LayerSchemes(codec), _Uses(recipe), selection.recipe(recipe)
    groups = SmallerGroups[LayerScheme](lambda layer: layer.weight)
    # Under its default rules a result loads in vLLM.
    floats = built_in_floats(config, (module_of(name) for name in entries))

    def given(rule: Rule, entry: TensorEntry) -> LayerScheme | None:
        return None if rule.gives is None or not_a_weight(entry) else layers.of(rule.gives, entry.use)

    def decided(entry: TensorEntry) -> TensorDecision:
        rule = rules.first(subject_of(entry, entries, config))
        by_default = rule is recipe.default
        kept = rule.gives is None and rule.place != "" and not by_default
        problem = None if kept else not_a_weight(entry)
        asked = given(rule, entry)
        layer = None if asked is None else groups.of(module_of(entry.name), asked)
        unfit = None if layer is None else _unfit(entry, source, layer, floats if by_default else ())
        if unfit is not None and asked is not None and selection.fit:
            unfit += why_none(asked)
        if problem is not None:
            experts = is_fused_experts(entry) or problem == EXPERTS_AS_ROWS
            why = Why.UNFIT if experts or selection.includes(entry.name) else Why.DEFAULT
            decision = TensorDecision(entry=entry, layer=None, why=why, reason=problem)
        elif rule.gives is None:
            why = why_kept(rule)
            decision = TensorDecision(entry=entry, layer=None, why=why, reason=_kept_by(rule, kept=kept))
        elif entry.name in selection.without_inputs and not rule.gives.is_dynamic:
            decision = TensorDecision(
                entry=entry, layer=None, why=Why.UNFIT, reason=_NO_SCALES, no_inputs=True
            )
        elif unfit is not None:
            decision = TensorDecision(entry=entry, layer=None, why=Why.UNFIT, reason=unfit)
        else:
            kind = "fused experts" if is_fused_experts(entry) else "a linear weight"
            reason, fitted = kind if by_default else rule.place, layer != asked
            if layer is not None and asked is not None and fitted:
                reason = f"groups of {group_of(layer.weight)} in place of {group_of(asked.weight)}, {reason}"
            alone = entry.name in selection.without_inputs or is_embedding(entry, entries, config)
            gives = rule.gives.without_inputs() if alone else rule.gives
            decision = TensorDecision(
                entry=entry,
                layer=layer,
                method=gives.method or NEAREST,
                why=Why.LINEAR if by_default else Why.USER,
                reason=reason,
                fitted=fitted,
                no_inputs=gives is not rule.gives,
            )
        uses.add(rule, decision, possible=problem is None)
        return decision

    if selection.fit:
        for entry in entries.values():
            layer = given(rules.first(subject_of(entry, entries, config)), entry)
            if layer is not None and _unfit(entry, source, layer) is not None:
                fitting = (half for half in smaller(layer) if _unfit(entry, source, half) is None)
                groups.add(module_of(entry.name), layer, next(fitting, None))
    decisions = compact(entries, map(decided, entries.values()))
    uses.check(subject_of(entry, entries, config) for entry in entries.values())
    _check_includes(selection, decisions)
    if selection.strict:
        _check_strict(decisions)
    return decisions


_NO_SCALES = "no data reached its inputs, whose scales are fixed before run time"


def _kept_by(rule: Rule, *, kept: bool) -> str:
    """Return a rule's reason, with its place in the user's recipe.

    kept: whether it keeps weights that would be quantized.
    """
    if not kept:
        return rule.reason
    return f"{rule.reason} ({rule.place})" if rule.reason else rule.place


def compact(entries: Entries, decisions: Iterable[TensorDecision]) -> Sequence[TensorDecision]:
    """Return decisions about ``entries``, in their order, in columns."""
    of, kinds = array("I"), Interned()
    for d in decisions:
        of.append(kinds.number((d.layer, d.method, d.why, d.reason, d.fitted, d.no_inputs)))

    def made(number: int) -> TensorDecision:
        layer, method, why, reason, fitted, no_inputs = kinds[of[number]]
        return TensorDecision(
            entry=entries.at(number),
            layer=layer,
            method=method,
            why=why,
            reason=reason,
            fitted=fitted,
            no_inputs=no_inputs,
        )

    return LazySequence(len(of), made)


class _Uses:
    """Rules of a recipe that decided, and rules that gave a scheme."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._used: set[int] = set()
        self._first: dict[int, TensorDecision] = {}

    def add(self, rule: Rule, decision: TensorDecision, *, possible: bool) -> None:
        if possible:
            self._used.add(id(rule))
        self._first.setdefault(id(rule), decision)

    def check(self, subjects: Iterable[Subject]) -> None:
        """Raise RecipeError for a rule without effect, or without weights."""
        if any(id(rule) not in self._first for rule in self._recipe.rules):
            self._recipe.decide(subjects)
        for rule in self._recipe.rules:
            # A rule without a first tensor has some, but the user's patterns decided about all of them.
            if rule.gives is None or id(rule) in self._used or id(rule) not in self._first:
                continue
            raise RecipeError(
                f"{rule.place}: rule ({rule}) gives a scheme to nothing that can be quantized, only to such "
                f"as {describe(self._first[id(rule)])}; name weights"
            )


class _LayerSchemes:
    """Layer scheme of each assignment and use, made once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._made: dict[tuple[int, Use | None], LayerScheme] = {}

    def of(self, gives: Assignment, use: Use | None) -> LayerScheme:
        if (id(gives), use) not in self._made:
            self._made[id(gives), use] = layer_of(gives, self._codec.used(use))
        return self._made[id(gives), use]


def _unfit(
    entry: TensorEntry, source: Source, layer: LayerScheme, floats: Collection[str] = ()
) -> str | None:
    """Return why a weight does not fit ``layer``, or None.

    floats: layers that stay so where vLLM reads the layout.
    """
    stem, entries = module_of(entry.name), source.entries
    if entry.inputs_first and not (layer.codec.replaces_conv1d or is_of_vllm(source.config or {})):
        return CONV1D
    biased = is_fused_experts(entry) and (f"{stem}_bias" in entries or f"{stem}.bias" in entries)
    stays = entry.stack is not None and entry.stack.stays
    if biased and not stays and not layer.codec.fused_experts:
        return "fused experts with a bias, which loaders do not take apart"
    problem = misfit(entry, layer)
    if problem is None and stem in floats and reads(layer.codec.engines[VLLM], layer):
        return BUILT_IN_FLOATS
    return problem


def misfit(entry: TensorEntry, layer: LayerScheme) -> str | None:
    """Return why the layout cannot hold a weight, or None."""
    if not is_fused_experts(entry) and (problem := no_matrix(entry.shape)) is not None:
        return problem
    fused = layer.codec.fused_experts
    shapes = {m.file_shape for m in matrices(entry, fused=fused)}
    if not shapes:
        return "is empty"
    return next(filter(None, (_refusal(layer, shape) for shape in shapes)), None)


def _refusal(layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
    """Return why a matrix or its inputs do not fit, or None."""
    problem = layer.codec.refusal(layer, shape)
    if problem is None and layer.input is not None:
        return partial_group(layer.input.scheme, shape[-2:], "the group of inputs")
    return problem


def _check_includes(selection: Selection, decisions: Sequence[TensorDecision]) -> None:
    for pattern in selection.include:
        named = [d for d in decisions if names(pattern, d.entry.name)]
        if not any(d.quantized or d.why is Why.USER for d in named):
            raise CheckpointError(
                f"pattern {printable(pattern)} of include names only tensors that cannot be quantized as "
                f"asked, such as {describe(named[0])}; leave it out"
            )


def _check_strict(decisions: Sequence[TensorDecision]) -> None:
    left = [d for d in decisions if d.kept_by_default]
    if left:
        names = listed([describe(d) for d in left], _LISTED, mark=";")
        raise CheckpointError(
            f"{count(len(left), 'linear weight')} would stay unquantized: {names}; name them in "
            f"{option('ignore')} by name, or leave out {option('strict', True)}"
        )


_LISTED = 10


def describe(decision: TensorDecision) -> str:
    """Return a description of a tensor and its decision."""
    entry = decision.entry
    return f"{printable(entry.name)} ({entry.dtype}, shape {list(entry.shape)}): {decision.reason}"


def remarks(decisions: Iterable[TensorDecision]) -> Iterator[str]:
    """Yield a sentence for each default reason to keep or refit weights."""
    found: dict[str, list[TensorDecision]] = {}
    for decision in decisions:
        if decision.kept_by_default or decision.fitted:
            found.setdefault(decision.reason, []).append(decision)
    for first, *others in found.values():
        more = f", and {len(others)} more for this reason" if others else ""
        yield f"{'quantized' if first.fitted else 'kept'} {describe(first)}{more}"


def nothing_selected(decisions: Sequence[TensorDecision]) -> str:
    """Return the error sentence for an empty selection, with reasons."""
    reasons = Counter(d.reason for d in decisions).most_common(3)
    listed = ", ".join(f"{number} because: {reason}" for reason, number in reasons)
    return (
        f"nothing would be quantized: all {len(decisions)} tensors are kept ({listed}); use "
        f"{option('include')} PATTERN to quantize some of them"
    )


def split_sets(decisions: Iterable[TensorDecision]) -> list[str]:
    """Return a sentence for each fused set without one common scheme."""
    sets: dict[str, dict[LayerScheme | None, str]] = {}
    for decision in decisions:
        entry = decision.entry
        if len(entry.shape) == 2 or is_fused_experts(entry):
            name = fused_set(module_of(entry.name))
            if name is not None:
                sets.setdefault(name, {}).setdefault(decision.layer, entry.name)
    return [_split(members) for members in sets.values() if len(members) > 1]


def _split(members: dict[LayerScheme | None, str]) -> str:
    schemes = [
        f"{printable(name)} is {'kept' if layer is None else f'quantized to {layer}'}"
        for layer, name in members.items()
    ]
    return f"{' and '.join(schemes)}, but engines run them as one layer"


def _with(layer: LayerScheme, weight: Scheme | None) -> LayerScheme | None:
    """Return a layer under another scheme of weights, or None."""
    try:
        return None if weight is None else named_layer(layer.codec, weight, layer.input)
    except ZeropointError:
        return None


def smaller(layer: LayerScheme) -> Iterator[LayerScheme]:
    """Yield a layer with halved groups that its codec has."""
    for weight in smaller_groups(layer.weight):
        if (found := _with(layer, weight)) is None:
            return
        yield found


def why_none(layer: LayerScheme) -> str:
    """Return why no smaller group fits, or "" without groups."""
    if not group_of(layer.weight):
        return ""
    if _with(layer, halved(layer.weight)) is None:
        return ", and its format has no other group"
    return f", and no smaller group of at least {SMALLEST} divides it"
