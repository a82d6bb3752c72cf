"""The kernels that search scales as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .least_error.affine_scales import affine_rows, long_affine_blocks, unpack_affine
from .least_error.integer_scales import fitted_rows, unpack_fitting
from .least_error.lanes import ONE
from .least_error.long_fits import long_fitted_slots
from .least_error.table_fits import fitted_slots
from .least_error.tried_scales import long_rows, tried_rows, unpack_tries
from .least_error.windows import searched_rows, unpack_candidates
from .machine.descriptor import unpack
from .machine.team import bundled, over_rows


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
