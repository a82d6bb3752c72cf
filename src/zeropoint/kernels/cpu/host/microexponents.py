"""Two levels of powers of two (MX9), chosen from fine magnitudes."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from ....errors import ShapeError
from ....formats import FloatFormat, Format
from ....formats.torch_dtypes import format_of, storage_dtype
from ....layout import packing
from ....layout.blocks import blocks_of_blocks
from ....ops.lowering import addend_of
from ....ops.threads import share
from ....params.arithmetic import rounder
from ....params.powers_of_two import reach
from ....params.stored import store
from ....params.tensors import Params, parameter_tensors
from ....schemes import Scheme, ZeroPoint
from ....schemes.scale_rules import Search
from ..encode.power_levels import LEAST, MOST, PowerArrays, Powers, power_level_rows
from ..machine import descriptor as k
from ..machine.named_records import pack
from . import memory
from .arrays import NO_BYTES, code_step, flat_array
from .calls import GivenCall, flat_bytes, given_call
from .views import KINDS, rows_of_levels

LEVELS = 2
_PAIR, _PAIRS, _STEP = 2, 8, 32
"""Values of a pair, pairs of a block, values of a step of :mod:`..encode.power_steps`."""
_DOWN = 255
"""-1 as a byte: the code step of a level whose codes fall with the exponent."""


class LevelPair(NamedTuple):
    """Kernel constants, and the call for codes under given scales."""

    powers: Any
    limits: Any
    call: GivenCall


def quantized(x: torch.Tensor, scheme: Scheme, pair: LevelPair, data: torch.Tensor | None) -> Params | None:
    """Scales of both levels, or None: the reference says why.

    data: memory for packed codes, which are written too, or None for scales alone.
    """
    fine, coarse = (
        memory.empty(grid, stored) for grid, stored in parameter_tensors(scheme, tuple(x.shape), x.dtype)
    )
    call, levels = pair.call, [flat_array(level).view(np.uint8) for level in (fine, coarse)]
    out = (
        NO_BYTES[:0]
        if data is None
        else flat_bytes(data, math.prod(packing.packed_shape(x.shape, scheme.bits)))
    )
    arrays = PowerArrays(
        x=flat_array(x), order=call.order, limits=pair.limits, fine=levels[0], coarse=levels[1], out=out
    )
    args = call.descriptor, pair.powers, *arrays
    state = share(power_level_rows, args, call.rows, call.count)
    return [fine, coarse] if state == k.OK else None


@functools.lru_cache(maxsize=256)
def pair_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> LevelPair | None:
    """Kernel arguments; None for other schemes and row-spanning blocks."""
    levels, element = scheme.scales, scheme.element
    plain = scheme.chained is None and scheme.zero_point is ZeroPoint.NONE and rounder(scheme, dtype) is None
    if len(levels) != LEVELS or not plain or not shape or 0 in shape or dtype not in KINDS:
        return None
    if any(isinstance(level.rule, Search) or not level.rule.power_of_two for level in levels):
        return None
    own = format_of(dtype)
    inner, outer = (_ladder(level.format_for(own)) for level in levels)
    grid = scheme.granularity.grid(shape)
    try:
        blocks = blocks_of_blocks(levels[1].granularity, scheme.granularity, shape).block_shape(grid)
    except ShapeError:
        return None
    rows = {*scheme.granularity.block_shape(shape)[:-1], *blocks[:-1]} <= {1}
    seen = rows_of_levels(scheme, shape, blocks[-1])
    if inner is None or outer is None or not rows or grid[-1] % blocks[-1] or seen is None:
        return None
    if not element.min < 0 < element.max:
        return None
    one, emax = np.float32(1), element.emax
    with np.errstate(over="ignore"):  # then nothing is past the limit
        most = np.ldexp(one, np.arange(outer.first, outer.last + 1)) * np.ldexp(one, inner.last)
    inner_addend, outer_addend = (addend_of(scheme, level.rule) for level in levels)
    limits = most.astype(np.float64) * reach(scheme)
    known = inner_addend == outer_addend and blocks[-1] == _PAIRS
    steps = _steps(scheme, shape[-1], inner, outer) if known else {}
    powers = Powers(
        per=blocks[-1],
        inner_addend=inner_addend,
        outer_addend=outer_addend,
        emax=emax,
        least=-127 - min(emax, 0),
        inner_first=inner.first,
        inner_last=inner.last,
        outer_first=outer.first,
        outer_last=outer.last,
        inner_code=inner.code,
        inner_step=inner.step,
        outer_code=outer.code,
        outer_step=outer.step,
        unit=float(code_step(scheme)),
        limits=limits,
        **steps,
    )
    return LevelPair(powers=pack(powers), limits=limits, call=given_call(scheme, seen, dtype, dtype, None))


def _steps(scheme: Scheme, columns: int, inner: PowerCodes, outer: PowerCodes) -> dict[str, int]:
    """Constants of :mod:`..encode.power_steps`; none where it does not know the blocks."""
    element, descends = scheme.element, inner.step == _DOWN
    if scheme.granularity.block_shape((1, columns))[-1] != _PAIR or columns % _STEP:
        return {}
    if not isinstance(element, FloatFormat) or element.exponent_bits or not element.signed or element.emax:
        return {}
    places = element.mantissa_bits - 1 + element.bias
    calm = max(outer.first, LEAST + 1 - inner.first, places - MOST - inner.first)
    if not (
        0 < places <= MOST and calm <= outer.last <= MOST and inner.step in (1, _DOWN) and inner.last >= 0
    ):
        return {}
    zeros = min(max(LEAST - outer.first, inner.first), inner.last) - inner.first
    return {
        "top_code": int(element.max * 2**places),
        "sign_place": scheme.bits - 1,
        "places": places,
        "calm": calm,
        # ~(n - 1) is -n.
        "pair_base": (-inner.first - inner.code - 1 if descends else inner.code - inner.first) % 2**32,
        "pair_flip": 2**32 - 1 if descends else 0,
        "zero_pair": (inner.code + zeros * inner.step) % 256,
    }


class PowerCodes(NamedTuple):
    """Powers of two: first and last exponent, code, code step (mod 256)."""

    first: int
    last: int
    code: int
    step: int


def _ladder(fmt: Format) -> PowerCodes | None:
    """Powers of a format; None unless exponents and codes are even."""
    held = fmt.exponents
    if held is None or storage_dtype(fmt).itemsize > 1 or len(held) != held[-1] - held[0] + 1:
        return None
    values = torch.tensor([2.0**exponent for exponent in held], dtype=torch.float64, device="cpu")
    codes = store(values, fmt).view(torch.uint8).tolist()
    step = (codes[-1] - codes[0]) // max(len(codes) - 1, 1)
    even = all(code == codes[0] + n * step for n, code in enumerate(codes))
    known = even and held[0] >= LEAST and held[-1] <= MOST
    return PowerCodes(first=held[0], last=held[-1], code=codes[0], step=step % 256) if known else None
