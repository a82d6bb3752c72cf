"""The host side of the kernels: tensors and launches of one request."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ...errors import NonFiniteError
from ...formats import IntFormat
from ...layout import packing
from ...layout.blocks import reduce_blocks
from ...ops import reference
from ...ops.lowering import How, value_table
from ...ops.reference_backend import filled
from ...ops.registry import Request
from ...params import arithmetic
from ...params.arithmetic import Ranges
from ...params.effective import effective_scale
from ...params.tensors import Params, parameter_tensors, require_parameters, zero_point_of
from ...schemes import Granularity, Scheme
from .segmentation import Segments, segments_of
from .specialization import Constants, constants_of, of_extremes

Codes = tuple[torch.Tensor, Params]
Ends = tuple[float, float] | None
"""Extremes of the tensor that a tensor is a part of."""
_Range = tuple[torch.Tensor, torch.Tensor]


class Launch:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        scheme = request.scheme
        found = segments_of(scheme.granularity, request.shape, scheme.bits)
        assert isinstance(found, Segments)
        self._request, self._segments = request, found
        self._given = constants_of(request, found, chosen=False)
        # Triton takes seconds to import, and is not needed where no tensor is on a GPU.
        from . import segments as kernels

        self._kernels = kernels

    @functools.cached_property
    def _chosen(self) -> Constants:
        """What the kernel that chooses scales is compiled for."""
        return constants_of(self._request, self._segments, chosen=True)

    @property
    def _empty(self) -> bool:
        return 0 in self._request.shape

    def choose_params(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        """Return the parameters that ``x`` gives, of extremes that a kernel finds; raises NonFiniteError."""
        scheme = self._request.scheme
        if self._empty or not scheme.scales:
            return reference.choose_params(x, scheme, extremes)
        found = [self._ends(x, level.granularity, extremes) for level in scheme.scales]
        return arithmetic.scales_from_ranges(scheme, _ranges(found, x))

    def _ends(self, x: torch.Tensor, granularity: Granularity, extremes: Ends) -> _Range:
        """Return the extremes of each block, float32; raises NonFiniteError."""
        whole = reference.whole_range(x, granularity, extremes)
        if whole is not None:
            return whole
        shape = tuple(x.shape)
        # Of a block that spans rows, those of its part of each row, of which torch takes the extremes.
        *lead, block = granularity.block_shape(shape) or (1,)
        cut = segments_of(Granularity.block(*[1] * len(lead), block), shape, 8)
        assert isinstance(cut, Segments)
        low, high = torch.empty((2, cut.cut.segments), dtype=torch.float32, device=x.device)
        _start(self._kernels.segment_extremes, (bits(x), low, high), cut, of_extremes(cut, x.device))
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            reference.require_finite(x)
            raise NonFiniteError("statistics of a finite tensor are not finite")
        return _over(low, shape, granularity, cut, "amin"), _over(high, shape, granularity, cut, "amax")

    def quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return codes under given parameters; raises NonFiniteError."""
        out = self._packed(x) if out is None else out
        if self._empty:
            return out
        bad = torch.zeros(1, dtype=torch.int32, device=x.device)
        tensors = bits(x), *self._factors(params, dividing=True), out, bad
        _start(self._kernels.quantize_segments, tensors, self._segments, self._given)
        if bad.item():
            reference.require_finite(x)
        return out

    def quantize_dynamic(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        """Return codes and the parameters that ``x`` gives, from one read where blocks are segments."""
        asked = self._request
        whole = asked.scheme.granularity == Granularity.tensor() and extremes is not None
        if not self._empty and asked.scheme.scales and self._segments.own and not whole:
            found = self._in_one_pass(x, extremes)
        else:
            params = self.choose_params(x, extremes)
            found = self.quantize(x, params), params
        return found if out is None else filled(out, *found)

    def _in_one_pass(self, x: torch.Tensor, extremes: Ends) -> Codes:
        scheme, device, constants = self._request.scheme, x.device, self._chosen
        params = [
            torch.empty(grid, dtype=dtype, device=device)
            for grid, dtype in parameter_tensors(scheme, self._request.shape, self._request.own_dtype)
        ]
        scales = _written(params[0], floats=constants.rule.how in (How.LINEAR, How.AFFINE))
        zeroed = bool(constants.element.zero_place)
        zeros = _written(params[-1], floats=True) if zeroed else scales
        coarse = scales
        if len(scheme.scales) > 1:
            coarse = params[1] = self._coarse(x, extremes)
        data, bad = self._packed(x), torch.zeros(1, dtype=torch.int32, device=device)
        tensors = bits(x), coarse, scales, zeros, data, bad
        _start(self._kernels.quantize_blocks, tensors, self._segments, constants)
        if bad.item():
            reference.choose_params(x, scheme, extremes)
            raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
        for made, written in ((params[0], scales), (params[-1], zeros))[: 1 + zeroed]:
            if written.dtype is torch.float32 and written is not made:
                made.view(-1).copy_(written)
        return data, params

    def _coarse(self, x: torch.Tensor, extremes: Ends) -> torch.Tensor:
        """Return the scale of the whole tensor."""
        scheme = self._request.scheme
        ends = self._ends(x, scheme.scales[1].granularity, extremes)
        return arithmetic.coarsest_scale(scheme, _ranges([ends, ends], x))

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of codes."""
        asked, device = self._request, data.device
        out = torch.empty(asked.shape, dtype=asked.dtype, device=device) if out is None else out
        if not self._empty:
            factors = self._factors(params, dividing=False)
            tensors = data.contiguous(), *factors, _table(asked.scheme, device), bits(out)
            _start(self._kernels.dequantize_segments, tensors, self._segments, self._given)
        return out

    def fake_quantize(self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of the codes of ``x``."""
        asked = self._request
        out = torch.empty(asked.shape, dtype=asked.dtype, device=x.device) if out is None else out
        if not self._empty:
            factors, zeros = self._factors(params, dividing=True)
            back, _ = self._factors(params, dividing=False)
            tensors = bits(x), factors, back, zeros, _table(asked.scheme, x.device), bits(out)
            _start(self._kernels.fake_quantize_segments, tensors, self._segments, self._given)
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
            factors = torch.ones(scheme.granularity.block_count(asked.shape), device=asked.device)
        factors = factors.to(torch.float32)
        if dividing:
            factors = torch.where(factors == 0, torch.inf, factors)
        if isinstance(scheme.element, IntFormat) and scheme.element.fraction_bits:
            factors = factors * float(scheme.element_step)
        zero = zero_point_of(scheme, params)
        zeros = factors if zero is None else zero.to(torch.float32)
        return factors.contiguous(), zeros.contiguous()


def _start(kernel: Any, tensors: tuple[torch.Tensor, ...], cut: Segments, constants: Constants) -> None:
    with on_device(tensors[0].device):
        kernel[(cut.programs,)](*tensors, cut.cut, constants, num_warps=cut.warps, enable_fp_fusion=False)


def _written(parameter: torch.Tensor, *, floats: bool) -> torch.Tensor:
    """Return what a kernel writes a parameter to: its bytes, or float32, from which others are rounded."""
    if not floats:
        return parameter.view(torch.uint8)
    if parameter.dtype is torch.float32:
        return parameter
    return torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)


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
    return reduce_blocks(
        values.reshape(*shape[:-1], cut.cut.per_row), Granularity.block(*lead, parts), kind, fill
    )


def _ranges(found: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> Ranges:
    """Return the extremes of the blocks of all levels, finest first."""
    lows, highs = zip(*found, strict=True)
    return Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as kernels take it: see :mod:`.element_codes`."""
    x = x.contiguous()
    return x.view(torch.int16) if x.dtype is torch.bfloat16 and x.device.type == "cpu" else x


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Have kernels started on ``device``, as those of torch are; the interpreter warns of each overflow."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")
