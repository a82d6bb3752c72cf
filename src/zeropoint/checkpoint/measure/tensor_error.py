"""Quantization error of a tensor, summed without rounding.

It is measured while a tile is in cache. Sums are kept as floats that add up to them exactly, so neither
tiles, units, threads nor the order in which results come in change a digit.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...functional import row_errors
from ...layout.blocks import reduce_blocks
from ...ops.row_errors import RowErrors
from ...params import QuantizationParams
from ...schemes import Scheme
from ...tensor import QuantizedTensor

_FEW, _PIECE = 64, 1 << 13
"""Numbers that are added one by one, and those whose temporaries stay in the first caches."""
_FIELD, _LAST_PLACE = 0x7FF, 1075
"""Exponent field of doubles that are not finite, and what a field is above the exponent of the last bit."""


_WORST = 5
"""Items that a list of the worst has."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Error of a dequantized tensor, or a part, against the original.

    values: how many. squares, errors: the exact sums of the squared values and of the squared errors, as
    :func:`exact_sum` gives them. largest: largest error.
    clipped: values past the last code. zero_blocks: blocks of zeros alone. lost_blocks: blocks that hold
    other values but came out as zeros.
    """

    values: int
    squares: tuple[float, ...]
    errors: tuple[float, ...]
    largest: float
    clipped: int = 0
    zero_blocks: int = 0
    lost_blocks: int = 0

    @property
    def relative(self) -> float:
        """Root of squared error over squared values; 0 when nothing is lost."""
        errors, squares = math.fsum(self.errors), math.fsum(self.squares)
        if errors == 0:
            return 0.0
        return math.sqrt(errors / squares) if squares else math.inf

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in decibels; infinite when nothing is lost."""
        return (
            math.inf
            if self.relative == 0
            else -20 * math.log10(self.relative)
            if math.isfinite(self.relative)
            else -math.inf
        )

    def __str__(self) -> str:
        ratio = "exact" if self.sqnr_db == math.inf else f"{self.sqnr_db:.1f} dB"
        return f"relative error {self.relative:.4f}, SQNR {ratio}"

    @property
    def clipped_share(self) -> float:
        """Share of clipped values."""
        return self.clipped / max(1, self.values)

    @staticmethod
    def merge(items: Iterable[TensorError]) -> TensorError:
        """Return the joint error of tensors or parts, in any order."""
        found = iter(items)
        first = next(found, None)
        second = next(found, None)
        if first is not None and second is None:
            return first
        counts, squares, errors, largest = [0, 0, 0, 0], array("d"), array("d"), 0.0
        for e in itertools.chain(filter(None, (first, second)), found):
            counts = [a + b for a, b in zip(counts, e._counts, strict=True)]
            squares.extend(e.squares)
            errors.extend(e.errors)
            largest = max(largest, e.largest)
        return TensorError._of(counts, largest, exact_sum(squares), exact_sum(errors))

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        return self.values, self.clipped, self.zero_blocks, self.lost_blocks

    @staticmethod
    def _of(
        counts: Sequence[int], largest: float, squares: tuple[float, ...], errors: tuple[float, ...]
    ) -> TensorError:
        values, clipped, zero, lost = counts
        return TensorError(
            values=values,
            squares=squares,
            errors=errors,
            largest=largest,
            clipped=clipped,
            zero_blocks=zero,
            lost_blocks=lost,
        )

    def pack(self) -> bytes:
        """Return it in few bytes; :meth:`unpack` is the inverse, without loss."""
        floats = (self.largest, *self.squares, *self.errors)
        return _COUNTS.pack(*self._counts, len(self.squares)) + array("d", floats).tobytes()

    @staticmethod
    def unpack(data: bytes) -> TensorError:
        """Return the error packed by :meth:`pack`."""
        *counts, many = _COUNTS.unpack_from(data)
        largest, *floats = memoryview(data)[_COUNTS.size :].cast("d")
        return TensorError._of(counts, largest, tuple(floats[:many]), tuple(floats[many:]))


_COUNTS = struct.Struct("=5q")


