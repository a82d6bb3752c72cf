"""Warnings about misfit or distorted weights, and the cost of keeping them.

This module decides nothing. It compares what was asked for with other schemes that could have been.
Layers that engines run as one need one scheme, so a weight is kept with all that it runs with. The cost
comes from a second plan, whose bytes are exact, and the error from the weights which this plan still
quantizes: what the same command would write and report.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...architectures import fused_set
from ...codecs.layer_schemes import layer_scheme, preset_layers
from ...codecs.protocol import LayerScheme
from ...errors import ZeropointError, count, option, printable, size_of
from ..measure.tensor_error import TensorError, worst
from ..plan.checkpoint_plan import CheckpointPlan, SolvedWeight, make_plan
from ..plan.decisions import TensorDecision, misfit
from ..plan.limits import give_back
from ..plan.output_tensors import Output
from ..plan.selection import EXPERTS_AS_ROWS, WEIGHT_DTYPES, is_fused_experts, module_of, not_a_weight
from ..read.tensor_entries import TensorEntry

if TYPE_CHECKING:
    from .loop import RunResult

ROUGH = 0.5
"""Relative error from which an output is hardly the model any more: of published schemes of 4 bits, the worst
have 0.2."""


@dataclass(slots=True)
class _Total:
    """Count and bytes of weights, and one entry of each shape."""

    count: int = 0
    nbytes: int = 0
    shapes: dict[tuple[int, ...], TensorEntry] = field(default_factory=dict)

    def add(self, entry: TensorEntry) -> None:
        self.count += 1
        self.nbytes += entry.nbytes
        self.shapes.setdefault(entry.shape, entry)


def misfit_warnings(plan: CheckpointPlan) -> list[str]:
    """Return a sentence where a scheme fits only some shapes."""
    for layer in plan.layers:
        left, taken, reason = _Total(), _Total(), ""
        for decision in plan.decisions:
            if decision.layer == layer:
                taken.add(decision.entry)
            elif _is_left(decision, layer):
                reason = reason or decision.reason
                left.add(decision.entry)
        if left.count:
            return [_partly(layer, left, taken, reason)]
    return []


def _is_left(decision: TensorDecision, layer: LayerScheme) -> bool:
    """Return whether a linear weight is kept as a misfit."""
    entry = decision.entry
    if not decision.kept_by_default or entry.dtype not in WEIGHT_DTYPES:
        return False
    if is_fused_experts(entry) or decision.reason == EXPERTS_AS_ROWS:
        return True
    return not_a_weight(entry) is None and misfit(entry, layer) is not None


def _fits(entry: TensorEntry, layer: LayerScheme) -> bool:
    return not_a_weight(entry) is None and misfit(entry, layer) is None


def _partly(layer: LayerScheme, left: _Total, taken: _Total, reason: str) -> str:
    shapes = (*left.shapes.values(), *taken.shapes.values())
    fitting = (o.name for o in _others(layer) if all(_fits(e, o) for e in shapes))
    found = next(fitting, None)
    remedy = "no scheme like it fits all" if found is None else f"{option('to', found)} fits all of them"
    first = shapes[0]
    return (
        f"{size_of(left.nbytes)} of {size_of(left.nbytes + taken.nbytes)} of linear weights stay in "
        f"{first.dtype}: {layer} does not fit {count(left.count, 'weight')}, such as {printable(first.name)} "
        f"({reason}); {remedy}"
    )


def error_warnings(result: RunResult) -> list[str]:
    """Return a sentence about large relative errors, with a finer scheme."""
    number, worst, most = 0, None, ROUGH
    for outcome in result.outcomes:
        relative = outcome.error.relative
        number += relative > ROUGH
        if relative > most:
            worst, most = outcome, relative
    if worst is None:
        return []
    whose = "all weights" if number == len(result.outcomes) else count(number, "weight")
    said = (
        f"the relative error of {whose} is above {ROUGH}, that of {printable(worst.weight.module)} is "
        f"{most:.2f}"
    )
    finer = _finer(worst.weight.layer)
    return [said if finer is None else f"{said}; {option('to', finer.name)} has less error"]


def _others(layer: LayerScheme) -> Iterator[LayerScheme]:
    """Yield schemes like ``layer`` that fit more shapes, the closest first."""
    element = str(layer.weight).partition(":")[0]
    for blocks in ("g64", "g32", "g16", "channel") if layer.input is None else ():
        with contextlib.suppress(ZeropointError):  # not every element has a layout for every block
            found = layer_scheme(f"{element}:{blocks}", layer.codec)
            yield LayerScheme(codec=layer.codec, name=f"{element}:{blocks}", weight=found.weight)
    yield from sorted(
        preset_layers(layer.codec),
        key=lambda other: (abs(other.weight.bits - layer.weight.bits), other.input != layer.input),
    )


def _finer(layer: LayerScheme) -> LayerScheme | None:
    """Return the weight-only preset closest to ``layer`` in bits, or None."""
    own = layer.weight
    alone = [
        other for other in preset_layers(layer.codec) if other.input is None and other.weight.bits >= own.bits
    ]
    return min(
        alone, key=lambda other: (other.weight.bits, other.weight.element != own.element), default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingCost:
    """A run with the worst weights kept: patterns, added bytes, and error.

    weights: how many would be kept. whole: whether some of them are only kept because engines run them as
    one with the worst. patterns: what to ignore.
    """

    weights: int
    whole: bool
    patterns: tuple[str, ...]
    nbytes: int
    error: TensorError

    def __str__(self) -> str:
        more = f"{size_of(abs(self.nbytes))} {'more' if self.nbytes >= 0 else 'less'}"
        named = count(self.weights, "weight") + (
            ", those that run as one with them too" if self.whole else ""
        )
        return f"keeping the worst ({named}): {more}, {self.error}"

    @property
    def option(self) -> str:
        """Option for the command, or for the call."""
        return option("ignore", list(self.patterns))


def keeping_cost(result: RunResult) -> KeepingCost | None:
    """Return the cost of keeping a run's worst weights, or None.

    None where no weight lost anything. None, too, where nothing else would be quantized.
    """
    plan, found = result.plan, worst(result.outcomes, lambda o: o.error)
    together = {_together(outcome.weight) for outcome in found}
    if not together:
        return None
    kept: dict[str, list[str]] = {}
    for weight in plan.weights:
        if _together(weight) in together:
            kept.setdefault(_together(weight), []).append(module_of(weight.source.name))
    number = sum(map(len, kept.values()))
    patterns = tuple(pattern for members in kept.values() for pattern in _patterns(members, plan.weights))
    selection = replace(plan.selection, ignore=(*plan.selection.ignore, *patterns))
    give_back()  # the second plan is as large as the first one, which is still in memory
    try:
        other = make_plan(plan.source, plan.recipe, selection=selection, limits=plan.limits, codec=plan.codec)
    except ZeropointError:  # nothing is left to quantize, or codes that cannot stay in this layout
        return None
    rest = (o.error for o in result.outcomes if _together(o.weight) not in together)
    return KeepingCost(
        weights=number,
        whole=number > len(found),
        patterns=patterns,
        error=TensorError.merge(rest),
        nbytes=other.output_bytes - plan.output_bytes,
    )


def _together(weight: Output) -> str:
    """Return the key of weights kept together: fused set, or tensor."""
    return fused_set(weight.module) or weight.source.name


def _patterns(members: Sequence[str], weights: Iterable[Output]) -> list[str]:
    """Return patterns for these modules alone; one pattern for a common parent."""
    modules = list(dict.fromkeys(members))
    below = f"{_common(modules)}."
    if len(modules) > 1 and sum(w.source.name.startswith(below) for w in weights) == len(members):
        return [f"{glob.escape(below)}*"]
    return [glob.escape(module) for module in modules]


def _common(names: Sequence[str]) -> str:
    """Return the parts that all names begin with.

    >>> _common(["a.mlp.experts.0.up", "a.mlp.experts.11.up"])
    'a.mlp.experts'
    """
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, parts))


_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?:[^.]+\.)*?(?P<number>\d+)(?:\..*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTokens:
    """Tokens of the solved experts of one layer.

    layer: the name of its experts. experts: how many were solved. fewest, median, most: tokens of one.
    without: experts that got none, and have taken all that is known of their inputs from the others.
    """

    layer: str
    experts: int
    fewest: int
    median: float
    most: int
    without: int


def expert_tokens(solved: Mapping[str, SolvedWeight]) -> tuple[ExpertTokens, ...]:
    """Return the tokens of each layer with experts, in order of weights.

    solved: weights by module, an expert's may have other counts, where a value of an input
    was not finite; the least counts.
    """
    return tokens_by_layer((module, weight.loss.own) for module, weight in solved.items())


def tokens_by_layer(own: Iterable[tuple[str, int]]) -> tuple[ExpertTokens, ...]:
    """Return the tokens of each layer with experts, from each weight's."""
    layers: dict[str, dict[int, int]] = {}
    for module, tokens in own:
        found = _EXPERT.fullmatch(module)
        if found is not None:
            counts = layers.setdefault(found["layer"], {})
            number = int(found["number"])
            counts[number] = min(tokens, counts.get(number, tokens))
    return tuple(
        ExpertTokens(
            layer=layer,
            experts=len(counts),
            fewest=min(counts.values()),
            most=max(counts.values()),
            median=statistics.median(counts.values()),
            without=sum(not n for n in counts.values()),
        )
        for layer, counts in layers.items()
    )
