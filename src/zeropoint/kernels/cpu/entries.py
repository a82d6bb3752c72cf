"""The kernels as Python calls them: descriptors come as one array, rows as plain integers.

See :mod:`.machine.descriptor` for the array, and for the rest the function of the same name, ``..._rows``;
of those that count, :mod:`.statistics.count` and :mod:`.statistics.sums`. Rows (blocks, for those that count)
from ``first`` to ``last`` are cut into ``parts`` for the threads of ``team``; see :mod:`.machine.team`.
:mod:`.block_entries` has those of llama.cpp's types.
"""

from typing import Any

import numpy as np

from .decode.fake import fake_quantize_backward_rows, fake_quantize_rows
from .decode.level_products import level_products
from .decode.rows import dequantize_rows
from .encode.chained_rows import chained_rows, unpack_chain
from .encode.rows import amax_rows, quantize_rows, range_rows
from .linear.from_codes import Input, Matrix, code_rows, float_rows, slot_of
from .linear.from_values import ONE, Packed, value_panels
from .machine.descriptor import OK, record_type, unpack_element, unpack_layout, unpack_rule
from .machine.intrinsics import device, inlined, kernel
from .machine.team import run_parts
from .machine.transposition import turn_panels
from .search.affine_scales import AffineFitting, affine_rows, long_affine_blocks
from .search.integer_scales import fitted_rows, fitting_of
from .search.long_fits import long_fitted_slots
from .search.powers import Power
from .search.table_fits import fitted_slots
from .search.tried_scales import ScaleTries, long_rows, tried_rows
from .search.windows import Candidates, searched_rows
from .statistics import column_sums, count, sums
from .statistics.error_sums import measure_rows

MATRIX = record_type(Matrix)


@device
def _quantize(
    x: Any, desc: Any, order: Any, scales: Any, scale_codes: Any, zeros: Any, out: Any, kept: Any, first: Any,
    last: Any,
) -> Any:  # fmt: skip
    return quantize_rows(
        x, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), order, scales, scale_codes, zeros,
        out, kept, first, last,
    )  # fmt: skip


@kernel
def quantize(*args: Any) -> Any:
    """Quantize rows; see :func:`.encode.rows.quantize_rows`."""
    return run_parts(_quantize, args)


@device
def _chained(
    x: Any, desc: Any, order: Any, chain: Any, levels: Any, keys: Any, values: Any, codes: Any, one: Any,
    two: Any, three: Any, four: Any, five: Any, six: Any, zeros: Any, out: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    return chained_rows(
        x, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), order, unpack_chain(chain), levels,
        (keys, values, codes), (one, two, three, four, five, six), zeros, out, first, last,
    )  # fmt: skip


@kernel
def quantize_chained(*args: Any) -> Any:
    """Quantize rows under levels chosen in turn; see :func:`.encode.chained_rows.chained_rows`."""
    return run_parts(_chained, args)


@device
def _amax(x: Any, desc: Any, out: Any, first: Any, last: Any) -> None:
    amax_rows(x, unpack_layout(desc), out, first, last)


@kernel
def amax(*args: Any) -> Any:
    """Find the largest magnitudes of blocks; see :func:`.encode.rows.amax_rows`."""
    return run_parts(_amax, args)


