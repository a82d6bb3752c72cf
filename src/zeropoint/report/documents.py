"""Documents about checkpoints for programs: plain values that JSON can hold, the same facts as the tables."""

from __future__ import annotations

import math
from typing import Any

from ..checkpoint.plan.plan_document import (
    decision_document,
    engine_documents,
    entry_document,
    scheme_document,
)
from ..checkpoint.run.advice import partly, rough
from ..checkpoint.run.loop import Outcome, RunResult
from ..checkpoint.run.tensor_error import TensorError
from ..checkpoint.run.worst import Keeping, keeping, worst
from ..checkpoint.verify.compare import Compared, Comparison
from ..checkpoint.verify.inspection import Inspection
from ..checkpoint.verify.proofs import LayerProof
from ..checkpoint.verify.verification import Verification


def run_document(result: RunResult, *, seconds: float) -> dict[str, Any]:
    """Return all that a run decided, wrote and measured."""
    plan = result.plan
    return {
        "source": str(plan.source.root),
        "output": str(result.path),
        "schemes": [scheme_document(layer) for layer in plan.layers],
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "quantized_values": plan.quantized_values,
        "bits_per_value": plan.bits_per_value,
        "decoded_values": 0 if plan.rotated else plan.restored_values,
        "rotated_values": plan.restored_values if plan.rotated else 0,
        "seconds": seconds,
        "sync_seconds": result.sync_seconds,
        "units": result.units,
        "resumed_units": result.resumed,
        "error": _error(result.error),
        "tensors": [decision_document(decision) for decision in plan.decisions],
        "weights": [_outcome(outcome) for outcome in result.outcomes],
        "worst": [_outcome(outcome) for outcome in worst(result.outcomes, lambda o: o.error)],
        "keeping": _keeping(keeping(result)),
        "engines": engine_documents(plan),
        "notes": list(result.notes),
        "warnings": [*partly(plan), *rough(result)],
    }


def inspection_document(inspection: Inspection) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    return {
        "path": str(inspection.source.root),
        "shards": list(inspection.source.shards),
        "bytes": inspection.nbytes,
        "values": inspection.values,
        "bits_per_value": inspection.bits_per_value,
        "quantization": inspection.quantization,
        "packed_by": inspection.packed_by,
        "bits": inspection.bits,
        "dtypes": [
            {"dtype": d.dtype, "tensors": d.tensors, "values": d.values, "bytes": d.nbytes}
            for d in inspection.dtypes
        ],
        "schemes": [
            {
                "scheme": s.scheme, "layout": s.layout, "method": s.method, "layers": s.layers,
                "values": s.values, "bytes": s.nbytes, "bits_per_value": s.bits_per_value,
            }
            for s in inspection.schemes
        ],
        "ignore": list(inspection.ignore),
        "kv_cache": {"scheme": inspection.cache, "layers": inspection.cached_layers},
        "tensors": [entry_document(entry) for entry in inspection.tensors],
        "notes": list(inspection.source.notes),
        "problems": list(inspection.problems),
    }  # fmt: skip


def comparison_document(comparison: Comparison, *, seconds: float) -> dict[str, Any]:
    """Return how far two checkpoints are apart, and what could not be compared."""
    a, b = comparison.sources
    return {
        "a": str(a.given), "b": str(b.given), "ok": comparison.ok,
        "problems": [{"where": p.where, "what": p.what} for p in comparison.problems],
        "notes": list(comparison.notes), "seconds": seconds,
        **_apart(comparison), "counted_tensors": comparison.counted.tensors,
        "tensors": [_compared(found) for found in comparison.tensors],
        "worst": [_compared(found) for found in worst(comparison.tensors.measured, lambda c: c.error)],
    }  # fmt: skip


def _compared(found: Compared) -> dict[str, Any]:
    pair = found.pair
    return {
        "name": pair.name, "shape": list(pair.shape), "a": pair.held_by[0], "b": pair.held_by[1],
        **_apart(found),
    }  # fmt: skip


def _apart(found: Comparison | Compared) -> dict[str, Any]:
    equality, error = found.equality, found.error
    return {
        "values": equality.values, "unequal": equality.unequal, "zeros_of_other_sign": equality.signs,
        "relative": _number(error.relative), "sqnr_db": _number(error.sqnr_db),
        "largest": _number(error.largest),
    }  # fmt: skip


def verification_document(verification: Verification, *, seconds: float) -> dict[str, Any]:
    """Return what was proven and what is wrong."""
    error = verification.error
    return {
        "ok": verification.ok,
        "problems": [{"where": p.where, "what": p.what} for p in verification.problems],
        "hashed": verification.hashed,
        "notes": list(verification.notes),
        "values": verification.values,
        "kept": verification.kept,
        "seconds": seconds,
        "error": None if error is None else _error(error),
        "layers": [_proof(proof) for proof in verification.layers],
        "worst": [_proof(proof) for proof, _ in worst(verification.layers.measured, lambda found: found[1])],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    weight = outcome.weight
    return {
        "module": weight.module, "tensor": weight.source.name, "shape": list(weight.shape),
        "bytes": outcome.nbytes, "outputs": [placed.name for placed in weight.outputs],
        "error": _error(outcome.error),
    }  # fmt: skip


def _keeping(found: Keeping | None) -> dict[str, Any] | None:
    """Return what it costs to keep the worst weights."""
    if found is None:
        return None
    return {
        "ignore": list(found.patterns), "weights": found.weights, "bytes": found.nbytes,
        "error": _error(found.error),
    }  # fmt: skip


def _proof(proof: LayerProof) -> dict[str, Any]:
    layer = proof.layer
    return {
        "module": layer.module, "scheme": str(layer.weight), "layout": layer.layer.layout,
        "shape": list(layer.shape), "error": None if proof.error is None else _error(proof.error),
        "of_bound": None if proof.of_bound is None else _number(proof.of_bound),
    }  # fmt: skip


def _error(error: TensorError) -> dict[str, Any]:
    return {
        "relative": _number(error.relative), "sqnr_db": _number(error.sqnr_db),
        "largest": _number(error.largest), "clipped_share": error.clipped_share,
        "zero_blocks": error.zero_blocks, "lost_blocks": error.lost_blocks,
    }  # fmt: skip


def _number(value: float) -> float | None:
    """Return a number that JSON can hold; infinities and NaN become null."""
    return value if math.isfinite(value) else None
