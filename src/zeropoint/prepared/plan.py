"""Plans: one operator on one kind of tensor, resolved without data."""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..errors import ShapeError, UnsupportedError, ZeropointError
from ..formats.torch_dtypes import wide_dtype
from ..functional import detached_params, fit_params
from ..ops.library import chosen_backend
from ..ops.registry import Explanation, Request, choose, explain
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..schemes import Scheme
from ..shown import repr_html
from .operands import Operand
from .planned_calls import CALLS, PlannedCall, Signature, check_code_range, check_possible


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan:
    """A prepared call of one operator.

    A plan whose parameters are not given, or for strided or float64 tensors, writes to its workspace: a run
    while another one runs in a second thread raises UnsupportedError. A plan keeps what it read of given
    parameters, whose tensors must not be changed as long as it is used.

    Args:
        signature: what the plan was made from.
        explanation: the backend that runs, and why the others do not.
        guarantee: what is promised of the numbers.
        workspace_bytes: memory that the plan holds and writes to in each run, in bytes: statistics, chosen
            scales, and contiguous copies of strided inputs.
        parameter_bytes: memory of its copies of given parameters, prepared for the kernel.
        allocates: why a run with ``out`` takes further memory that grows with the tensor, or None when it
            takes none.

    Example:
        >>> p = plan("quantize", QuantizationParams.new(0.5), (4,))
        >>> p.run(torch.tensor([1.0, -1.25, 0.2, 90.0])).codes
        tensor([  2,  -2,   0, 127], dtype=torch.int8)
    """

    signature: Signature
    explanation: Explanation
    guarantee: Guarantee
    workspace_bytes: int
    parameter_bytes: int
    allocates: str | None
    _call: PlannedCall = field(repr=False)
    _free: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def identity(self) -> str:
        """One spelling of the plan: backend, operator, scheme, tensor, parameters."""
        own, chosen = self.signature, self.explanation.chosen
        given = "chosen" if own.params is None else "given"
        codes = "" if own.code_range is None else "/codes[{}..{}]".format(*own.code_range)
        strides = "" if own.operand.strides is None else f"/strides{list(own.operand.strides)}"
        tensor = f"{str(own.operand.dtype).removeprefix('torch.')}{list(own.operand.shape)}"
        return f"{chosen}/{own.op.value}/{own.scheme}/{tensor}{strides}/{given}{codes}"

    def empty(self) -> Any:
        """Return uninitialized memory for a result, a tensor or QuantizedTensor."""
        return self._call.empty()

    def run(self, *inputs: Any, out: Any = None) -> Any:
        """Run on ``inputs``; return the result, in ``out`` if given.

        quantize: ``run(x) -> QuantizedTensor``. dequantize: ``run(q: QuantizedTensor) -> Tensor``.
        fake_quantize: ``run(x) -> Tensor``. fake_quantize_backward: ``run(grad, x) -> Tensor``, where
        ``grad`` is laid out as ``x``. quantize_backward: the same, where ``grad`` is the gradient of the
        codes.
        dequantize_backward: ``run(grad) -> Tensor``, the gradient of the codes from the gradient of the
            values.

        No result carries a gradient, and no input is modified.

        Args:
            out: memory for the result; allocated if None.
            inputs: a tensor, or what the operator takes.

        Returns:
            The result, which is ``out`` where given.

        Raises:
            DtypeError: for tensors that the plan is not for.
            ShapeError: for tensors that the plan is not for.
            NonFiniteError: for NaN and Inf where quantize does; after an error the content of ``out`` means
                nothing.
            UnsupportedError: when another thread runs the plan, whose workspace serves one run at a time.
        """
        result = self._call.empty() if out is None else out
        if self.signature.reentrant:
            return self._call.run(*inputs, out=result)
        if not self._free.acquire(blocking=False):
            raise UnsupportedError(
                "plan is running in another thread, and its workspace serves one run at a time; make one "
                "plan for each thread"
            )
        try:
            with gradual_underflow():
                return self._call.run(*inputs, out=result)
        finally:
            self._free.release()

    def check(self, *inputs: Any, out: Any = None) -> None:
        """Raise the errors of :meth:`run` for these tensors, but for values.

        Args:
            inputs, out: as for :meth:`run`.

        Example:
            >>> plan("quantize", "int8", (4,)).check(torch.zeros(4))
        """
        self._call.check(*inputs, out=out)

    def synchronize(self) -> None:
        """Wait for the device, and raise errors of runs since then.

        A run on a device returns before the device is done, and so before it is known whether numbers are
        finite. A CUDA graph that replays runs is one of them. On the host, runs raise at once.

        Raises:
            NonFiniteError: for NaN and Inf, and for a block whose scale does not fit its format.

        Example:
            >>> plan("quantize", "int8", (4,)).synchronize()
        """
        settle = self._call.kernel.settle
        if settle is not None:
            settle()

    def within(self, low: int, high: int) -> Plan:
        """Return the plan with codes, zero point included, clamped to ``low..high``.

        Args:
            low: the smallest code that is written.
            high: the largest code that is written.

        Raises:
            RangeError: unless these are integer codes of the scheme, its parameters are given, and the
                operator clips.

        Example:
            >>> p = plan("fake_quantize", QuantizationParams.new(0.5), (2,)).within(-3, 3)
            >>> p.run(torch.tensor([1.0, 9.0]))
            tensor([1.0000, 1.5000])
        """
        return _plan(replace(self.signature, code_range=(low, high)))

    _repr_html_ = repr_html

    def __repr__(self) -> str:
        return f"Plan({self.identity}, workspace of {self.workspace_bytes} bytes)"


