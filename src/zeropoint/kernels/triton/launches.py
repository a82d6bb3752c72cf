"""The host side of the kernels: tensors, constants and launches of one request."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import NonFiniteError
from ...formats import FloatFormat, IntFormat
from ...layout import packing
from ...layout.blocks import reduce_blocks
from ...ops import lowering, reference
from ...ops.lowering import How, LoweredRule, code_order, value_table
from ...ops.reference_backend import filled
from ...ops.registry import Request
from ...params import arithmetic
from ...params.arithmetic import Ranges
from ...params.effective import effective_scale
from ...params.tensors import Params, parameter_tensors, require_parameters, zero_point_of
from ...schemes import Granularity, Scheme
from .cuts import Segments, segments_of

_BYTE_WIDTHS = {1: 8, 2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 7: 8, 8: 1}
"""Codes of each width that fill whole bytes together."""


class Launch:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        scheme = request.scheme
        found = segments_of(scheme.granularity, request.shape, scheme.bits)
        assert isinstance(found, Segments)
        self._request, self._segments = request, found
        element = lowering.element_of(scheme, request.own_dtype, multiply=False)
        if request.code_range is not None:
            element = element._replace(low=request.code_range[0], high=request.code_range[1])
        self._element = _constants(element)
        self._order = _packed_order(scheme)
        self._width, self._group = scheme.bits, _BYTE_WIDTHS[scheme.bits]
        # Triton takes seconds to import, and is not needed where no tensor is on a GPU.
        from . import segments as kernels

        self._kernels = kernels

    @property
    def _empty(self) -> bool:
        return 0 in self._request.shape

    def _start(self, kernel: Any, tensors: tuple[torch.Tensor, ...], cut: Segments, **constants: Any) -> None:
        with _on(tensors[0].device):
            kernel[(cut.programs,)](
                *tensors, cut.cut, size=cut.size, many=cut.many, flat=cut.flat, **constants,
                num_warps=8 if cut.size * cut.many > _SMALL else 4, enable_fp_fusion=False,
            )  # fmt: skip

    def choose_params(self, x: torch.Tensor, extremes: tuple[float, float] | None = None) -> Params:
        """Return the parameters that ``x`` gives, of extremes that a kernel finds; raises NonFiniteError."""
        scheme = self._request.scheme
        if self._empty or not scheme.scales:
            return reference.choose_params(x, scheme, extremes)
        found = [
            reference.whole_range(x, level.granularity, extremes) or self._extremes(x, level.granularity)
            for level in scheme.scales
        ]
        return arithmetic.scales_from_ranges(scheme, _ranges(found, x))

    def _extremes(self, x: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the extremes of each block, float32; raises NonFiniteError."""
        shape = tuple(x.shape)
        # Of a block that spans rows, those of its part of each row, of which torch takes the extremes.
        *lead, block = granularity.block_shape(shape) or (1,)
        cut = segments_of(Granularity.block(*[1] * len(lead), block), shape, 8)
        assert isinstance(cut, Segments)
        low, high = torch.empty((2, cut.cut.count), dtype=torch.float32, device=x.device)
        self._start(self._kernels.segment_extremes, (_bits(x.contiguous()), low, high), cut)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            reference.require_finite(x)
            raise NonFiniteError("statistics of a finite tensor are not finite")
        return _over(low, shape, granularity, cut, "amin"), _over(high, shape, granularity, cut, "amax")

    def quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return codes under given parameters; raises NonFiniteError."""
        out = self._packed(x) if out is None else out
        if self._empty:
            return out
        factors, zeros = self._factors(params, dividing=True)
        bad = torch.zeros(1, dtype=torch.int32, device=x.device)
        tensors = _bits(x.contiguous()), factors, zeros, out, bad
        self._start(
            self._kernels.quantize_segments, tensors, self._segments, element=self._element,
            order=self._order, width=self._width, group=self._group, own=self._segments.own,
        )  # fmt: skip
        if bad.item():
            reference.require_finite(x)
        return out

    def quantize_dynamic(
        self,
        x: torch.Tensor,
        out: tuple[torch.Tensor, Params] | None = None,
        extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:
        """Return codes and the parameters that ``x`` gives, from one read where blocks are segments."""
        asked = self._request
        whole = asked.scheme.granularity == Granularity.tensor() and extremes is not None
        if not self._empty and asked.scheme.scales and self._segments.own and not whole:
            found = self._in_one_pass(x, extremes)
        else:
            params = self.choose_params(x, extremes)
            found = self.quantize(x, params), params
        return found if out is None else filled(out, *found)

    def _in_one_pass(self, x: torch.Tensor, extremes: tuple[float, float] | None) -> tuple[torch.Tensor, Params]:
        asked, device = self._request, x.device
        scheme = asked.scheme
        rule, element, multiply = _chosen(scheme, asked.own_dtype)
        params = [
            torch.empty(grid, dtype=dtype, device=device)
            for grid, dtype in parameter_tensors(scheme, asked.shape, asked.own_dtype)
        ]
        two_levels = len(scheme.scales) > 1
        if two_levels:
            params[1] = self._coarse(x, extremes)
        count = self._segments.cut.count
        floats = rule.how in (How.LINEAR, How.AFFINE)
        scales = params[0].view(torch.uint8)
        if floats:
            scales = params[0] if params[0].dtype is torch.float32 else torch.empty(count, device=device)
        zeroed = zero_point_of(scheme, params) is not None
        zeros = torch.empty(count, device=device) if zeroed else scales
        data, bad = self._packed(x), torch.zeros(1, dtype=torch.int32, device=device)
        self._start(
            self._kernels.quantize_blocks, (_bits(x.contiguous()), params[1] if two_levels else scales, scales, zeros, data, bad),
            self._segments, element=element, rule=rule, order=self._order, width=self._width,
            group=self._group, multiply=multiply,
        )  # fmt: skip
        if bad.item():
            reference.choose_params(x, scheme, extremes)
            raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
        if floats and scales is not params[0]:
            params[0].view(-1).copy_(scales)
        if zeroed:
            params[-1].view(-1).copy_(zeros)
        return data, params

    def _coarse(self, x: torch.Tensor, extremes: tuple[float, float] | None) -> torch.Tensor:
        """Return the scale of the whole tensor."""
        scheme = self._request.scheme
        level = scheme.scales[1].granularity
        ends = reference.whole_range(x, level, extremes) or self._extremes(x, level)
        return arithmetic.coarsest_scale(scheme, _ranges([ends, ends], x))

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of codes."""
        asked = self._request
        if out is None:
            out = torch.empty(asked.shape, dtype=asked.dtype, device=data.device)
        if self._empty:
            return out
        factors, zeros = self._factors(params, dividing=False)
        self._start(
            self._kernels.dequantize_segments,
            (data.contiguous(), factors, zeros, _table(asked.scheme, data.device), _bits(out)),
            self._segments, element=self._element, width=self._width, group=self._group,
            own=self._segments.own,
        )  # fmt: skip
        return out

    def fake_quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of the codes of ``x``."""
        asked = self._request
        out = torch.empty(asked.shape, dtype=asked.dtype, device=x.device) if out is None else out
        if self._empty:
            return out
        factors, zeros = self._factors(params, dividing=True)
        back, _ = self._factors(params, dividing=False)
        self._start(
            self._kernels.fake_quantize_segments,
            (_bits(x.contiguous()), factors, back, zeros, _table(asked.scheme, x.device), _bits(out)),
            self._segments, element=self._element, order=self._order, width=self._width,
            own=self._segments.own,
        )  # fmt: skip
        return out

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        shape = packing.packed_shape(self._request.shape, self._request.scheme.bits)
        return torch.empty(shape, dtype=torch.uint8, device=x.device)

    def _factors(self, params: Params, *, dividing: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one float32 factor a block, the step of integer codes included, and the zero points.

        dividing: whether a zero factor becomes Inf, by which every value divides to zero.
        """
        asked = self._request
        scheme = asked.scheme
        require_parameters(scheme, params, asked.shape)
        factors = effective_scale(scheme, params, asked.shape, asked.own_dtype)
        if factors is None:
            count = scheme.granularity.block_count(asked.shape)
            factors = torch.ones(count, device=asked.device)
        factors = factors.to(torch.float32)
        if dividing:
            factors = torch.where(factors == 0, torch.inf, factors)
        if isinstance(scheme.element, IntFormat) and scheme.element.fraction_bits:
            factors = factors * float(scheme.element_step)
        zero = zero_point_of(scheme, params)
        zeros = factors if zero is None else zero.to(torch.float32)
        return factors.contiguous(), zeros.contiguous()


