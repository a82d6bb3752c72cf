"""SQuant: codes whose errors cancel in each block, without data.

    minimize over q in {floor(v), ceil(v)}:   (sum_j v_j - q_j)^2, then sum_j (v_j - q_j)^2,      each block
    v_j = w_j / s + z

An input with a mean meets the sum of a block's errors, which rounding leaves at random. From the codes of
``nearest``, as many as the sum says move by one, those first whose error grows least: the sum of errors of
a block is at most half a step afterwards, where no code is at an end of the range.

Source: Guo et al., SQuant, arXiv:2202.07471, whose kernels are the blocks of a scale here; rows of several
blocks are left as the blocks give them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats import IntFormat, RoundingMode
from ..layout import packing
from ..layout.blocks import block_rows, from_block_rows, spread_blocks
from ..ops.threads import gradual_underflow
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Scope, require_scheme
from .nearest import METHOD as NEAREST

_UNIT = 2.0**40


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledErrors(Method):
    """Move codes by one until the errors of a block cancel."""

    name: ClassVar[str] = "squant"
    formula: ClassVar[str] = "min over q in {floor, ceil} of (sum w / s + z - q)^2 in each block"
    source: ClassVar[str] = "SQuant (arXiv:2202.07471), by the blocks of scales"

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002 (the same for all)
        """Blocks, whose errors cancel each on its own."""
        return Scope.BLOCKS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse all but integers in groups of a row, and random rounding."""
        extent = 1 << 40
        plain = isinstance(scheme.element, IntFormat) and bool(scheme.scales) and scheme.chained is None
        if not plain or scheme.granularity.block_shape((extent, extent))[0] != 1:
            return f"method squant moves integers in groups of a row, unlike {scheme}; use int4:g64"
        if scheme.rounding.mode is RoundingMode.STOCHASTIC:
            return f"method squant compares errors, which {scheme} draws at random; use half_even"
        return None

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (the same for all)
        """Return no bound: codes may be the second closest."""
        return Bound.NONE

    def value_bytes(self, scheme: Scheme) -> int:  # noqa: ARG002 (the same for all)
        """Return the memory of errors, their order, and masks."""
        return 64

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes whose errors cancel in each block.

        >>> w = torch.tensor([[0.0, 0.4, 0.4, 0.4, 0.4, 3.0]])
        >>> METHOD.quantize(w, Scheme.parse("uint2:channel")).q.dequantize()
        tensor([[0., 1., 1., 0., 0., 3.]])
        """
        require_scheme(self, scheme)
        q = NEAREST.quantize(weight, scheme, data).q
        if weight.numel() == 0:
            return LayerResult(q=q)
        with torch.no_grad(), gradual_underflow():
            codes = q.codes.int() + _moves(weight.detach(), q)
        return LayerResult(q=replace(q, data=packing.pack(codes, scheme.bits)))


METHOD = CancelledErrors()


def _moves(weight: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """Return the moves of codes, -1, 0 or 1, int32."""
    scheme, scale = q.scheme, q.params.effective_scale()
    assert scale is not None
    steps = spread_blocks(scale.double(), scheme.granularity, q.shape).expand(q.shape)
    off = (q.dequantize(torch.float64) - weight.double()) / steps
    off = torch.where(torch.isfinite(off), off, 0.0)
    # Errors of 2^-40 steps make any sum of a block exact, in whatever order it is taken.
    errors = block_rows((off.clamp(-1, 1) * _UNIT).round().long(), scheme.granularity, 0)
    sums = errors.sum(1, keepdim=True)
    sign = sums.sign()
    room = block_rows(_room(q.codes, scheme, off), scheme.granularity, 0) > 0
    own = torch.where(room & (errors * sign > 0), errors * sign, 0)
    order = own.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    wanted = (2 * sums.abs() + int(_UNIT) - 1) // (2 * int(_UNIT))
    moves = torch.where((order < wanted) & (own > 0), -sign, 0)
    return from_block_rows(moves, scheme.granularity, q.shape).int()


def _room(codes: torch.Tensor, scheme: Scheme, off: torch.Tensor) -> torch.Tensor:
    """Return 1 where a code may move against its error."""
    target = codes.long() - off.sign().long()
    return ((target >= scheme.qmin) & (target <= scheme.qmax)).long()
