"""Kernel entry points: numbers come as packed records, rows as integers.

See :mod:`.machine.named_records` for records, :mod:`.machine.descriptor` for the one of most calls, and for
the rest the function of the same name, ``..._rows``. Rows (blocks, for kernels that count) from ``first`` to
``last`` are cut into ``parts`` for the threads of ``team``; see :mod:`.machine.team`. The other modules of
``..._entries`` have the kernels of what fewer schemes ask for.
"""

from typing import Any

import numpy as np

from .decode.fake import (
    BackwardArrays,
    FakeQuantizeArrays,
    fake_quantize_backward_rows,
    fake_quantize_rows,
    unpack_bounds,
)
from .decode.level_products import level_products
from .decode.rows import DequantizeArrays, dequantize_rows
from .encode.chained_rows import ChainedArrays, chained_rows
from .encode.outer_scale import largest_bits_of_rows, outer_scale, unpack_outer
from .encode.rows import QuantizeArrays, amax_rows, quantize_rows, range_rows
from .machine.descriptor import set_coarse, unpack
from .machine.intrinsics import kernel
from .machine.team import bundled, over_rows
from .statistics.error_sums import ErrorArrays, measure_rows, unpack_extent


@bundled
def quantize(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows: a descriptor, then :class:`.encode.rows.QuantizeArrays`."""
    return quantize_rows(QuantizeArrays(*args[1:]), unpack(args[0]), first, last)


@over_rows
def largest_bits(x: Any, desc: Any, first: Any, last: Any) -> Any:
    """Largest magnitude of a tensor, as bits: data, and a descriptor."""
    return largest_bits_of_rows(x, unpack(desc).layout, first, last)


@kernel
def choose_outer(bits: Any, rule: Any, desc: Any, out: Any) -> Any:
    """Write a tensor's scale to ``out`` and to a descriptor; see :func:`.encode.outer_scale.outer_scale`."""
    scale, state = outer_scale(np.uint32(bits), unpack_outer(rule))
    out[0] = scale
    set_coarse(desc, scale)
    return state


@bundled
def quantize_chained(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows under chained levels: a descriptor, then :class:`.encode.chained_rows.ChainedArrays`."""
    return chained_rows(ChainedArrays(*args[1:]), unpack(args[0]), first, last)


@over_rows
def amax(x: Any, desc: Any, out: Any, first: Any, last: Any) -> None:
    """Find the largest magnitudes of blocks; see :func:`.encode.rows.amax_rows`."""
    amax_rows(x, unpack(desc).layout, out, first, last)


@over_rows
def extremes(x: Any, desc: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Find the extremes of blocks; see :func:`.encode.rows.range_rows`."""
    range_rows(x, unpack(desc).layout, lows, highs, first, last)


@bundled
def dequantize(args: Any, first: Any, last: Any) -> None:
    """Dequantize rows: a descriptor, then :class:`.decode.rows.DequantizeArrays`."""
    dequantize_rows(DequantizeArrays(*args[1:]), unpack(args[0]), np.uint64(0), True, first, last)


products_of_levels = over_rows(level_products)
"""Write the number of each block."""


@bundled
def fake_quantize(args: Any, first: Any, last: Any) -> None:
    """Fake-quantize rows: a descriptor, then :class:`.decode.fake.FakeQuantizeArrays`."""
    fake_quantize_rows(FakeQuantizeArrays(*args[1:]), unpack(args[0]), first, last)


@bundled
def fake_quantize_backward(args: Any, first: Any, last: Any) -> None:
    """Set the straight-through gradient of rows.

    A descriptor, :class:`.decode.fake.GradientBounds`, :class:`.decode.fake.BackwardArrays`.
    """
    bounds, arrays = unpack_bounds(args[1]), BackwardArrays(*args[2:])
    fake_quantize_backward_rows(arrays, unpack(args[0]), bounds, first, last)


@bundled
def measure(args: Any, first: Any, last: Any) -> None:
    """Measure rows against their codes.

    A descriptor, :class:`.statistics.error_sums.ClipExtent`, :class:`.statistics.error_sums.ErrorArrays`.
    """
    measure_rows(ErrorArrays(*args[2:]), unpack(args[0]), unpack_extent(args[1]), first, last)
