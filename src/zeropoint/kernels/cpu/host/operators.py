"""Backend operators: each runs on any tensors, or is held.

Both run the same compiled kernels with the same arguments. A run makes what it needs for its parameters; a
held kernel has it in memory of its own, which no call allocates again.
"""

from __future__ import annotations

import numpy as np
import torch

from ....ops import reference, scale_search
from ....ops.lowering_refusals import rule_refusal
from ....ops.reference_backend import Codes, filled
from ....ops.registry import HeldKernel, Request
from ....ops.row_errors import RowErrors
from ....ops.threads import share
from ....params.tensors import Params, require_parameters
from ....schemes import Granularity, Scheme
from ..machine import descriptor as k
from ..statistics.error_sums import ErrorArrays, measure_rows
from . import memory, microexponents, rare_kernels, statistics
from .arrays import (
    NO_FLOATS,
    block_factors,
    block_offsets,
    clip_extent,
    flat_array,
    packed_like,
    stored_factors,
    value_bounds,
)
from .calls import ChosenScales, ScaleMemory, flat_pass, given_call, levels_call, one_pass, refuse
from .factors import BlockScales, Factors, StoredScales, load_refusal
from .statistics import Ends, TensorExtremes, coarse_scale
from .views import stored_rule


class _Operator:
    """Request, and the call of its kernels, for all operators."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._call = given_call(
            request.scheme, request.shape, request.dtype, request.own_dtype, request.code_range
        )

    def _factors(self, params: Params, *, dividing: bool) -> tuple[object, object]:
        asked = self.request
        return block_factors(asked.scheme, params, asked.shape, asked.own_dtype, dividing=dividing)


class ChooseParamsKernel(_Operator):
    """Parameters of a tensor."""

    def run(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        asked = self.request
        if asked.scheme.search is not None and one_pass(asked.scheme, asked.shape, asked.dtype) is not None:
            return QuantizeDynamicKernel(asked).run(x, None, extremes)[1]
        return choose_params(x, asked.scheme, extremes)


class QuantizeKernel(_Operator):
    """Codes under given parameters."""

    def run(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        out = packed_like(x, self.request.scheme) if out is None else out
        self._call.quantize(x, *self._factors(params, dividing=True), out)
        return out

    def hold(self, params: Params | None) -> HeldKernel:
        call, divisors = self._call, Factors(self.request, params, dividing=True)
        values, zeros = divisors.arrays

        def run(x: torch.Tensor, *, out: torch.Tensor) -> None:
            call.quantize(x, values, zeros, out)

        return divisors.held(run)


class QuantizeDynamicKernel(_Operator):
    """Parameters and codes: one pass for row blocks, else two."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        asked = request.scheme, request.shape, request.dtype
        self._once = one_pass(*asked) or flat_pass(*asked)
        self._pair = microexponents.pair_of(*asked)
        self._whole = request.scheme.granularity == Granularity.tensor()

    def run(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        # A row alone may be one block of a whole tensor, whose scale does not come from the row.
        if self._once is not None and not (self._whole and extremes is not None):
            return self._in_one_pass(x, out, extremes, ScaleMemory(self._once.scales))
        scheme, shape = self.request.scheme, self.request.shape
        data = packed_like(x, scheme) if out is None else out[0]
        pair = self._pair if extremes is None else None
        params = None if pair is None else microexponents.quantized(x, scheme, pair, data)
        if params is not None:
            return (data, params) if out is None else filled(out, data, params)
        params = choose_params(x, scheme, extremes)
        self._call.quantize(x, *block_factors(scheme, params, shape, x.dtype, dividing=True), data)
        return (data, params) if out is None else filled(out, data, params)

    def _in_one_pass(
        self,
        x: torch.Tensor,
        out: Codes | None,
        extremes: Ends,
        room: ScaleMemory,
        whole: TensorExtremes | None = None,
    ) -> Codes:
        """Choose scales and codes in one pass; the reference explains trouble."""
        scheme, call = self.request.scheme, self._once
        assert call is not None
        if out is None:
            out = memory.empty(call.scales.packed_shape, torch.uint8), call.scales.empty()
        alone = not call.two_levels or (call.chooses_outer and extremes is None)
        if alone and call.run(x, *out, room) == k.OK:
            return out
        coarse = _coarse(x, scheme, extremes, out[1], whole) if call.two_levels else None
        if call.run(x, *out, room, coarse) != k.OK:
            refuse(x, scheme, extremes)
        return out

    def hold(self, params: Params | None) -> HeldKernel | str:
        asked, scheme, once = self.request, self.request.scheme, self._once
        if not scheme.scales:
            encode = QuantizeKernel(asked).run
            return HeldKernel(run=lambda x, *, out: encode(x, [], out[0]))
        reason = rule_refusal(scheme, asked.dtype)
        if reason is not None:
            return reason
        if 0 in asked.shape:
            return HeldKernel(run=self.run)
        whole = TensorExtremes(scheme, asked.shape, asked.dtype) if len(scheme.scales) > 1 else None
        held = 0 if whole is None else whole.nbytes
        if once is not None:
            room = ScaleMemory(once.scales)

            def run(x: torch.Tensor, *, out: Codes) -> None:
                self._in_one_pass(x, out, None, room, whole)

            return HeldKernel(run=run, workspace_bytes=held + room.nbytes)
        return self._hold_two_passes(whole, held)

    def _hold_two_passes(self, whole: TensorExtremes | None, held: int) -> HeldKernel:
        asked = self.request
        room = ScaleMemory(ChosenScales(asked.scheme, asked.shape, asked.dtype))
        blocks, divisors = BlockScales(asked), Factors(asked, None, dividing=True)

        def run(x: torch.Tensor, *, out: Codes) -> None:
            data, params = out
            coarse = None if whole is None else _coarse(x, asked.scheme, None, params, whole)
            blocks.choose(x, coarse, room, params)
            room.store(params)
            self._call.quantize(x, *divisors.load(params), data)

        held += room.nbytes + blocks.nbytes + divisors.nbytes
        return HeldKernel(run=run, workspace_bytes=held)


def _coarse(
    x: torch.Tensor, scheme: Scheme, extremes: Ends, params: Params, whole: TensorExtremes | None
) -> float:
    """Choose the scale of a whole tensor, store it and return it."""
    return float(params[1].copy_(coarse_scale(x, scheme, extremes, whole)))


def offsets_lie_in_rows(asked: Request) -> bool:
    """Whether offset blocks are runs of rows, added block by block."""
    *lead, block = asked.scheme.granularity.block_shape(asked.shape) or (1,)
    return bool(asked.shape) and set(lead) <= {1} and asked.shape[-1] % block == 0


class DequantizeKernel(_Operator):
    """Values of codes."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._by_levels = levels_call(request.scheme, request.shape, request.dtype, request.own_dtype)

    def run(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        asked = self.request
        out = memory.empty(asked.shape, asked.dtype) if out is None else out
        if self._by_levels is not None:
            require_parameters(asked.scheme, params, asked.shape)
            self._by_levels.dequantize(data, params, out)
            return out
        stored = stored_factors(asked.scheme, params, asked.shape, asked.own_dtype)
        offset = block_offsets(asked.scheme, params, asked.shape, asked.own_dtype)
        self._call.dequantize(data, stored, out, offset)
        return out

    def hold(self, params: Params | None) -> HeldKernel | str:
        scheme, own = self.request.scheme, self.request.own_dtype
        if scheme.offsets:
            return "offsets are added to products in memory of each call"
        reason = load_refusal(scheme, own) if params is None and stored_rule(scheme, own) is None else None
        if reason is not None:
            return reason
        call, stored = self._call, StoredScales(self.request, params)

        def run(data: torch.Tensor, *, out: torch.Tensor, params: Params | None = None) -> None:
            call.dequantize(data, stored.load(params), out)

        return stored.held(run)


class FakeQuantizeKernel(_Operator):
    """Values of the codes of values, under given parameters."""

    def run(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        out = memory.empty(self.request.shape, self.request.dtype) if out is None else out
        factors, zeros = self._factors(params, dividing=True)
        multiplying, _ = self._factors(params, dividing=False)
        self._call.fake_quantize(x, factors, multiplying, zeros, out)
        return out

    def hold(self, params: Params | None) -> HeldKernel:
        assert params is not None
        call, divisors = self._call, Factors(self.request, params, dividing=True)
        values, zeros = divisors.arrays
        multipliers = Factors(self.request, params, dividing=False).arrays[0]

        def run(x: torch.Tensor, *, out: torch.Tensor) -> None:
            call.fake_quantize(x, values, multipliers, zeros, out)

        return HeldKernel(run=run, parameter_bytes=divisors.nbytes + multipliers.nbytes)


class BackwardKernel(_Operator):
    """The straight-through gradient, under given parameters."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._bounds = value_bounds(request.scheme)

    def run(
        self, grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = memory.empty(self.request.shape, grad.dtype) if out is None else out
        factors, zeros = self._factors(params, dividing=True)
        self._call.fake_quantize_backward(grad, x, self._bounds, factors, zeros, out)
        return out

    def hold(self, params: Params | None) -> HeldKernel | str:
        asked, bounds, call = self.request, self._bounds, self._call
        reason = load_refusal(asked.scheme, asked.own_dtype) if params is None else None
        if reason is not None:
            return reason
        divisors = Factors(asked, params, dividing=True)

        def run(
            grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor, params: Params | None = None
        ) -> None:
            call.fake_quantize_backward(grad, x, bounds, *divisors.load(params), out)

        return divisors.held(run)


class MeasureKernel(_Operator):
    """Errors of codes, a row at a time."""

    def run(self, x: torch.Tensor, data: torch.Tensor, params: Params) -> RowErrors:
        asked, call = self.request, self._call
        sums, clipped = np.zeros(3 * call.rows), np.zeros(call.rows, np.int64)
        if call.count > 0:
            stored = stored_factors(asked.scheme, params, asked.shape, asked.own_dtype)
            offset = block_offsets(asked.scheme, params, asked.shape, asked.own_dtype)
            arrays = ErrorArrays(
                x=flat_array(x),
                source=call.codes_in(data),
                table=call.table,
                scales=stored.factors,
                scale_codes=stored.codes,
                zeros=stored.zeros,
                adds=NO_FLOATS[:0] if offset is None else flat_array(offset),
                sums=sums,
                clipped=clipped,
            )
            args = call.descriptor_of(stored), clip_extent(asked.scheme), *arrays
            share(measure_rows, args, call.rows, call.count)
        columns = sums.reshape(-1, 3)
        return RowErrors(squares=columns[:, 0], errors=columns[:, 1], largest=columns[:, 2], clipped=clipped)


def choose_params(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Params:
    """Return the parameters that ``x`` gives."""
    start = statistics.choose_params(x, scheme, extremes)
    if scheme.search is None:
        return start
    reference.require_whole(scheme, extremes)
    if scheme.search.factor:
        return scale_search.chosen(x, scheme, start, rare_kernels.decoded)
    return rare_kernels.search_params(x, scheme, start)