_SMALL = 2048
"""Elements of a program from which on it takes eight warps."""


def _packed_order(scheme: Scheme) -> int:
    """Return the codes of all ranks of a codebook, four bits each, as an int64."""
    packed = sum(int(code) << (4 * rank) for rank, code in enumerate(code_order(scheme)))
    return packed - (1 << 64) if packed >> 63 else packed


def _constants(record: NamedTuple) -> Any:
    """Return a record whose fields are plain numbers, of which Triton makes constants of compilation."""
    plain = (int(value) if isinstance(value, IntEnum) else value for value in record)
    return type(record)(*plain)


@functools.lru_cache(maxsize=1024)
def _chosen(scheme: Scheme, dtype: torch.dtype) -> tuple[LoweredRule, Any, bool]:
    """Return rule and element for scales that are chosen, and whether factors are multiplied by."""
    rule = lowering.rule_of(scheme, dtype)
    multiply = rule.how is How.POWER and isinstance(scheme.element, FloatFormat)
    return _constants(rule), _constants(lowering.element_of(scheme, dtype, multiply=multiply)), multiply


@functools.lru_cache(maxsize=256)
def _table(scheme: Scheme, device: torch.device) -> torch.Tensor:
    """Return the values of all codes of a scheme on a device."""
    return torch.from_numpy(value_table(scheme)).to(device)


def _over(
    values: torch.Tensor, shape: tuple[int, ...], granularity: Granularity, cut: Segments, kind: str
) -> torch.Tensor:
    """Return the extremes of blocks from those of segments of rows."""
    fill = math.inf if kind == "amin" else -math.inf
    if not shape:
        return values.reshape(())
    parts = -(-cut.cut.block // cut.cut.length)  # segments of a block along the row
    lead = granularity.block_shape(shape)[:-1]
    return reduce_blocks(values.reshape(*shape[:-1], cut.cut.per_row), Granularity.block(*lead, parts), kind, fill)


def _ranges(found: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> Ranges:
    """Return the extremes of the blocks of all levels, finest first."""
    lows, highs = zip(*found, strict=True)
    return Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels take it: bfloat16 as its bits."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Have kernels started on ``device``, as those of torch are; the interpreter warns of each overflow."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")
