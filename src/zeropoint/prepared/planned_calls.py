"""What ``run`` does, operator by operator: check the tensors, call the kernel.

Each call is made of kernels that the plan holds; those without given parameters choose them from the data
first, into memory of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import RangeError, ShapeError, UnsupportedError
from ..functional import check_apart, tensors_of
from ..layout.blocks import spread_blocks
from ..ops.library import chosen_backend
from ..ops.registry import HeldKernel, Op, Request, held_kernel
from ..params import QuantizationParams
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from .operands import Codes, Operand, Staged, bytes_of

Value = torch.Tensor | QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Signature of a plan.

    op: quantize, dequantize, fake_quantize or the gradient of one of them.
    params: given parameters on the grids of the operand, or None when they are chosen from the data, or come
        with the codes.
    operand: the tensor of values, in or out.
    code_range: smallest and largest integer code in use, or None for the scheme's.
    backend: the only one permitted, or None for the fastest.
    """

    op: Op
    scheme: Scheme
    params: QuantizationParams | None
    operand: Operand
    code_range: tuple[int, int] | None
    backend: str | None = None

    @property
    def own_dtype(self) -> torch.dtype:
        """Dtype of the tensor that is quantized."""
        given = self.op is Op.DEQUANTIZE and self.params is not None
        return self.params.dtype if given and self.params is not None else self.operand.dtype

    def request(self, op: Op) -> Request:
        """Return the request that a kernel for ``op`` makes."""
        operand = self.operand
        return Request(
            op=op, scheme=self.scheme, shape=operand.shape, dtype=operand.dtype, own_dtype=self.own_dtype,
            device=operand.device, code_range=self.code_range, strides=operand.strides,
        )  # fmt: skip

    def codes(self) -> Codes:
        """Return the quantized tensor of the call."""
        own = self.operand
        return Codes(
            scheme=self.scheme,
            operand=Operand(shape=own.shape, dtype=self.own_dtype, strides=None, device=own.device),
        )

    @property
    def reentrant(self) -> bool:
        """Whether a run writes to its result alone, as threads need."""
        own = self.operand
        return self.params is not None and own.strides is None and own.dtype is not torch.float64

    def kernel(self, op: Op) -> HeldKernel:
        """Return the kernel for ``op``, with given parameters if any."""
        params = None if self.params is None else self.params.stored
        return held_kernel(self.request(op), chosen_backend(self.backend), params)


class PlannedCall(Protocol):
    """The executable part of a plan.

    workspace_bytes: memory held between calls that a call writes to. parameter_bytes: memory of copies of
    given parameters. allocates: why a call takes more, or None. settle: its kernels' own.
    """

    workspace_bytes: int
    parameter_bytes: int
    allocates: str | None
    settle: Callable[[], None] | None

    def empty(self) -> Value:
        """Return memory for a result."""

    def check(self, *inputs: Value, out: Value | None = None) -> None:
        """Raise the errors of a run that precede reading numbers."""

    def run(self, *inputs: Value, out: Value) -> Value:
        """Write the result into ``out`` and return it."""


class PlannedQuantize:
    """Codes of ``x``, under given parameters or with parameters chosen from it."""

    def __init__(self, signature: Signature) -> None:
        given = signature.params is not None
        kernel = signature.kernel(Op.QUANTIZE if given else Op.QUANTIZE_DYNAMIC)
        self._operand, self._codes = signature.operand, signature.codes()
        self._params, self._run = signature.params, kernel.run
        self._staged = Staged(signature.operand, kernel)
        self.workspace_bytes = kernel.workspace_bytes + self._staged.nbytes
        self.parameter_bytes, self.allocates = kernel.parameter_bytes, kernel.allocates
        self.settle = kernel.settle

    def empty(self) -> QuantizedTensor:
        return self._codes.empty(self._params)

    def check(self, x: torch.Tensor, *, out: QuantizedTensor | None = None) -> None:
        given = self._params
        self._operand.check("x", x)
        if out is not None:
            self._codes.check("out", out, whole=given is None)
            check_apart((out.data,) if given is not None else tensors_of(out), (x,))

    def run(self, x: torch.Tensor, *, out: QuantizedTensor) -> QuantizedTensor:
        given = self._params
        self.check(x, out=out)
        source = self._staged.ready(x)
        if given is None:
            self._run(source, out=(out.data, out.params.stored))
            return out
        self._run(source, out=out.data)
        if out.params is given:
            return out
        return QuantizedTensor(data=out.data, params=given, shape=out.shape, dtype=out.dtype)


