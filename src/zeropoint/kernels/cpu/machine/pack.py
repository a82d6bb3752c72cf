"""Bit packing: two nibbles a byte, and LSB-first streams of b-bit codes."""

from typing import Any

import numpy as np

from .byte_vectors import load_strided, store_strided
from .intrinsics import and32, device, inlined, load64, shl16, shl32, shr16, shr32, store64
from .vector import LONGS, load_lanes, longs_of, store_lanes

LONG = np.uint64(LONGS.count)


@device
def pack_nibbles(pairs: Any, count: Any, out: Any, at: Any) -> None:
    """Pack ``count`` pairs of 4-bit codes, first in the low nibble.

    pairs: uint16 view of the codes; reading two codes as one uint16 avoids every shuffle (little-endian
    hosts).
    """
    for i in range(count):
        v = pairs[i]
        out[at + i] = np.uint8((v & np.uint16(15)) | (shr16(v, np.uint16(4)) & np.uint16(0xF0)))


@device
def pack_pairs_of_bits(fours: Any, count: Any, out: Any, at: Any) -> None:
    """Pack ``count`` times four 2-bit codes, lowest first; fours: uint32 view."""
    for i in range(count):
        v = and32(fours[i], np.uint32(0x03030303))
        high = shr32(v, np.uint32(12)) | shr32(v, np.uint32(18))
        out[at + i] = np.uint8(v | shr32(v, np.uint32(6)) | high)


@inlined
def steps_of(bits: Any) -> Any:
    """Masks and shift of each of three steps: codes, pairs, fours."""
    one, gap = np.uint64(1), np.uint64(8) - bits
    m0 = np.uint64(((one << bits) - one) * np.uint64(0x0001000100010001))
    m1 = np.uint64(((one << (bits + bits)) - one) * np.uint64(0x0000000100000001))
    m2 = np.uint64((one << (np.uint64(4) * bits)) - one)
    first, second = (m0, m0 << bits, gap), (m1, m1 << (bits + bits), gap + gap)
    return first, second, (m2, m2 << (np.uint64(4) * bits), np.uint64(4) * gap)


@inlined
def _of_longs(steps: Any) -> Any:
    """Return :func:`steps_of` as vectors."""
    a, b, c = steps
    return (
        (longs_of(a[0]), longs_of(a[1]), longs_of(a[2])),
        (longs_of(b[0]), longs_of(b[1]), longs_of(b[2])),
        (longs_of(c[0]), longs_of(c[1]), longs_of(c[2])),
    )


@inlined
def together(x: Any, steps: Any) -> Any:
    """Pack 8 codes, a byte each: three shift-and-or steps halve the gaps."""
    a, b, c = steps
    x = (x & a[0]) | ((x >> a[2]) & a[1])
    x = (x & b[0]) | ((x >> b[2]) & b[1])
    return (x & c[0]) | ((x >> c[2]) & c[1])


@inlined
def apart(x: Any, steps: Any) -> Any:
    """Return 8 codes that follow one another, a byte each."""
    a, b, c = steps
    x = (x & c[0]) | ((x & c[1]) << c[2])
    x = (x & b[0]) | ((x & b[1]) << b[2])
    return (x & a[0]) | ((x & a[1]) << a[2])


@device
def pack_bits(octets: Any, count: Any, bits: Any, out: Any, at: Any) -> None:
    """Pack codes of ``bits`` bits LSB first; 8 codes fill ``bits`` bytes.

    octets: uint64 view of the codes, 8 a word; count: number of words. Writes 8 bytes a word, so ``out``
    needs 8 - bits bytes of slack behind the last one.
    """
    steps, whole = steps_of(bits), count // LONG * LONG
    wide = _of_longs(steps)
    for k in range(np.uint64(0), whole, LONG):
        store_strided(out, at + k * bits, bits, together(load_lanes(octets, k), wide))
    for k in range(whole, count):
        store64(out, at + k * bits, together(octets[k], steps))


@device
def unpack_nibbles(source: Any, at: Any, count: Any, pairs: Any) -> None:
    """Spread ``count`` bytes into pairs of codes, low nibble first.

    pairs: uint16 view of the codes.
    """
    for i in range(count):
        v = np.uint16(source[at + i])
        pairs[i] = np.uint16((v & np.uint16(15)) | (shl16(v, np.uint16(4)) & np.uint16(0x0F00)))


@device
def unpack_pairs_of_bits(source: Any, at: Any, count: Any, fours: Any) -> None:
    """Spread ``count`` bytes into four codes each; the inverse of :func:`pack_pairs_of_bits`."""
    for i in range(count):
        v = np.uint32(source[at + i])
        high = shl32(v, np.uint32(12)) | shl32(v, np.uint32(18))
        fours[i] = np.uint32((v | shl32(v, np.uint32(6)) | high) & np.uint32(0x03030303))


@device
def unpack_bits(source: Any, at: Any, limit: Any, count: Any, bits: Any, octets: Any) -> None:
    """Spread ``count`` groups of ``bits`` bytes into 8 codes each.

    Reads 8 bytes at a time, never at or past ``limit``.
    """
    steps, k, eight = steps_of(bits), np.uint64(0), np.uint64(8)
    wide = _of_longs(steps)
    while k + LONG <= count and at + (k + LONG) * bits + eight - bits <= limit:
        store_lanes(octets, k, apart(load_strided(source, at + k * bits, bits), wide))
        k += LONG
    for rest in range(k, count):
        base = at + rest * bits
        if base + eight <= limit:
            x = load64(source, base)
        else:
            x = np.uint64(0)
            for j in range(min(eight, limit - base)):
                x |= np.uint64(source[base + j]) << (eight * j)
        octets[rest] = apart(x, steps)


@device
def load_codes(source: Any, at: Any, count: Any, bits: Any, codes: Any) -> None:
    """Unpack ``count`` codes that begin at byte ``at`` of ``source``."""
    if bits == np.uint64(8):
        for i in range(count):
            codes[i] = source[at + i]
    elif bits == np.uint64(4):
        unpack_nibbles(source, at, (count + np.uint64(1)) // np.uint64(2), codes.view(np.uint16))
    elif bits == np.uint64(2):
        unpack_pairs_of_bits(source, at, (count + np.uint64(3)) // np.uint64(4), codes.view(np.uint32))
    else:
        octets = (count + np.uint64(7)) // np.uint64(8)
        unpack_bits(source, at, np.uint64(len(source)), octets, bits, codes.view(np.uint64))
