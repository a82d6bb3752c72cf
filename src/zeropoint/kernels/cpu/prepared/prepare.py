"""From a call without its data to a function of tensors alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....ops.preparation import Call, PreparedKernel
from ....ops.registry import Op, Params, Request
from ....ops.threads import gradual_underflow
from .. import layout as k
from ..arrays import value_bounds
from ..backend import BACKEND
from ..calls import ChosenScales, GivenCall, OnePass, ScaleMemory, one_pass, refuse
from ..lowering import rule_refusal
from .choose import BlockScales, CoarseScale
from .factors import Divisors, StoredScales, dequantize_refusal, load_refusal, multipliers

Run = Callable[..., None]


def prepare(call: Call) -> PreparedKernel:
    """Return the kernel for ``call``, which the backend does not refuse."""
    return _PREPARE[call.request.op](call)


def _given(call: Call) -> GivenCall:
    """Return the call under given parameters."""
    wanted = call.request
    return GivenCall(wanted.scheme, wanted.shape, wanted.dtype, wanted.own_dtype, call.code_range)


def _quantize(call: Call) -> PreparedKernel:
    given, divisors = _given(call), Divisors(call)

    def run(x: torch.Tensor, data: torch.Tensor) -> None:
        given.quantize(x, divisors.values, divisors.zeros, data)

    return PreparedKernel(run=run, workspace_bytes=divisors.nbytes)


def _quantize_dynamic(call: Call) -> PreparedKernel:
    wanted = call.request
    scheme, shape, dtype = wanted.scheme, wanted.shape, wanted.dtype
    if not scheme.scales:
        encode = _quantize(Call(request=wanted, params=((), None))).run
        return PreparedKernel(run=lambda x, data, _params: encode(x, data), workspace_bytes=0)
    reason = rule_refusal(scheme, dtype)
    if reason is not None or 0 in shape:
        return PreparedKernel(run=_unprepared(wanted), workspace_bytes=0, allocates=reason)
    once = one_pass(scheme, shape, dtype)
    return _two_passes(call) if once is None else _one_pass(wanted, once)


def _unprepared(wanted: Request) -> Run:
    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            BACKEND.quantize_dynamic(x, wanted.scheme, (data, params))

    return run


def _one_pass(wanted: Request, call: OnePass) -> PreparedKernel:
    memory, coarse = ScaleMemory(call.scales), CoarseScale(wanted) if call.two_levels else None

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            factor = None if coarse is None else coarse.into(x, params[0][1])
            if call.run(x, data, params, memory, factor) != k.OK:
                refuse(x, wanted.scheme)

    return PreparedKernel(run=run, workspace_bytes=memory.nbytes + (0 if coarse is None else coarse.nbytes))


def _two_passes(call: Call) -> PreparedKernel:
    wanted = call.request
    scheme, shape, dtype = wanted.scheme, wanted.shape, wanted.dtype
    memory, blocks = ScaleMemory(ChosenScales(scheme, shape, dtype)), BlockScales(wanted)
    coarse = CoarseScale(wanted) if len(scheme.scales) > 1 else None
    given, divisors = _given(call), Divisors(call)

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            factor = None if coarse is None else coarse.into(x, params[0][1])
            blocks.choose(x, factor, memory, params)
            memory.store(params)
            divisors.load(params)
            given.quantize(x, divisors.values, divisors.zeros, data)

    held = memory.nbytes + blocks.nbytes + divisors.nbytes + (0 if coarse is None else coarse.nbytes)
    return PreparedKernel(run=run, workspace_bytes=held)


def _dequantize(call: Call) -> PreparedKernel:
    given, stored = _given(call), StoredScales(call)

    def run(data: torch.Tensor, params: Params | None, out: torch.Tensor) -> None:
        with gradual_underflow():
            scales = stored.load(params)
        given.dequantize(data, scales, out)

    return PreparedKernel(run=run, workspace_bytes=stored.nbytes, allocates=dequantize_refusal(call))


def _fake_quantize(call: Call) -> PreparedKernel:
    given, divisors, back = _given(call), Divisors(call), multipliers(call)

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        given.fake_quantize(x, divisors.values, back, divisors.zeros, out)

    return PreparedKernel(run=run, workspace_bytes=divisors.nbytes + back.nbytes)


def _backward(call: Call) -> PreparedKernel:
    scheme, own = call.request.scheme, call.request.own_dtype
    given, divisors, bounds = _given(call), Divisors(call), value_bounds(scheme)
    refusal = None if call.params is not None else load_refusal(scheme, own)

    def run(grad: torch.Tensor, x: torch.Tensor, params: Params | None, out: torch.Tensor) -> None:
        with gradual_underflow():
            divisors.load(params)
        given.fake_quantize_backward(grad, x, bounds, divisors.values, divisors.zeros, out)

    return PreparedKernel(run=run, workspace_bytes=divisors.nbytes, allocates=refusal)


_PREPARE: dict[Op, Callable[[Call], PreparedKernel]] = {
    Op.QUANTIZE: _quantize,
    Op.QUANTIZE_DYNAMIC: _quantize_dynamic,
    Op.DEQUANTIZE: _dequantize,
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
}
