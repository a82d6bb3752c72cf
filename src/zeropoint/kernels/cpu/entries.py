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
from .machine.intrinsics import device, kernel
from .machine.team import run_bundled, run_parts
from .machine.transposition import turn_panels
from .statistics import column_sums, count, sums
from .statistics.error_sums import ErrorArrays, measure_rows, unpack_extent


@device
def _quantize(args: Any, first: Any, last: Any) -> Any:
    return quantize_rows(QuantizeArrays(*args[1:]), unpack(args[0]), first, last)


@kernel
def quantize(*args: Any) -> Any:
    """Quantize rows: a descriptor, then :class:`.encode.rows.QuantizeArrays`."""
    return run_bundled(_quantize, args)


@device
def _largest(x: Any, desc: Any, first: Any, last: Any) -> Any:
    return largest_bits_of_rows(x, unpack(desc).layout, first, last)


@kernel
def largest_bits(*args: Any) -> Any:
    """Largest magnitude of a tensor, as bits: data, and a descriptor."""
    return run_parts(_largest, args)


@kernel
def choose_outer(bits: Any, rule: Any, desc: Any, out: Any) -> Any:
    """Write a tensor's scale to ``out`` and to a descriptor; see :func:`.encode.outer_scale.outer_scale`."""
    scale, state = outer_scale(np.uint32(bits), unpack_outer(rule))
    out[0] = scale
    set_coarse(desc, scale)
    return state


@device
def _chained(args: Any, first: Any, last: Any) -> Any:
    return chained_rows(ChainedArrays(*args[1:]), unpack(args[0]), first, last)


@kernel
def quantize_chained(*args: Any) -> Any:
    """Quantize rows under chained levels: a descriptor, then :class:`.encode.chained_rows.ChainedArrays`."""
    return run_bundled(_chained, args)


@device
def _amax(x: Any, desc: Any, out: Any, first: Any, last: Any) -> None:
    amax_rows(x, unpack(desc).layout, out, first, last)


@kernel
def amax(*args: Any) -> Any:
    """Find the largest magnitudes of blocks; see :func:`.encode.rows.amax_rows`."""
    return run_parts(_amax, args)


