"""Search results as JSON documents: each layer's choice and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .searching import CurvePoint, LayerChoice, SearchResult


def search_document(result: SearchResult) -> dict[str, Any]:
    """Return a result as values that JSON holds."""
    allocation = result.allocation
    return {
        "budget": str(result.budget), "importance": result.importance, "recipe": result.recipe.text,
        "candidates": list(result.choices.candidates), "values": result.choices.values,
        "bytes": allocation.size, "bits_per_value": result.bits, "loss": allocation.loss,
        "bound": allocation.bound, "optimal": allocation.optimal, "output_bytes": result.plan.output_bytes,
        "layers": [_choice(choice) for choice in result.chosen],
        "uniform": [{"candidate": p.name, **_point(p)} for p in result.uniform],
        "curve": [_point(point) for point in result.curve],
        "notes": list(result.notes),
    }  # fmt: skip


def _choice(choice: LayerChoice) -> dict[str, Any]:
    return {
        "weights": [weight.module for weight in choice.layer.weights], "candidate": choice.candidate,
        "bytes": choice.nbytes, "bits_per_value": choice.bits, "relative": choice.relative,
        "loss": choice.loss,
    }  # fmt: skip


def _point(point: CurvePoint) -> dict[str, Any]:
    return {"bytes": point.nbytes, "loss": point.loss}
