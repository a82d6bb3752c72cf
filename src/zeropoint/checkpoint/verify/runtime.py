"""Load check of a verified ONNX model in onnxruntime, if installed."""

from __future__ import annotations

from pathlib import Path

from ...codecs.containers.onnx_graph import RUNTIME, STANDARD, all_graphs, parsed
from ...codecs.engines import ONNXRUNTIME, Facts, Loads
from ...errors import printable
from ..plan.limits import Limits
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayers
from ..read.source import Source

_KNOWN = (*STANDARD, RUNTIME, "ai.onnx.ml")
"""Domains whose operators every build of onnxruntime has."""


def runtime_problems(
    source: Source, stored: StoredLayers, original: Source | None, limits: Limits
) -> tuple[list[Problem], list[str]]:
    """Return why onnxruntime rejects a model, and why it was not tried."""
    if not source.graph:
        return [], []
    file = source.shards[0]
    reason = "it lies behind a URL"
    if isinstance(source.root, Path):
        reason = _untried(source, stored, limits)
        error = None if reason else source.container.load_error(source.root / file)
        if error is None and not reason:
            return [], []
        if error is not None and not _is_broken(original):
            return [Problem(where=file, what=error)], []
        reason = reason or "it does not load the original either"
    return [], [f"{file} was not loaded into onnxruntime: {reason}"]


def _is_broken(original: Source | None) -> bool:
    """Return whether onnxruntime does not load the original, where there is one."""
    if original is None or not original.graph or not isinstance(original.root, Path):
        return False
    return original.container.load_error(original.root / original.shards[0]) is not None


def _untried(source: Source, stored: StoredLayers, limits: Limits) -> str:
    """Return why loading the model would say nothing, or nothing."""
    size = sum(entry.nbytes for entry in source.entries.values())
    room = (limits.max_memory - limits.base_memory) // 2
    if size > room:
        return f"its {size:,} bytes are above the {room:,} that the limit of memory leaves"
    nodes = (node for graph in all_graphs(parsed(source.graph)) for node in graph.node)
    foreign = sorted({node.domain for node in nodes if node.domain not in _KNOWN})
    if foreign:
        return f"it has operators of {printable(', '.join(foreign)[:100])}"
    facts = Facts(
        family={}, layers=tuple({layer.layer for layer in stored.layers}), experts=frozenset(), section={},
        nonlinear=False, transposed=False, wider=False, whole_experts=False, split=None,
    )  # fmt: skip
    rules = (layer.codec.engines[ONNXRUNTIME] for layer in facts.layers)
    return next((why for rule in rules for loads, why in rule(facts) if loads is Loads.NO), "")