@device
def _extremes(x: Any, desc: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    range_rows(x, unpack(desc).layout, lows, highs, first, last)


@kernel
def extremes(*args: Any) -> Any:
    """Find the extremes of blocks; see :func:`.encode.rows.range_rows`."""
    return run_parts(_extremes, args)


@device
def _dequantize(args: Any, first: Any, last: Any) -> None:
    dequantize_rows(DequantizeArrays(*args[1:]), unpack(args[0]), np.uint64(0), True, first, last)


@kernel
def dequantize(*args: Any) -> Any:
    """Dequantize rows: a descriptor, then :class:`.decode.rows.DequantizeArrays`."""
    return run_bundled(_dequantize, args)


@kernel
def products_of_levels(*args: Any) -> Any:
    """Write the number of each block; see :func:`.decode.level_products.level_products`."""
    return run_parts(level_products, args)


@device
def _fake_quantize(args: Any, first: Any, last: Any) -> None:
    fake_quantize_rows(FakeQuantizeArrays(*args[1:]), unpack(args[0]), first, last)


@kernel
def fake_quantize(*args: Any) -> Any:
    """Fake-quantize rows: a descriptor, then :class:`.decode.fake.FakeQuantizeArrays`."""
    return run_bundled(_fake_quantize, args)


@device
def _fake_quantize_backward(args: Any, first: Any, last: Any) -> None:
    bounds, arrays = unpack_bounds(args[1]), BackwardArrays(*args[2:])
    fake_quantize_backward_rows(arrays, unpack(args[0]), bounds, first, last)


@kernel
def fake_quantize_backward(*args: Any) -> Any:
    """Set the straight-through gradient of rows.

    A descriptor, :class:`.decode.fake.GradientBounds`, :class:`.decode.fake.BackwardArrays`.
    """
    return run_bundled(_fake_quantize_backward, args)


@device
def _measure(args: Any, first: Any, last: Any) -> None:
    measure_rows(ErrorArrays(*args[2:]), unpack(args[0]), unpack_extent(args[1]), first, last)


@kernel
def measure(*args: Any) -> Any:
    """Measure rows against their codes.

    A descriptor, :class:`.statistics.error_sums.ClipExtent`, :class:`.statistics.error_sums.ErrorArrays`.
    """
    return run_bundled(_measure, args)


@device
def _codes(args: Any, first: Any, last: Any) -> Any:
    like, x, desc, order, signed, given, weight, work, out, cut = args
    source = Input(unpack(desc), order, np.uint8(signed), given[0], given[1])
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots, state = unpack_slots(cut), OK
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        state = max(state, code_rows(like, (x, source, weights, own, out, rows, columns)))
    return state


@kernel
def linear_from_codes(*args: Any) -> Any:
    """Compute slots of a layer's output from integer codes; see :func:`.linear.from_codes.code_rows`.

    An array of the dtype of codes, x, a descriptor, order, whether codes have a sign, the given scale and
    zero point, fields of :class:`.linear.chunks.Weights`, workspace, output,
    :class:`.linear.chunks.Slots`.
    """
    return run_bundled(_codes, args)


@device
def _floats(x: Any, weight: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots = unpack_slots(cut)
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        float_rows(x, weights, own, out, rows, columns)


@kernel
def linear_from_floats(*args: Any) -> Any:
    """Compute slots of a layer's output from float32; see :func:`.linear.from_codes.float_rows`."""
    return run_parts(_floats, args)


@device
def _values(x: Any, stored: Any, bias: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    weight, shape = PackedValues(unpack(stored[0]), *stored[1:]), unpack_panels(cut)
    panels, slots = shape.panels, shape.slots
    size = np.uint64(len(work)) // slots
    for slot in range(np.uint64(first), np.uint64(last)):
        own = work[slot * size : (slot + ONE) * size]
        ends = panels * slot // slots, panels * (slot + ONE) // slots
        value_panels(x, weight, shape, bias, own, out, *ends)


@kernel
def linear_from_values(*args: Any) -> Any:
    """Compute slots of a layer's output from values of its weight: :func:`.linear.from_values.value_panels`.

    x, fields of :class:`.linear.from_values.PackedValues`, bias, workspace, output,
    :class:`.linear.from_values.Panels`.
    """
    return run_parts(_values, args)


@kernel
def extreme_keys(*args: Any) -> Any:
    """Find the keys of the extremes of blocks."""
    return run_parts(count.extreme_keys, args)


@kernel
def column_keys(*args: Any) -> Any:
    """Find the keys of the extremes of blocks that are columns."""
    return run_parts(count.column_keys, args)


@device
def _count_slots(
    x: Any, runs: Any, tables: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    shape, one = count.unpack_runs(runs), np.uint64(1)
    blocks, slots = shape.blocks, shape.slots
    size = np.uint64(len(tables)) // slots
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        count.count_runs(x, shape, table, counts, (lows, highs), begin, end)


@kernel
def count_runs(*args: Any) -> Any:
    """Count long blocks in bins. Rows are slots: a table, blocks."""
    return run_parts(_count_slots, args)


@kernel
def count_short_runs(*args: Any) -> Any:
    """Count short blocks in bins."""
    return run_parts(count.count_short_runs, args)


@kernel
def sum_runs(*args: Any) -> Any:
    """Add up long blocks."""
    return run_parts(sums.sum_runs, args)


@kernel
def sum_short_runs(*args: Any) -> Any:
    """Add up short blocks."""
    return run_parts(sums.sum_short_runs, args)


@kernel
def sum_columns(*args: Any) -> Any:
    """Add up blocks that are columns."""
    return run_parts(column_sums.sum_columns, args)


@device
def _windows(
    x: Any, desc: Any, window: Any, order: Any, scale_codes: Any, out: Any, first: Any, last: Any
) -> Any:
    window = unpack_candidates(window)
    return searched_rows(x, unpack(desc), window, order, scale_codes, out, first, last)


@kernel
def search_windows(*args: Any) -> Any:
    """Quantize rows under scales of least squared error; see :func:`.least_error.windows.searched_rows`.

    Scales that can be best are :class:`.least_error.windows.Candidates`.
    """
    return run_parts(_windows, args)


@device
def _fits(args: Any, first: Any, last: Any) -> Any:
    x, desc, fitting, ratios, order, scales, out = args
    found = unpack_fitting(fitting, ratios=ratios)
    return fitted_rows(x, unpack(desc), found, order, scales, out, first, last)


@kernel
def search_fits(*args: Any) -> Any:
    """Quantize rows under the scales that fit codes; see :func:`.least_error.integer_scales.fitted_rows`.

    What is tried is :class:`.least_error.integer_scales.Fitting`, and its ratios.
    """
    return run_bundled(_fits, args)


@device
def _long_fits(args: Any, first: Any, last: Any) -> None:
    x, desc, fitting, ratios, scales, floats, doubles = args
    found = unpack_fitting(fitting, ratios=ratios)
    long_fitted_slots(x, unpack(desc), found, scales, floats, doubles, first, last)


@kernel
def search_long_fits(*args: Any) -> Any:
    """Search the scales that fit codes; rows are slots.

    See :func:`.least_error.long_fits.long_fitted_slots`.
    """
    return run_bundled(_long_fits, args)


@device
def _affine(args: Any, first: Any, last: Any) -> None:
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


@kernel
def search_affine(*args: Any) -> Any:
    """Improve start scales and zero points; see :func:`.least_error.affine_scales.affine_rows`.

    What is tried is :class:`.least_error.affine_scales.AffineFitting`, and its widths. The last two arrays
    are room for a long block in each slot.
    """
    return run_bundled(_affine, args)


@device
def _tried(args: Any, first: Any, last: Any) -> None:
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


@kernel
def search_scales(*args: Any) -> Any:
    """Improve start scales; see :func:`.least_error.tried_scales.tried_rows`.

    What is tried is :class:`.least_error.tried_scales.ScaleTries`, and its arrays. The last two arrays are
    room for a long block in each slot.
    """
    return run_bundled(_tried, args)


@kernel
def fit_tables(*args: Any) -> Any:
    """Fit tables of blocks; see :func:`.least_error.table_fits.fitted_slots`. Rows are slots."""
    return run_parts(fitted_slots, args)


@kernel
def turn_words(*args: Any) -> Any:
    """Transpose words; rows are panels of words. See :func:`.machine.transposition.turn_panels`."""
    return run_parts(turn_panels, args)
