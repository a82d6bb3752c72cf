"""Known shapes, tensors as rows, and scales read as stored."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ....layout.blocks import row_mapping
from ....ops.lowering import How, LoweredRule, rule_of
from ....ops.lowering_refusals import rule_refusal
from ....schemes import Scheme, ZeroPoint
from ..machine.descriptor import RowLayout
from ..machine.tile import BFLOAT16, FEW, FLOAT16, FLOAT32, TILE

KINDS = {torch.bfloat16: int(BFLOAT16), torch.float16: int(FLOAT16), torch.float32: int(FLOAT32)}


@functools.lru_cache(maxsize=1024)
def stored_rule(scheme: Scheme, dtype: torch.dtype) -> LoweredRule | None:
    """Rule to read scales as stored; None: kernels take factors."""
    # Read as they are stored, scales have no zero points next to them.
    if (
        not scheme.scales
        or scheme.zero_point is not ZeroPoint.NONE
        or rule_refusal(scheme.start, dtype) is not None
    ):
        return None
    rule = rule_of(scheme, dtype)
    return rule if rule.how in (How.POWER, How.MINIFLOAT) else None


@dataclass(frozen=True, kw_only=True)
class View:
    """Row view of a tensor: rows, and layout of codes and parameters."""

    rows: int
    layout: RowLayout

    @property
    def one_pass(self) -> bool:
        """Whether blocks lie in one row; others need a statistics pass."""
        return self.layout.row_div == 1 and self.layout.row_mod >= self.rows


@functools.lru_cache(maxsize=1024)
def view_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> View | str:
    """Tensor as rows with blocks along the row, or the reason against."""
    cols = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    granularity = scheme.granularity
    extents, grid = granularity.block_shape(shape) or (1,), granularity.grid(shape) or (1,)
    block = min(extents[-1], max(cols, 1))
    if block * scheme.bits % 8 and block < cols and block > TILE // 8:
        return f"blocks of {block} codes of {scheme.bits} bits do not end on bytes"
    mapping = row_mapping(shape[:-1], extents[:-1], grid[:-1])
    if mapping is None:
        return f"blocks of {granularity} in a tensor of shape {shape} span rows unevenly"
    div, mod = mapping
    row_blocks = grid[-1]
    return View(
        rows=rows,
        layout=RowLayout(
            cols=cols,
            block=block,
            row_blocks=row_blocks,
            row_bytes=-(-cols * scheme.bits // 8),
            bits=scheme.bits,
            kind=KINDS[dtype],
            row_div=div,
            row_mod=mod,
        ),
    )


def rows_of_levels(scheme: Scheme, shape: tuple[int, ...], blocks: int) -> tuple[int, int] | None:
    """Matrix shape for kernels taking few rows, or None for long.

    Rows are the tensor's, or coarse blocks. blocks: fine blocks in a coarse block. None, too, where
    the granularity cuts that matrix into other blocks, as the granularity of a numbered axis does.
    """
    cols, fine = shape[-1], scheme.row_block(shape)
    coarse = blocks * fine
    alone = cols > FEW and cols % coarse == 0 and coarse * scheme.bits % 8 == 0
    rows = math.prod(shape) // (coarse if alone else cols), coarse if alone else cols
    same = scheme.granularity.block_shape(rows) == (1, min(fine, rows[1]))
    return rows if same and rows[1] <= FEW else None
