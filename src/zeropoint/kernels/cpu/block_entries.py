"""The kernels of llama.cpp's types as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .machine.bit_moves import move_rows
from .machine.intrinsics import device, inlined, kernel
from .machine.team import run_parts
from .search.extreme_scales import rounded_rows
from .search.line_search import Tries
from .search.minima import MinimaKind, MinimaLevels, minima_rows
from .search.plain import TABLE, Numbers, PlainKind, plain_rows, square_rows
from .search.signed import THREE, SignedKind, moved_rows, six_bit_rows, three_bit_rows
from .search.table_scales import FOUR, table_rows, table_super_rows


@device
def _minima(
    x: Any, importance: Any, numbers: Any, sizes: Any, packed: Any, scales: Any, halves: Any, minima: Any,
    half_minima: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    line = Tries(numbers[0], numbers[1], numbers[2], sizes[0], sizes[1] != 0)
    kind = MinimaKind(sizes[2], line, numbers[3], numbers[4], sizes[3], sizes[4], sizes[5] != 0, sizes[6])
    return minima_rows(
        x, importance, kind, packed, MinimaLevels(scales, halves, minima, half_minima), first, last
    )


@kernel
def search_minima(*args: Any) -> Any:
    """Search scales and minima; rows are super-blocks. See :func:`.search.minima.minima_rows`.

    numbers: (5,) float32, of the line top, first and step, the largest code of a scale, factor. sizes: (7,)
    uint64, steps, magnitudes, size, stored, columns, weighted, bits.
    """
    return run_parts(_minima, args)


@device
def _signed(
    x: Any, importance: Any, sizes: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any
) -> Any:
    kind = SignedKind(sizes[0], sizes[1], sizes[2] != 0)
    if kind.bits == FOUR:
        return table_super_rows(
            x, importance, kind.columns, kind.weighted, packed, scales, halves, first, last
        )
    if kind.bits != THREE:
        return six_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    if kind.weighted:
        return three_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    return moved_rows(x, packed, scales, halves, first, last)


@kernel
def search_signed(*args: Any) -> Any:
    """Search signed scales; rows are super-blocks. See :func:`.search.signed.six_bit_rows`.

    sizes: (3,) uint64, bits, columns, weighted.
    """
    return run_parts(_signed, args)


@inlined
def _plain_kind(sizes: Any) -> Any:
    return PlainKind(sizes[0], sizes[1], np.float32(sizes[2]), sizes[3], sizes[4], sizes[5] != 0)


@device
def _rounded(
    x: Any, source: Any, sizes: Any, packed: Any, halves: Any, half_minima: Any, octets: Any, first: Any,
    last: Any,
) -> Any:  # fmt: skip
    numbers = Numbers(halves, half_minima, octets)
    return rounded_rows(x, np.uint64(source), _plain_kind(sizes), packed, numbers, first, last)


@kernel
def round_plain(*args: Any) -> Any:
    """Quantize blocks under scales of their extremes; see :func:`.search.extreme_scales.rounded_rows`.

    sizes: those of :func:`search_plain`.
    """
    return run_parts(_rounded, args)


@device
def _plain(
    x: Any, importance: Any, means: Any, sizes: Any, packed: Any, halves: Any, half_minima: Any, octets: Any,
    first: Any, last: Any,
) -> Any:  # fmt: skip
    kind = _plain_kind(sizes)
    if kind.kind == TABLE:
        octets = packed.view(np.uint8)
        return table_rows(x, importance, kind.columns, kind.weighted, octets, halves, first, last)
    return plain_rows(x, importance, means, kind, packed, Numbers(halves, half_minima, octets), first, last)


@kernel
def search_plain(*args: Any) -> Any:
    """Quantize blocks with one number or two; rows are blocks. See :func:`.search.plain.plain_rows`.

    sizes: (6,) uint64, kind, size, top, bits, columns, weighted.
    """
    return run_parts(_plain, args)


@kernel
def row_squares(*args: Any) -> Any:
    """Add up the squares of rows; see :func:`.search.plain.square_rows`."""
    return run_parts(square_rows, args)


@kernel
def move_bits(*args: Any) -> Any:
    """Join or split blocks; see :func:`.machine.bit_moves.move_rows`."""
    return run_parts(move_rows, args)
