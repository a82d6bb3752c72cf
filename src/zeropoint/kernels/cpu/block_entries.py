"""The kernels of llama.cpp's types as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .least_error.extreme_scales import rounded_rows
from .least_error.minima import MinimaLevels, minima_rows, unpack_minima
from .least_error.plain import TABLE, Numbers, plain_rows, square_rows, unpack_plain
from .least_error.signed import THREE, moved_rows, six_bit_rows, three_bit_rows, unpack_signed
from .least_error.table_scales import FOUR, table_rows, table_super_rows
from .machine.bit_moves import move_rows
from .machine.intrinsics import device, kernel
from .machine.team import run_bundled, run_parts


@device
def _minima(args: Any, first: Any, last: Any) -> Any:
    x, importance, kind, packed, scales, halves, minima, half_minima = args
    levels = MinimaLevels(scales, halves, minima, half_minima)
    return minima_rows(x, importance, unpack_minima(kind), packed, levels, first, last)


@kernel
def search_minima(*args: Any) -> Any:
    """Search scales and minima; rows are super-blocks. See :func:`.least_error.minima.minima_rows`."""
    return run_bundled(_minima, args)


@device
def _signed(args: Any, first: Any, last: Any) -> Any:
    x, importance, record, packed, scales, halves = args
    kind = unpack_signed(record)
    if kind.bits == FOUR:
        return table_super_rows(x, importance, kind, packed, scales, halves, first, last)
    if kind.bits != THREE:
        return six_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    if kind.weighted:
        return three_bit_rows(x, importance, kind, packed, scales, halves, first, last)
    return moved_rows(x, packed, scales, halves, first, last)


@kernel
def search_signed(*args: Any) -> Any:
    """Search signed scales; rows are super-blocks. See :func:`.least_error.signed.six_bit_rows`."""
    return run_bundled(_signed, args)


@device
def _rounded(args: Any, first: Any, last: Any) -> Any:
    x, source, kind, packed, halves, half_minima, octets = args
    numbers = Numbers(halves, half_minima, octets)
    return rounded_rows(x, np.uint64(source), unpack_plain(kind), packed, numbers, first, last)


@kernel
def round_plain(*args: Any) -> Any:
    """Quantize blocks by their extremes; see :func:`.least_error.extreme_scales.rounded_rows`."""
    return run_bundled(_rounded, args)


@device
def _plain(args: Any, first: Any, last: Any) -> Any:
    x, importance, means, record, packed, halves, half_minima, octets = args
    kind = unpack_plain(record)
    if kind.kind == TABLE:
        codes = packed.view(np.uint8)
        return table_rows(x, importance, kind.columns, kind.weighted, codes, halves, first, last)
    return plain_rows(x, importance, means, kind, packed, Numbers(halves, half_minima, octets), first, last)


@kernel
def search_plain(*args: Any) -> Any:
    """Quantize blocks with one number or two; rows are blocks. See :func:`.least_error.plain.plain_rows`."""
    return run_bundled(_plain, args)


@kernel
def row_squares(*args: Any) -> Any:
    """Add up the squares of rows; see :func:`.least_error.plain.square_rows`."""
    return run_parts(square_rows, args)


@kernel
def move_bits(*args: Any) -> Any:
    """Join or split blocks; see :func:`.machine.bit_moves.move_rows`."""
    return run_parts(move_rows, args)
