"""Kernels of chained levels: K-quants and the like, rounded to nearest.

One kernel chooses the levels and the codes under them, where blocks are runs of rows and levels hold numbers
that it knows. Elsewhere the reference makes the levels of each block, of extremes that a kernel finds. Under
the numbers that these combine to, codes are as under one level of float32 scales, which a kernel knows,

    q = round((x - offset) / scale + z),    (x - offset) / scale = (offset - x) / -scale

and whatever it refuses is left to the reference, which says why.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....errors import ShapeError, ZeropointError
from ....formats.torch_dtypes import dtype_of, format_of
from ....layout import packing
from ....layout.blocks import exact_sum, signed_largest, spread_blocks
from ....ops import lowering, reference
from ....ops.chain_levels import Lowered, lowered_chain
from ....ops.code_tables import code_order
from ....ops.lowering import Offset
from ....ops.reference_backend import Codes, filled
from ....ops.registry import HeldKernel, Request
from ....ops.threads import share
from ....params import arithmetic, chains
from ....params.arithmetic import Ranges, rounder
from ....params.tensors import Params, parameter_tensors
from ....schemes import Granularity, ScaleLevel, Scheme, ZeroPoint
from ....schemes.dialects import SmallScales
from ....schemes.scale_rules import Pick, Store
from ..encode.chained_rows import (
    BLOCKS,
    LEVELS,
    RUN,
    ChainedArrays,
    LevelArrays,
    chained_rows,
    stored_rows,
)
from ..machine import descriptor as k
from ..machine.descriptor import Descriptor
from ..machine.named_records import pack
from ..machine.tile import TILE
from . import memory
from .arrays import NO_BYTES, NO_FLOATS, flat_array
from .calls import OnePass, ScaleMemory, one_pass
from .operators import QuantizeKernel
from .rare_requests import codes_request, single_level
from .statistics import Ends, block_extremes
from .views import KINDS, View, view_of

_LOST = SmallScales(of_zeros=math.inf, least=0.0)
"""Blocks of zeros have infinite scales, which give the code of zero."""
_WORK = 8
"""Elements whose encoding takes as long as storing one scale."""


class ChainedKernel:
    """Parameters and codes."""

    def __init__(self, request: Request) -> None:
        asked = codes_request(request)
        assert asked is not None
        self._request, self._codes = request, QuantizeKernel(asked)
        found = request.scheme, request.shape, request.dtype
        self._fused = fused_call(*found) or late_call(request.scheme, asked.scheme, *found[1:])

    def run(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        scheme = self._request.scheme
        if self._fused is not None and extremes is None:
            out = self._fused.empty() if out is None else out
            if self._fused.run(x.detach(), out) == k.OK:
                return out
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
        scale = torch.where(scale == 0, torch.inf, scale.abs())  # lost scales belong to zeros
        given = [scale] if chosen.zero_point is None else [scale, chosen.zero_point]
        return self._codes.run(values, given), [*chosen.tensors]

    def hold(self, _: Params | None) -> HeldKernel | str:
        if self._fused is None or self._fused.allocates:
            return f"{self._request.scheme.chained} are chosen in memory of each call"
        return HeldKernel(run=self.run)


class FusedCall:
    """One-pass calls that choose levels and codes of ``shape``."""

    allocates = False

    def __init__(
        self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, view: View, found: Lowered
    ) -> None:
        single = single_level(scheme)
        assert single is not None
        offset = Offset[scheme.dialect.zero_points.formula.name]
        rule = lowering.GIVEN._replace(offset=offset, formula=scheme.formula_zero_point)
        element = lowering.element_of(single, torch.float32, multiply=False)
        self._descriptor, self._order = pack(Descriptor(view.layout, element, rule)), code_order(scheme)
        self._records = ChainRecords(found)
        self._made = parameter_tensors(scheme, shape, dtype)
        self._zeroed = scheme.zero_point is not ZeroPoint.NONE
        self._shape, self._bits, self._rows = shape, scheme.bits, view.rows

    def empty(self) -> Codes:
        """Return memory for a result."""
        params = [torch.empty(grid, dtype=dtype, device="cpu") for grid, dtype in self._made]
        return memory.empty(packing.packed_shape(self._shape, self._bits), torch.uint8), params

    def run(self, x: torch.Tensor, out: Codes) -> int:
        """Write codes and parameters; after another state than OK they mean nothing."""
        data, params = out
        zeros = np.empty(params[-1].numel(), np.float32) if self._zeroed else NO_FLOATS
        arrays = ChainedArrays(
            x=flat_array(x),
            order=self._order,
            levels=self._records.arguments(params),
            zeros=zeros,
            out=flat_array(data),
        )
        state = share(chained_rows, (self._descriptor, *arrays), self._rows, x.numel())
        if self._zeroed:
            params[-1].view(-1).copy_(torch.from_numpy(zeros))
        return state


@functools.lru_cache(maxsize=1024)
def fused_call(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> FusedCall | None:
    """Call that takes one pass; None if levels are chosen apart."""
    single = single_level(scheme)
    if single is None or 0 in shape or not shape or dtype not in KINDS:
        return None
    try:
        view, found = view_of(single, shape, dtype), lowered_chain(scheme, shape, dtype)
    except ShapeError:  # the reference says it where it meets it
        return None
    *lead, block = scheme.granularity.block_shape(shape)
    if isinstance(view, str) or isinstance(found, str) or set(lead) - {1} or shape[-1] % block:
        return None
    run, bits = min(found.chain.run, shape[-1]), scheme.bits
    run = max(run, min(RUN, BLOCKS * block) // run * run)
    whole = run * bits % 8 == 0 and shape[-1] * bits % 8 == 0
    return (
        FusedCall(scheme, shape, dtype, view, found)
        if whole and block <= TILE and run <= BLOCKS * block
        else None
    )


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
    """Find each block's number of largest magnitude, the first of equals."""
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


