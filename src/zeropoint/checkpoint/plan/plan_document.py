"""Plans as JSON documents: the request, its identity, and all decisions.

{"zeropoint_plan": 1, "request": {"source", "recipe": {"name", "text"}, "include", "ignore", "strict"},
 "identity": {FIELD: VALUE, ...}, "tensors": [...], ...}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...codecs.protocol import LayerScheme
from ..read.tensor_entries import TensorEntry
from .decisions import TensorDecision
from .identity import identity
from .output_tensors import OutputTensor
from .selection import Why
from .verdicts import indivisible, verdicts

if TYPE_CHECKING:
    from .checkpoint_plan import CheckpointPlan

FORMAT = "zeropoint_plan"
VERSION = 1


def plan_document(plan: CheckpointPlan) -> dict[str, Any]:
    """Return all that a plan decides, as values that JSON can hold."""
    return {
        FORMAT: VERSION,
        "request": {
            "source": str(plan.source.root),
            "recipe": dataclasses.asdict(plan.recipe),
            "format": plan.codec.name,
            "include": list(plan.selection.include),
            "ignore": list(plan.selection.ignore),
            "strict": plan.selection.strict,
            "fit": plan.selection.fit,
            "dequantize": plan.selection.dequantize.value,
            "floats": plan.selection.floats,
            **({"kv_scales": True} if plan.selection.kv_scales else {}),
        },
        "identity": identity(plan),
        "rotation": None if plan.rotation is None else plan.rotation.name,
        "schemes": [scheme_document(layer) for layer in plan.layers],
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "quantized_values": plan.quantized_values,
        "bits_per_value": plan.bits_per_value,
        "peak_memory": plan.peak_memory,
        "tensors": list(tensor_documents(plan)),
        "shards": [{"name": shard.name, "bytes": shard.size} for shard in plan.shards],
        "files": {name: text.size for name, text in plan.texts.items()}
        | {str(path): size for path, size in plan.companions.items()},
        "shared_scales": [{"modules": list(s.modules), "shards": list(s.shards)} for s in plan.shared_scales],
        "engines": engine_documents(plan),
        "tensor_parallel": [
            {"module": found.module, "ways": found.ways, "reason": found.reason}
            for found in indivisible(plan.weights)
        ],
        "notes": list(plan.notes),
    }


def engine_documents(plan: CheckpointPlan) -> list[dict[str, Any]]:
    """Return the verdict of each engine on the result."""
    return [
        {"engine": v.engine, "loads": v.loads.value, "reason": v.reason, "checked": v.checked}
        for v in verdicts(plan)
    ]


def scheme_document(layer: LayerScheme) -> dict[str, Any]:
    """Return the scheme of a layer."""
    return {
        "name": str(layer),
        "weight": str(layer.weight),
        "input": None if layer.input is None else str(layer.input.scheme),
        "layout": layer.layout,
    }


def entry_document(entry: TensorEntry) -> dict[str, Any]:
    """Return a tensor of a file."""
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "file": entry.file.name,
    }


def decision_document(decision: TensorDecision) -> dict[str, Any]:
    """Return a source tensor with its decision and the reason."""
    kept = "rotated" if decision.why is Why.ROTATED else "kept"
    return {
        **entry_document(decision.entry),
        "action": "quantized" if decision.quantized else kept,
        "scheme": None if decision.layer is None else str(decision.layer),
        "method": None if decision.layer is None else decision.method,
        "why": decision.why.value,
        "reason": decision.reason,
    }


def tensor_documents(plan: CheckpointPlan) -> Iterator[dict[str, Any]]:
    """Yield each source tensor with its action and its output tensors."""
    outputs: dict[str, list[OutputTensor]] = {}
    for item in plan.outputs.all:
        outputs.setdefault(item.source.name, []).extend(item.tensors)
    for decision in plan.decisions:
        yield {
            **decision_document(decision),
            "outputs": [
                {
                    "name": tensor.name,
                    "dtype": tensor.spec.dtype,
                    "shape": list(tensor.spec.shape),
                    "bytes": tensor.nbytes,
                    "shard": tensor.shard,
                    "begin": tensor.begin,
                }
                for tensor in outputs.get(decision.entry.name, ())
            ],
        }
