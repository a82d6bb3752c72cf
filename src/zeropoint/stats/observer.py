"""Observer: an identity module that accumulates its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..params import QuantizationParams
from ..params.module_buffers import keeping_dtypes
from ..params.tracing import traced_as_constant
from ..schemes import Scheme
from .accumulator import Accumulator, State, Statistics, on_device
from .processes import gathered, shares_work
from .statistic import Statistic


class Observer(nn.Module):
    """Identity module that, while enabled, takes its input into an accumulator.

    The state lies in buffers, complete from the start: state_dict, deepcopy and pickle carry it, and casts of
    the model (``model.half()``) leave its dtypes alone.

    Of methods, ``x`` is a float tensor of any shape, and ``batches`` are such tensors, in order.

    Args:
        statistic: what to learn; one that gives a range for :meth:`range` and :meth:`params`.
        name: where the observer stands in its model, for messages.
        shared: whether the processes of torch.distributed, where it is initialized, each see a part of every
            batch. The parts are then merged before they are taken, so that all processes hold the state that
            one would have on the concatenated batch, and every process must observe the same number of
            batches. Not for a module that only some processes have, as in a pipeline: it would wait for the
            others.

    Example:
        >>> from zeropoint.stats import MinMax
        >>> observer = Observer(MinMax())
        >>> observer(torch.tensor([-1.0, 3.0]))
        tensor([-1.,  3.])
        >>> observer.params("uint8:tensor:asym").zero_point
        tensor([64], dtype=torch.int32)
    """

    def __init__(self, statistic: Accumulator, *, name: str | None = None, shared: bool = True) -> None:
        super().__init__()
        self.statistic = statistic
        self.name = name
        self.shared = shared
        self.enabled = True
        self._adds = _is_plain(statistic)  # in place, which saves two copies of a histogram at each update
        start = statistic.start()
        self._keys = tuple(start)
        for key, tensor in start.items():
            self.register_buffer(key, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, the same tensor, after :meth:`update` while enabled."""
        if self.enabled:
            if torch.compiler.is_compiling():
                _leave_graphs()
            Observer.update(self, x)
        return x

    @property
    def shares_batches(self) -> bool:
        """Whether other processes see other parts of each batch."""
        return self.shared and shares_work()

    def update(self, x: torch.Tensor) -> None:
        """Take one batch into the state; raises what :meth:`Statistic.measure` raises."""
        with torch.no_grad():
            self.take(self.measure(x))

    def update_all(self, batches: Sequence[torch.Tensor]) -> None:
        """Take several batches into the state; faster for small batches."""
        self.statistic.check_all(batches)
        if self.shares_batches or not batches:
            for batch in batches:
                self.update(batch)
            return
        own = self.state()
        with torch.no_grad():
            _set(own, self.statistic.update_all(on_device(batches[0].device, own), batches))

    def measure(self, x: torch.Tensor) -> State:
        """Return one batch's state, joined over processes that share it."""
        batch = self.statistic.measure(x)
        if self.shares_batches:
            batch = gathered(batch, self.statistic.merge_batches)
        return batch

    def take(self, batch: State) -> None:
        """Take what :meth:`measure` returned into the state.

        Args:
            batch: a state that :meth:`measure` gave.
        """
        own = self.state()
        batch = on_device(own["seen"].device, batch)
        if self._adds:
            _add(own, batch)
        else:
            _set(own, self.statistic.fold(own, batch))

    def merge(self, other: Observer) -> None:
        """Merge the state of another observer with the same statistic.

        Args:
            other: an observer of the same statistic.
        """
        own = self.state()
        with torch.no_grad():
            _set(own, self.statistic.merge(own, on_device(own["seen"].device, other.state())))

    def gathered(self) -> Observer:
        """Return a copy merged over all processes, each of which must call.

        Raises:
            UnsupportedError: for a shared observer, whose state covers all processes already.
        """
        if self.shared:
            raise UnsupportedError(
                f"{self.name or 'the observer'} (shared=True) holds the state of all processes already; "
                "use it as it is, or make it with shared=False"
            )
        whole = copy.deepcopy(self)
        _set(whole.state(), gathered(self.state(), self.statistic.merge))
        return whole

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of the data, float64, one number a block."""
        return self._ranged().range(self.state())

    def params(self, scheme: str | Scheme, *, dtype: torch.dtype = torch.float32) -> QuantizationParams:
        """Return parameters from the data; raises CalibrationError without data.

        Args:
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            dtype: of the tensors to be quantized; scales of ``scale=input`` take it.
        """
        return self._ranged().params(self.state(), scheme, dtype=dtype, name=self.name)

    def statistics(self) -> Statistics:
        """Return a snapshot of the statistics."""
        state = {key: tensor.clone() for key, tensor in self.state().items()}
        return Statistics(accumulator=self.statistic, state=state, name=self.name or "")

    def _ranged(self) -> Statistic:
        if not isinstance(self.statistic, Statistic):
            kind = type(self.statistic).__name__
            raise UnsupportedError(f"{self.name or 'the observer'} ({kind}) gives no range; use statistics()")
        return self.statistic

    def state(self) -> State:
        """Return the buffers by name."""
        buffers = self._buffers  # get_buffer would look for the key in a path of modules, at each update
        return {key: tensor for key in self._keys if (tensor := buffers[key]) is not None}

    def reset(self) -> None:
        """Forget all data."""
        own = self.state()
        _set(own, on_device(own["seen"].device, self.statistic.start()))

    def enable(self) -> None:
        """Take in what passes."""
        self.enabled = True

    def disable(self) -> None:
        """Let data pass without a look."""
        self.enabled = False

    def extra_repr(self) -> str:
        """Return the statistic, and whether it is frozen."""
        return f"{self.statistic}" + ("" if self.enabled else ", disabled")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def update_together(observers: Sequence[Observer], batches: Sequence[torch.Tensor]) -> None:
    """Update several observers with the same batches, sharing equal states."""
    first, *others = observers
    before = {key: tensor.clone() for key, tensor in first.state().items()} if others else {}
    first.update_all(batches)
    for other in others:
        own = other.state()
        if all(torch.equal(tensor, before[key]) for key, tensor in own.items()):
            _set(own, first.state())
        else:
            other.update_all(batches)


def _is_plain(accumulator: Accumulator) -> bool:
    """Return whether a batch is taken in by adding, but for extremes."""
    kind = type(accumulator)
    if isinstance(accumulator, Statistic) and type(accumulator).join is not Statistic.join:
        return False
    return kind.fold is Accumulator.fold and kind.merge in (Accumulator.merge, Statistic.merge)


def _set(own: State, state: State) -> None:
    for key, tensor in state.items():
        own[key].copy_(tensor)


def _add(state: State, batch: State) -> None:
    """Change ``state`` into what :meth:`Statistic.fold` returns where nothing of it is overridden."""
    for key, tensor in batch.items():
        if key == "minimum":
            torch.minimum(state[key], tensor, out=state[key])
        elif key == "maximum":
            torch.maximum(state[key], tensor, out=state[key])
        else:
            state[key].add_(tensor)


def name_observers(model: nn.Module) -> dict[str, Observer]:
    """Name a model's unnamed observers after their module path.

    Args:
        model: any module; its places are dotted names.

    Returns:
        The observers by place.

    Example:
        >>> from zeropoint.stats import MinMax
        >>> model = nn.Sequential(nn.Linear(2, 2), Observer(MinMax()))
        >>> list(name_observers(model)), model[1].name
        (['1'], '1')
    """
    found = {path: module for path, module in model.named_modules() if isinstance(module, Observer)}
    for path, observer in found.items():
        observer.name = observer.name or path
    return found


@traced_as_constant
def _leave_graphs() -> bool:
    """Exclude :meth:`Observer.update` from compiled graphs; runs while tracing.

    Whether data are finite decides what is computed, which no graph can hold. Decorating the method where it
    is defined would import all of dynamo, 2 seconds, for those who do not compile too.
    """
    if not getattr(Observer.update, "_torchdynamo_disable", False):
        Observer.update = torch.compiler.disable(Observer.update)  # type: ignore[method-assign,no-untyped-call]
    return True
