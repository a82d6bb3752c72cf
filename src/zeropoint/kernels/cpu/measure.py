"""The error of a quantized tensor by rows, in an order that no thread count or vector width changes."""

from typing import Any

import numpy as np

from .decode import decode, stored_scales
from .intrinsics import amax32, bits32, device, float32_of, kernel, scratch, squares32
from .layout import ZERO_NONE
from .pack import load_codes
from .quantize import parameter_row
from .tile import TILE, clear, fetch_ahead, load, spread

LANES = 32
"""Squares of so many neighbors are added in float32, as a tree; their sums in float64, in order."""


@device
def measure_tile(values: Any, decoded: Any, count: Any, totals: Any) -> None:
    """Add one tile's figures to ``totals``: (3,) float64, sum of x**2, sum of (x - y)**2, largest |x - y|.

    ``decoded`` holds the errors afterwards.
    """
    for i in range(count):
        decoded[i] = values[i] - decoded[i]
    width = np.uint64(LANES)
    whole = count // width * width
    squares, errors, worst = totals[0], totals[1], np.uint32(0)
    for k in range(np.uint64(0), whole, width):
        squares += np.float64(squares32(values, k))
        errors += np.float64(squares32(decoded, k))
        worst = max(worst, np.uint32(amax32(decoded, k)))
    for i in range(whole, count):
        squares += np.float64(values[i] * values[i])
        errors += np.float64(decoded[i] * decoded[i])
        worst = max(worst, np.uint32(bits32(decoded[i]) & np.uint32(0x7FFFFFFF)))
    totals[0] = squares
    totals[1] = errors
    totals[2] = max(totals[2], np.float64(float32_of(worst)))


@device
def may_clip(tile: Any, factors: Any, count: Any, reach: Any) -> Any:
    """Return whether some magnitude exceeds ``reach`` steps of its own block."""
    found = np.uint32(0)
    for i in range(count):
        found |= np.uint32(bits32(reach * factors[i] - abs(tile[i])))
    return found >= np.uint32(0x80000000)


@device
def count_clipped(tile: Any, factors: Any, zeros: Any, count: Any, middle: Any, reach: Any) -> Any:
    """Return how many values lie further than ``reach`` steps from the middle of the codes."""
    clipped = np.uint32(0)
    for i in range(count):
        away = abs(tile[i] - (middle - zeros[i]) * factors[i])
        clipped += np.uint32(1) if away > reach * factors[i] else np.uint32(0)
    return clipped


@kernel
def measure_rows(
    x: Any, source: Any, layout: Any, element: Any, rule: Any, table: Any, scales: Any, scale_codes: Any,
    zeros: Any, extent: Any, sums: Any, clipped: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Measure rows ``first`` to ``last`` of ``x`` against their codes in ``source``.

    extent: (middle of the codes, steps from there to the first clipped value). sums: (3 * rows,) float64 of
    :func:`measure_tile`'s totals; clipped: (rows,) int64.
    """
    step = np.uint64(TILE)
    tile, decoded = scratch(TILE, np.float32), scratch(TILE, np.float32)
    factors, offsets = scratch(TILE, np.float32), scratch(TILE, np.float32)
    codes, per_block = scratch(TILE, np.uint8), scratch(TILE, np.float32)
    clear(offsets)
    centered = element.zero_place == ZERO_NONE and extent[0] == np.float32(0)
    fit = max(step // layout.block, np.uint64(1))
    fit = fit // np.uint64(8) * np.uint64(8) if fit >= np.uint64(8) else fit
    for r in range(first, last):
        at = r * layout.cols
        end = at + layout.cols
        block_at = parameter_row(layout, r)
        byte_at = r * layout.row_bytes
        totals = sums[np.uint64(3) * r : np.uint64(3) * r + np.uint64(3)]
        totals[:] = 0
        over = np.uint64(0)
        while at < end:
            span = min(end - at, fit * layout.block)
            blocks = (span + layout.block - np.uint64(1)) // layout.block
            stored_scales(rule, scales, scale_codes, block_at, blocks, per_block)
            spread(per_block, min(span, step), layout.block, factors)
            if element.zero_place != ZERO_NONE:
                for b in range(blocks):
                    per_block[b] = zeros[block_at + b]
                spread(per_block, min(span, step), layout.block, offsets)
            for chunk in range(np.uint64(0), span, step):
                n = min(step, span - chunk)
                load(x, at + chunk, n, layout.kind, tile)
                load_codes(source, byte_at, n, layout.bits, codes)
                byte_at += (n * layout.bits + np.uint64(7)) // np.uint64(8)
                fetch_ahead(x, at + chunk + n, n)
                decode(codes, n, element, table, factors, offsets, decoded)
                measure_tile(tile, decoded, n, totals)
                # Blocks centered on zero seldom clip, and a mask of signs tells at a fraction of the cost of
                # counting.
                if not centered or may_clip(tile, factors, n, extent[1]):
                    over += np.uint64(count_clipped(tile, factors, offsets, n, extent[0], extent[1]))
            at += span
            block_at += blocks
        clipped[r] = over
