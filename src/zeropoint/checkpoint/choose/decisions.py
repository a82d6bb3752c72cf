"""The fate of each tensor of a checkpoint under a recipe: quantized or kept, and why.

This module joins the selection by name (selection.py) with what the layout can hold; it places nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...codecs.layers import layer_of
from ...codecs.protocol import Codec, LayerScheme
from ...columns import Kinds, Made
from ...errors import CheckpointError, RecipeError, count, printable
from ...methods import NEAREST
from ...recipes import Recipe, Rule, Subject
from ..read.entries import Entries, TensorEntry
from ..read.source import Source
from .experts import matrices
from .selection import Choice, Selection, Why, choose, subject_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one tensor: quantized to ``layer`` by ``method``, or kept where that is None."""

    entry: TensorEntry
    choice: Choice
    layer: LayerScheme | None
    method: str = NEAREST

    @property
    def quantized(self) -> bool:
        """Whether the tensor is quantized."""
        return self.layer is not None

    @property
    def left_alone(self) -> bool:
        """Whether it is a linear weight that is kept although nobody asked for it."""
        return self.choice.why in (Why.UNFIT, Why.UNNAMED)


def decide(source: Source, recipe: Recipe, selection: Selection, codec: Codec) -> Sequence[Decision]:
    """Return the fate of every tensor of ``source``, in the order of its entries.

    The rules of ``recipe`` come before the default rules, which decide about what no rule names and give what
    the recipe gives by default. codec: what the files are written in.

    Raises RecipeError when a rule decides about nothing, or gives a scheme to nothing that can be quantized;
    CheckpointError when an include pattern names nothing that can be, or, under strict, when a linear weight
    is left alone although nobody asked for it.
    """
    entries, config = source.entries, source.config or {}
    layers, uses = _Layers(codec), _Uses(recipe)

    def decided(entry: TensorEntry) -> Decision:
        subject = subject_of(entry, config)
        found = recipe.first(subject)
        choice = choose(entry, entries, selection, config, rule=None if found is recipe.default else found)
        if choice.quantize and found.gives is None:
            choice = _left_over(recipe.default)
        layer = layers.of(found) if choice.quantize else None
        uses.add(found, entry, choice, quantized=layer is not None)
        problem = None if layer is None else misfit(entry, layer)
        if problem is not None:
            choice, layer = Choice(quantize=False, why=Why.UNFIT, reason=problem), None
        method = NEAREST if layer is None or found.gives is None else found.gives.method or NEAREST
        return Decision(entry=entry, choice=choice, layer=layer, method=method)

    decisions = compact(entries, map(decided, entries.values()))
    uses.check(subject_of(entry, config) for entry in entries.values())
    _check_includes(selection, decisions)
    if selection.strict:
        _check_strict(decisions)
    return decisions


def compact(entries: Entries, decisions: Iterable[Decision]) -> Sequence[Decision]:
    """Return the decisions about ``entries``, one for each in their order, in columns."""
    of, kinds = array("I"), Kinds()
    for decision in decisions:
        of.append(kinds.number((decision.choice, decision.layer, decision.method)))

    def made(number: int) -> Decision:
        choice, layer, method = kinds[of[number]]
        return Decision(entry=entries.at(number), choice=choice, layer=layer, method=method)

    return Made(len(of), made)


class _Uses:
    """What became of the rules of a recipe: which decided, and which gave a scheme to something."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._gave: set[int] = set()
        self._first: dict[int, Decision] = {}
        self._wished: set[int] = set()

    def add(self, rule: Rule, entry: TensorEntry, choice: Choice, *, quantized: bool) -> None:
        if quantized:
            self._gave.add(id(rule))
        if choice.why is Why.USER:
            self._wished.add(id(rule))
        self._first.setdefault(id(rule), Decision(entry=entry, choice=choice, layer=None))

    def check(self, subjects: Iterable[Subject]) -> None:
        """Raise RecipeError when a rule decided about nothing, or gave a scheme to nothing."""
        if any(id(rule) not in self._first for rule in self._recipe.rules):
            self._recipe.decide(subjects)
        for rule in self._recipe.rules:
            if rule.gives is None or id(rule) in self._gave or id(rule) in self._wished:
                continue
            raise RecipeError(
                f"{rule.place}: rule ({rule}) gives a scheme to nothing that can be quantized, only to such "
                f"as {fate(self._first[id(rule)])}; name weights"
            )


class _Layers:
    """The layer scheme of each rule, made once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._made: dict[int, LayerScheme] = {}

    def of(self, rule: Rule) -> LayerScheme:
        if id(rule) not in self._made:
            assert rule.gives is not None
            self._made[id(rule)] = layer_of(rule.gives, self._codec)
        return self._made[id(rule)]


def _left_over(default: Rule) -> Choice:
    """Return what happens to a weight that no rule names, where the recipe gives nothing by default."""
    why = Why.USER if default.place else Why.UNNAMED
    return Choice(quantize=False, why=why, reason=default.reason)


def misfit(entry: TensorEntry, layer: LayerScheme) -> str | None:
    """Return why the layout cannot hold a weight, or None when it can."""
    shapes = {m.shape for m in matrices(entry)}
    if not shapes:
        return "is empty"
    return next(filter(None, (layer.codec.refusal(layer, shape) for shape in shapes)), None)


def _check_includes(selection: Selection, decisions: Sequence[Decision]) -> None:
    for pattern in selection.include:
        named = [d for d in decisions if selection.named(pattern, d.entry.name)]
        if not any(d.quantized or d.choice.why is Why.USER for d in named):
            raise CheckpointError(
                f"pattern {printable(pattern)} of include names only tensors that cannot be quantized as "
                f"asked, such as {fate(named[0])}; leave it out"
            )


def _check_strict(decisions: Sequence[Decision]) -> None:
    left = [d for d in decisions if d.left_alone]
    if left:
        listed = "; ".join(fate(d) for d in left[:_LISTED])
        more = f"; and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        raise CheckpointError(
            f"{count(len(left), 'linear weight')} would stay unquantized: {listed}{more}; --ignore them by "
            "name, or leave out --strict"
        )


_LISTED = 10


def fate(decision: Decision) -> str:
    """Return what the tensor is and why it is quantized or kept, in words."""
    entry = decision.entry
    return f"{printable(entry.name)} ({entry.dtype}, shape {list(entry.shape)}): {decision.choice.reason}"


def nothing_selected(decisions: Sequence[Decision]) -> str:
    """Return the sentence for a checkpoint of which nothing would be quantized, with the reasons."""
    reasons = Counter(d.choice.reason for d in decisions).most_common(3)
    listed = ", ".join(f"{number} because: {reason}" for reason, number in reasons)
    return (
        f"nothing would be quantized: all {len(decisions)} tensors are kept ({listed}); use --include "
        "PATTERN to quantize some of them"
    )
