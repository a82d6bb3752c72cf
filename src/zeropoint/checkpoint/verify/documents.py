"""JSON documents of inspections, comparisons and verifications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..measure.tensor_error import error_document, finite_number, worst
from ..plan.plan_document import entry_document
from .proofs import LayerProof

if TYPE_CHECKING:
    from .compare import Compared, Comparison
    from .inspection import Inspection
    from .verification import Verification


def inspection_document(inspection: Inspection) -> dict[str, Any]:
    """Return the document of an inspection."""
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
                "scheme": s.scheme,
                "layout": s.layout,
                "method": s.method,
                "layers": s.layers,
                "values": s.values,
                "bytes": s.nbytes,
                "bits_per_value": s.bits_per_value,
            }
            for s in inspection.schemes
        ],
        "ignore": list(inspection.ignore),
        "kv_cache": {"scheme": inspection.cache, "layers": inspection.cached_layers},
        "tensors": [entry_document(entry) for entry in inspection.tensors],
        "notes": list(inspection.source.notes),
        "problems": list(inspection.problems),
    }


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return the document of a comparison."""
    a, b = comparison.sources
    return {
        "a": str(a.given),
        "b": str(b.given),
        "ok": comparison.ok,
        "problems": [{"where": p.where, "what": p.what} for p in comparison.problems],
        "notes": list(comparison.notes),
        **_apart(comparison),
        "counted_tensors": comparison.counted.tensors,
        "tensors": [_compared(found) for found in comparison.tensors],
        "worst": [_compared(found) for found in worst(comparison.tensors.measured, lambda c: c.error)],
    }


def _compared(found: Compared) -> dict[str, Any]:
    pair = found.pair
    return {
        "name": pair.name,
        "shape": list(pair.shape),
        "a": pair.held_by[0],
        "b": pair.held_by[1],
        **_apart(found),
    }


def _apart(found: Comparison | Compared) -> dict[str, Any]:
    equality, error = found.equality, found.error
    return {
        "values": equality.values,
        "unequal": equality.unequal,
        "zeros_of_other_sign": equality.signs,
        "relative": finite_number(error.relative),
        "sqnr_db": finite_number(error.sqnr_db),
        "largest": finite_number(error.largest),
    }


def verification_document(verification: Verification) -> dict[str, Any]:
    """Return the document of a verification."""
    error = verification.error
    return {
        "ok": verification.ok,
        "problems": [{"where": p.where, "what": p.what} for p in verification.problems],
        "hashed": verification.hashed,
        "notes": list(verification.notes),
        "values": verification.values,
        "kept": verification.kept,
        "outputs": None if verification.outputs is None else verification.outputs.to_dict(),
        "error": None if error is None else error_document(error),
        "layers": [_proof(proof) for proof in verification.layers],
        "worst": [_proof(proof) for proof, _ in worst(verification.layers.measured, lambda found: found[1])],
    }


def _proof(proof: LayerProof) -> dict[str, Any]:
    layer = proof.layer
    return {
        "module": layer.module,
        "scheme": str(layer.weight),
        "layout": layer.layer.layout,
        "shape": list(layer.shape),
        "error": None if proof.error is None else error_document(proof.error),
        "of_bound": None if proof.of_bound is None else finite_number(proof.of_bound),
    }
