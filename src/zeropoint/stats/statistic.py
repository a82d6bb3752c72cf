"""Statistics with a range: minimum and maximum to quantize, per block.

    (low, high) = range(state)

This module owns what all of them share: the exact extremes of each block and the count of values that are not
finite, which never enter a range. It knows neither modules nor processes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch

from ..errors import CalibrationError, SchemeError, ShapeError
from ..layout.blocks import reduce_blocks, spread_blocks
from ..layout.runs import runs_of
from ..ops.library import counter_for
from ..ops.registry import Extremes
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from ..schemes.granularity import WHOLE, Anchor
from .accumulator import Accumulator, State, no_data

TENSOR = Granularity.tensor()
_SHARED = ("minimum", "maximum", "seen", "left_out")
_MANY = 1 << 20
"""Numbers from which the kernel finds the extremes of a tensor faster than torch.aminmax."""
_PIECE = 1 << 18
"""Elements whose minimum and maximum are taken before the next ones: 1 MiB of float32, which caches hold."""


@lru_cache(maxsize=1024)
def calibrated_shape(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest shape with the blocks of ``shape``.

    Axes that lie within one block have length 1, or are left out: batches may differ along those alone.

    >>> calibrated_shape(Granularity.channel(-1), (32, 128, 768))
    (768,)
    """
    named, rank = len(granularity.extents), len(shape)
    granularity.block_shape(shape)
    first = granularity.anchor is Anchor.FIRST
    rest = [granularity.rest] * (rank - named)
    extents = [*granularity.extents, *rest] if first else [*rest, *granularity.extents]
    sides = [1 if extent == WHOLE else length for extent, length in zip(extents, shape, strict=True)]
    if granularity.rest == WHOLE:
        sides = sides[:named] if first else sides[rank - named :]
    return tuple(sides) or (1,)


