"""From a call without its data to a function of tensors alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ....formats import FloatFormat
from ....ops import reference
from ....ops.preparation import Call, PreparedKernel
from ....ops.registry import Op, Params, Request
from ....ops.threads import gradual_underflow, over_rows
from .. import layout as k
from ..arrays import NO_BYTES, code_order, flat_array, value_bounds, value_table
from ..backend import BACKEND
from ..decode import dequantize_rows
from ..fake import fake_quantize_backward_rows, fake_quantize_rows
from ..half import quantize_bfloat16_rows
from ..layout import Element
from ..lowering import View, element_of, given_rule, half_boundaries, rule_of, rule_refusal, view_of
from ..quantize import quantize_rows
from .choose import BlockScales, CoarseScale, ScaleMemory, refuse
from .factors import Divisors, StoredScales, dequantize_refusal, load_refusal, multipliers

Run = Callable[..., None]


def prepare(call: Call) -> PreparedKernel:
    """Return the kernel for ``call``, which the backend does not refuse."""
    return _PREPARE[call.request.op](call)


def _parts(call: Call) -> tuple[View, Element]:
    """Return the view and the element, its codes limited to those of the call."""
    wanted = call.request
    view = view_of(wanted.scheme, wanted.shape, wanted.dtype)
    assert isinstance(view, View)
    element = element_of(wanted.scheme, wanted.own_dtype, multiply=False)
    if call.code_range is not None:
        low, high = call.code_range
        element = element._replace(low=np.float32(low), high=np.float32(high))
    return view, element


def _encoder(call: Call, divisors: Divisors) -> Callable[[torch.Tensor, torch.Tensor], None]:
    view, element = _parts(call)
    order, rule = code_order(call.request.scheme), given_rule()

    def encode(x: torch.Tensor, data: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        source, target = flat_array(x), data.numpy().reshape(-1)

        def work(first: int, last: int) -> int:
            return int(quantize_rows(
                source, view.layout, element, rule, order, divisors.values, NO_BYTES, divisors.zeros, target,
                np.uint64(first), np.uint64(last),
            ))  # fmt: skip

        if over_rows(view.rows, x.numel(), work) == k.BAD_VALUE:
            reference.require_finite(x)

    return encode


def _quantize(call: Call) -> PreparedKernel:
    divisors = Divisors(call)
    return PreparedKernel(run=_encoder(call, divisors), workspace_bytes=divisors.nbytes)


def _quantize_dynamic(call: Call) -> PreparedKernel:
    wanted = call.request
    view, _ = _parts(call)
    if not wanted.scheme.scales:
        encode = _encoder(call, Divisors(Call(request=wanted, params=((), None))))
        return PreparedKernel(run=lambda x, data, _params: encode(x, data), workspace_bytes=0)
    reason = rule_refusal(wanted.scheme, wanted.dtype)
    if reason is not None or 0 in wanted.shape:
        return PreparedKernel(run=_unprepared(wanted), workspace_bytes=0, allocates=reason)
    return _one_pass(wanted, view) if view.one_pass else _two_passes(call, view)


def _unprepared(wanted: Request) -> Run:
    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            BACKEND.quantize_dynamic(x, wanted.scheme, (data, params))

    return run


def _one_pass(wanted: Request, view: View) -> PreparedKernel:
    scheme, dtype = wanted.scheme, wanted.dtype
    fixed, memory = rule_of(scheme, dtype), ScaleMemory(wanted)
    coarse = CoarseScale(wanted) if len(scheme.scales) > 1 else None
    multiply = fixed.how == k.POWER and isinstance(scheme.element, FloatFormat)
    element, order = element_of(scheme, dtype, multiply=multiply), code_order(scheme)
    boundaries = half_boundaries(scheme, dtype, view)

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            rule = fixed if coarse is None else coarse.into(x, params[0][1], fixed)
            scales, codes = memory.arrays(params)
            source, target = flat_array(x), data.numpy().reshape(-1)

            def work(first: int, last: int) -> int:
                rows = np.uint64(first), np.uint64(last)
                if boundaries is not None:
                    return int(quantize_bfloat16_rows(
                        source, view.layout, element, rule, boundaries, codes, target, *rows
                    ))  # fmt: skip
                return int(quantize_rows(
                    source, view.layout, element, rule, order, scales, codes, memory.zeros, target, *rows
                ))  # fmt: skip

            if over_rows(view.rows, x.numel(), work) != k.OK:
                refuse(x, scheme)
            memory.store(params)

    return PreparedKernel(run=run, workspace_bytes=memory.nbytes + (0 if coarse is None else coarse.nbytes))


def _two_passes(call: Call, view: View) -> PreparedKernel:
    wanted = call.request
    fixed, memory, blocks = (
        rule_of(wanted.scheme, wanted.dtype),
        ScaleMemory(wanted),
        BlockScales(wanted, view),
    )
    coarse = CoarseScale(wanted) if len(wanted.scheme.scales) > 1 else None
    divisors = Divisors(call)
    encode = _encoder(call, divisors)

    def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
        with gradual_underflow():
            rule = fixed if coarse is None else coarse.into(x, params[0][1], fixed)
            blocks.choose(x, rule, memory, params)
            memory.store(params)
            divisors.load(params)
            encode(x, data)

    held = memory.nbytes + blocks.nbytes + divisors.nbytes + (0 if coarse is None else coarse.nbytes)
    return PreparedKernel(run=run, workspace_bytes=held)


def _dequantize(call: Call) -> PreparedKernel:
    view, element = _parts(call)
    stored, table = StoredScales(call), value_table(call.request.scheme)

    def run(data: torch.Tensor, params: Params | None, out: torch.Tensor) -> None:
        if out.numel() == 0:
            return
        with gradual_underflow():
            rule, scales, codes, zeros = stored.arrays(params)
        source, target = data.numpy().reshape(-1), flat_array(out)

        def work(first: int, last: int) -> None:
            dequantize_rows(
                source, view.layout, element, rule, table, scales, codes, zeros, target,
                np.uint64(first), np.uint64(last),
            )  # fmt: skip

        over_rows(view.rows, out.numel(), work)

    return PreparedKernel(run=run, workspace_bytes=stored.nbytes, allocates=dequantize_refusal(call))


def _fake_quantize(call: Call) -> PreparedKernel:
    wanted = call.request
    assert call.params is not None
    view, element = _parts(call)
    divisors, order, table = Divisors(call), code_order(wanted.scheme), value_table(wanted.scheme)
    back = multipliers(call)

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        source, target = flat_array(x), flat_array(out)

        def work(first: int, last: int) -> None:
            fake_quantize_rows(
                source, view.layout, element, order, table, divisors.values, back, divisors.zeros, target,
                np.uint64(first), np.uint64(last),
            )  # fmt: skip

        over_rows(view.rows, x.numel(), work)

    return PreparedKernel(run=run, workspace_bytes=divisors.nbytes + back.nbytes)


def _backward(call: Call) -> PreparedKernel:
    wanted = call.request
    view, element = _parts(call)
    divisors, bounds = Divisors(call), value_bounds(wanted.scheme)
    refusal = None if call.params is not None else load_refusal(wanted.scheme, wanted.own_dtype)

    def run(grad: torch.Tensor, x: torch.Tensor, params: Params | None, out: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        with gradual_underflow():
            divisors.load(params)
        slope, source, target = flat_array(grad), flat_array(x), flat_array(out)

        def work(first: int, last: int) -> None:
            fake_quantize_backward_rows(
                slope, source, view.layout, element, bounds, divisors.values, divisors.zeros, target,
                np.uint64(first), np.uint64(last),
            )  # fmt: skip

        over_rows(view.rows, x.numel(), work)

    return PreparedKernel(run=run, workspace_bytes=divisors.nbytes, allocates=refusal)


_PREPARE: dict[Op, Callable[[Call], PreparedKernel]] = {
    Op.QUANTIZE: _quantize,
    Op.QUANTIZE_DYNAMIC: _quantize_dynamic,
    Op.DEQUANTIZE: _dequantize,
    Op.FAKE_QUANTIZE: _fake_quantize,
    Op.FAKE_QUANTIZE_BACKWARD: _backward,
}
