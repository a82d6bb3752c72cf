"""The fate of each tensor of a checkpoint under a scheme: quantized or kept, and why.

This module joins the selection by name (selection.py) with what the layout can hold; it places nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..codecs.compressed_tensors import unfit
from ..codecs.compressed_tensors_config import LayerScheme
from ..errors import CheckpointError, printable
from .experts import matrices
from .safetensors_file import TensorEntry
from .selection import Choice, Selection, Why, choose, module_of
from .source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one tensor: quantized under ``layer``, or kept where that is None, and why."""

    entry: TensorEntry
    choice: Choice
    layer: LayerScheme | None

    @property
    def quantized(self) -> bool:
        """Whether the tensor is quantized."""
        return self.layer is not None


def decide(source: Source, layer: LayerScheme, selection: Selection) -> tuple[Decision, ...]:
    """Return the fate of every tensor of ``source``, in the order of its entries.

    Raises CheckpointError when an include pattern names nothing that can be quantized, or, under strict, when
    a linear weight cannot be.
    """
    decisions = []
    for entry in source.entries.values():
        choice = choose(entry, source.entries, selection, source.config or {})
        if choice.quantize:
            shapes = {m.shape for m in matrices(entry)}
            problem = next(filter(None, (unfit(layer.weight, layer.layout, shape) for shape in shapes)), None)
            if problem is not None or not shapes:
                choice = Choice(quantize=False, why=Why.UNFIT, reason=problem or "is empty")
        decisions.append(Decision(entry=entry, choice=choice, layer=layer if choice.quantize else None))
    misfits = [d for d in decisions if d.choice.why is Why.UNFIT]
    for pattern in selection.include:
        named = [d for d in decisions if selection.named(pattern, d.entry.name)]
        if not any(d.quantized or d.choice.why is Why.USER for d in named):
            raise CheckpointError(
                f"pattern {printable(pattern)} of include names only tensors that cannot be quantized to "
                f"{layer}, such as {fate(named[0])}; leave it out"
            )
    if selection.strict and misfits:
        listed = "; ".join(fate(d) for d in misfits[:_LISTED])
        raise CheckpointError(
            f"{len(misfits)} linear weights cannot be quantized to {layer}: {listed}; ignore them by name, "
            "or leave out strict"
        )
    return tuple(decisions)


_LISTED = 10


def fate(decision: Decision) -> str:
    """Return what the tensor is and why it is quantized or kept, in words."""
    entry = decision.entry
    return f"{printable(entry.name)} ({entry.dtype}, shape {list(entry.shape)}): {decision.choice.reason}"


def nothing_selected(decisions: Sequence[Decision]) -> str:
    """Return the sentence for a checkpoint of which nothing would be quantized, with the reasons."""
    reasons = Counter(d.choice.reason for d in decisions).most_common(3)
    listed = ", ".join(f"{count} because: {reason}" for reason, count in reasons)
    count = len(decisions)
    return f"nothing would be quantized: all {count} tensors are kept ({listed}); name some with include"


# The sets whose members take one tensor scale together: llm-compressor 0.14,
# entrypoints/model_free/microscale.py. Engines run each set as one matrix with one scale.
_FUSED = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<set>.*(attn|attention))\.[qkv]_proj$",
        r"(?P<set>.*(attn|attention))\.(wq_a|wkv_a_with_mqa)$",
        r"(?P<set>.*mlp)\.(gate|up)_proj$",
        r"(?P<set>.*)w[13]$",
    )
)


def fused_sets(modules: Sequence[str]) -> dict[str, str]:
    """Return module to the name of its set, for modules that share a tensor scale with another one."""
    sets = {}
    for module in modules:
        for number, pattern in enumerate(_FUSED):
            found = pattern.fullmatch(module)
            if found is not None:
                sets[module] = f"{found['set']}#{number}"
                break
    sizes = Counter(sets.values())
    return {module: name for module, name in sets.items() if sizes[name] > 1}


def split_sets(decisions: Sequence[Decision]) -> list[str]:
    """Return a warning for each set that engines run as one matrix and that is quantized in part."""
    fates: dict[str, dict[bool, str]] = {}
    for d in decisions:
        for number, pattern in enumerate(_FUSED):
            found = pattern.fullmatch(module_of(d.entry.name)) if len(d.entry.shape) == 2 else None
            if found is not None:
                fates.setdefault(f"{found['set']}#{number}", {})[d.quantized] = d.entry.name
                break
    return [
        f"{printable(both[True])} is quantized and {printable(both[False])} is not, but engines run them as "
        "one layer"
        for both in fates.values()
        if len(both) > 1
    ]
