"""The kernels as Python calls them: what they are told comes as one array, rows as plain integers.

See :mod:`.layout` for the array, and the function of the same name, ``..._rows``, for the rest.
"""

from typing import Any

import numpy as np

from .decode import dequantize_rows
from .fake import fake_quantize_backward_rows, fake_quantize_rows
from .half import quantize_bfloat16_rows
from .intrinsics import inlined, kernel
from .layout import element_in, layout_in, rule_in
from .linear import Input, Matrix, float_rows, pair_rows, quad_rows
from .measure import measure_rows
from .quantize import amax_rows, quantize_rows, range_rows


@kernel
def quantize(
    x: Any, told: Any, order: Any, scales: Any, scale_codes: Any, zeros: Any, out: Any, first: Any, last: Any
) -> Any:
    """Quantize rows; see :func:`.quantize.quantize_rows`."""
    return quantize_rows(
        x, layout_in(told), element_in(told), rule_in(told), order, scales, scale_codes, zeros, out,
        np.uint64(first), np.uint64(last),
    )  # fmt: skip


@kernel
def quantize_bfloat16(
    x: Any, told: Any, boundaries: Any, scale_codes: Any, out: Any, first: Any, last: Any
) -> Any:
    """Quantize rows of bfloat16 to a 4-bit float; see :func:`.half.quantize_bfloat16_rows`.

    boundaries: (7,) int16.
    """
    seven = (
        boundaries[0], boundaries[1], boundaries[2], boundaries[3], boundaries[4], boundaries[5],
        boundaries[6],
    )  # fmt: skip
    return quantize_bfloat16_rows(
        x, layout_in(told), element_in(told), rule_in(told), seven, scale_codes, out, np.uint64(first),
        np.uint64(last),
    )  # fmt: skip


@kernel
def amax(x: Any, told: Any, out: Any, first: Any, last: Any) -> None:
    """Find the largest magnitudes of blocks; see :func:`.quantize.amax_rows`."""
    amax_rows(x, layout_in(told), out, np.uint64(first), np.uint64(last))


@kernel
def extremes(x: Any, told: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Find the extremes of blocks; see :func:`.quantize.range_rows`."""
    range_rows(x, layout_in(told), lows, highs, np.uint64(first), np.uint64(last))


@kernel
def dequantize(
    source: Any, told: Any, table: Any, scales: Any, scale_codes: Any, zeros: Any, out: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Dequantize rows; see :func:`.decode.dequantize_rows`."""
    dequantize_rows(
        source, layout_in(told), element_in(told), rule_in(told), table, scales, scale_codes, zeros, out,
        np.uint64(first), np.uint64(last),
    )  # fmt: skip


@kernel
def fake_quantize(
    x: Any, told: Any, order: Any, table: Any, scales: Any, back: Any, zeros: Any, out: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Fake-quantize rows; see :func:`.fake.fake_quantize_rows`."""
    fake_quantize_rows(
        x, layout_in(told), element_in(told), order, table, scales, back, zeros, out, np.uint64(first),
        np.uint64(last),
    )  # fmt: skip


@kernel
def fake_quantize_backward(
    grad: Any, x: Any, told: Any, bounds: Any, scales: Any, zeros: Any, out: Any, first: Any, last: Any
) -> None:
    """Set the straight-through gradient of rows; see :func:`.fake.fake_quantize_backward_rows`.

    bounds: (3,) float32.
    """
    fake_quantize_backward_rows(
        grad, x, layout_in(told), element_in(told), bounds, scales, zeros, out, np.uint64(first),
        np.uint64(last),
    )  # fmt: skip


@kernel
def measure(
    x: Any, source: Any, told: Any, table: Any, scales: Any, scale_codes: Any, zeros: Any, extent: Any,
    sums: Any, clipped: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Measure rows against their codes; see :func:`.measure.measure_rows`.

    extent: (2,) float32.
    """
    measure_rows(
        x, source, layout_in(told), element_in(told), rule_in(told), table, scales, scale_codes, zeros,
        (extent[0], extent[1]), sums, clipped, np.uint64(first), np.uint64(last),
    )  # fmt: skip


@inlined
def matrix_in(a: Any) -> Any:
    """Return the weight's matrix from an array of its numbers."""
    return Matrix(
        np.uint64(a[0]), np.uint64(a[1]), np.uint64(a[2]), np.uint64(a[3]), np.uint64(a[4]), np.uint64(a[5]),
        np.uint8(a[6]), np.uint8(a[7]),
    )  # fmt: skip


@kernel
def linear_from_pairs(
    x: Any, told: Any, order: Any, signed: Any, given: Any, weight: Any, matrix: Any, scales: Any, bias: Any,
    work: Any, out: Any, top: Any, bottom: Any, left: Any, right: Any,
) -> Any:  # fmt: skip
    """Compute a part of a layer's output from integer codes; see :func:`.linear.pair_rows`."""
    source = Input(layout_in(told), element_in(told), rule_in(told), order, np.uint8(signed))
    rows, columns = (np.uint64(top), np.uint64(bottom)), (np.uint64(left), np.uint64(right))
    return pair_rows(x, source, given, weight, matrix_in(matrix), scales, bias, work, out, rows, columns)


@kernel
def linear_from_quads(
    x: Any, told: Any, order: Any, signed: Any, given: Any, weight: Any, matrix: Any, scales: Any, bias: Any,
    work: Any, out: Any, top: Any, bottom: Any, left: Any, right: Any,
) -> Any:  # fmt: skip
    """Compute a part of a layer's output from integer codes; see :func:`.linear.quad_rows`."""
    source = Input(layout_in(told), element_in(told), rule_in(told), order, np.uint8(signed))
    rows, columns = (np.uint64(top), np.uint64(bottom)), (np.uint64(left), np.uint64(right))
    return quad_rows(x, source, given, weight, matrix_in(matrix), scales, bias, work, out, rows, columns)


@kernel
def linear_from_floats(
    x: Any, weight: Any, matrix: Any, scales: Any, bias: Any, work: Any, out: Any, top: Any, bottom: Any,
    left: Any, right: Any,
) -> None:  # fmt: skip
    """Compute a part of a layer's output from float32; see :func:`.linear.float_rows`."""
    rows, columns = (np.uint64(top), np.uint64(bottom)), (np.uint64(left), np.uint64(right))
    float_rows(x, weight, matrix_in(matrix), scales, bias, work, out, rows, columns)