@device
def _extremes(x: Any, desc: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    range_rows(x, unpack_layout(desc), lows, highs, first, last)


@kernel
def extremes(*args: Any) -> Any:
    """Find the extremes of blocks; see :func:`.encode.rows.range_rows`."""
    return run_parts(_extremes, args)


@device
def _dequantize(
    source: Any, desc: Any, table: Any, scales: Any, scale_codes: Any, zeros: Any, out: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    dequantize_rows(
        source, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), table, scales, scale_codes,
        zeros, out, np.uint64(0), True, first, last,
    )  # fmt: skip


@kernel
def dequantize(*args: Any) -> Any:
    """Dequantize rows; see :func:`.decode.rows.dequantize_rows`."""
    return run_parts(_dequantize, args)


@kernel
def products_of_levels(*args: Any) -> Any:
    """Write the number of each block; see :func:`.decode.level_products.level_products`."""
    return run_parts(level_products, args)


@device
def _fake_quantize(
    x: Any, desc: Any, order: Any, table: Any, scales: Any, back: Any, zeros: Any, out: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    fake_quantize_rows(
        x, unpack_layout(desc), unpack_element(desc), order, table, scales, back, zeros, out, first, last,
    )  # fmt: skip


@kernel
def fake_quantize(*args: Any) -> Any:
    """Fake-quantize rows; see :func:`.decode.fake.fake_quantize_rows`."""
    return run_parts(_fake_quantize, args)


@device
def _fake_quantize_backward(
    grad: Any, x: Any, desc: Any, bounds: Any, scales: Any, zeros: Any, out: Any, first: Any, last: Any
) -> None:
    fake_quantize_backward_rows(
        grad, x, unpack_layout(desc), unpack_element(desc), bounds, scales, zeros, out, first, last,
    )  # fmt: skip


@kernel
def fake_quantize_backward(*args: Any) -> Any:
    """Set the straight-through gradient of rows; see :func:`.decode.fake.fake_quantize_backward_rows`.

    bounds: (3,) float32.
    """
    return run_parts(_fake_quantize_backward, args)


@device
def _measure(
    x: Any, source: Any, desc: Any, table: Any, scales: Any, scale_codes: Any, zeros: Any, adds: Any,
    extent: Any, sums: Any, clipped: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    measure_rows(
        x, source, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), table, scales, scale_codes,
        zeros, adds, (extent[0], extent[1]), sums, clipped, first, last,
    )  # fmt: skip


@kernel
def measure(*args: Any) -> Any:
    """Measure rows against their codes; see :func:`.statistics.errors.measure_rows`.

    extent: (2,) float32.
    """
    return run_parts(_measure, args)


@inlined
def unpack_matrix(packed: Any) -> Any:
    """Return the weight's matrix from its record."""
    r = packed.view(MATRIX)[0]
    return Matrix(
        rows=r["rows"], cols=r["cols"], row_bytes=r["row_bytes"], bits=r["bits"], group=r["group"],
        groups=r["groups"], signed=r["signed"], grouped=r["grouped"],
    )  # fmt: skip


@device
def _codes(
    like: Any, x: Any, desc: Any, order: Any, signed: Any, given: Any, weight: Any, matrix: Any, scales: Any,
    bias: Any, work: Any, out: Any, cut: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    source = Input(unpack_layout(desc), unpack_element(desc), unpack_rule(desc), order, np.uint8(signed))
    weights, state = unpack_matrix(matrix), OK
    for slot in range(first, last):
        own, rows, columns = slot_of(work, cut, slot)
        args = x, source, given, weight, weights, scales, bias, own, out, rows, columns
        state = max(state, code_rows(like, args))
    return state


@kernel
def linear_from_codes(*args: Any) -> Any:
    """Compute slots of a layer's output from integer codes; see :func:`.linear.codes.code_rows`."""
    return run_parts(_codes, args)


@device
def _floats(
    x: Any, weight: Any, matrix: Any, scales: Any, bias: Any, work: Any, out: Any, cut: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    for slot in range(first, last):
        own, rows, columns = slot_of(work, cut, slot)
        float_rows(x, weight, unpack_matrix(matrix), scales, bias, own, out, rows, columns)


@kernel
def linear_from_floats(*args: Any) -> Any:
    """Compute slots of a layer's output from float32; see :func:`.linear.codes.float_rows`."""
    return run_parts(_floats, args)


@device
def _values(
    x: Any, source: Any, desc: Any, table: Any, stored: Any, bias: Any, work: Any, out: Any, cut: Any,
    first: Any, last: Any,
) -> None:  # fmt: skip
    weight = Packed(source, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), table, *stored)
    count, cols, rows, panels, slots = cut[0], cut[1], cut[2], cut[3], cut[4]
    size = np.uint64(len(work)) // slots
    for slot in range(np.uint64(first), np.uint64(last)):
        own = work[slot * size : (slot + ONE) * size]
        ends = panels * slot // slots, panels * (slot + ONE) // slots
        value_panels(x, weight, count, cols, rows, bias, own, out, *ends)


@kernel
def linear_from_values(*args: Any) -> Any:
    """Compute slots of a layer's output from values of its weight; see :func:`.linear.values.value_panels`.

    stored: scales, their codes, and zero points. cut: (5,) uint64, rows of the input, columns and rows of the
    weight, panels, slots.
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
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, shift: Any, tables: Any, slots: Any, counts: Any,
    lows: Any, highs: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    size, one = np.uint64(len(tables)) // slots, np.uint64(1)
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        count.count_runs(x, kind, outer, blocks, inner, shift, table, counts, lows, highs, begin, end)


@kernel
def count_runs(*args: Any) -> Any:
    """Count long blocks in bins. Rows are ``slots``, a table and some blocks each."""
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
    x: Any, desc: Any, ratios: Any, ends: Any, order: Any, scale_codes: Any, out: Any, first: Any, last: Any
) -> Any:
    window = Candidates(ratios[0], ratios[1], ratios[2], ratios[3], ends[0], ends[1], ends[2])
    return searched_rows(
        x, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), window, order, scale_codes, out,
        first, last,
    )  # fmt: skip


@kernel
def search_windows(*args: Any) -> Any:
    """Quantize rows under scales of least squared error; see :func:`.search.windows.searched_rows`.

    ratios: (4,) float32 and ends: (3,) uint32, of :class:`.search.windows.Candidates`.
    """
    return run_parts(_windows, args)


@device
def _fits(
    x: Any, desc: Any, ratios: Any, numbers: Any, counts: Any, order: Any, scales: Any, out: Any, first: Any,
    last: Any,
) -> Any:  # fmt: skip
    return fitted_rows(
        x, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), fitting_of(ratios, numbers, counts),
        order, scales, out, first, last,
    )  # fmt: skip


@kernel
def search_fits(*args: Any) -> Any:
    """Quantize rows under the scales that fit codes; see :func:`.search.integer_scales.fitted_rows`.

    ratios: float32, numbers: (5,) float64, counts: (3,) uint64, of :class:`.search.integer_scales.Fitting`.
    """
    return run_parts(_fits, args)


@device
def _long_fits(
    x: Any, desc: Any, ratios: Any, numbers: Any, counts: Any, scales: Any, floats: Any, doubles: Any,
    first: Any, last: Any,
) -> None:  # fmt: skip
    long_fitted_slots(
        x, unpack_layout(desc), unpack_element(desc), unpack_rule(desc), fitting_of(ratios, numbers, counts),
        counts[3], scales, floats, doubles, first, last,
    )  # fmt: skip


@kernel
def search_long_fits(*args: Any) -> Any:
    """Search the scales that fit codes; see :func:`.search.long_fits.long_fitted_slots`. Rows are slots.

    counts: those of :func:`search_fits`, and the number of slots.
    """
    return run_parts(_long_fits, args)


@device
def _affine(
    x: Any, desc: Any, weights: Any, widths: Any, numbers: Any, counts: Any, scales: Any, zeros: Any,
    floats: Any, doubles: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    layout, element, rule, slots = unpack_layout(desc), unpack_element(desc), unpack_rule(desc), counts[7]
    fitting = AffineFitting(
        widths, numbers[0], numbers[1], numbers[2], counts[0], counts[1], counts[2], counts[3],
        counts[4] != 0, counts[5] != 0, counts[6], slots > 0,
    )  # fmt: skip
    if not fitting.row:
        affine_rows(x, layout, element, rule, weights, fitting, scales, zeros, first, last)
        return
    blocks, two = np.uint64(scales.size), layout.block + layout.block
    for slot in range(first, last):
        memory = floats[slot * (two + layout.block) :], doubles[slot * (two + two + layout.block) :]
        begin, end = blocks * slot // slots, blocks * (slot + ONE) // slots
        long_affine_blocks(x, layout, element, rule, weights, fitting, scales, zeros, memory, begin, end)


@kernel
def search_affine(*args: Any) -> Any:
    """Search scales and zero points from those of a start; see :func:`.search.affine_scales.affine_rows`.

    widths: float64, numbers: (3,) float64, counts: (8,) uint64, of
    :class:`.search.affine_scales.AffineFitting`, and how many slots there are where these are rows, else 0;
    floats, doubles: room for a long block in each.
    """
    return run_parts(_affine, args)


@device
def _tried(
    x: Any, desc: Any, weights: Any, parts: Any, table: Any, halved: Any, values: Any, ratios: Any,
    numbers: Any, counts: Any, scales: Any, floats: Any, doubles: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    layout, element, rule = unpack_layout(desc), unpack_element(desc), unpack_rule(desc)
    power = Power(ratios[5], counts[7], counts[8] != 0, counts[9])
    tries = ScaleTries(
        parts, table, halved, counts[0], values, ratios[0], ratios[1], ratios[2], ratios[3], numbers[0],
        numbers[1], numbers[2], numbers[3], numbers[4], ratios[4], counts[1] != 0, counts[2], counts[3] != 0,
        counts[4] != 0, counts[5] != 0, counts[6], power,
    )  # fmt: skip
    if not tries.row:
        tried_rows(x, layout, element, rule, weights, tries, scales, first, last)
        return
    blocks, slots = np.uint64(scales.size), counts[10]
    for slot in range(first, last):
        own = floats[slot * (layout.block + layout.block) :]
        more = doubles[slot * (layout.block + layout.block + layout.block) :]
        begin, end = blocks * slot // slots, blocks * (slot + ONE) // slots
        long_rows(x, layout, element, rule, weights, tries, scales, (own, more), begin, end)


@kernel
def search_scales(*args: Any) -> Any:
    """Search scales from those of a start; see :func:`.search.tried_scales.tried_rows`.

    parts: float64, table: float32, halved: uint8, values: float32, ratios: (6,) float32, numbers: (5,)
    float64, counts: (10,) uint64, of :class:`.search.tried_scales.ScaleTries` and its power, and how many
    slots there are where these are rows; floats, doubles: room for a long block in each.
    """
    return run_parts(_tried, args)


@kernel
def fit_tables(*args: Any) -> Any:
    """Fit tables of blocks; see :func:`.search.table_fits.fitted_slots`. Rows are slots."""
    return run_parts(fitted_slots, args)


@kernel
def turn_words(*args: Any) -> Any:
    """Transpose words; rows are panels of those of a row. See :func:`.machine.transposition.turn_panels`."""
    return run_parts(turn_panels, args)
