"""The host side: tensors to flat arrays, one pass or two, threads over rows, errors with their place."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from ...errors import NonFiniteError
from ...layout.blocks import reduce_blocks
from ...ops import reference
from ...ops.registry import Op, Params, Request, filled
from ...ops.row_errors import RowErrors
from ...ops.threads import share
from ...params import arithmetic
from ...params.arithmetic import Ranges
from ...schemes import Granularity, Scheme
from . import entries
from . import layout as k
from .arrays import (
    aligned_empty,
    block_factors,
    clip_extent,
    flat_array,
    needs_range,
    packed_like,
    rows_of,
    stored_factors,
    value_bounds,
)
from .calls import OnePass, ScaleMemory, given_call, one_pass, refuse
from .lowering import KINDS, element_refusal, view_of


class CpuBackend:
    """Numba kernels for float32, bfloat16 and float16 tensors in the memory of the host."""

    name = "cpu"
    rank = 10

    def refusal(self, request: Request) -> str | None:
        """Return why the kernels cannot run ``request``, or None."""
        if request.device.type != "cpu":
            return f"the data is on {request.device}"
        if request.op is Op.DEQUANTIZE_BACKWARD:
            return "a product is left to torch"
        if request.dtype not in KINDS or request.own_dtype not in KINDS:
            return f"{request.dtype} is computed in float64"
        reason = element_refusal(request.scheme)
        if reason is not None:
            return reason
        view = view_of(request.scheme, request.shape, request.dtype)
        return view if isinstance(view, str) else None

    def quantize_dynamic(
        self, x: torch.Tensor, scheme: Scheme, out: tuple[torch.Tensor, Params] | None = None,
        *, extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:  # fmt: skip
        """See :class:`zeropoint.ops.registry.Backend`."""
        # A row alone may be one block of a whole tensor, whose scale does not come from the row.
        given = extremes is not None and scheme.granularity == Granularity.tensor()
        call = None if given else one_pass(scheme, tuple(x.shape), x.dtype)
        if call is not None:
            return self._one_pass(x, scheme, call, out, extremes)
        params = self._params_from_statistics(x, scheme, extremes)
        data = self.quantize(x, scheme, params, None if out is None else out[0])
        return (data, params) if out is None else filled(out, data, params)

    def quantize(
        self, x: torch.Tensor, scheme: Scheme, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        shape = tuple(x.shape)
        out = packed_like(x, scheme) if out is None else out
        factors, zeros = block_factors(scheme, params, shape, x.dtype, dividing=True)
        given_call(scheme, shape, x.dtype, x.dtype).quantize(x, factors, zeros, out)
        return out

    def _one_pass(
        self, x: torch.Tensor, scheme: Scheme, call: OnePass, out: tuple[torch.Tensor, Params] | None,
        extremes: tuple[float, float] | None,
    ) -> tuple[torch.Tensor, Params]:  # fmt: skip
        """Choose scales and codes in one pass; on any trouble let the reference find it and say where."""
        coarse = self._coarse_scale(x, scheme, extremes) if call.two_levels else None
        if out is None:
            fine, zeros = call.scales.empty()
            out = packed_like(x, scheme), ((fine,) if coarse is None else (fine, coarse), zeros)
        elif coarse is not None:
            out[1][0][1].copy_(coarse)
        factor = None if coarse is None else float(coarse)
        if call.run(x, *out, ScaleMemory(call.scales), factor) != k.OK:
            refuse(x, scheme, extremes)
        return out

    def _coarse_scale(
        self, x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None
    ) -> torch.Tensor:
        """Return the tensor's own scale of a scheme with two levels."""
        if extremes is not None:
            return _coarse_scale_of(scheme, extremes, x.dim(), x.dtype).clone()
        low, high = self._block_extremes(x, Granularity.tensor(), scheme)
        _require(x, high)
        ranges = Ranges(minimum=(low, low), maximum=(high, high), dtype=x.dtype, shape=tuple(x.shape))
        return arithmetic.coarsest_scale(scheme, ranges)

    def _params_from_statistics(
        self, x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None
    ) -> Params:
        """Return parameters from a pass of its own over the data."""
        if x.numel() == 0 or not scheme.scales:
            return reference.choose_params(x, scheme, extremes)
        lows, highs = [], []
        for level in scheme.scales:
            given = reference.whole_range(x, level.granularity, extremes)
            low, high = given or self._block_extremes(x, level.granularity, scheme)
            lows.append(low)
            highs.append(high)
        _require(x, highs[0])
        ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))
        return arithmetic.scales_from_ranges(scheme, ranges)

    def _block_extremes(
        self, x: torch.Tensor, granularity: Granularity, scheme: Scheme
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what scales follow from: extremes of each block, or its magnitude for both."""
        if needs_range(scheme):
            return self._block_range(x, granularity)
        amax = self._block_amax(x, granularity)
        return amax, amax

    def _block_amax(self, x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the largest magnitude of each block, float32; NaN and Inf show as such."""
        rows, width, told = rows_of(tuple(x.shape), x.dtype, granularity)
        out, source = np.empty(rows * width, np.float32), flat_array(x)
        share(entries.amax, (source, told, out), rows, x.numel())
        return _over_lead(torch.from_numpy(out), x, granularity, width, "amax", -math.inf)

    def _block_range(self, x: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and largest value of each block, float32; raises NonFiniteError for NaN."""
        _require(x, self._block_amax(x, granularity))
        rows, width, told = rows_of(tuple(x.shape), x.dtype, granularity)
        low, high = np.empty(rows * width, np.float32), np.empty(rows * width, np.float32)
        source = flat_array(x)
        share(entries.extremes, (source, told, low, high), rows, x.numel())
        return (
            _over_lead(torch.from_numpy(low), x, granularity, width, "amin", math.inf),
            _over_lead(torch.from_numpy(high), x, granularity, width, "amax", -math.inf),
        )

    def dequantize(
        self, data: torch.Tensor, params: Params, request: Request, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        scheme, shape, own = request.scheme, request.shape, request.own_dtype
        out = aligned_empty(shape, request.dtype) if out is None else out
        stored = stored_factors(scheme, params, shape, own)
        given_call(scheme, shape, request.dtype, own).dequantize(data, stored, out)
        return out

    def fake_quantize(self, x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        shape, dtype = tuple(x.shape), x.dtype
        out = aligned_empty(shape, dtype)
        factors, zeros = block_factors(scheme, params, shape, dtype, dividing=True)
        back, _ = block_factors(scheme, params, shape, dtype, dividing=False)
        given_call(scheme, shape, dtype, dtype).fake_quantize(x, factors, back, zeros, out)
        return out

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, scheme: Scheme, params: Params
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        shape, dtype = tuple(x.shape), x.dtype
        out, bounds = aligned_empty(shape, grad.dtype), value_bounds(scheme)
        factors, zeros = block_factors(scheme, params, shape, dtype, dividing=True)
        call = given_call(scheme, shape, dtype, dtype)
        call.fake_quantize_backward(grad, x, bounds, factors, zeros, out)
        return out

    def measure(self, x: torch.Tensor, data: torch.Tensor, scheme: Scheme, params: Params) -> RowErrors:
        """See :class:`zeropoint.ops.registry.Backend`."""
        call = given_call(scheme, tuple(x.shape), x.dtype, x.dtype)
        sums, clipped = np.zeros(3 * call.rows), np.zeros(call.rows, np.int64)
        if call.count > 0:
            values, source = flat_array(x), call.codes_in(data)
            stored = stored_factors(scheme, params, tuple(x.shape), x.dtype)
            told, table = call.told_of(stored), call.table
            scales = stored.factors, stored.codes, stored.zeros
            args = values, source, told, table, *scales, clip_extent(scheme), sums, clipped
            share(entries.measure, args, call.rows, call.count)
        columns = sums.reshape(-1, 3)
        return RowErrors(squares=columns[:, 0], errors=columns[:, 1], largest=columns[:, 2], clipped=clipped)


@functools.lru_cache(maxsize=256)
def _coarse_scale_of(
    scheme: Scheme, extremes: tuple[float, float], rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the own scale of a tensor of so many axes; the parts of one that is read in parts share it."""
    part = torch.empty((1,) * rank, dtype=dtype, device="cpu")  # whatever the default is
    given = reference.whole_range(part, Granularity.tensor(), extremes)
    assert given is not None
    low, high = given
    ranges = Ranges(minimum=(low, low), maximum=(high, high), dtype=dtype, shape=tuple(part.shape))
    return arithmetic.coarsest_scale(scheme, ranges)


def _require(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise NonFiniteError with the place in ``x`` when a block's magnitude is not finite."""
    if not bool(torch.isfinite(amax).all()):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")


def _over_lead(
    values: torch.Tensor, x: torch.Tensor, granularity: Granularity, width: int, kind: str, fill: float
) -> torch.Tensor:
    """Reduce row-wise statistics over the leading axes of each block."""
    shape = tuple(x.shape)
    if not shape:
        return values.reshape(())
    lead = Granularity.block(*granularity.block_shape(shape)[:-1], 1)
    return reduce_blocks(values.reshape(*shape[:-1], width), lead, kind, fill)


BACKEND = CpuBackend()
