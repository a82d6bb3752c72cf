"""JSON document of a run: decisions, outputs and errors."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..measure.tensor_error import error_document, worst
from ..plan.learned_data import offered_quality
from ..plan.plan_document import decision_document, engine_documents, scheme_document
from .advice import KeepingCost, error_warnings, expert_tokens, keeping_cost, misfit_warnings

if TYPE_CHECKING:
    from ..plan.checkpoint_plan import CheckpointPlan
    from .loop import Outcome, RunResult


def run_document(result: RunResult) -> dict[str, Any]:
    """Return all that a run decided, wrote and measured."""
    plan = result.plan
    return {
        "source": str(plan.source.root),
        "output": str(result.path),
        "report": None if result.page is None else str(result.page),
        "rotation": None if plan.rotation is None else plan.rotation.name,
        "device": plan.limits.device.type,
        "schemes": [scheme_document(layer) for layer in plan.layers],
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "quantized_values": plan.quantized_values,
        "bits_per_value": plan.bits_per_value,
        "decoded_values": plan.restored_values if plan.rotation is None else 0,
        "rotated_values": 0 if plan.rotation is None else plan.restored_values,
        "sync_seconds": result.sync_seconds,
        "units": result.units,
        "resumed_units": result.resumed,
        "error": error_document(result.error) if result.outcomes else None,
        "tensors": [decision_document(decision) for decision in plan.decisions],
        "weights": [_outcome(outcome, plan) for outcome in result.outcomes],
        "worst": [_outcome(outcome, plan) for outcome in worst(result.outcomes, lambda o: o.error)],
        "experts": [asdict(each) for each in expert_tokens(plan.solved)],
        "keeping": _keeping(keeping_cost(result)),
        "engines": engine_documents(plan),
        "notes": [*result.notes, *offered_quality(plan)],
        "warnings": [*misfit_warnings(plan), *error_warnings(result)],
    }


def _outcome(outcome: Outcome, plan: CheckpointPlan) -> dict[str, Any]:
    weight = outcome.weight
    solved = plan.solved.get(weight.module)
    loss = {} if solved is None else {"loss": asdict(solved.loss)}
    return {
        "module": weight.module,
        "tensor": weight.source.name,
        "shape": list(weight.shape),
        "bytes": outcome.nbytes,
        "outputs": [tensor.name for tensor in weight.tensors],
        "error": error_document(outcome.error),
        **loss,
    }


def _keeping(found: KeepingCost | None) -> dict[str, Any] | None:
    """Return the cost of keeping the worst weights."""
    if found is None:
        return None
    return {
        "ignore": list(found.patterns),
        "weights": found.weights,
        "bytes": found.nbytes,
        "error": error_document(found.error),
    }
