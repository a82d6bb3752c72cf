"""Layers that engines run as one: which ones they are, what they share, and where they would not agree.

This module knows names and schemes; it places nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...codecs.protocol import LayerScheme
from ...errors import printable
from .decisions import Decision
from .selection import is_fused_experts, module_of

# The sets whose members take one tensor scale together: llm-compressor 0.14,
# entrypoints/model_free/microscale.py. Engines run each set as one matrix with one scale.
_SHARING = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<set>.*(attn|attention))\.[qkv]_proj$",
        r"(?P<set>.*(attn|attention))\.(wq_a|wkv_a_with_mqa)$",
        r"(?P<set>.*mlp)\.(gate|up)_proj$",
        r"(?P<set>.*)w[13]$",
    )
)
# Sets that engines run as one, each member with scales of its own: vLLM merges the experts of a layer, the
# parts of gate and up that are not called mlp, and DeepSeek's low-rank projections.
_TOGETHER = (
    re.compile(r"(?P<set>.*\.experts)(\..*)?$"),
    *_SHARING,
    re.compile(r"(?P<set>.*)\.(gate|up)_proj$"),
    re.compile(r"(?P<set>.*)\.(q_a_proj|kv_a_proj_with_mqa)$"),
)


def _set_of(module: str, patterns: Sequence[re.Pattern[str]]) -> str | None:
    for number, pattern in enumerate(patterns):
        found = pattern.fullmatch(module)
        if found is not None:
            return f"{found['set']}#{number}"
    return None


def sharing_set(module: str) -> str | None:
    """Return the name of the set with whose other members a module shares a tensor scale, or None.

    >>> sharing_set("a.mlp.gate_proj"), sharing_set("a.mlp.up_proj"), sharing_set("a.mlp.down_proj")
    ('a.mlp#2', 'a.mlp#2', None)
    """
    return _set_of(module, _SHARING)


def split_sets(decisions: Iterable[Decision]) -> list[str]:
    """Return a sentence for each set that engines run as one and whose members do not have one scheme."""
    sets: dict[str, dict[LayerScheme | None, str]] = {}
    for decision in decisions:
        entry = decision.entry
        if len(entry.shape) == 2 or is_fused_experts(entry):
            name = _set_of(module_of(entry.name), _TOGETHER)
            if name is not None:
                sets.setdefault(name, {}).setdefault(decision.layer, entry.name)
    return [_split(members) for members in sets.values() if len(members) > 1]


def _split(members: dict[LayerScheme | None, str]) -> str:
    fates = [
        f"{printable(name)} is {'kept' if layer is None else f'quantized to {layer}'}"
        for layer, name in members.items()
    ]
    return f"{' and '.join(fates)}, but engines run them as one layer"
