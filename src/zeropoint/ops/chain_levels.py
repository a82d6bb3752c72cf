"""Constants of chained levels for kernels.

They are the numbers of :mod:`zeropoint.params.chains`. As :mod:`.lowering` does for one level, this derives
everything from the scheme. A format of at most 8 bits that holds other numbers than integers becomes a
ladder: its values in order, and for each the largest float32 that is rounded to it, found by bisection with
the reference's own rounding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..formats import Format, IntFormat
from ..formats.codes import decode
from ..formats.torch_dtypes import dtype_of, format_of
from ..layout.blocks import blocks_of_blocks
from ..params.effective import signed_end, span
from ..params.stored import IEEE, LEAST_NORMAL, round_to, smallest, store, top
from ..schemes import ScaleLevel, Scheme, ZeroPoint
from ..schemes.scale_rules import Linear, Pick, Store
from .lowering import HELD, Chain, From, HeldAs, Level

_MOST = torch.finfo(torch.float32).max
_SAME = 0x7FFFFFFF


class Rungs(NamedTuple):
    """Ladders one after the other.

    keys: int32, of the largest float32 that is rounded to each value, ordered as the numbers are. values:
    float32. codes: uint8.
    """

    keys: list[int]
    values: list[float]
    codes: list[int]


class Lowered(NamedTuple):
    """A chain, its levels, scales first, and their ladders."""

    chain: Chain
    levels: tuple[Level, ...]
    ladder: Rungs


@functools.lru_cache(maxsize=256)
def lowered_chain(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Lowered | str:
    """Return a chain's kernel constants, or the reason for none."""
    if scheme.center is not None or scheme.dialect.table_steps:
        return f"levels of {scheme} follow from a mean, or from steps of a table"
    if scheme.zero_point is not ZeroPoint.NONE and scheme.element_step != 1:
        return "zero points of fixed-point integers are chosen by the reference"
    one_sided = not scheme.element.min < 0 < scheme.element.max
    if one_sided and not scheme.offsets and scheme.zero_point is ZeroPoint.NONE:
        return f"signs of numbers for {scheme.element_name} are checked by the reference"
    ladder = Rungs([], [], [])
    levels: list[Level] = []
    for chained in (scheme.scales, scheme.offsets):
        for index in range(len(chained)):
            made = _level(chained, index, scheme, shape, format_of(dtype), ladder)
            if isinstance(made, str):
                return made
            levels.append(made)
    return Lowered(_chain(scheme, shape, dtype, levels), tuple(levels), ladder)


def _level(
    chained: tuple[ScaleLevel, ...],
    index: int,
    scheme: Scheme,
    shape: tuple[int, ...],
    own: Format,
    ladder: Rungs,
) -> Level | str:
    """Return the constants of one level, and append its ladder."""
    level, fmt = chained[index], chained[index].format_for(own)
    native, up = dtype_of(fmt), level.stores(Store.UP)
    extents = blocks_of_blocks(level.granularity, scheme.granularity, shape).block_shape(
        scheme.granularity.grid(shape)
    )
    if not isinstance(level.rule, Linear) or native is torch.float64 or set(extents[:-1]) - {1}:
        return f"level {level} is chosen by the reference"
    whole = isinstance(fmt, IntFormat) and fmt.step == 1 and fmt.bits <= 8
    held = HELD.get(native) if native in IEEE else HeldAs.INTEGER if whole else HeldAs.LADDER
    if held is None or (native in IEEE and up) or (native not in IEEE and fmt.bits > 8):
        return f"numbers of level {level} are rounded by the reference"
    first = len(ladder.keys)
    if held is HeldAs.LADDER:
        one = torch.ones(())
        if float(round_to(one, fmt, up=up)) != 1.0 or fmt.has_inf:
            return f"numbers of level {level} are rounded by the reference"
        found = _ladder(fmt, up=up)
        ladder.keys.extend(found.keys)
        ladder.values.extend(found.values)
        ladder.codes.extend(found.codes)
    below = min(fmt.ceiling - fmt.max, fmt.smallest / 2)
    most, signed = top(fmt, up=up), level.picks(Pick.SIGNED)
    count = len(ladder.keys) - first
    return Level(
        blocks=extents[-1] if extents else 1, held=held, signed=signed, late=level.stores(Store.LATE),
        mask=(1 << fmt.bits) - 1 if whole else 0,
        low=max(float(fmt.min), -_MOST), high=min(float(fmt.max), _MOST),
        least=-most if fmt.min == -fmt.max else float(fmt.min - below), most=most, tiny=smallest(fmt),
        span=span(chained[:index], own, signed=signed), first=first, rungs=count,
    )  # fmt: skip


def _chain(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, levels: list[Level]) -> Chain:
    """Return the constants of all levels together."""
    small, fine = scheme.dialect.small_scales, scheme.scales[0]
    quiet = torch.finfo(dtype).eps if small.of_zeros is None else small.of_zeros
    fmt, zeroed = fine.format_for(format_of(dtype)), scheme.zero_point is not ZeroPoint.NONE
    edge, ranged = fine.picks(Pick.EDGE), bool(scheme.offsets) or zeroed
    low, high = scheme.ends
    unsigned = zeroed or (ranged and scheme.offsets[0].format_for(format_of(dtype)).min >= 0)
    blank = float(round_to(torch.tensor(max(quiet, smallest(fmt))), fmt, up=False)) if quiet else 0.0
    signed = fine.picks(Pick.SIGNED)
    scale_from = From.SIGNED if signed else From.LARGEST
    return Chain(
        scale_from=From.EDGE if edge else From.RANGE if ranged else scale_from,
        under_zero=unsigned and not edge, zeroed=zeroed, steps=high - low,
        divisor=signed_end(low, high) if signed else scheme.divisor, end=low, quiet=quiet, blank=blank,
        least=small.least if not edge and small.least >= smallest(fmt) else 0.0,
        step=max(small.least, LEAST_NORMAL), scales=len(scheme.scales), offsets=len(scheme.offsets),
        run=max(level.blocks for level in levels) * scheme.row_block(shape),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _ladder(fmt: Format, *, up: bool) -> Rungs:
    """Return the ladder of a format; zeros of both signs are distinct."""
    ends = torch.tensor([-_MOST, _MOST])
    low, high = key_of(ends).tolist()
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32)
    every = round_to(decode(codes.to(torch.uint8), fmt, torch.float32), fmt, up=up)
    # Numbers that round to others, or to none, are no values.
    every = every[torch.isfinite(every)]
    keys = torch.unique(key_of(torch.cat([every, round_to(ends, fmt, up=up)])))
    values = value_of(keys)
    # The largest number that is rounded to each value or a smaller one.
    least, most = torch.full_like(keys, low), torch.full_like(keys, high)
    while bool((least < most).any()):
        middle = least + (most - least + 1).div(2, rounding_mode="floor")
        inside = key_of(round_to(value_of(middle), fmt, up=up)) <= keys
        least, most = torch.where(inside, middle, least), torch.where(inside, most, middle - 1)
    stored = store(values, fmt).view(torch.uint8)
    return Rungs(least.tolist(), values.tolist(), stored.tolist())


def key_of(x: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that order as float32, negative zero below zero."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, bits ^ _SAME, bits)


def value_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the float32 of keys: the inverse of :func:`key_of`."""
    return torch.where(keys < 0, keys ^ _SAME, keys).to(torch.int32).view(torch.float32)
