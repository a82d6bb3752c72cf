"""Ranges from extremes: over all data, or averaged across batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RangeError
from ..ops.threads import gradual_underflow
from .accumulator import State
from .statistic import TENSOR, Batch, Statistic, merged_extremes

_AVERAGES = ("average_minimum", "average_maximum")


@dataclass(frozen=True, kw_only=True)
class MinMax(Statistic, batch_free=True):
    """The smallest and the largest number seen; exact, in any order.

    Example:
        >>> statistic = MinMax()
        >>> state = statistic.update(statistic.start(), torch.tensor([-1.0, 3.0, torch.nan]))
        >>> statistic.params(state, "uint8:tensor:asym").zero_point
        tensor([64], dtype=torch.int32)
    """

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the extremes."""
        return state["minimum"], state["maximum"]


@dataclass(frozen=True, kw_only=True)
class MovingAverage(Statistic):
    """Moving average of batch extremes: ``average += rate * (extreme - average)``.

    The first batch of a block starts its average; a batch without finite numbers does not change it. The
    result depends on the order of the batches. Parts of one batch merge exactly (their extremes do), so that
    several processes that share each batch agree with one. The averages of separate runs merge with the
    counts of their batches as weights: neither run is the later one, so no order of their batches is more
    right, and this is commutative and keeps a common average.

    Args:
        rate: weight of the newest batch, in (0, 1]; torch's MovingAverageMinMaxObserver has 0.01 too.

    Raises:
        RangeError: for another rate.

    Example:
        >>> statistic, state = MovingAverage(rate=0.5), MovingAverage(rate=0.5).start()
        >>> for batch in (torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 2.0])):
        ...     state = statistic.update(state, batch)
        >>> statistic.range(state)
        (tensor([-0.5000], dtype=torch.float64), tensor([1.5000], dtype=torch.float64))
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise RangeError(f"rate (={self.rate}) must be above 0 and at most 1")

    def empty(self) -> State:
        """Return averages of no batches."""
        zeros = torch.zeros(self.grid, dtype=torch.float64)
        return {
            "average_minimum": zeros,
            "average_maximum": zeros.clone(),
            "batches": torch.zeros(self.grid, dtype=torch.int64),
        }

    def take(self, batch: Batch) -> State:
        """Return the extremes of one batch as the averages of one."""
        low, high = batch.minimum, batch.maximum
        held = low <= high
        if batch.finite is not None:
            low, high = low.where(held, 0.0), high.where(held, 0.0)
        return {"average_minimum": low, "average_maximum": high, "batches": held.long()}

    def join(self, a: State, b: State) -> State:
        """Return averages weighted by the counts of batches."""
        count = a["batches"] + b["batches"]

        def mean(name: str) -> torch.Tensor:
            total = a["batches"] * a[name] + b["batches"] * b[name]
            # Of one average alone, or of two equal ones, nothing is to be rounded.
            kept = torch.where(a["batches"] == 0, b[name], total / count.clamp(min=1))
            return torch.where((b["batches"] == 0) | (a[name] == b[name]), a[name], kept)

        return {**{name: mean(name) for name in _AVERAGES}, "batches": count}

    def fold(self, state: State, batch: State) -> State:
        """Return the averages after one more batch."""
        # The first batch weighs all, one without finite numbers nothing; averages of no batches are zeros.
        weight = batch["batches"].double()
        weight = (weight * self.rate).where(state["batches"] > 0, weight)
        return {
            **merged_extremes(state, batch),
            **{name: _toward(state[name], batch[name], weight) for name in _AVERAGES},
            "batches": state["batches"] + batch["batches"],
        }

    def update_all(self, state: State, batches: Sequence[torch.Tensor]) -> State:
        """Return the averages after several batches, on floats for whole tensors."""
        self.check_all(batches)
        if self.granularity != TENSOR or len(batches) < 2 or not all(x.numel() for x in batches):
            return super().update_all(state, batches)
        with gradual_underflow():
            ends = torch.stack(
                [torch.cat([end.reshape(1) for end in self.scan(x.detach())[0]]) for x in batches]
            )
        if not ends.isfinite().all():
            return super().update_all(state, batches)
        averages, before = [state[name].item() for name in _AVERAGES], int(state["batches"])
        for number, extremes in enumerate(ends.tolist(), before):
            weight = self.rate if number else 1.0
            averages = [_toward(*pair, weight) for pair in zip(averages, extremes, strict=True)]
        both = {
            "minimum": ends[:, :1].amin(0),
            "maximum": ends[:, 1:].amax(0),
            "seen": torch.tensor(sum(x.numel() for x in batches), device=ends.device),
            "left_out": torch.zeros_like(state["left_out"]),
        }
        low, high = (torch.full_like(both["minimum"], average) for average in averages)
        return {
            **merged_extremes(state, both),
            **dict(zip(_AVERAGES, (low, high), strict=True)),
            "batches": state["batches"] + len(batches),
        }

    def merge_batches(self, a: State, b: State) -> State:
        """Return the extremes of the two parts together, as one batch."""
        merged = self.merge(a, b)
        held = merged["minimum"] <= merged["maximum"]
        merged["average_minimum"] = merged["minimum"].where(held, 0.0)
        merged["average_maximum"] = merged["maximum"].where(held, 0.0)
        merged["batches"] = held.long()
        return merged

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the averages."""
        return state["average_minimum"], state["average_maximum"]


def _toward(old: Any, new: Any, weight: Any) -> Any:
    """Return an updated average: three float64 operations, on floats or tensors."""
    return old + weight * (new - old)
