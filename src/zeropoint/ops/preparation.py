"""Prepared kernels: a call of an operator whose arguments but the tensors are resolved once.

A backend called ``x`` may offer ``zeropoint.kernels.x.prepared.prepare``, whose kernels take no memory for
each call; every other backend is wrapped here, and takes what its own functions take.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import code_range as limits
from . import in_place
from .registry import Backend, Op, Params, Reference, Request
from .threads import gradual_underflow


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call without its data, and what is known before there is any.

    params: given parameters, of which the kernel keeps its own copy; None when they come with the data.
    code_range: smallest and largest integer code in use, within those of the scheme; None means all.
    """

    request: Request
    params: Params | None = None
    code_range: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedKernel:
    """A function of tensors: contiguous, of the shapes and dtypes of the call, unchecked.

    run: by operator, ``quantize(x, data)``, ``quantize_dynamic(x, data, params)``,
        ``dequantize(data, params, out)``, ``fake_quantize(x, out)``,
        ``fake_quantize_backward(grad, x, params, out)``; ``params`` is None where they were given before.
        It writes to ``data``, ``out`` and, dynamic, ``params``.
    workspace_bytes: memory that the kernel holds between calls, and writes to in each.
    parameter_bytes: memory of its copies of given parameters, which no call writes to.
    allocates: why a call takes further memory that grows with the data, or None when it takes none.
    """

    run: Callable[..., None]
    workspace_bytes: int
    parameter_bytes: int = 0
    allocates: str | None = None


def prepare(call: Call, backend: Backend) -> PreparedKernel:
    """Return the kernel for ``call``, which ``backend`` does not refuse."""
    name = f"zeropoint.kernels.{backend.name}"
    # A backend that was registered in the place of ours must not run our kernels.
    ours = type(backend).__module__.startswith(f"{name}.")
    if not ours or importlib.util.find_spec(f"{name}.prepared") is None:
        return _in_place(call, backend) or _wrapped(call, backend)
    kernel: PreparedKernel = importlib.import_module(f"{name}.prepared").prepare(call)
    if call.params is None:
        return kernel
    # Under given parameters these kernels hold nothing else.
    return replace(kernel, workspace_bytes=0, parameter_bytes=kernel.workspace_bytes)


def _in_place(call: Call, backend: Backend) -> PreparedKernel | None:
    """Return the reference's kernel that takes no memory, where there is one."""
    if type(backend) is not Reference or call.params is None or in_place.refusal(call.request) is not None:
        return None
    kernel = in_place.InPlace(call.request, call.params, call.code_range)
    return PreparedKernel(
        run=kernel.runner(call.request.op),
        workspace_bytes=kernel.workspace_bytes,
        parameter_bytes=kernel.parameter_bytes,
    )


def _wrapped(call: Call, backend: Backend) -> PreparedKernel:
    call = replace(call, params=_copied(call.params))
    run, held = _WRAPPERS[call.request.op](call, backend), 0
    if call.params is not None:
        scales, zero_point = call.params
        held = sum(scale.nbytes for scale in scales) + (0 if zero_point is None else zero_point.nbytes)
    reason = f"backend {backend.name} computes in temporary tensors"
    if type(backend) is Reference and call.params is not None:
        reason = in_place.refusal(call.request) or reason

    def unflushed(*tensors: Any) -> None:
        with gradual_underflow():
            run(*tensors)

    return PreparedKernel(run=unflushed, workspace_bytes=0, parameter_bytes=held, allocates=reason)


def _quantize(call: Call, backend: Backend) -> Callable[..., None]:
    scheme, params = call.request.scheme, call.params
    assert params is not None

    def run(x: torch.Tensor, data: torch.Tensor) -> None:
        backend.quantize(x, scheme, params, data)
        if call.code_range is not None:
            limits.clamp_codes(data, scheme, call.request.shape, call.code_range)

    return run


def _quantize_dynamic(call: Call, backend: Backend) -> Callable[..., None]:
    scheme = call.request.scheme

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        backend.quantize_dynamic(x, scheme, (data, params))

    return run


def _dequantize(call: Call, backend: Backend) -> Callable[..., None]:
    given = call.params

    def run(data: torch.Tensor, params: Params, out: torch.Tensor) -> None:
        backend.dequantize(data, params if given is None else given, call.request, out)

    return run


def _fake_quantize(call: Call, backend: Backend) -> Callable[..., None]:
    scheme, params = call.request.scheme, call.params
    assert params is not None

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        if call.code_range is None:
            out.copy_(backend.fake_quantize(x, scheme, params))
        else:
            out.copy_(limits.fake_quantize(x, scheme, params, call.code_range))

    return run


def _backward(call: Call, backend: Backend) -> Callable[..., None]:
    scheme, given = call.request.scheme, call.params

    def run(grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor) -> None:
        used = params if given is None else given
        out.copy_(backend.fake_quantize_backward(grad, x, scheme, used))
        if call.code_range is not None:
            limits.gate(out, x, scheme, used, call.code_range)

    return run


def _copied(params: Params | None) -> Params | None:
    """Return parameters that later changes to the caller's tensors do not reach."""
    if params is None:
        return None
    scales, zero_point = params
    return tuple(
        s.detach().clone() for s in scales
    ), None if zero_point is None else zero_point.detach().clone()


_WRAPPERS: dict[Op, Callable[[Call, Backend], Callable[..., None]]] = {
    Op.QUANTIZE: _quantize,
    Op.QUANTIZE_DYNAMIC: _quantize_dynamic,
    Op.DEQUANTIZE: _dequantize,
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
}