def plan(
    op: str,
    scheme: str | Scheme | QuantizationParams,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    strides: tuple[int, ...] | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
) -> Plan:
    """Return a prepared call of ``op`` on one kind of tensor.

    The backend is chosen now, :func:`zeropoint.only_backend` considered.

    Args:
        op: quantize, dequantize, fake_quantize, or a straight-through gradient: fake_quantize_backward, and
            under given parameters quantize_backward and dequantize_backward, of which it is made.
        scheme: parameters, or a scheme whose parameters each run takes from the data (quantize, fake_quantize
            and its gradient) or from the codes (dequantize).
        shape: of the tensor of values.
        dtype: float64, float32, float16 or bfloat16, of the values, in or out.
        strides: None for contiguous tensors; results are always contiguous.
        device: of the tensors.
        backend: the name of the one that shall run, or None for the fastest that can.

    Raises:
        UnsupportedError: for another operator or device.
        ShapeError: for a combination without meaning, and what :meth:`QuantizationParams.validate` raises.
        DtypeError: for a combination without meaning, and what :meth:`QuantizationParams.validate` raises.
        SchemeError: for a combination without meaning, and what :meth:`QuantizationParams.validate` raises.

    Example:
        >>> plan("quantize", "int8:channel", (8, 256)).identity
        'cpu/quantize/int8:channel/float32[8, 256]/chosen'
    """
    signature = _signature(op, scheme, shape, dtype, strides=strides, device=device)
    return _plan(replace(signature, backend=backend))


def can_implement(
    op: str,
    scheme: str | Scheme | QuantizationParams,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    strides: tuple[int, ...] | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
) -> Explanation:
    """Return a plan's backend, and refusals of the others.

    Of a plan that cannot be made, the answer is false, and says under ``request`` what :func:`plan` raises.
    Tensors are checked by :meth:`Plan.check`.

    Args:
        op, scheme, shape, dtype, strides, device, backend: as for :func:`plan`.

    Example:
        >>> (
        ...     bool(can_implement("quantize", "int8:channel4", (2, 3))),
        ...     bool(can_implement("quantize", "int8", (2, 3))),
        ... )
        (False, True)
        >>> can_implement("quantize", "int8", (4,), torch.float64).reasons["cpu"]
        'torch.float64 is computed in float64'
    """
    try:
        signature = _signature(op, scheme, shape, dtype, strides=strides, device=device)
        made = replace(signature, backend=backend)
        check_possible(made)
        return explain(made.request(made.op), backend)
    except ZeropointError as error:
        return Explanation(chosen=None, reasons={"request": str(error)})


def _signature(
    op: str,
    scheme: str | Scheme | QuantizationParams,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    strides: tuple[int, ...] | None,
    device: str | torch.device,
) -> Signature:
    try:
        lengths = tuple(map(operator.index, shape))
    except TypeError:
        raise ShapeError(f"shape (={shape!r}) must be a tuple of lengths") from None
    operand = Operand(shape=lengths, dtype=dtype, strides=strides, device=_resolved(device))
    known = {member.value: member for member in CALLS}
    if op not in known:
        raise UnsupportedError(f"op (={op!r}) must be one of {', '.join(known)}")
    params = None
    if isinstance(scheme, QuantizationParams):
        params = detached_params(fit_params(scheme, operand.shape, operand.dtype))
        _require_device(params, operand.device)
        params.validate()
        scheme = params.scheme
    parsed = Scheme.parse(scheme)
    # A granularity with more axes than the tensor is an error of the plan, not of its first run.
    parsed.granularity.block_shape(operand.shape)
    return Signature(op=known[op], scheme=parsed, params=params, operand=operand, code_range=None)


def _resolved(device: str | torch.device) -> torch.device:
    """Return the device with its index, which tensors have: ``cuda:0`` for ``cuda``."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"device (={str(device)!r}) is not there: {reason}") from error


def _require_device(params: QuantizationParams, device: torch.device) -> None:
    for tensor in params.stored:
        if tensor.device != device:
            raise ShapeError(
                f"parameters (on {tensor.device}) must be on {device}; use params.to({str(device)!r})"
            )


def _plan(signature: Signature) -> Plan:
    check_code_range(signature)
    request = signature.request(signature.op)
    chosen = choose(request, chosen_backend(signature.backend)).name
    call = CALLS[signature.op](signature)
    kernel = call.kernel
    return Plan(
        signature=signature,
        explanation=explain(request, chosen),
        guarantee=guarantee_of(request),
        workspace_bytes=kernel.workspace_bytes,
        parameter_bytes=kernel.parameter_bytes,
        allocates=kernel.allocates,
        _call=call,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """The numerical promise of a plan.

    deterministic: the same input gives the same bytes in every run; stochastic rounding draws from its seed.
    bit_stable: neither the number of threads nor the backend changes a byte.
    arithmetic: dtype in which quotients and products are computed; steps are rounded without loss in it or in
        a wider one.

    The first two hold of every plan.

    >>> Guarantee(arithmetic=torch.float32).bit_stable
    True
    """

    deterministic: ClassVar[bool] = True
    bit_stable: ClassVar[bool] = True
    arithmetic: torch.dtype


def guarantee_of(request: Request) -> Guarantee:
    """Return the promise for ``request``, which holds of every backend.

    Computation is in float64 when the values or the tensor that was quantized are, else in float32.
    """
    wide = {wide_dtype(request.dtype), wide_dtype(request.own_dtype)}
    arithmetic = torch.float64 if torch.float64 in wide else torch.float32
    return Guarantee(arithmetic=arithmetic)