class LateCall:
    """Calls on ``shape``: one pass writes codes, another stores scales.

    Schemes that store scales minus their mean have codes under the scales themselves.

    width: numbers that are stored together: whole blocks of all levels, or a row.
    """

    allocates = True

    def __init__(
        self,
        scheme: Scheme,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        call: OnePass,
        records: ChainRecords,
        width: int,
    ) -> None:
        self._call, self._records, self._width = call, records, width
        self._made = parameter_tensors(scheme, shape, dtype)
        self._bytes = packing.packed_shape(shape, scheme.bits)

    def empty(self) -> Codes:
        """Return memory for a result."""
        params = [torch.empty(grid, dtype=dtype, device="cpu") for grid, dtype in self._made]
        return memory.empty(self._bytes, torch.uint8), params

    def run(self, x: torch.Tensor, out: Codes) -> int:
        """Write codes and parameters; after another state than OK they mean nothing."""
        data, params = out
        found = self._call.scales.empty()
        state = self._call.run(x, data, found, ScaleMemory(self._call.scales))
        if state != k.OK:
            return state
        numbers: Any = flat_array(found[0])
        numbers[np.isinf(numbers)] = 0
        center = np.float32(exact_sum(numbers) / numbers.size)
        params[-1].fill_(float(center))
        levels = self._records.arguments(params[:-1])
        args = numbers, levels, center, np.uint64(self._width)
        runs = -(-numbers.size // self._width)
        return share(stored_rows, args, runs, numbers.size * _WORK)


@functools.lru_cache(maxsize=1024)
def late_call(scheme: Scheme, single: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> LateCall | None:
    """Return the call, or None where levels are chosen otherwise.

    single: the scheme of the same codes under one level of float32 scales.
    """
    fine, center, own = scheme.scales[0], scheme.center, format_of(dtype)
    kept = fine.stores(Store.LATE) and fine.picks(Pick.LARGEST) and len(scheme.scales) > 1
    plain = not scheme.offsets and scheme.zero_point is ZeroPoint.NONE and rounder(single, dtype) is None
    if center is None or not (kept and plain and _is_a_mean(center, own)):
        return None
    as_they_are = replace(single, dialect=replace(single.dialect, small_scales=_LOST))
    call = one_pass(as_they_are, shape, dtype)
    found = lowered_chain(replace(scheme, center=None), shape, dtype)
    if call is None or isinstance(found, str):
        return None
    per, row = found.chain.run // scheme.row_block(shape), scheme.granularity.grid(shape)[-1]
    width = BLOCKS // per * per if row % per == 0 else row
    return LateCall(scheme, shape, dtype, call, ChainRecords(found), width) if 0 < width <= BLOCKS else None


def _is_a_mean(center: ScaleLevel, own: Any) -> bool:
    """Return whether a center is the float32 mean of all numbers."""
    return center.granularity == Granularity.tensor() and dtype_of(center.format_for(own)) is torch.float32


class ChainRecords:
    """The constants of a chain."""

    def __init__(self, found: Lowered) -> None:
        self._chain, self._levels = pack(found.chain), pack(*found.levels)
        kinds = np.int32, np.float32, np.uint8
        ladder = (np.array(part or [0], kind) for part, kind in zip(found.ladder, kinds, strict=True))
        self._ladder = (*ladder,)
        self._count = len(found.levels)

    def arguments(self, params: Params) -> tuple[Any, ...]:
        """Fields of :class:`..encode.chained_rows.LevelArrays` that write the first tensors of ``params``."""
        levels: list[Any] = [flat_array(level).view(np.uint8) for level in params[: self._count]]
        levels += [NO_BYTES] * (LEVELS - len(levels))
        return (*LevelArrays(chain=self._chain, levels=self._levels, ladder=self._ladder, outs=(*levels,)),)
