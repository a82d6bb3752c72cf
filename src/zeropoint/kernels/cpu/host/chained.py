"""Codes of schemes whose levels follow from each other: K-quants and the like, rounded to nearest.

The reference makes the levels of each block, of extremes that a kernel finds. Under the numbers that these
combine to, codes are those of one level of float32 scales, which a kernel knows,

    q = round((x - offset) / scale + z),    (x - offset) / scale = (offset - x) / -scale

and whatever it refuses is left to the reference, which says why.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ....errors import ZeropointError
from ....formats import get_format
from ....layout.blocks import signed_largest, spread_blocks
from ....ops import reference
from ....ops.reference_backend import filled
from ....ops.registry import HeldKernel, Op, Request
from ....params import arithmetic, chains
from ....params.arithmetic import Ranges
from ....params.tensors import Params
from ....schemes import Granularity, ScaleLevel, Scheme, ZeroPoint
from ....schemes.scale_rules import Pick
from .operators import QuantizeKernel
from .statistics import Ends, block_extremes

Codes = tuple[torch.Tensor, Params]


@functools.lru_cache(maxsize=256)
def single_level(scheme: Scheme) -> Scheme | None:
    """Return the scheme of the same codes under one level of float32 scales, or None where there is none."""
    element = scheme.element
    if scheme.chained is None or element.reads_sign or scheme.zero_point is ZeroPoint.REAL:
        return None
    level = ScaleLevel(granularity=scheme.granularity, format=get_format("float32"))
    single = replace(scheme, scales=(level,), offsets=(), center=None)
    return single if arithmetic.multiplies(single) == arithmetic.multiplies(scheme) else None


def codes_of(request: Request) -> Request | None:
    """Return what the kernel of codes is asked for, or None where there is no such scheme."""
    single = single_level(request.scheme)
    if single is None or request.op is not Op.QUANTIZE_DYNAMIC:
        return None
    wide = torch.float32
    return replace(request, op=Op.QUANTIZE, scheme=single, dtype=wide, own_dtype=wide)


class ChainedKernel:
    """Parameters and codes."""

    def __init__(self, request: Request) -> None:
        asked = codes_of(request)
        assert asked is not None
        self._request, self._codes = request, QuantizeKernel(asked)

    def run(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        """See :class:`zeropoint.ops.registry.Op`."""
        scheme = self._request.scheme
        try:
            data, params = self._by_kernels(x.detach(), scheme, extremes)
        except ZeropointError:
            data, stored = reference.quantize_dynamic(x, scheme, extremes)
            params = [*stored]
        return (data, params) if out is None else filled(out, data, params)

    def _by_kernels(self, x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Codes:
        reference.require_whole(scheme, extremes)
        found = _ranges(x, scheme, extremes)
        arithmetic.require_chosen(scheme, found)
        chosen = chains.choose(scheme, found)
        scale, blocks = chosen.scale, scheme.granularity
        values = x.to(torch.float32)
        if chosen.offset is not None:
            values = values - spread_blocks(chosen.offset, blocks, found.shape)
        if bool((scale < 0).any()):
            values = values * spread_blocks(torch.where(scale < 0, -1.0, 1.0), blocks, found.shape)
        scale = torch.where(scale == 0, torch.inf, scale.abs())  # lost scales are those of zeros
        given = [scale] if chosen.zero_point is None else [scale, chosen.zero_point]
        return self._codes.run(values, given), [*chosen.tensors]

    def hold(self, params: Params | None) -> HeldKernel:
        """See :class:`zeropoint.ops.registry.PlanKernel`."""

        def run(x: torch.Tensor, data: torch.Tensor, params: Params) -> None:
            self.run(x, (data, params))

        reason = f"{self._request.scheme.chained} are chosen in memory of each call"
        return HeldKernel(run=run, workspace_bytes=0, allocates=reason)


def _ranges(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Ranges:
    """Return the extremes of the finest blocks, from which all levels follow."""
    blocks = scheme.granularity
    low, high = reference.whole_range(x, blocks, extremes) or block_extremes(x, blocks, ranged=True)
    largest = _signed(x, blocks, low, high) if scheme.scales[0].picks(Pick.SIGNED) else None
    count = len(scheme.scales)
    return Ranges(
        minimum=(low,) * count, maximum=(high,) * count, dtype=x.dtype, shape=tuple(x.shape), largest=largest
    )


def _signed(x: torch.Tensor, blocks: Granularity, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the number of largest magnitude of each block, the first of equals."""
    largest = torch.where(high.abs() > low.abs(), high, low)
    tied = high == -low  # zeros have signs, too
    if bool(tied.any()):
        *lead, width = blocks.block_shape(tuple(x.shape))
        if set(lead) <= {1} and x.shape[-1] % width == 0:
            rows = x.reshape(-1, width)[tied.reshape(-1)]
            largest[tied] = signed_largest(rows, Granularity.group(width))[:, 0].float()
        else:
            largest = torch.where(tied, signed_largest(x, blocks).float(), largest)
    return largest
