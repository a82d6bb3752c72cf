"""Results of a search: choices of layers, sizes and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.recipe import RecipeText
from ..errors import size_of
from ..results import Result
from .budgets import Budget
from .knapsack import Allocation
from .offers import Choices, SearchedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """What a layer gets.

    candidate: its text. nbytes: what it takes. relative: root of the mean over its weights of the squared
    error over the squared values. loss: what it adds to the loss.
    """

    layer: SearchedLayer
    candidate: str
    nbytes: int
    relative: float
    loss: float

    @property
    def bits(self) -> float:
        """Bits of each number."""
        return 8 * self.nbytes / max(1, self.layer.values)

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as values that JSON holds."""
        return {
            "weights": [weight.module for weight in self.layer.weights],
            "candidate": self.candidate,
            "bytes": self.nbytes,
            "bits_per_value": self.bits,
            "relative": self.relative,
            "loss": self.loss,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A size of searched weights and its loss; name: a uniform candidate."""

    nbytes: int
    loss: float
    name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return size and loss as values that JSON holds."""
        return {"bytes": self.nbytes, "loss": self.loss}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(Result):
    """What a search found.

    chosen: of each layer. allocation: how good that is. recipe: what ``quantize`` takes. plan: what it would
    do. curve: the best losses at rising sizes. uniform: candidates that fit all layers. notes: sentences.
    """

    choices: Choices
    budget: Budget
    importance: str
    chosen: tuple[LayerChoice, ...]
    allocation: Allocation
    recipe: RecipeText
    plan: CheckpointPlan
    curve: tuple[CurvePoint, ...]
    uniform: tuple[CurvePoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (*summary(self), *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        allocation = self.allocation
        return {
            "budget": str(self.budget),
            "importance": self.importance,
            "recipe": self.recipe.text,
            "candidates": list(self.choices.candidates),
            "values": self.choices.values,
            "bytes": allocation.size,
            "bits_per_value": self.bits,
            "loss": allocation.loss,
            "bound": allocation.bound,
            "optimal": allocation.optimal,
            "output_bytes": self.plan.output_bytes,
            "layers": [choice.to_dict() for choice in self.chosen],
            "uniform": [{"candidate": point.name, **point.to_dict()} for point in self.uniform],
            "curve": [point.to_dict() for point in self.curve],
            "notes": list(self.notes),
        }

    @property
    def bits(self) -> float:
        """Average bits of the numbers that were decided about."""
        return 8 * self.allocation.size / max(1, self.choices.values)


def summary(result: SearchResult) -> tuple[str, ...]:
    """Return the sizes and the loss of a result, a line each."""
    allocation, plan = result.allocation, result.plan
    proof = (
        "no choice within the budget has less"
        if allocation.optimal
        else (f"at most {allocation.loss / max(allocation.bound, math.ulp(0.0)) - 1:.2%} above the least")
    )
    return (
        f"{result.bits:.3f} bits for each of {result.choices.values:,} weights, budget {result.budget}",
        f"{size_of(plan.source_bytes)} -> {size_of(plan.output_bytes)}",
        f"loss {allocation.loss:.6g}: {proof}",
    )
