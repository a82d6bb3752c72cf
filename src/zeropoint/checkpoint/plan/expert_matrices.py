"""Matrices in one tensor: itself, or one per projection and expert.

    X.experts.gate_up_proj (E, 2 I, H)  ->  X.experts.{e}.gate_proj (I, H), X.experts.{e}.up_proj (I, H)
    X.experts.down_proj    (E, H, I)    ->  X.experts.{e}.down_proj (H, I)

The names are those that llm-compressor 0.14 gives (entrypoints/model_free/converter.py,
split_fused_moe_experts). Each matrix is a run of rows of the source, or every second one where gate and up
alternate; of transposed experts, outputs count as rows. In layouts that keep experts fused, the rows of all
experts are one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...architectures import ExpertLayout, expert_parts
from ...schemes import ZeroPoint
from ..read.tensor_entries import TensorEntry
from .selection import module_of

if TYPE_CHECKING:
    from ..read.quantized_layers import StoredLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """A matrix inside a source tensor.

    module: name of its module. shape: rows and columns. first, step: the rows of the tensor that are its own,
    from ``first`` on each ``step``-th. experts: how many experts it holds, or None.
    """

    module: str
    shape: tuple[int, int]
    first: int = 0
    step: int = 1
    experts: int | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Its shape, with a first axis of experts where it holds several."""
        rows, columns = self.shape
        return self.shape if self.experts is None else (self.experts, rows // self.experts, columns)


def matrices(entry: TensorEntry, *, fused: bool = False) -> list[WeightMatrix]:
    """Return the matrices of a weight or of known fused experts.

    fused: whether experts stay in one.

    >>> from pathlib import Path
    >>> from zeropoint.checkpoint.read.tensor_entries import Stack
    >>> experts = TensorEntry(
    ...     name="m.down_proj",
    ...     dtype="F32",
    ...     shape=(2, 3, 4),
    ...     begin=8,
    ...     nbytes=96,
    ...     file=Path("f"),
    ...     stack=Stack("m", ("down_proj",)),
    ... )
    >>> [(m.module, m.first) for m in matrices(experts)]
    [('m.0.down_proj', 0), ('m.1.down_proj', 3)]
    """
    module, stack = module_of(entry.name), entry.stack
    if stack is None:
        rows, columns = entry.shape
        return [WeightMatrix(module=module, shape=(rows, columns))]
    experts, *matrix = entry.shape
    columns, rows = matrix if stack.transposed else reversed(matrix)
    if not experts:
        return []
    if fused:
        return [WeightMatrix(module=module, shape=(experts * rows, columns), experts=experts)]
    prefix = f"{stack.holder}." if stack.holder else ""
    part = rows // len(stack.parts)
    step = len(stack.parts) if stack.interleaved else 1
    return [
        WeightMatrix(
            module=f"{prefix}{expert}.{name}",
            shape=(part, columns),
            first=expert * rows + n * (1 if stack.interleaved else part),
            step=step,
        )
        for expert in range(experts)
        for n, name in enumerate(stack.parts)
    ]


def has_one_scale_each(layer: StoredLayer, layout: ExpertLayout) -> bool:
    """Return whether each fused matrix has exactly one scale."""
    weight = layer.weight
    plain = len(weight.scales) == 1 and weight.zero_point is ZeroPoint.NONE and not weight.offsets
    if layer.experts is None or not plain:
        return False
    rows, columns = weight.granularity.block_shape(layer.shape)
    halves = len(expert_parts(layer.module))
    apart = not layout.interleaved and rows * halves == layer.shape[0]
    return columns == layer.shape[1] and (rows == layer.shape[0] or apart)
