"""What ``run`` does, operator by operator: check the tensors, call the kernel.

A kernel without given parameters runs under those that another one chooses from the data first, into memory
of the plan. Two gradients stand alone, under given parameters:

    quantize_backward      dx = m dv / S     m = 1 where the rounded x lies within the codes, else 0
    dequantize_backward    dv = dy S

``v`` is the number that a code represents, before zero point and scale: for integers the code itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..errors import RangeError, ShapeError, UnsupportedError
from ..functional import check_apart, tensors_of
from ..layout.blocks import spread_blocks
from ..ops.library import chosen_backend
from ..ops.registry import HeldKernel, Op, Request, held_kernel
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..params.tensors import Params
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

    kernel: runs, with all memory of the plan.
    """

    kernel: HeldKernel

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
        self._params, self._staged = signature.params, Staged(signature.operand, kernel)
        self.kernel, self._run = with_workspace(kernel, self._staged.nbytes), kernel.run

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
        self.kernel = signature.kernel(Op.DEQUANTIZE)
        self._operand, self._codes = signature.operand.contiguous(), signature.codes()
        self._params = signature.params

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
            self.kernel.run(q.data, params=q.params.stored, out=out)
        else:
            self.kernel.run(q.data, out=out)
        return out


class PlannedValues:
    """Values from values ``x``, or from a gradient."""

    def __init__(self, signature: Signature) -> None:
        kernel, self._operand = _OF_VALUES[signature.op](signature), signature.operand
        self._name = "grad" if signature.op is Op.DEQUANTIZE_BACKWARD else "x"
        self._staged, self._run = Staged(signature.operand, kernel), kernel.run
        self.kernel = with_workspace(kernel, self._staged.nbytes)

    def empty(self) -> torch.Tensor:
        return self._operand.empty()

    def check(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        self._operand.check(self._name, x)
        if out is not None:
            self._operand.check_out(out, x)

    def run(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check(x, out=out)
        self._run(self._staged.ready(x), out=out)
        return out


class PlannedGradient(PlannedValues):
    """Values from a gradient and ``x``."""

    def __init__(self, signature: Signature) -> None:
        super().__init__(signature)
        self._slope = Staged(signature.operand)
        self.kernel = with_workspace(self.kernel, self._slope.nbytes)

    def check(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor | None = None) -> None:  # type: ignore[override]
        self._operand.check("grad", grad)
        super().check(x, out=out)
        if out is not None:
            self._operand.check_out(out, grad)

    def run(self, grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.check(grad, x, out=out)
        self._run(self._slope.ready(grad), self._staged.ready(x), out=out)
        return out


def with_workspace(kernel: HeldKernel, nbytes: int) -> HeldKernel:
    """Return a kernel with so many more bytes of workspace."""
    return replace(kernel, workspace_bytes=kernel.workspace_bytes + nbytes)


def _fake_quantize(signature: Signature) -> HeldKernel:
    """Kernel of fake quantization, through codes of the plan if dynamic."""
    if signature.params is not None:
        return signature.kernel(Op.FAKE_QUANTIZE)
    first, second, codes = _chosen(signature, Op.DEQUANTIZE)
    data, params = codes

    def run(x: torch.Tensor, *, out: torch.Tensor) -> None:
        first.run(x, out=codes)
        second.run(data, params=params, out=out)

    return replace(second, run=run, settle=first.settle, strided=first.strided)


def _backward(signature: Signature) -> HeldKernel:
    """Kernel of the straight-through gradient: the result's inside the codes, else 0."""
    if signature.params is not None:
        return signature.kernel(Op.FAKE_QUANTIZE_BACKWARD)
    first, second, codes = _chosen(signature, Op.FAKE_QUANTIZE_BACKWARD)

    def run(grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> None:
        first.run(x, out=codes)
        second.run(grad, x, params=codes[1], out=out)

    return replace(second, run=run, settle=first.settle)


def _chosen(signature: Signature, op: Op) -> tuple[HeldKernel, HeldKernel, tuple[torch.Tensor, Params]]:
    """Kernel that chooses codes, kernel for ``op``, and the plan's codes.

    The second one has the memory of all.
    """
    first, second = signature.kernel(Op.QUANTIZE_DYNAMIC), signature.kernel(op)
    codes = signature.codes().empty(None)
    held = with_workspace(second, first.workspace_bytes + bytes_of(codes))
    held = replace(held, allocates=first.allocates or second.allocates)
    return first, held, (codes.data, codes.params.stored)


def _quantize_backward(signature: Signature) -> HeldKernel:
    """Kernel of the gradient of codes to values."""
    scale, reason = _element_scale(signature, dividing=True)
    kernel = signature.kernel(Op.FAKE_QUANTIZE_BACKWARD)
    if scale is None:
        return kernel

    def run(grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> None:
        kernel.run(grad, x, out=out)
        with gradual_underflow():
            out.div_(scale)

    nbytes = kernel.parameter_bytes + scale.nbytes
    return replace(kernel, run=run, parameter_bytes=nbytes, allocates=kernel.allocates or reason)


def _dequantize_backward(signature: Signature) -> HeldKernel:
    """Kernel of the gradient of values to codes."""
    scale, reason = _element_scale(signature, dividing=False)
    if scale is None:
        return HeldKernel(run=lambda grad, *, out: out.copy_(grad))

    def run(grad: torch.Tensor, *, out: torch.Tensor) -> None:
        with gradual_underflow():
            torch.mul(grad, scale, out=out)

    return HeldKernel(run=run, parameter_bytes=scale.nbytes, allocates=reason)


def _element_scale(signature: Signature, *, dividing: bool) -> tuple[torch.Tensor | None, str | None]:
    """Scales of elements, or a broadcastable one; and why products allocate.

    None is 1.
    """
    check_possible(signature)
    params, dtype = signature.params, signature.operand.dtype
    assert params is not None
    scale = params.effective_scale()
    if scale is None:
        return None, None
    # A block whose scale was lost is a constant.
    scale = torch.where(scale == 0, torch.inf, scale) if dividing else scale
    spread = spread_blocks(scale.detach(), params.scheme.granularity, params.shape).clone()
    wide = f"{dtype} is multiplied in temporary tensors of {torch.float32}"
    return spread, wide if spread.dtype is not dtype else None


_OF_VALUES: dict[Op, Callable[[Signature], HeldKernel]] = {
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
    Op.QUANTIZE_BACKWARD: _quantize_backward,
    Op.DEQUANTIZE_BACKWARD: _dequantize_backward,
}
CALLS: dict[Op, Callable[[Signature], Any]] = {
    Op.QUANTIZE: PlannedQuantize,
    Op.DEQUANTIZE: PlannedDequantize,
    Op.FAKE_QUANTIZE: PlannedValues,
    Op.FAKE_QUANTIZE_BACKWARD: PlannedGradient,
    Op.QUANTIZE_BACKWARD: PlannedGradient,
    Op.DEQUANTIZE_BACKWARD: PlannedValues,
}
"""What is planned for each operator."""


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
    if signature.op in (Op.QUANTIZE_BACKWARD, Op.DEQUANTIZE_BACKWARD) and signature.params is None:
        raise UnsupportedError(
            f"{signature.op.value} needs given parameters, whose gradient it is; pass QuantizationParams"
        )
