"""The kernels of llama.cpp's types as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .least_error.extreme_scales import rounded_rows
from .least_error.minima import MinimaLevels, minima_rows, unpack_minima
from .least_error.plain import TABLE, Numbers, plain_rows, square_rows, unpack_plain
from .least_error.signed import THREE, moved_rows, six_bit_rows, three_bit_rows, unpack_signed
from .least_error.table_scales import FOUR, table_rows, table_super_rows
from .machine.team import bundled, over_rows


@bundled
def search_minima(args: Any, first: Any, last: Any) -> Any:
    """Search scales and minima; rows are super-blocks. See :func:`.least_error.minima.minima_rows`."""
    x, importance, kind, packed, scales, halves, minima, half_minima = args
    levels = MinimaLevels(scales, halves, minima, half_minima)
    return minima_rows(x, importance, unpack_minima(kind), packed, levels, first, last)


@bundled
def search_signed(args: Any, first: Any, last: Any) -> Any:
    """Search signed scales; rows are super-blocks. See :func:`.least_error.signed.six_bit_rows`."""
    x, importance, record, packed, scales, halves = args
    kind = unpack_signed(record)
    if kind.bits == FOUR:
        return table_super_rows(x, importance, kind, packed, scales, halves, first, last)
    if kind.bits != THREE:
        return six_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    if kind.weighted:
        return three_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    return moved_rows(x, packed, scales, halves, first, last)


@bundled
def round_plain(args: Any, first: Any, last: Any) -> Any:
    """Quantize blocks by their extremes; see :func:`.least_error.extreme_scales.rounded_rows`."""
    x, source, kind, packed, halves, half_minima, octets = args
    numbers = Numbers(halves, half_minima, octets)
    return rounded_rows(x, np.uint64(source), unpack_plain(kind), packed, numbers, first, last)


@bundled
def search_plain(args: Any, first: Any, last: Any) -> Any:
    """Quantize blocks with one number or two; rows are blocks. See :func:`.least_error.plain.plain_rows`."""
    x, importance, means, record, packed, halves, half_minima, octets = args
    kind = unpack_plain(record)
    if kind.kind == TABLE:
        codes = packed.view(np.uint8)
        return table_rows(x, importance, kind.columns, kind.weighted, codes, halves, first, last)
    return plain_rows(x, importance, means, kind, packed, Numbers(halves, half_minima, octets), first, last)


row_squares = over_rows(square_rows)
"""Add up the squares of rows."""
