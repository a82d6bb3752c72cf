"""Fused layers of engines, and conflicts of their schemes."""

from __future__ import annotations

from collections.abc import Iterable

from ...architectures import fused_set
from ...codecs.protocol import LayerScheme
from ...errors import printable
from .decisions import TensorDecision
from .selection import is_fused_experts, module_of


def split_sets(decisions: Iterable[TensorDecision]) -> list[str]:
    """Return a sentence for each fused set without one common scheme."""
    sets: dict[str, dict[LayerScheme | None, str]] = {}
    for decision in decisions:
        entry = decision.entry
        if len(entry.shape) == 2 or is_fused_experts(entry):
            name = fused_set(module_of(entry.name))
            if name is not None:
                sets.setdefault(name, {}).setdefault(decision.layer, entry.name)
    return [_split(members) for members in sets.values() if len(members) > 1]


def _split(members: dict[LayerScheme | None, str]) -> str:
    schemes = [
        f"{printable(name)} is {'kept' if layer is None else f'quantized to {layer}'}"
        for layer, name in members.items()
    ]
    return f"{' and '.join(schemes)}, but engines run them as one layer"
