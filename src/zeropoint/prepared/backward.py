"""The gradients of quantize and of dequantize, each alone, under given parameters.

    quantize_backward      dx = m dv / S     m = 1 where the rounded x lies within the codes, else 0
    dequantize_backward    dv = dy S

``v`` is the number that a code represents, before zero point and scale: for integers the code itself.
"""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from ..layout.blocks import spread_blocks
from ..ops.registry import Op
from .operands import Staged
from .planned_calls import PlannedBackward, Signature


def check_possible(signature: Signature) -> None:
    """Raise UnsupportedError for gradients without given parameters."""
    if signature.op in BACKWARD_PARTS and signature.params is None:
        raise UnsupportedError(
            f"{signature.op.value} needs given parameters, whose gradient it is; pass QuantizationParams"
        )


class _Factors:
    """Scales of elements, or a broadcastable one; None means 1."""

    def __init__(self, signature: Signature, *, dividing: bool) -> None:
        check_possible(signature)
        params = signature.params
        assert params is not None
        scale, self._values = params.effective_scale(), None
        if scale is not None:
            # A block whose scale was lost is a constant.
            scale = torch.where(scale == 0, torch.inf, scale) if dividing else scale
            self._values = spread_blocks(scale.detach(), params.scheme.granularity, params.shape).clone()
        self.nbytes = 0 if self._values is None else self._values.nbytes
        narrow = self._values is not None and self._values.dtype is not signature.operand.dtype
        dtype = signature.operand.dtype
        self.allocates = f"{dtype} is multiplied in temporary tensors of {torch.float32}" if narrow else None

    def divide(self, grad: torch.Tensor) -> None:
        """Divide ``grad`` in place."""
        if self._values is not None:
            grad.div_(self._values)

    def multiply(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product to ``out``."""
        if self._values is None:
            out.copy_(grad)
        else:
            torch.mul(grad, self._values, out=out)


class QuantizeBackward(PlannedBackward):
    """The gradient of codes to values."""

    def __init__(self, signature: Signature) -> None:
        self._factors = _Factors(signature, dividing=True)
        super().__init__(signature)
        self.parameter_bytes += self._factors.nbytes
        self.allocates = self.allocates or self._factors.allocates

    def run(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """See :class:`PlannedCall`."""
        super().run(grad, x, out=out)
        self._factors.divide(out)
        return out


class DequantizeBackward:
    """The gradient of values to codes."""

    def __init__(self, signature: Signature) -> None:
        self._operand, self._staged = signature.operand, Staged(signature.operand)
        self._factors = _Factors(signature, dividing=False)
        self.workspace_bytes, self.parameter_bytes = self._staged.nbytes, self._factors.nbytes
        self.allocates, self.settle = self._factors.allocates, None

    def empty(self) -> torch.Tensor:
        """See :class:`PlannedCall`."""
        return self._operand.empty()

    def check(self, grad: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        """See :class:`PlannedCall`."""
        self._operand.check("grad", grad)
        if out is not None:
            self._operand.check_out(out, grad)

    def run(self, grad: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """See :class:`PlannedCall`."""
        self.check(grad, out=out)
        self._factors.multiply(self._staged.ready(grad), out)
        return out


BACKWARD_PARTS = {Op.QUANTIZE_BACKWARD: QuantizeBackward, Op.DEQUANTIZE_BACKWARD: DequantizeBackward}
"""Operator to its call."""
