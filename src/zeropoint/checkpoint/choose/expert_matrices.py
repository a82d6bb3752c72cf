"""The matrices that one tensor of a checkpoint holds: itself, or one a projection and expert.

    X.experts.gate_up_proj (E, 2 I, H)  ->  X.experts.{e}.gate_proj (I, H), X.experts.{e}.up_proj (I, H)
    X.experts.down_proj    (E, H, I)    ->  X.experts.{e}.down_proj (H, I)

The names are those that llm-compressor 0.14 gives (entrypoints/model_free/converter.py,
split_fused_moe_experts). Each matrix is a run of whole rows of the source, so nothing needs to be moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...architectures import EXPERT_PARTS
from ..read.tensor_entries import TensorEntry
from .selection import is_fused_experts, module_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """A matrix inside a source tensor: its module's name, its shape, and the absolute offset of its bytes."""

    module: str
    shape: tuple[int, int]
    begin: int


def matrices(entry: TensorEntry) -> list[WeightMatrix]:
    """Return the matrices of a weight; fused experts must have passed the check of their layout.

    >>> from pathlib import Path
    >>> fused = TensorEntry(
    ...     name="m.down_proj", dtype="F32", shape=(2, 3, 4), begin=8, nbytes=96, file=Path("f")
    ... )
    >>> [(m.module, m.begin) for m in matrices(fused)]
    [('m.0.down_proj', 8), ('m.1.down_proj', 56)]
    """
    module = module_of(entry.name)
    if not is_fused_experts(entry):
        rows, columns = entry.shape
        return [WeightMatrix(module=module, shape=(rows, columns), begin=entry.begin)]
    experts, rows, columns = entry.shape
    if not experts:
        return []
    parent, _, kind = module.rpartition(".")
    names = EXPERT_PARTS[kind]
    prefix = f"{parent}." if parent else ""
    part, size = rows // len(names), entry.nbytes // (experts * len(names))
    return [
        WeightMatrix(
            module=f"{prefix}{expert}.{name}",
            shape=(part, columns),
            begin=entry.begin + (expert * len(names) + n) * size,
        )
        for expert in range(experts)
        for n, name in enumerate(names)
    ]
