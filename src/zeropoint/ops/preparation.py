"""Held kernels made of one plain function, the fallback for plans.

Held by a plan, such a kernel computes in temporary tensors and copies its result to the given memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..params.tensors import Params
from .registry import HeldKernel, Op, Request
from .threads import gradual_underflow


class FunctionKernel:
    """A function as :class:`zeropoint.ops.registry.Kernel`.

    backend: the name of its backend. run: the function, with the arguments of :meth:`Kernel.run`.
    """

    def __init__(self, backend: str, request: Request, run: Callable[..., Any]) -> None:
        self.request, self.run = request, run
        self._backend = backend

    def hold(self, params: Params | None) -> HeldKernel:
        """See :class:`zeropoint.ops.registry.PlanKernel`."""
        return self.in_temporaries(params)

    def in_temporaries(self, params: Params | None, reason: str | None = None) -> HeldKernel:
        """Return the held kernel; reason: the cause of its temporaries."""
        given, held = _copied(params), 0
        run = _HELD[self.request.op](self.run, given)
        if given is not None:
            held = sum(each.nbytes for each in given)

        def unflushed(*tensors: Any) -> None:
            with gradual_underflow():
                run(*tensors)

        reason = reason or f"backend {self._backend} computes in temporary tensors"
        return HeldKernel(run=unflushed, workspace_bytes=0, parameter_bytes=held, allocates=reason)


Function = Callable[..., Any]


def _quantize(run: Function, given: Params | None) -> Callable[..., None]:
    return lambda x, data: run(x, given, data)


def _quantize_dynamic(run: Function, _: Params | None) -> Callable[..., None]:
    return lambda x, data, params: run(x, (data, params))


def _dequantize(run: Function, given: Params | None) -> Callable[..., None]:
    return lambda data, params, out: run(data, params if given is None else given, out)


def _fake_quantize(run: Function, given: Params | None) -> Callable[..., None]:
    return lambda x, out: run(x, given, out)


def _backward(run: Function, given: Params | None) -> Callable[..., None]:
    return lambda grad, x, params, out: run(grad, x, params if given is None else given, out)


def _copied(params: Params | None) -> Params | None:
    """Return parameters that later changes to the caller's tensors do not reach."""
    return None if params is None else [each.detach().clone() for each in params]


_HELD: dict[Op, Callable[[Function, Params | None], Callable[..., None]]] = {
    Op.QUANTIZE: _quantize,
    Op.QUANTIZE_DYNAMIC: _quantize_dynamic,
    Op.DEQUANTIZE: _dequantize,
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
}
