"""What the kernels refuse, and the table of what they offer."""

from __future__ import annotations

from collections.abc import Callable

from ....formats import RoundingMode
from ....ops.lowering_refusals import element_refusal
from ....ops.registry import Kernel, Op, Request
from ....params.arithmetic import multiplies, rounder
from . import (
    block_searches,
    chained,
    layout_calls,
    linear,
    lookups,
    parameter_searches,
)
from .operators import (
    BackwardKernel,
    ChooseParamsKernel,
    DequantizeKernel,
    FakeQuantizeKernel,
    MeasureKernel,
    QuantizeDynamicKernel,
    QuantizeKernel,
    offsets_lie_in_rows,
)
from .views import KINDS, view_of


class CpuBackend:
    """Numba kernels for float32, bfloat16 and float16 tensors on the host."""

    name = "cpu"
    rank = 10

    def refusal(self, request: Request) -> str | None:
        """Return why the kernels cannot run ``request``, or None."""
        if request.device.type != "cpu":
            return f"the data is on {request.device}"
        if request.op is Op.SEARCH:
            return block_searches.refusal(request)
        if lookups.takes(request):
            digits = lookups.single(request)
            return None if digits is None else self.refusal(digits)
        element = request.scheme.element
        if element.per_scale > 1:
            return parameter_searches.table_refusal(request)
        if request.op in (Op.JOIN_BLOCKS, Op.SPLIT_BLOCKS) and layout_calls.takes(element):
            return None
        if element.per_code > 1:
            return f"{element.kind} codes, of several values each, are known to the reference alone"
        if request.op is Op.DEQUANTIZE_BACKWARD:
            return "a product is left to torch"
        if request.op in (Op.TO_LINES, Op.FROM_LINES):
            return layout_calls.lines_refusal(request)
        if request.op is Op.LINEAR:
            return linear.codes_refusal(request)
        if request.op is Op.LINEAR_VALUES:
            return linear.values_refusal(request)
        if request.op is Op.QUANTIZE_DYNAMIC and block_searches.rounds(request):
            return None
        if request.dtype not in KINDS or request.own_dtype not in KINDS:
            return f"{request.dtype} is computed in float64"
        codes = chained.codes_of(request)
        if codes is not None and request.shape and self.refusal(codes) is None:
            return None
        if multiplies(request.scheme) and rounder(request.scheme, request.own_dtype) is not None:
            return "reciprocals of 16 bits are known to the reference alone"
        noisy = request.scheme.rounding.mode is RoundingMode.STOCHASTIC
        reason = element_refusal(
            request.scheme,
            decoding=request.op in (Op.DEQUANTIZE, Op.MEASURE),
            rounds=not noisy,
        )
        if reason is not None:
            return reason
        if request.scheme.offsets and not offsets_lie_in_rows(request):
            return "offsets are known to the reference alone"
        view = view_of(request.scheme, request.shape, request.dtype)
        return view if isinstance(view, str) else None

    def prepare(self, request: Request) -> Kernel:
        if request.op is Op.QUANTIZE_DYNAMIC and block_searches.rounds(request):
            return block_searches.RoundedBlocksKernel(request)
        if lookups.takes(request):
            digits = lookups.single(request)
            if digits is not None:
                return lookups.DigitsKernel(request, self.prepare(digits))
            return _LOOKUPS[request.op](request)
        if request.scheme.element.per_scale > 1:
            return parameter_searches.TableSearchKernel(request)
        if chained.codes_of(request) is not None:
            return chained.ChainedKernel(request)
        return _KERNELS[request.op](request)


_LOOKUPS: dict[Op, Callable[[Request], Kernel]] = {
    Op.DEQUANTIZE: lookups.LookupKernel,
    Op.QUANTIZE: lookups.TableEncodeKernel,
    Op.QUANTIZE_DYNAMIC: lookups.TableDynamicKernel,
}
_KERNELS: dict[Op, Callable[[Request], Kernel]] = {
    Op.CHOOSE_PARAMS: ChooseParamsKernel,
    Op.QUANTIZE_DYNAMIC: QuantizeDynamicKernel,
    Op.QUANTIZE: QuantizeKernel,
    Op.DEQUANTIZE: DequantizeKernel,
    Op.FAKE_QUANTIZE: FakeQuantizeKernel,
    Op.FAKE_QUANTIZE_BACKWARD: BackwardKernel,
    Op.SEARCH: block_searches.SearchKernel,
    Op.SEARCH_PARAMS: parameter_searches.SearchParamsKernel,
    Op.JOIN_BLOCKS: layout_calls.JoinKernel,
    Op.SPLIT_BLOCKS: layout_calls.SplitKernel,
    Op.TO_LINES: layout_calls.LinesKernel,
    Op.FROM_LINES: layout_calls.LinesKernel,
    Op.MEASURE: MeasureKernel,
    Op.LINEAR: linear.LinearKernel,
    Op.LINEAR_VALUES: linear.ValueKernel,
}

BACKEND = CpuBackend()