def block_extremes(
    lows: torch.Tensor, highs: torch.Tensor, granularity: Granularity
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per-block minima of ``lows`` and maxima of ``highs``, on the grid.

    Both are taken of one piece before the next, so that data that are both are read from memory once.
    """
    shape = tuple(lows.shape)
    rows, extent, step = 1, 1, 1
    if shape:
        rows, extent = shape[0], granularity.block_shape(shape)[0]
        step = max(1, _PIECE * rows // max(1, lows.numel()))
        step = step if extent >= rows else -(-step // extent) * extent
    if step >= rows:
        low = reduce_blocks(lows, granularity, "amin", math.inf)
        return low, reduce_blocks(highs, granularity, "amax", -math.inf)
    starts = range(0, rows, step)
    pieces = ((lows[start : start + step], highs[start : start + step]) for start in starts)
    low_parts, high_parts = zip(*(block_extremes(*piece, granularity) for piece in pieces), strict=True)
    if extent >= rows:
        return torch.stack(low_parts).amin(0), torch.stack(high_parts).amax(0)
    return torch.cat(low_parts), torch.cat(high_parts)


@lru_cache(maxsize=256)
def _number(value: int, device: torch.device) -> torch.Tensor:
    """Return a count as an immutable tensor, shared by all states."""
    return torch.full((), value, dtype=torch.int64, device=device)


def merged_extremes(a: State, b: State) -> State:
    """Return the merged common tensors of two statistics."""
    return {
        "minimum": torch.minimum(a["minimum"], b["minimum"]),
        "maximum": torch.maximum(a["maximum"], b["maximum"]),
        "seen": a["seen"] + b["seen"],
        "left_out": a["left_out"] + b["left_out"],
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One tensor as a statistic sees it.

    Args:
        x: the numbers, without gradient.
        finite: which of them are finite, or None when all are.
        minimum, maximum: exact extremes of the finite numbers of each block, float64 on the grid; +Inf and
            -Inf for a block without any.
        granularity, grid: the blocks, and how the result of one number a block is shaped.
    """

    x: torch.Tensor
    finite: torch.Tensor | None
    minimum: torch.Tensor
    maximum: torch.Tensor
    granularity: Granularity
    grid: tuple[int, ...]

    def values(self) -> torch.Tensor:
        """Return the finite numbers, flat, in their own dtype."""
        return self.x.reshape(-1) if self.finite is None else self.x[self.finite]

    def blocks(self) -> torch.Tensor:
        """Return the number of the block that holds each of :meth:`values`, int64."""
        shape = tuple(self.x.shape)
        count = math.prod(self.grid)
        numbers = torch.arange(count, device=self.x.device)
        spread = spread_blocks(numbers, self.granularity, shape).expand(shape)
        return spread.reshape(-1) if self.finite is None else spread[self.finite]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each block of ``values``, on the grid.

        Exact, and therefore independent of order, for integers below 2**53.

        Args:
            values: one for each number of ``x``.
        """
        count = math.prod(self.grid)
        wide = values.to(torch.float64 if values.is_floating_point() else torch.int64)
        if count == 1:
            return wide.sum().reshape(self.grid)
        return wide.new_zeros(count).index_add_(0, self.blocks(), wide).reshape(self.grid)


@dataclass(frozen=True, kw_only=True)
class Statistic(Accumulator):
    """Rule for summing up data per block, with a range.

    Tensors of a state that hold a number for each block are shaped like the grid.

    A subclass defines :meth:`range`, and where the extremes are not enough :meth:`empty`, :meth:`take` and
    :meth:`join`. Everything is a pure function: states that are passed in are never modified.

    Args:
        granularity: which elements share parameters, as in the schemes to come.
        shape: a shape of the data; only axes that are cut into blocks matter, so that per tensor any will do.
    """

    granularity: Granularity = TENSOR
    shape: tuple[int, ...] = (1,)
    batch_free: ClassVar[bool] = False

    def __init_subclass__(cls, *, batch_free: bool = False) -> None:
        """Declare whether a subclass is independent of batch boundaries; not inherited."""
        super().__init_subclass__()
        cls.batch_free = batch_free

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Shape of one number a block."""
        return self.granularity.grid(self._calibrated_shape)

    @cached_property
    def _calibrated_shape(self) -> tuple[int, ...]:
        return calibrated_shape(self.granularity, self.shape)

    def empty(self) -> State:
        """Return the statistic's own tensors before any data."""
        return {}

    def take(self, batch: Batch) -> State:  # noqa: ARG002 - a statistic of extremes alone takes nothing more
        """Return the statistic's own tensors for one batch with finite numbers.

        Args:
            batch: one tensor, with its extremes.
        """
        return {}

    def join(self, a: State, b: State) -> State:
        """Return the statistic's own tensors, joined: sums unless overridden."""
        return {name: a[name] + b[name] for name in a if name not in _SHARED}

    @abstractmethod
    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to quantize, float64 minima and maxima on the grid."""

    def start(self) -> State:
        """Return the state before any data."""
        return {
            "minimum": torch.full(self.grid, math.inf, dtype=torch.float64),
            "maximum": torch.full(self.grid, -math.inf, dtype=torch.float64),
            "seen": torch.zeros((), dtype=torch.int64),
            "left_out": torch.zeros((), dtype=torch.int64),
            **self.empty(),
        }

    def measure(self, x: torch.Tensor) -> State:
        """Return the state of one batch; non-finite numbers are only counted.

        x: float64, float32, float16 or bfloat16; any stride; may be empty.
        Raises DtypeError for other tensors, ShapeError when an axis that is cut into blocks has another
        length than in ``shape``.
        """
        self.check(x)
        if x.numel() == 0:
            return {name: tensor.to(x.device) for name, tensor in self.start().items()}
        with gradual_underflow():
            return self._measured(x.detach())

    def _measured(self, x: torch.Tensor) -> State:
        finite, grid, seen = None, self.grid, x.numel()
        (low, high), own = self.scan(x)
        # A NaN or Inf anywhere shows in an extreme, so that clean data are read but once.
        if not math.isfinite((high - low).sum().item()):
            finite = torch.isfinite(x)
            low, high = self._extremes(x.where(finite, math.inf), x.where(finite, -math.inf))
            seen = int(finite.sum())
        if low.shape != grid:
            low, high = low.reshape(grid), high.reshape(grid)
        if own is None:
            batch = Batch(
                x=x, finite=finite, minimum=low, maximum=high, granularity=self.granularity, grid=grid
            )
            own = self.take(batch) if seen else {n: t.to(x.device) for n, t in self.empty().items()}
        left_out = x.numel() - seen
        return {
            "minimum": low,
            "maximum": high,
            "seen": _number(seen, x.device),
            "left_out": _number(left_out, x.device),
            **own,
        }

    def scan(self, x: torch.Tensor) -> tuple[Extremes, State | None]:
        """Return each block's extremes, and the statistic's own tensors if found.

        NaN and Inf show in the extremes, and are left out of all else. Where the tensors are None,
        :meth:`take` is asked for them.
        """
        if self.granularity == TENSOR and x.numel() < _MANY:
            found = self._extremes(x, x)
            # torch's threads may flush subnormal numbers, which shows where an extreme is that small.
            if all(abs(end.item()) >= torch.finfo(x.dtype).tiny for end in found):
                return found, None
        runs, counter = runs_of(self.granularity, tuple(x.shape)), counter_for(x)
        if runs is not None and counter is not None:
            return counter.extremes(x, runs), None
        return self._extremes(x, x), None

    def merge(self, a: State, b: State) -> State:
        """Return the state of two sets of data together."""
        return {**merged_extremes(a, b), **self.join(a, b)}

    def update_all(self, state: State, batches: Sequence[torch.Tensor]) -> State:
        """Return ``state`` after several batches, in order; faster for small batches.

        Raises what :meth:`measure` raises for one of them, DtypeError for what is no sequence of tensors.
        """
        self.check_all(batches)
        if self.batch_free and self.granularity == TENSOR and len(batches) > 1:
            batches = [torch.cat([x.reshape(-1) for x in batches])]
        return super().update_all(state, batches)

    def params(
        self,
        state: State,
        scheme: str | Scheme,
        *,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
    ) -> QuantizationParams:
        """Return parameters from a state's range under a scheme.

        Args:
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            dtype: dtype of the tensors to be quantized.
            name: what was observed, for messages.

        Raises:
            CalibrationError: when a block has seen no finite number.
            SchemeError: when the scheme's blocks differ from the statistic's.
        """
        parsed = Scheme.parse(scheme)
        if parsed.scales and parsed.granularity != self.granularity:
            raise SchemeError(
                f"scheme {parsed} has blocks {parsed.granularity}, but statistics were taken per "
                f"{self.granularity}; give both the same"
            )
        self._require_data(state, name)
        with gradual_underflow():
            low, high = self.range(state)
            shape = self._calibrated_shape
            return QuantizationParams.from_range(parsed, low, high, shape=shape, dtype=dtype)

    def _require_data(self, state: State, name: str | None) -> None:
        bare = state["minimum"] > state["maximum"]
        if not bool(bare.any()):
            return
        where = "" if bare.numel() == 1 else f" in block {tuple(torch.nonzero(bare)[0].tolist())}"
        raise CalibrationError(no_data(name or type(self).__name__, state, where))

    def check(self, x: torch.Tensor) -> None:
        """Raise what :meth:`measure` raises for ``x``."""
        super().check(x)
        shape, want = tuple(x.shape), self._calibrated_shape
        if calibrated_shape(self.granularity, shape) != want:
            raise ShapeError(
                f"x (shape {shape}) must have blocks {self.granularity} of a tensor of shape {want}; "
                "give the statistic the shape of its data, or a granularity that spans the axes that vary"
            )

    def _extremes(self, lows: torch.Tensor, highs: torch.Tensor) -> Extremes:
        if self.granularity == TENSOR and lows is highs:
            low, high = torch.aminmax(lows)
        else:
            low, high = block_extremes(lows, highs, self.granularity)
        # Zeros become positive: which of them is found depends on the order of reading.
        return low.double() + 0.0, high.double() + 0.0
