"""The accumulator protocol: pure functions on states of tensors.

    state_0 = start()          state_n = fold(state_{n-1}, measure(x_n))          merge(state_a, state_b)

A state is a dictionary of tensors whose names, shapes and dtypes never change, so that buffers, files and
processes carry it as it is. Ranges that follow from some of them are another thing: statistic.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from ..errors import CalibrationError, DtypeError
from ..functional import check_input

State = dict[str, torch.Tensor]
"""Name to tensor."""


def on_device(device: torch.device, state: State) -> State:
    """Return a state on a device.

    Args:
        device: where its tensors are wanted.
        state: of any accumulator.
    """
    if all(tensor.device == device for tensor in state.values()):
        return state
    return {key: tensor.to(device) for key, tensor in state.items()}


class Accumulator(ABC):
    """Rule for summing up batches; states are never modified.

    Every state has ``seen`` and ``left_out``, int64: values taken in, and those left out as not finite.

    Of methods, ``state`` is one of this accumulator, ``a`` and ``b`` are an earlier and a later one, ``x`` is
    a float tensor of any shape, and ``batches`` are such tensors, in order.
    """

    @abstractmethod
    def start(self) -> State:
        """Return the state before any data."""

    @abstractmethod
    def measure(self, x: torch.Tensor) -> State:
        """Return the state of one batch; non-finite values are only counted.

        Args:
            x: float64, float32, float16 or bfloat16; any stride; may be empty.

        Raises:
            DtypeError: for other tensors.
            ShapeError: for a shape that the accumulator is not for.
        """

    def merge(self, a: State, b: State) -> State:
        """Return the state of two sets of data together: sums, unless overridden."""
        return {name: a[name] + b[name] for name in a}

    def fold(self, state: State, batch: State) -> State:
        """Return ``state`` merged with one more batch, a result of :meth:`measure`.

        Args:
            batch: the state of one batch.
        """
        return self.merge(state, batch)

    def merge_batches(self, a: State, b: State) -> State:
        """Return the merged measures of two parts of one batch."""
        return self.merge(a, b)

    def update(self, state: State, x: torch.Tensor) -> State:
        """Return ``state`` after one more batch.

        Args:
            state: changed in place where possible.
        """
        return self.fold(state, self.measure(x))

    def update_all(self, state: State, batches: Sequence[torch.Tensor]) -> State:
        """Return ``state`` after several batches, in order; faster for small batches.

        Raises:
            ZeropointError: what :meth:`measure` raises for one of them.
            DtypeError: for what is no sequence of tensors.
        """
        self.check_all(batches)
        return reduce(self.update, batches, state)

    def check_all(self, batches: Sequence[torch.Tensor]) -> None:
        """Raise what :meth:`update_all` raises for ``batches``.

        Raises:
            DtypeError: for what is no list or tuple of tensors.
        """
        if not isinstance(batches, (list, tuple)):
            raise DtypeError(
                f"batches (a {type(batches).__name__}) must be a list or tuple of tensors; pass [x]"
            )
        for x in batches:
            self.check(x)

    def check(self, x: torch.Tensor) -> None:
        """Raise what :meth:`measure` raises for ``x``.

        Raises:
            DtypeError: for a tensor on the meta device.
        """
        check_input(x)
        if x.is_meta:
            raise DtypeError("x (device meta) must hold data to be measured; materialize it first")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics:
    """The state of an accumulator, and the name of the observed layer.

    Args:
        accumulator: how data were summed up.
        state: its tensors by name, as its ``add`` and ``merge`` return them.
        name: of the layer, for messages.
    """

    accumulator: Accumulator
    state: State
    name: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        same = (self.accumulator, self.state.keys()) == (other.accumulator, other.state.keys())
        return same and all(torch.equal(tensor, other.state[key]) for key, tensor in self.state.items())

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor of the state."""
        return self.state[name]

    def require_data(self) -> None:
        """Raise CalibrationError where no value was seen."""
        if int(self.state["seen"]) == 0:
            raise CalibrationError(no_data(self.name or type(self.accumulator).__name__, self.state))


def no_data(name: str, state: State, where: str = "") -> str:
    """Return the sentence for missing finite data; ``where`` names a block."""
    left_out = int(state["left_out"])
    found = f"finite number ({left_out:,} non-finite left out)" if left_out else "calibration data"
    return f"{name} received no {found}{where}; run calibration data through it before asking for parameters"
