"""Integer operators on float64 tensors in preallocated memory.

Plain torch, any device. Each step equals the step of :mod:`.reference`, in the same order and dtype, written
to memory that exists. Other requests run on the reference, in temporary tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..formats import Overflow, RoundingMode
from ..layout.blocks import spread_blocks
from ..params.arithmetic import multiplies
from ..params.effective import effective_scale
from ..params.tensors import Params, zero_point_of
from . import reference
from .registry import HeldKernel, Op, Request

Slice = slice | tuple[()]
CHUNK = 1 << 17
"""Elements of the workspace, 1 MiB of float64, unless a row alone has more."""


def refusal(request: Request) -> str | None:
    """Return why :class:`InPlace` does not offer ``request``, or None."""
    scheme = request.scheme
    element = scheme.element
    if (request.dtype, request.own_dtype) != (torch.float64, torch.float64):
        return f"{request.dtype} is computed in temporary tensors"
    if not element.is_whole or element.bits > 31:
        return f"{scheme.element_name} is computed in temporary tensors"
    if request.op in (Op.QUANTIZE, Op.DEQUANTIZE) and element.bits != 8:
        return f"codes of {element.bits} bits are packed in temporary tensors"
    if scheme.chained is not None or len(scheme.scales) != 1 or multiplies(scheme):
        return f"scales of {scheme} are combined in temporary tensors"
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN or scheme.overflow is not Overflow.SATURATE:
        return f"rounding {scheme.rounding}, overflow {scheme.overflow.value} take temporary tensors"
    return None


class InPlace:
    """Operators on float64 tensors under given parameters.

    scale, zero: one for each element, broadcastable; the zero point is 0 where the scheme has none.
    """

    def __init__(self, request: Request, params: Params) -> None:
        scheme, shape = request.scheme, request.shape
        scale = effective_scale(scheme, params, shape, request.own_dtype)
        assert scale is not None
        blocks = scheme.granularity
        self._scale = spread_blocks(scale, blocks, shape).clone()
        zero = zero_point_of(scheme, params)
        zero = torch.zeros_like(scale) if zero is None else zero.double()
        self._zero = spread_blocks(zero, blocks, shape).clone()
        self._inside = scheme.zero_inside
        self._low, self._high = request.code_range or (scheme.qmin, scheme.qmax)
        self._chunks = reference.chunks(shape, CHUNK)
        rows = max((pick.stop - pick.start for pick in self._chunks if isinstance(pick, slice)), default=0)
        side = (rows, *shape[1:]) if shape else ()
        needs = request.op is Op.QUANTIZE
        masks = request.op is Op.FAKE_QUANTIZE_BACKWARD
        self._steps = torch.empty(side if needs else 0, dtype=torch.float64, device=request.device)
        self._fits = torch.empty((2, *side) if masks else 0, dtype=torch.bool, device=request.device)
        self._nothing = torch.zeros((), dtype=torch.float64, device=request.device)
        self._total = torch.zeros((), dtype=torch.float64, device=request.device)
        self._codes = torch.int8 if scheme.element.signed else torch.uint8
        self._op = request.op

    def held(self) -> HeldKernel:
        """Return the kernel with its memory."""
        runs: dict[Op, Callable[..., None]] = {
            Op.QUANTIZE: self._quantize,
            Op.DEQUANTIZE: self._dequantize,
            Op.FAKE_QUANTIZE: self._fake_quantize,
            Op.FAKE_QUANTIZE_BACKWARD: self._backward,
        }
        room = self._steps, self._fits, self._nothing, self._total
        return HeldKernel(
            run=runs[self._op],
            workspace_bytes=sum(each.nbytes for each in room),
            parameter_bytes=self._scale.nbytes + self._zero.nbytes,
        )

    def _quantize(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        codes = out.view(self._codes).reshape(x.shape)
        for pick in self._chunks:
            steps = self._part(self._steps, pick)
            # Inf and NaN times zero are NaN, and so is the sum of all.
            torch.mul(x[pick], 0.0, out=steps)
            torch.sum(steps, tuple(range(steps.dim())), out=self._total)
            if math.isnan(self._total.item()):
                reference.require_finite(x)
            self._round(x, pick, steps)
            codes[pick].copy_(steps.clamp_(self._low, self._high))

    def _dequantize(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        codes = data.view(self._codes).reshape(out.shape)
        for pick in self._chunks:
            self._scale_back(out[pick].copy_(codes[pick]), pick)

    def _fake_quantize(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        for pick in self._chunks:
            steps = out[pick]
            self._round(x, pick, steps)
            steps.clamp_(self._low, self._high).nan_to_num_(nan=float(self._low))
            self._scale_back(steps, pick)

    def _backward(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> None:
        for pick in self._chunks:
            slope, target = grad[pick], out[pick]
            low, high = self._part(self._fits[0], pick), self._part(self._fits[1], pick)
            self._round(x, pick, target)
            torch.ge(target, self._low, out=low)
            torch.le(target, self._high, out=high)
            low.logical_and_(high)
            torch.copysign(self._nothing.expand(slope.shape), slope, out=target)
            torch.where(low, slope, target, out=target)

    def _round(self, x: torch.Tensor, pick: Slice, steps: torch.Tensor) -> None:
        """Set ``steps`` to rounded quotients plus zero point; -0.0 becomes 0.0."""
        torch.div(x[pick], self._of(self._scale, pick), out=steps)
        zero = self._of(self._zero, pick)
        if self._inside:
            steps.add_(zero).round_().add_(0.0)
        else:
            steps.round_().add_(zero)

    def _scale_back(self, steps: torch.Tensor, pick: Slice) -> None:
        steps.sub_(self._of(self._zero, pick)).mul_(self._of(self._scale, pick))

    @staticmethod
    def _of(values: torch.Tensor, pick: Slice) -> torch.Tensor:
        """Return the part of broadcastable ``values`` that belongs to a chunk."""
        return values[pick] if values.ndim and values.shape[0] > 1 else values

    @staticmethod
    def _part(buffer: torch.Tensor, pick: Slice) -> torch.Tensor:
        return buffer[: pick.stop - pick.start] if isinstance(pick, slice) else buffer
