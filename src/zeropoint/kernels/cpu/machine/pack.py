"""Codes to bytes and back: two nibbles a byte, and an LSB-first stream of b-bit codes."""

from typing import Any

import numpy as np

from .intrinsics import device, inlined, load64, shl16, shr16, store64


@device
def pack_nibbles(pairs: Any, count: Any, out: Any, at: Any) -> None:
    """Pack ``count`` pairs of 4-bit codes into bytes, first code in the low nibble.

    pairs: uint16 view of the codes; reading two codes as one uint16 avoids every shuffle (little-endian
    hosts).
    """
    for i in range(count):
        v = pairs[i]
        out[at + i] = np.uint8((v & np.uint16(15)) | (shr16(v, np.uint16(4)) & np.uint16(0xF0)))


@inlined
def _masks(bits: Any) -> Any:
    """Return the gap between codes of a byte each, and masks of every second code, pair and four."""
    one = np.uint64(1)
    m0 = np.uint64(((one << bits) - one) * np.uint64(0x0001000100010001))
    m1 = np.uint64(((one << (bits + bits)) - one) * np.uint64(0x0000000100000001))
    return np.uint64(8) - bits, m0, m1, np.uint64((one << (np.uint64(4) * bits)) - one)


@inlined
def together(x: Any, bits: Any) -> Any:
    """Return 8 codes, a byte each, in ``bits`` bytes: three shift-and-or steps halve the gaps."""
    gap, m0, m1, m2 = _masks(bits)
    x = (x & m0) | ((x >> gap) & (m0 << bits))
    x = (x & m1) | ((x >> (gap + gap)) & (m1 << (bits + bits)))
    return (x & m2) | ((x >> (np.uint64(4) * gap)) & (m2 << (np.uint64(4) * bits)))


@inlined
def apart(x: Any, bits: Any) -> Any:
    """Return the 8 codes of ``bits`` bytes, a byte each."""
    gap, m0, m1, m2 = _masks(bits)
    x = (x & m2) | ((x & (m2 << (np.uint64(4) * bits))) << (np.uint64(4) * gap))
    x = (x & m1) | ((x & (m1 << (bits + bits))) << (gap + gap))
    return (x & m0) | ((x & (m0 << bits)) << gap)


@device
def pack_bits(octets: Any, count: Any, bits: Any, out: Any, at: Any) -> None:
    """Pack codes of ``bits`` bits LSB first into ``out[at:]``; 8 codes fill ``bits`` bytes.

    octets: uint64 view of the codes, 8 a word; count: number of words. Writes 8 bytes a word, so ``out``
    needs 8 - bits bytes of slack behind the last one.
    """
    for k in range(count):
        store64(out, at + k * bits, together(octets[k], bits))


@device
def unpack_nibbles(source: Any, at: Any, count: Any, pairs: Any) -> None:
    """Spread ``count`` bytes into pairs of codes, low nibble first.

    pairs: uint16 view of the codes.
    """
    for i in range(count):
        v = np.uint16(source[at + i])
        pairs[i] = np.uint16((v & np.uint16(15)) | (shl16(v, np.uint16(4)) & np.uint16(0x0F00)))


@device
def unpack_bits(source: Any, at: Any, limit: Any, count: Any, bits: Any, octets: Any) -> None:
    """Spread ``count`` groups of ``bits`` bytes into 8 codes each.

    Reads 8 bytes at a time, never at or past ``limit``.
    """
    for k in range(count):
        base = at + k * bits
        if base + np.uint64(8) <= limit:
            x = load64(source, base)
        else:
            x = np.uint64(0)
            for j in range(min(np.uint64(8), limit - base)):
                x |= np.uint64(source[base + j]) << (np.uint64(8) * j)
        octets[k] = apart(x, bits)


@device
def load_codes(source: Any, at: Any, count: Any, bits: Any, codes: Any) -> None:
    """Unpack ``count`` codes that begin at byte ``at`` of ``source``."""
    if bits == np.uint64(8):
        for i in range(count):
            codes[i] = source[at + i]
    elif bits == np.uint64(4):
        unpack_nibbles(source, at, (count + np.uint64(1)) // np.uint64(2), codes.view(np.uint16))
    else:
        octets = (count + np.uint64(7)) // np.uint64(8)
        unpack_bits(source, at, np.uint64(len(source)), octets, bits, codes.view(np.uint64))