class PlannedDequantize:
    """Values of codes."""

    def __init__(self, signature: Signature) -> None:
        kernel = signature.kernel(Op.DEQUANTIZE)
        self._operand, self._codes = signature.operand.contiguous(), signature.codes()
        self._params, self._run = signature.params, kernel.run
        self.workspace_bytes, self.parameter_bytes = kernel.workspace_bytes, kernel.parameter_bytes
        self.allocates, self.settle = kernel.allocates, kernel.settle

    def empty(self) -> torch.Tensor:
        return self._operand.empty()

    def check(self, q: QuantizedTensor, *, out: torch.Tensor | None = None) -> None:
        given = self._params
        self._codes.check("q", q, whole=given is None)
        if given is not None and q.params is not given and q.params != given:
            raise ShapeError(
                f"q ({q.params}) must have the parameters of the plan ({given}); make a plan for it"
            )
        if out is not None:
            self._operand.check_out(out, *tensors_of(q))

    def run(self, q: QuantizedTensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check(q, out=out)
        if self._params is None:
            self._run(q.data, params=q.params.stored, out=out)
        else:
            self._run(q.data, out=out)
        return out


class PlannedFakeQuantize:
    """Fake-quantized values of ``x``, through plan-owned codes if dynamic."""

    def __init__(self, signature: Signature) -> None:
        self._operand = signature.operand
        self._codes: QuantizedTensor | None = None
        if signature.params is not None:
            kernel = signature.kernel(Op.FAKE_QUANTIZE)
            self._run, self._staged = kernel.run, Staged(signature.operand, kernel)
            self.workspace_bytes = kernel.workspace_bytes + self._staged.nbytes
            self.parameter_bytes, self.allocates = kernel.parameter_bytes, kernel.allocates
            self.settle = kernel.settle
            return
        first, second = signature.kernel(Op.QUANTIZE_DYNAMIC), signature.kernel(Op.DEQUANTIZE)
        self._codes = signature.codes().empty(None)
        self._choose, self._run, self._staged = first.run, second.run, Staged(signature.operand, first)
        held = first.workspace_bytes + second.workspace_bytes + bytes_of(self._codes)
        self.workspace_bytes, self.parameter_bytes = held + self._staged.nbytes, 0
        self.allocates, self.settle = first.allocates or second.allocates, first.settle

    def empty(self) -> torch.Tensor:
        return self._operand.empty()

    def check(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        self._operand.check("x", x)
        if out is not None:
            self._operand.check_out(out, x)

    def run(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check(x, out=out)
        source = self._staged.ready(x)
        if self._codes is None:
            self._run(source, out=out)
            return out
        data, params = self._codes.data, self._codes.params.stored
        self._choose(source, out=(data, params))
        self._run(data, params=params, out=out)
        return out


class PlannedBackward:
    """The straight-through gradient: the result's inside the codes, else 0."""

    def __init__(self, signature: Signature) -> None:
        self._operand = signature.operand
        self._staged, self._staged_slope = Staged(signature.operand), Staged(signature.operand)
        kernel = signature.kernel(Op.FAKE_QUANTIZE_BACKWARD)
        self._run, self.allocates, self.settle = kernel.run, kernel.allocates, kernel.settle
        self.workspace_bytes = kernel.workspace_bytes + 2 * self._staged.nbytes
        self.parameter_bytes = kernel.parameter_bytes
        self._codes: QuantizedTensor | None = None
        if signature.params is None:
            first = signature.kernel(Op.QUANTIZE_DYNAMIC)
            self._codes, self._choose = signature.codes().empty(None), first.run
            self.workspace_bytes += first.workspace_bytes + bytes_of(self._codes)
            self.allocates, self.settle = first.allocates or kernel.allocates, first.settle

    def empty(self) -> torch.Tensor:
        return self._operand.empty()

    def check(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        self._operand.check("grad", grad)
        self._operand.check("x", x)
        if out is not None:
            self._operand.check_out(out, grad, x)

    def run(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check(grad, x, out=out)
        source, slope = self._staged.ready(x), self._staged_slope.ready(grad)
        if self._codes is None:
            self._run(slope, source, out=out)
            return out
        params = self._codes.params.stored
        self._choose(source, out=(self._codes.data, params))
        self._run(slope, source, params=params, out=out)
        return out


def check_code_range(signature: Signature) -> None:
    """Raise RangeError unless the code range fits given parameters' scheme."""
    if signature.code_range is None:
        return
    (low, high), scheme = signature.code_range, signature.scheme
    if type(low) is not int or type(high) is not int:
        raise RangeError(f"code range {low!r}..{high!r} must be two whole numbers, as codes are")
    if signature.params is None or signature.op in (Op.DEQUANTIZE, Op.DEQUANTIZE_BACKWARD):
        raise RangeError(
            f"code range {low}..{high} needs given parameters and values to clip: a scale chosen from "
            "the data uses all codes; pass QuantizationParams"
        )
    if not scheme.qmin <= low <= high <= scheme.qmax:
        raise RangeError(
            f"code range {low}..{high} must lie in {scheme.qmin}..{scheme.qmax}, the codes of {scheme}"
        )


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
        return self._operand.empty()

    def check(self, grad: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        self._operand.check("grad", grad)
        if out is not None:
            self._operand.check_out(out, grad)

    def run(self, grad: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check(grad, out=out)
        self._factors.multiply(self._staged.ready(grad), out)
        return out


BACKWARD_PARTS = {Op.QUANTIZE_BACKWARD: QuantizeBackward, Op.DEQUANTIZE_BACKWARD: DequantizeBackward}
"""Operator to its call."""
