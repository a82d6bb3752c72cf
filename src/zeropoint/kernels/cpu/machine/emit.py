"""Stores of float32 values and of codes narrower than a byte."""

from typing import Any

import numpy as np

from .intrinsics import address_of, device, stream32
from .pack import pack_bits, pack_nibbles, pack_pairs_of_bits


@device
def stream_floats(tile: Any, count: Any, target: Any, at: Any) -> None:
    """Copy float32 of a tile to ``target[at:]``, cache lines past the cache.

    An ordinary store first reads the line it overwrites; four bytes an element make that the larger part of
    the traffic.
    """
    short = (np.uint64(64) - address_of(target, at) % np.uint64(64)) % np.uint64(64)
    head = min(count, short // np.uint64(4))
    for i in range(head):
        target[at + i] = tile[i]
    lines = (count - head) // np.uint64(16)
    for k in range(lines):
        i = head + k * np.uint64(16)
        stream32(target, at + i, tile, i)
        stream32(target, at + i + np.uint64(8), tile, i + np.uint64(8))
    for i in range(head + lines * np.uint64(16), count):
        target[at + i] = tile[i]


@device
def emit_packed(codes: Any, count: Any, bits: Any, packed: Any, target: Any, at: Any) -> None:
    """Pack ``count`` codes of less than 8 bits into ``target[at:]``.

    ``codes`` has room for zeros up to whole words of 8; ``packed`` takes the bytes of a stream that may write
    past its end.
    """
    for i in range(count, (count + np.uint64(7)) // np.uint64(8) * np.uint64(8)):
        codes[i] = np.uint8(0)
    if bits == np.uint64(4):
        pack_nibbles(codes.view(np.uint16), (count + np.uint64(1)) // np.uint64(2), target, at)
        return
    if bits == np.uint64(2):
        pack_pairs_of_bits(codes.view(np.uint32), (count + np.uint64(3)) // np.uint64(4), target, at)
        return
    pack_bits(codes.view(np.uint64), (count + np.uint64(7)) // np.uint64(8), bits, packed, np.uint64(0))
    for i in range((count * bits + np.uint64(7)) // np.uint64(8)):
        target[at + i] = packed[i]
