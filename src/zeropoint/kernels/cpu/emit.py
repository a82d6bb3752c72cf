"""The way of a finished tile to memory: packing into scratch, then stores that go past the cache."""

from typing import Any

import numpy as np

from .intrinsics import address_of, kernel, stream32
from .pack import pack_bits, pack_nibbles


@kernel
def stream_bytes(source: Any, count: Any, target: Any, at: Any) -> None:
    """Copy ``count`` bytes of an L1 tile to ``target[at:]``, whole cache lines past the cache.

    An ordinary store first reads the line it overwrites; at memory speed that costs a third of the write traffic.
    """
    head = min(count, (np.uint64(64) - address_of(target, at) % np.uint64(64)) % np.uint64(64))
    for i in range(head):
        target[at + i] = source[i]
    lines = (count - head) // np.uint64(64)
    for k in range(lines):
        i = head + k * np.uint64(64)
        stream32(target, at + i, source, i)
        stream32(target, at + i + np.uint64(32), source, i + np.uint64(32))
    for i in range(head + lines * np.uint64(64), count):
        target[at + i] = source[i]


@kernel
def emit_codes(codes: Any, count: Any, bits: Any, packed: Any, target: Any, at: Any) -> None:
    """Pack ``count`` codes and stream them to ``target[at:]``; ``codes`` has room for zeros up to whole words of 8."""
    if bits == np.uint64(8):
        stream_bytes(codes, count, target, at)
        return
    for i in range(count, (count + np.uint64(7)) // np.uint64(8) * np.uint64(8)):
        codes[i] = np.uint8(0)
    if bits == np.uint64(4):
        pack_nibbles(codes.view(np.uint16), (count + np.uint64(1)) // np.uint64(2), packed, np.uint64(0))
    else:
        pack_bits(codes.view(np.uint64), (count + np.uint64(7)) // np.uint64(8), bits, packed, np.uint64(0))
    stream_bytes(packed, (count * bits + np.uint64(7)) // np.uint64(8), target, at)
