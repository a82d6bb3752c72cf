"""The host side: tensors to flat arrays, one pass or two, threads over rows, errors with their place."""

from __future__ import annotations

import math

import numpy as np
import torch

from ...errors import NonFiniteError
from ...formats import FloatFormat
from ...formats.torch_dtypes import format_of, storage_dtype
from ...layout.blocks import reduce_blocks
from ...ops import reference
from ...ops.registry import Params, Request, filled
from ...ops.row_errors import RowErrors, code_extent
from ...ops.threads import over_rows
from ...params import arithmetic
from ...params.arithmetic import Ranges, zero_point_dtype
from ...schemes import Granularity, Scheme, ZeroPoint
from . import layout as k
from .arrays import (
    NO_BYTES,
    NO_FLOATS,
    aligned_empty,
    block_factors,
    code_order,
    code_step,
    flat_array,
    has_sign,
    packed_like,
    row_view,
    stored_factors,
    value_bounds,
    value_table,
    view_of_tensor,
)
from .decode import dequantize_rows
from .fake import fake_quantize_backward_rows, fake_quantize_rows
from .half import quantize_bfloat16_rows
from .layout import ScaleRule as Rule
from .lowering import (
    KINDS,
    View,
    element_of,
    element_refusal,
    given_rule,
    half_boundaries,
    rule_of,
    rule_refusal,
    view_of,
)
from .measure import measure_rows
from .quantize import amax_rows, quantize_rows, range_rows


