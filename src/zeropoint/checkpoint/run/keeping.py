"""Cost of keeping the weights with the largest errors.

Layers that engines run as one need one scheme, so a weight is kept with all that it runs with. The cost
comes from a second plan, whose bytes are exact, and the error from the weights which this plan still
quantizes: what the same command would write and report.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...architectures import fused_set
from ...errors import ZeropointError, count, option, size_of
from ..measure.tensor_error import TensorError, worst
from ..plan.checkpoint_plan import make_plan
from ..plan.limits import give_back
from ..plan.output import Output
from ..plan.selection import module_of

if TYPE_CHECKING:
    from .loop import RunResult


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
