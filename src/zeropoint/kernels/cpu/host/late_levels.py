"""Schemes storing scales minus their mean: codes use the scales themselves."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....formats.torch_dtypes import dtype_of, format_of
from ....layout import packing
from ....layout.blocks import exact_sum
from ....ops.chain_levels import lowered_chain
from ....ops.threads import share
from ....params.arithmetic import rounder
from ....params.tensors import Params, parameter_tensors
from ....schemes import Granularity, ScaleLevel, Scheme, ZeroPoint
from ....schemes.dialects import SmallScales
from ....schemes.scale_rules import Pick, Store
from .. import lookup_entries
from ..encode.chained_rows import BLOCKS
from ..machine import descriptor as k
from . import memory
from .arrays import flat_array
from .calls import OnePass, ScaleMemory, one_pass
from .chain_records import ChainRecords

Codes = tuple[torch.Tensor, Params]
_LOST = SmallScales(of_zeros=math.inf, least=0.0)
"""Blocks of zeros have infinite scales, which give the code of zero."""
_WORK = 8
"""Elements whose encoding takes as long as storing one scale."""


class LateCall:
    """Calls on ``shape``: one pass writes codes, another stores scales.

    width: numbers that are stored together: whole blocks of all levels, or a row.
    """

    allocates = True

    def __init__(
        self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, call: OnePass,
        records: ChainRecords, width: int,
    ) -> None:  # fmt: skip
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
        return share(lookup_entries.store_levels, args, runs, numbers.size * _WORK)


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