class CpuBackend:
    """Numba kernels for float32, bfloat16 and float16 tensors in the memory of the host."""

    name = "cpu"
    rank = 10

    def refusal(self, request: Request) -> str | None:
        """Return why the kernels cannot run ``request``, or None."""
        if request.device.type != "cpu":
            return f"the data is on {request.device}"
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
        known = x.numel() > 0 and not given and rule_refusal(scheme, x.dtype) is None
        if known and view_of_tensor(scheme, x).one_pass:
            return self._one_pass(x, scheme, out, extremes)
        params = self._params_from_statistics(x, scheme, extremes)
        data = self.quantize(x, scheme, params, None if out is None else out[0])
        return (data, params) if out is None else filled(out, data, params)

    def quantize(
        self, x: torch.Tensor, scheme: Scheme, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        view = view_of_tensor(scheme, x)
        out = packed_like(x, scheme) if out is None else out
        if x.numel() == 0:
            return out
        source, target = flat_array(x), out.numpy().reshape(-1)
        factors, zeros = block_factors(scheme, params, tuple(x.shape), x.dtype, dividing=True)
        element, order = element_of(scheme, x.dtype, multiply=False), code_order(scheme)

        def work(first: int, last: int) -> int:
            return int(quantize_rows(
                source, view.layout, element, given_rule(), order, factors, NO_BYTES, zeros, target,
                np.uint64(first), np.uint64(last),
            ))  # fmt: skip

        if over_rows(view.rows, x.numel(), work) == k.BAD_VALUE:
            reference.require_finite(x)
        return out

    def _one_pass(
        self, x: torch.Tensor, scheme: Scheme, out: tuple[torch.Tensor, Params] | None,
        extremes: tuple[float, float] | None,
    ) -> tuple[torch.Tensor, Params]:  # fmt: skip
        """Choose scales and codes in one pass; on any trouble let the reference find it and say where."""
        view, rule = view_of_tensor(scheme, x), rule_of(scheme, x.dtype)
        coarse = self._coarse_scale(x, scheme, extremes) if len(scheme.scales) > 1 else None
        if coarse is not None:
            rule = rule._replace(coarse=np.float32(coarse.reshape(-1)[0].item()))
        multiply = rule.how == k.POWER and isinstance(scheme.element, FloatFormat)
        element, order = element_of(scheme, x.dtype, multiply=multiply), code_order(scheme)
        data = packed_like(x, scheme) if out is None else out[0]
        chosen = _Chosen(scheme, x, rule, None if out is None else out[1])
        source, target = flat_array(x), data.numpy().reshape(-1)
        boundaries = half_boundaries(scheme, x.dtype, view)

        def work(first: int, last: int) -> int:
            rows = np.uint64(first), np.uint64(last)
            if boundaries is not None:
                return int(quantize_bfloat16_rows(
                    source, view.layout, element, rule, boundaries, chosen.codes, target, *rows
                ))  # fmt: skip
            return int(quantize_rows(
                source, view.layout, element, rule, order, chosen.scales, chosen.codes, chosen.zeros, target,
                *rows
            ))  # fmt: skip

        if over_rows(view.rows, x.numel(), work) != k.OK:
            reference.choose_params(x, scheme, extremes)
            raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
        return data, chosen.params(coarse)

    def _coarse_scale(
        self, x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None
    ) -> torch.Tensor:
        """Return the tensor's own scale of a scheme with two levels."""
        given = reference.whole_range(x, Granularity.tensor(), extremes)
        if given is None:
            amax = self._block_amax(x, Granularity.tensor())
            _require(x, amax)
        else:
            amax = torch.maximum(given[0].abs(), given[1].abs())
        ranges = Ranges(minimum=(amax, amax), maximum=(amax, amax), dtype=x.dtype, shape=tuple(x.shape))
        return arithmetic.coarsest_scale(scheme, ranges)

    def _params_from_statistics(
        self, x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None
    ) -> Params:
        """Return parameters from a pass of its own over the data."""
        if x.numel() == 0 or not scheme.scales:
            return reference.choose_params(x, scheme, extremes)
        ranged = scheme.zero_point is not ZeroPoint.NONE or not has_sign(scheme)
        lows, highs = [], []
        for level in scheme.scales:
            given = reference.whole_range(x, level.granularity, extremes)
            if given is not None:
                low, high = given
            elif ranged:
                low, high = self._block_range(x, level.granularity)
            else:
                high = self._block_amax(x, level.granularity)
                low = high
            lows.append(low)
            highs.append(high)
        _require(x, highs[0])
        ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))
        return arithmetic.scales_from_ranges(scheme, ranges)

    def _block_amax(self, x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the largest magnitude of each block, float32; NaN and Inf show as such."""
        view, width = row_view(x, granularity)
        out = np.empty(view.rows * width, np.float32)
        source = flat_array(x)
        over_rows(
            view.rows, x.numel(), lambda a, b: amax_rows(source, view.layout, out, np.uint64(a), np.uint64(b))
        )
        return _over_lead(torch.from_numpy(out), x, granularity, width, "amax", -math.inf)

    def _block_range(self, x: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and largest value of each block, float32; raises NonFiniteError for NaN."""
        _require(x, self._block_amax(x, granularity))
        view, width = row_view(x, granularity)
        low, high = np.empty(view.rows * width, np.float32), np.empty(view.rows * width, np.float32)
        source = flat_array(x)
        over_rows(
            view.rows,
            x.numel(),
            lambda a, b: range_rows(source, view.layout, low, high, np.uint64(a), np.uint64(b)),
        )
        return (
            _over_lead(torch.from_numpy(low), x, granularity, width, "amin", math.inf),
            _over_lead(torch.from_numpy(high), x, granularity, width, "amax", -math.inf),
        )

    def dequantize(
        self, data: torch.Tensor, params: Params, request: Request, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        scheme, shape = request.scheme, request.shape
        view = view_of(scheme, shape, request.dtype)
        assert isinstance(view, View)
        out = aligned_empty(shape, request.dtype) if out is None else out
        if out.numel() == 0:
            return out
        source, target = data.contiguous().numpy().reshape(-1), flat_array(out)
        rule, scales, codes, zeros = stored_factors(scheme, params, shape, request.own_dtype)
        element, table = element_of(scheme, request.own_dtype, multiply=False), value_table(scheme)

        def work(first: int, last: int) -> None:
            dequantize_rows(
                source,
                view.layout,
                element,
                rule,
                table,
                scales,
                codes,
                zeros,
                target,
                np.uint64(first),
                np.uint64(last),
            )

        over_rows(view.rows, out.numel(), work)
        return out

    def fake_quantize(self, x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        view, out = view_of_tensor(scheme, x), aligned_empty(tuple(x.shape), x.dtype)
        if x.numel() == 0:
            return out
        source, target = flat_array(x), flat_array(out)
        shape = tuple(x.shape)
        factors, zeros = block_factors(scheme, params, shape, x.dtype, dividing=True)
        back, _ = block_factors(scheme, params, shape, x.dtype, dividing=False)
        element, order, table = (
            element_of(scheme, x.dtype, multiply=False),
            code_order(scheme),
            value_table(scheme),
        )

        def work(first: int, last: int) -> None:
            fake_quantize_rows(
                source,
                view.layout,
                element,
                order,
                table,
                factors,
                back,
                zeros,
                target,
                np.uint64(first),
                np.uint64(last),
            )

        over_rows(view.rows, x.numel(), work)
        return out

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, scheme: Scheme, params: Params
    ) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Backend`."""
        view, out = view_of_tensor(scheme, x), aligned_empty(tuple(x.shape), grad.dtype)
        if x.numel() == 0:
            return out
        slope, source, target = flat_array(grad), flat_array(x), flat_array(out)
        factors, zeros = block_factors(scheme, params, tuple(x.shape), x.dtype, dividing=True)
        element, bounds = element_of(scheme, x.dtype, multiply=False), value_bounds(scheme)

        def work(first: int, last: int) -> None:
            fake_quantize_backward_rows(
                slope,
                source,
                view.layout,
                element,
                bounds,
                factors,
                zeros,
                target,
                np.uint64(first),
                np.uint64(last),
            )

        over_rows(view.rows, x.numel(), work)
        return out

    def measure(self, x: torch.Tensor, data: torch.Tensor, scheme: Scheme, params: Params) -> RowErrors:
        """See :class:`zeropoint.ops.registry.Backend`."""
        view, shape = view_of_tensor(scheme, x), tuple(x.shape)
        sums, clipped = np.zeros(3 * view.rows), np.zeros(view.rows, np.int64)
        if x.numel() > 0:
            values, source = flat_array(x), data.contiguous().numpy().reshape(-1)
            rule, scales, codes, zeros = stored_factors(scheme, params, shape, x.dtype)
            element, table = element_of(scheme, x.dtype, multiply=False), value_table(scheme)
            middle, reach = (number / float(code_step(scheme)) for number in code_extent(scheme))
            extent = np.float32(middle), np.float32(reach)

            def work(first: int, last: int) -> None:
                measure_rows(
                    values, source, view.layout, element, rule, table, scales, codes, zeros, extent, sums,
                    clipped, np.uint64(first), np.uint64(last),
                )  # fmt: skip

            over_rows(view.rows, x.numel(), work)
        columns = sums.reshape(-1, 3)
        return RowErrors(squares=columns[:, 0], errors=columns[:, 1], largest=columns[:, 2], clipped=clipped)


class _Chosen:
    """The flat arrays into which a kernel writes scales and zero points, and the tensors they become.

    Arrays are memory of ``into`` where its dtypes are those of the kernel.
    """

    def __init__(self, scheme: Scheme, x: torch.Tensor, rule: Rule, into: Params | None) -> None:
        self._scheme, self._into = scheme, into
        self._grid = scheme.granularity.grid(tuple(x.shape))
        self._stored = storage_dtype(scheme.scales[0].format_for(format_of(x.dtype)))
        count = math.prod(self._grid)
        self._floats, self._affine = rule.how in (k.LINEAR, k.AFFINE), rule.how == k.AFFINE
        self.scales = np.empty(count, np.float32) if self._floats else NO_FLOATS
        self.codes = NO_BYTES if self._floats else np.empty(count, np.uint8)
        self.zeros = np.empty(count, np.float32) if self._affine else NO_FLOATS
        if into is not None and self._floats and self._stored == torch.float32:
            self.scales = into[0][0].numpy().reshape(-1)
        elif into is not None and not self._floats:
            self.codes = into[0][0].view(torch.uint8).numpy().reshape(-1)

    def params(self, coarse: torch.Tensor | None) -> Params:
        """Return the scales, coarse one included, and zero points."""
        source = torch.from_numpy(self.scales if self._floats else self.codes)
        fine = (source.to(self._stored) if self._floats else source.view(self._stored)).reshape(self._grid)
        levels = (fine,) if coarse is None else (fine, coarse)
        points = None
        if self._affine:
            integer = self._scheme.zero_point is ZeroPoint.INTEGER
            dtype = zero_point_dtype(self._scheme) if integer else torch.float32
            points = torch.from_numpy(self.zeros).to(dtype).reshape(self._grid)
        if self._into is None:
            return levels, points
        for mine, theirs in zip(self._into[0], levels, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.view(torch.uint8).copy_(theirs.view(torch.uint8))
        if self._into[1] is not None and points is not None:
            self._into[1].copy_(points)
        return self._into


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