def exact_sum(numbers: Iterable[float] | npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return the exact sum of ``numbers`` as floats, the rounded sum first.

    Each is the rounded rest that those before it leave, so equal sums have equal parts. A sum that is not
    finite is one part.

    >>> exact_sum([1e100, 1.0, -1e100, 2.0**-60])
    (1.0, 8.673617379884035e-19)
    >>> exact_sum([])
    ()
    """
    if isinstance(numbers, np.ndarray):
        pieces = (numbers[at : at + _PIECE] for at in range(0, len(numbers), _PIECE))
        rest = [number for piece in pieces for number in _by_exponent(piece)]
    else:
        rest = list(numbers)
    parts = []
    while part := math.fsum(rest):
        parts.append(part)
        if not math.isfinite(part):
            break
        rest.append(-part)
    return tuple(parts)


def _by_exponent(x: npt.NDArray[np.float64]) -> list[float]:
    """Return few numbers with the exact sum of ``x``, two per exponent.

    They are sums of upper and of lower bits. Of integers below 2**27, doubles hold sums of a piece. ``x``
    itself if it is not finite.
    """
    bits = x.view(np.int64)
    field = (bits >> 52) & _FIELD
    if x.size < _FEW or field.max() == _FIELD:
        return list(map(float, x))
    whole = (bits & ((1 << 52) - 1)) | (np.minimum(field, 1) << 52)
    if (bits < 0).any():
        whole = np.where(bits < 0, -whole, whole)
    field = np.maximum(field, 1)  # numbers without a leading bit have the exponent of the next ones
    least = int(field.min())
    found = []
    for part, shift in ((whole >> 26, 26), (whole & ((1 << 26) - 1), 0)):
        sums = np.bincount(field - least, weights=part)
        found += np.ldexp(sums, np.arange(least, least + len(sums)) + (shift - _LAST_PLACE)).tolist()
    return found


def measure(x: torch.Tensor, q: QuantizedTensor, known: RowErrors | None = None) -> TensorError:
    """Return the error of ``q`` against ``x``, some rows of a weight.

    known: how far each row is, where that was found out before.
    """
    rows = row_errors(x, q) if known is None else known
    zero, lost = _quiet_blocks(x, q)
    return TensorError(
        values=x.numel(),
        squares=exact_sum(rows.squares),
        errors=exact_sum(rows.errors),
        largest=float(rows.largest.max()),
        clipped=int(rows.clipped.sum()),
        zero_blocks=zero,
        lost_blocks=lost,
    )


def measure_columns(x: torch.Tensor, q: QuantizedTensor, width: int) -> TensorError:
    """Return the error of ``q`` against ``x``, some columns of a weight.

    The result does not depend on their number: the plan decides it for a unit, memory for a check.

    width: columns that always stay together and divide their number; sums are exact beyond these. Blocks
    must lie in rows and divide ``width``.
    """
    rows = x.numel() // width
    grid = q.params.scheme.granularity.grid((rows, width))
    # The scale of the whole tensor is one number.
    stored = [values if values.numel() == 1 else values.reshape(grid) for values in q.params.stored]
    params = QuantizationParams.of(q.scheme, (rows, width), q.params.dtype, stored)
    blocks = QuantizedTensor(data=q.data.reshape(rows, -1), params=params, shape=(rows, width), dtype=q.dtype)
    return measure(x.reshape(rows, width), blocks)


def worst(items: Iterable[T], error: Callable[[T], TensorError]) -> list[T]:
    """Return the items with the largest nonzero relative errors, in descending order.

    >>> worst([], lambda error: error)
    []
    """
    found = ((error(item).relative, item) for item in items)
    largest = heapq.nlargest(_WORST, (pair for pair in found if pair[0] > 0), key=lambda pair: pair[0])
    return [item for _, item in largest]


def error_document(error: TensorError) -> dict[str, Any]:
    """Return an error, with the counts of blocks."""
    return {
        "relative": finite_number(error.relative),
        "sqnr_db": finite_number(error.sqnr_db),
        "largest": finite_number(error.largest),
        "clipped_share": error.clipped_share,
        "zero_blocks": error.zero_blocks,
        "lost_blocks": error.lost_blocks,
    }


def error_in(document: object) -> TensorError | None:
    """Return the error in a document of :func:`dataclasses.asdict`, or None.

    Only the kinds of its numbers are checked.
    """
    match document:
        case {
            "values": int(values),
            "squares": [*squares],
            "errors": [*errors],
            "largest": float(largest),
            "clipped": int(clipped),
            "zero_blocks": int(zero),
            "lost_blocks": int(lost),
        } if all(isinstance(part, float) for part in (*squares, *errors)):
            return TensorError(
                values=values,
                squares=tuple(squares),
                errors=tuple(errors),
                largest=largest,
                clipped=clipped,
                zero_blocks=zero,
                lost_blocks=lost,
            )
    return None


def finite_number(value: float) -> float | None:
    """Return a number that JSON can hold; infinities and NaN become null."""
    return value if math.isfinite(value) else None


def _quiet_blocks(x: torch.Tensor, q: QuantizedTensor) -> tuple[int, int]:
    """Count the zero blocks, and the nonzero blocks quantized to zero.

    Only blocks that have the scale of a zero range are looked at, where blocks lie in rows and divide them.
    """
    granularity, scheme = q.scheme.granularity, q.scheme
    if not granularity.extents:
        return 0, 0
    found = _bits(q.scales[0]) == _zero_bits(scheme, q.params.dtype)
    if not found.any():
        return 0, 0
    height, width = granularity.block_shape(tuple(x.shape))
    if height == 1 and x.shape[1] % width == 0:
        # Without its sign, the larger of two numbers has the larger bits.
        patterns = _bits(x).reshape(*found.shape, width)[found]
        magnitudes = np.bitwise_and(patterns, np.iinfo(patterns.dtype).max, out=patterns).max(1)
        largest = torch.from_numpy(magnitudes).view(x.dtype)
    else:
        largest = reduce_blocks(x.abs(), granularity, "amax", 0.0)[torch.from_numpy(found)]
    scale = q.params.effective_scale()
    assert scale is not None
    # What is at most half the smallest step rounds to zero.
    reach = scale.numpy()[found] * float(scheme.element.smallest) / 2
    biggest = largest.to(scale.dtype).numpy()
    zero = int((biggest == 0).sum())
    return zero, int((biggest <= reach).sum()) - zero


def _bits(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bit patterns as integers of equal width, without a copy."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return np.asarray(values.contiguous().view(signed[values.element_size()]).numpy())


@functools.lru_cache(maxsize=64)
def _zero_bits(scheme: Scheme, dtype: torch.dtype) -> int:
    """Return the bit pattern of a zero block's finest scale."""
    columns = max(1, *scheme.granularity.extents)
    params = QuantizationParams.from_range(scheme, 0.0, 0.0, shape=(1, columns), dtype=dtype)
    return int(_bits(params.scales[0]).flat[0])
