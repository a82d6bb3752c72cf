"""Kernel entry points: numbers come as packed records, rows as integers.

See :mod:`.machine.named_records` for records, :mod:`.machine.descriptor` for the one of most calls, and for
the rest the function of the same name, ``..._rows``; of the kernels that count, :mod:`.statistics.count` and
:mod:`.statistics.sums`. Rows (blocks, for kernels that count) from ``first`` to ``last`` are cut into
``parts`` for the threads of ``team``; see :mod:`.machine.team`. :mod:`.block_entries` has the kernels of
llama.cpp's types.
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
from .least_error.affine_scales import affine_rows, long_affine_blocks, unpack_affine
from .least_error.integer_scales import fitted_rows, unpack_fitting
from .least_error.long_fits import long_fitted_slots
from .least_error.table_fits import fitted_slots
from .least_error.tried_scales import long_rows, tried_rows, unpack_tries
from .least_error.windows import searched_rows, unpack_candidates
from .linear.chunks import Weights, unpack_matrix, unpack_slots
from .linear.from_codes import Input, code_rows, float_rows, slot_of
from .linear.from_values import ONE, PackedValues, unpack_panels, value_panels
from .machine.descriptor import OK, set_coarse, unpack
from .machine.intrinsics import kernel
from .machine.team import bundled, over_rows
from .machine.transposition import turn_panels
from .statistics import column_sums, count, sums
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


@bundled
def linear_from_codes(args: Any, first: Any, last: Any) -> Any:
    """Compute slots of a layer's output from integer codes; see :func:`.linear.from_codes.code_rows`.

    An array of the dtype of codes, x, a descriptor, order, whether codes have a sign, the given scale and
    zero point, fields of :class:`.linear.chunks.Weights`, workspace, output,
    :class:`.linear.chunks.Slots`.
    """
    like, x, desc, order, signed, given, weight, work, out, cut = args
    source = Input(unpack(desc), order, np.uint8(signed), given[0], given[1])
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots, state = unpack_slots(cut), OK
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        state = max(state, code_rows(like, (x, source, weights, own, out, rows, columns)))
    return state


@over_rows
def linear_from_floats(x: Any, weight: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    """Compute slots of a layer's output from float32; see :func:`.linear.from_codes.float_rows`."""
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots = unpack_slots(cut)
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        float_rows(x, weights, own, out, rows, columns)


@over_rows
def linear_from_values(
    x: Any, stored: Any, bias: Any, work: Any, out: Any, cut: Any, first: Any, last: Any
) -> None:
    """Compute slots of a layer's output from values of its weight: :func:`.linear.from_values.value_panels`.

    x, fields of :class:`.linear.from_values.PackedValues`, bias, workspace, output,
    :class:`.linear.from_values.Panels`.
    """
    weight, shape = PackedValues(unpack(stored[0]), *stored[1:]), unpack_panels(cut)
    panels, slots = shape.panels, shape.slots
    size = np.uint64(len(work)) // slots
    for slot in range(np.uint64(first), np.uint64(last)):
        own = work[slot * size : (slot + ONE) * size]
        ends = panels * slot // slots, panels * (slot + ONE) // slots
        value_panels(x, weight, shape, bias, own, out, *ends)


extreme_keys = over_rows(count.extreme_keys)
"""Find the keys of the extremes of blocks."""
column_keys = over_rows(count.column_keys)
"""Find the keys of the extremes of blocks that are columns."""


@over_rows
def count_runs(
    x: Any, runs: Any, tables: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    """Count long blocks in bins. Rows are slots: a table, blocks."""
    shape, one = count.unpack_runs(runs), np.uint64(1)
    blocks, slots = shape.blocks, shape.slots
    size = np.uint64(len(tables)) // slots
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        count.count_runs(x, shape, table, counts, (lows, highs), begin, end)


count_short_runs = over_rows(count.count_short_runs)
"""Count short blocks in bins."""
sum_runs = over_rows(sums.sum_runs)
"""Add up long blocks."""
sum_short_runs = over_rows(sums.sum_short_runs)
"""Add up short blocks."""
sum_columns = over_rows(column_sums.sum_columns)
"""Add up blocks that are columns."""


@over_rows
def search_windows(
    x: Any, desc: Any, window: Any, order: Any, scale_codes: Any, out: Any, first: Any, last: Any
) -> Any:
    """Quantize rows under scales of least squared error; see :func:`.least_error.windows.searched_rows`.

    Scales that can be best are :class:`.least_error.windows.Candidates`.
    """
    window = unpack_candidates(window)
    return searched_rows(x, unpack(desc), window, order, scale_codes, out, first, last)


@bundled
def search_fits(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows under the scales that fit codes; see :func:`.least_error.integer_scales.fitted_rows`.

    What is tried is :class:`.least_error.integer_scales.Fitting`, and its ratios.
    """
    x, desc, fitting, ratios, order, scales, out = args
    found = unpack_fitting(fitting, ratios=ratios)
    return fitted_rows(x, unpack(desc), found, order, scales, out, first, last)


@bundled
def search_long_fits(args: Any, first: Any, last: Any) -> None:
    """Search the scales that fit codes; rows are slots.

    See :func:`.least_error.long_fits.long_fitted_slots`.
    """
    x, desc, fitting, ratios, scales, floats, doubles = args
    found = unpack_fitting(fitting, ratios=ratios)
    long_fitted_slots(x, unpack(desc), found, scales, floats, doubles, first, last)


@bundled
def search_affine(args: Any, first: Any, last: Any) -> None:
    """Improve start scales and zero points; see :func:`.least_error.affine_scales.affine_rows`.

    What is tried is :class:`.least_error.affine_scales.AffineFitting`, and its widths. The last two arrays
    are room for a long block in each slot.
    """
    x, packed, weights, record, widths, scales, zeros, floats, doubles = args
    desc, fitting = unpack(packed), unpack_affine(record, widths=widths)
    starts, size, slots = (scales, zeros), desc.layout.block, fitting.slots
    if not fitting.row:
        affine_rows(x, desc, weights, fitting, starts, first, last)
        return
    blocks, two = np.uint64(scales.size), size + size
    for slot in range(first, last):
        memory = floats[slot * (two + size) :], doubles[slot * (two + two + size) :]
        begin, end = blocks * slot // slots, blocks * (slot + ONE) // slots
        long_affine_blocks(x, desc, weights, fitting, starts, memory, begin, end)


@bundled
def search_scales(args: Any, first: Any, last: Any) -> None:
    """Improve start scales; see :func:`.least_error.tried_scales.tried_rows`.

    What is tried is :class:`.least_error.tried_scales.ScaleTries`, and its arrays. The last two arrays are
    room for a long block in each slot.
    """
    x, packed, weights, record, (parts, table, halved, values), scales, floats, doubles = args
    desc = unpack(packed)
    tries = unpack_tries(record, parts=parts, table=table, halved=halved, values=values)
    if not tries.row:
        tried_rows(x, desc, weights, tries, scales, first, last)
        return
    blocks, slots, size = np.uint64(scales.size), tries.slots, desc.layout.block
    for slot in range(first, last):
        memory = floats[slot * (size + size) :], doubles[slot * (size + size + size) :]
        begin, end = blocks * slot // slots, blocks * (slot + ONE) // slots
        long_rows(x, desc, weights, tries, scales, memory, begin, end)


fit_tables = over_rows(fitted_slots)
"""Fit tables of blocks; rows are slots."""
turn_words = over_rows(turn_panels)
"""Transpose words; rows are panels of words."""
