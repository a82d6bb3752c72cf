"""What the kernels refuse, and the table of what they offer."""

from __future__ import annotations

from collections.abc import Callable

from ....formats import RoundingMode
from ....ops.lowering_refusals import element_refusal
from ....ops.registry import Kernel, Op, Request
from ....params.arithmetic import multiplies, rounder
from . import rare_kernels
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
from .rare_requests import codes_request, digits_request, has_five_digits, is_looked_up, rounds_blocks
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
            return rare_kernels.search_refusal(request)
        if is_looked_up(request):
            digits = digits_request(request)
            return None if digits is None else self.refusal(digits)
        element = request.scheme.element
        if element.per_scale > 1:
            return rare_kernels.table_refusal(request)
        moves = request.op in (Op.JOIN_BLOCKS, Op.SPLIT_BLOCKS)
        if moves and (element.per_code == 1 or has_five_digits(element)):
            return None
        if element.per_code > 1:
            return f"{element.kind} codes, of several values each, are known to the reference alone"
        if request.op is Op.DEQUANTIZE_BACKWARD:
            return "a product is left to torch"
        if request.op in (Op.TO_LINES, Op.FROM_LINES):
            return rare_kernels.lines_refusal(request)
        if request.op is Op.LINEAR:
            return rare_kernels.codes_refusal(request)
        if request.op is Op.LINEAR_VALUES:
            return rare_kernels.values_refusal(request)
        if rounds_blocks(request):
            return None
        if request.dtype not in KINDS or request.own_dtype not in KINDS:
            return f"{request.dtype} is computed in float64"
        codes = codes_request(request)
        if codes is not None and request.shape and self.refusal(codes) is None:
            return None
        if multiplies(request.scheme) and rounder(request.scheme, request.own_dtype) is not None:
            return "reciprocals of 16 bits are known to the reference alone"
        noisy = request.scheme.rounding.mode is RoundingMode.STOCHASTIC
        reason = element_refusal(
            request.scheme, decoding=request.op in (Op.DEQUANTIZE, Op.MEASURE), rounds=not noisy
        )
        if reason is not None:
            return reason
        if request.scheme.offsets and not offsets_lie_in_rows(request):
            return "offsets are known to the reference alone"
        view = view_of(request.scheme, request.shape, request.dtype)
        return view if isinstance(view, str) else None

    def prepare(self, request: Request) -> Kernel:
        if rounds_blocks(request):
            return rare_kernels.RoundedBlocksKernel(request)
        if is_looked_up(request):
            digits = digits_request(request)
            if digits is not None:
                return rare_kernels.DigitsKernel(request, self.prepare(digits))
            return _family(_LOOKUPS, request)
        if request.scheme.element.per_scale > 1:
            return rare_kernels.TableSearchKernel(request)
        if codes_request(request) is not None:
            return rare_kernels.ChainedKernel(request)
        if request.op in _FAMILIES:
            return _family(_FAMILIES, request)
        return _KERNELS[request.op](request)


_KERNELS: dict[Op, Callable[[Request], Kernel]] = {
    Op.CHOOSE_PARAMS: ChooseParamsKernel,
    Op.QUANTIZE_DYNAMIC: QuantizeDynamicKernel,
    Op.QUANTIZE: QuantizeKernel,
    Op.DEQUANTIZE: DequantizeKernel,
    Op.FAKE_QUANTIZE: FakeQuantizeKernel,
    Op.FAKE_QUANTIZE_BACKWARD: BackwardKernel,
    Op.MEASURE: MeasureKernel,
}
_LOOKUPS = {
    Op.DEQUANTIZE: "LookupKernel",
    Op.QUANTIZE: "TableEncodeKernel",
    Op.QUANTIZE_DYNAMIC: "TableDynamicKernel",
}
_FAMILIES = {
    Op.SEARCH: "SearchKernel",
    Op.SEARCH_PARAMS: "SearchParamsKernel",
    Op.JOIN_BLOCKS: "JoinKernel",
    Op.SPLIT_BLOCKS: "SplitKernel",
    Op.TO_LINES: "LinesKernel",
    Op.FROM_LINES: "LinesKernel",
    Op.LINEAR: "LinearKernel",
    Op.LINEAR_VALUES: "ValueKernel",
}
"""Names in :mod:`.rare_kernels`, of looked-up values and of the other operators."""


def _family(names: dict[Op, str], request: Request) -> Kernel:
    found: Kernel = getattr(rare_kernels, names[request.op])(request)
    return found


BACKEND = CpuBackend()
