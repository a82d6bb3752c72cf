"""Two levels of powers of two, such as those of MX9, chosen by a kernel from magnitudes of fine blocks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from ....errors import ShapeError
from ....formats import Format
from ....formats.torch_dtypes import format_of, storage_dtype
from ....layout.blocks import blocks_of_blocks
from ....ops.lowering import addend_of
from ....ops.threads import share
from ....params.arithmetic import rounder
from ....params.powers_of_two import reach
from ....params.stored import store
from ....params.tensors import Params, parameter_tensors
from ....schemes import Scheme, ZeroPoint
from ....schemes.scale_rules import Search
from .. import lookup_entries
from ..machine import descriptor as k
from .arrays import flat_array
from .views import KINDS

LEVELS = 2


class Powers(NamedTuple):
    """What the kernel computes with: see :func:`..encode.power_levels.power_level_blocks`."""

    sizes: Any
    numbers: Any
    codes: Any
    limits: Any


def chosen(
    amax: Any, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, found: Powers
) -> Params | None:
    """Return the scales of both levels, or None where the reference says what is wrong.

    amax: float32 magnitudes of the fine blocks, flat.
    """
    fine, coarse = (
        torch.empty(grid, dtype=stored, device="cpu")
        for grid, stored in parameter_tensors(scheme, shape, dtype)
    )
    outputs = (flat_array(level).view(np.uint8) for level in (fine, coarse))
    args = amax, *found, *outputs
    state = share(lookup_entries.choose_powers, args, coarse.numel(), amax.size)
    return [fine, coarse] if state == k.OK else None


@functools.lru_cache(maxsize=256)
def powers_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Powers | None:
    """Return what the kernel computes with, or None for other schemes, and for blocks that span rows."""
    levels, element = scheme.scales, scheme.element
    plain = scheme.chained is None and scheme.zero_point is ZeroPoint.NONE and rounder(scheme, dtype) is None
    if len(levels) != LEVELS or not plain or not shape or 0 in shape or dtype not in KINDS:
        return None
    if any(isinstance(level.rule, Search) or not level.rule.power_of_two for level in levels):
        return None
    own = format_of(dtype)
    ladders = [_ladder(level.format_for(own)) for level in levels]
    grid = scheme.granularity.grid(shape)
    try:
        blocks = blocks_of_blocks(levels[1].granularity, scheme.granularity, shape).block_shape(grid)
    except ShapeError:
        return None
    rows = {*scheme.granularity.block_shape(shape)[:-1], *blocks[:-1]} <= {1}
    if None in ladders or not rows or grid[-1] % blocks[-1] or not element.min < 0 < element.max:
        return None
    (low, fine), (bottom, coarse) = (ladder for ladder in ladders if ladder is not None)
    high, top = low + len(fine) - 1, bottom + len(coarse) - 1
    emax = element.emax
    with np.errstate(over="ignore"):  # then nothing is past the limit
        outer = np.ldexp(np.float32(1), np.arange(bottom, top + 1)) * np.ldexp(np.float32(1), high)
    return Powers(
        sizes=np.array((blocks[-1], *(addend_of(scheme, level.rule) for level in levels)), np.uint64),
        numbers=np.array((emax, -127 - min(emax, 0), low, high, bottom, top), np.int32),
        codes=np.array((*fine, *coarse), np.uint8),
        limits=outer.astype(np.float64) * reach(scheme),
    )


def _ladder(fmt: Format) -> tuple[int, list[int]] | None:
    """Return the first exponent of a format and the codes of all, or None where one between them is none."""
    held = fmt.exponents
    if held is None or storage_dtype(fmt).itemsize > 1 or len(held) != held[-1] - held[0] + 1:
        return None
    values = torch.tensor([2.0**exponent for exponent in held], dtype=torch.float64, device="cpu")
    return held[0], store(values, fmt).view(torch.uint8).tolist()
