"""The short cut from bfloat16 to 4-bit floats with power-of-two scales: integers only, on 16-bit lanes.

Scaling by 2 ** k adds k to the exponent field, so ``bits(|x|) - (k << 7)`` compares with the bits of the
seven rounding boundaries as the scaled value would. Subnormal inputs break that rule, but in a block whose
E8M0 byte is at least SAFE_BYTE they are far below the first boundary; tiles with smaller bytes take the
float32 stages.
"""

from typing import Any

import numpy as np

from .encode import encode_float, scale_tile
from .intrinsics import count_above16, device, kernel, shl16, shr16, shr32
from .layout import BAD_VALUE, MULTIPLY, OK
from .pack import pack_nibbles
from .scales import block_scales
from .tile import BFLOAT16, NOT_FINITE, TILE, block_amax, fetch_ahead, load, spread

SAFE_BYTE = np.uint8(8)
"""2 ** -126 * 2 ** (127 - 8) = 2 ** -7 is below half the smallest value of every 4-bit float format."""


@device
def largest_unsigned(byte: Any) -> Any:
    """Return the bits of the largest bfloat16 magnitude whose quotient rounds to zero in bfloat16.

    byte: E8M0 byte of the block's scale, ``2 ** (byte - 127)``.
    """
    exponent = np.int32(byte) - np.int32(261)
    if exponent >= np.int32(-126):
        return np.int16((exponent + np.int32(127)) * np.int32(128))
    if exponent >= np.int32(-133):
        return np.int16(np.int32(1) << (exponent + np.int32(133)))
    return np.int16(0)


@device
def encode_bfloat16(
    source: Any, start: Any, count: Any, shifts: Any, floors: Any, boundaries: Any, codes: Any
) -> None:
    """Set 16-bit ``codes[i]``: sign in bit 3, magnitude = how many boundaries lie below |x| scaled.

    shifts: int16, (byte - 127) << 7 of each element's block.
    floors: int16, magnitudes up to which the sign is dropped.
    boundaries: tuple of 7 int16, bfloat16 bits of the midpoints, less one where the tie goes up (to the even
    code).
    """
    for i in range(count):
        u = np.uint16(source[start + i])
        m = np.int16(u & np.uint16(0x7FFF))
        d = np.int16(m - shifts[i])
        sign = np.uint16(shl16(shr16(u, np.uint16(15)), np.uint16(3))) if m > floors[i] else np.uint16(0)
        codes[i] = np.uint16(count_above16(d, boundaries) | sign)


@device
def pack_wide(pairs: Any, count: Any, out: Any, at: Any) -> None:
    """Pack ``count`` pairs of 16-bit codes into ``out[at:]``, low nibble first.

    pairs: uint32 view of the codes.
    """
    for i in range(count):
        v = pairs[i]
        out[at + i] = np.uint8((v & np.uint32(15)) | shr32(v, np.uint32(12)))


@kernel
def quantize_bfloat16_rows(
    x: Any,
    layout: Any,
    element: Any,
    rule: Any,
    boundaries: Any,
    scale_codes: Any,
    out: Any,
    first: Any,
    last: Any,
) -> Any:
    """Quantize rows of bfloat16 bits to a packed 4-bit float with E8M0 scales.

    Gives the bytes of ``quantize_rows``. Needs ``cols`` a multiple of ``block``, ``block`` even and at most a
    tile, and parameters in row order.
    """
    tile, factors = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    multipliers, amax = np.empty(TILE, np.float32), np.empty(TILE, np.uint32)
    none = np.empty(1, np.float32)
    steps, shifts = np.empty(TILE, np.int16), np.empty(TILE, np.int16)
    limits, floors = np.empty(TILE, np.int16), np.empty(TILE, np.int16)
    wide, narrow = np.empty(TILE, np.uint16), np.empty(TILE, np.uint8)
    end = last * layout.cols
    at = first * layout.cols
    block_at = first * layout.row_blocks
    worst, state = np.uint32(0), OK
    signed = element.unsigned_below < np.float32(0)
    for i in range(np.uint64(TILE)):
        floors[i] = np.int16(-1)
    while at < end:
        n = min(end - at, np.uint64(TILE) // layout.block * layout.block)
        blocks = n // layout.block
        block_amax(x, at, n, layout.block, BFLOAT16, amax)
        found = block_scales(
            amax, none, none, blocks, rule, True, block_at, none, scale_codes, none, multipliers, none
        )
        state = max(state, found)
        least = np.uint8(255)
        for b in range(blocks):
            worst = max(worst, amax[b])
            byte = scale_codes[block_at + b]
            least = min(least, byte)
            steps[b] = np.int16((np.int32(byte) - np.int32(127)) * np.int32(128))
        fetch_ahead(x, at + n, n)
        if least >= SAFE_BYTE:
            spread(steps, n, layout.block, shifts)
            if not signed:
                for b in range(blocks):
                    limits[b] = largest_unsigned(scale_codes[block_at + b])
                spread(limits, n, layout.block, floors)
            encode_bfloat16(x, at, n, shifts, floors, boundaries, wide)
            pack_wide(wide.view(np.uint32), n // np.uint64(2), out, at // np.uint64(2))
        else:
            load(x, at, n, BFLOAT16, tile)
            spread(multipliers, n, layout.block, factors)
            scale_tile(tile, factors, n, MULTIPLY)
            encode_float(tile, n, element, narrow)
            pack_nibbles(narrow.view(np.uint16), n // np.uint64(2), out, at // np.uint64(2))
        at += n
        block_at += blocks
    return BAD_VALUE if worst >= NOT_FINITE else state
