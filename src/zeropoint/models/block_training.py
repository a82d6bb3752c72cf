"""Gradient training of a block's tensors for its output.

The trained parameters and their moves are defined elsewhere (:mod:`.block_rounding`,
:mod:`.block_distillation`). Gradients of the error on windows of data are added in their order within a step,
so that how many run at once changes no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .block_chain import Steps
from .site_inputs import is_held

COMPARED = 10
"""How often the error on windows that are held out is compared, evenly over the steps."""
OnOutputs = Callable[[int, Callable[[], Any], Any], None]
"""Takes the number of a window, what runs the block on it, and the output that is wanted."""


class RunsBlock(Protocol):
    """What calls a function for windows of a block, in threads."""

    def __call__(self, numbers: Sequence[int], act: OnOutputs, workers: int) -> None:
        """Call ``act`` for each window.

        numbers: of the windows. act: raises what this raises. workers: number of threads.
        """


class Trained(Protocol):
    """A trained parameter of a block, or some of its rows.

    weight: the parameter. nbytes: additional memory while it is trained.
    """

    @property
    def weight(self) -> nn.Parameter: ...  # noqa: D102 (see the class)

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def state(self) -> Any:
        """Return the state that :meth:`put` takes."""

    def put(self, state: Any) -> None:
        """Let the parameter have the values of a state.

        state: an earlier one, or the present one.
        """

    def step(self, slope: torch.Tensor, size: float) -> None:
        """Move against a gradient, and update the parameter.

        slope: by the whole parameter. size: of the step, the first one of which is 1.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSteps:
    """Number of steps, windows of each, and the seed of their order."""

    count: int
    windows: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Trained states, with the block's error before and after."""

    states: list[Any]
    first: float
    least: float


def trained(
    every: Sequence[Trained], run: RunsBlock, windows: int, steps: TrainingSteps, memory: Steps
) -> TrainingResult:
    """Train parameters of a block, and return their best states.

    The parameters then have these states. States are compared on held-out windows, the initial ones among
    them, and the states of least error are taken. every: the trained parameters. run: runs the block.
    windows: how many there are; of eight and more, every eighth is held out. steps: that are taken. memory:
    says how many windows run at once.
    """
    with _learning(every):
        search = _Search(every, run, windows, memory)
        search.descend(steps)
    for each, state in zip(every, search.best, strict=True):
        each.put(state)
    return TrainingResult(states=search.best, first=search.first, least=search.least)


@contextmanager
def _learning(every: Sequence[Trained]) -> Iterator[None]:
    """Let parameters take gradients, until the end."""
    before = [each.weight.requires_grad for each in every]
    try:
        for each in every:
            each.weight.requires_grad_(True)
        yield
    finally:
        for each, learns in zip(every, before, strict=True):
            each.weight.requires_grad_(learns)


class _Search:
    """Search of the best states; first, least: error before and after."""

    def __init__(self, every: Sequence[Trained], run: RunsBlock, windows: int, memory: Steps) -> None:
        self._every, self._run = every, run
        held = [number for number in range(windows) if is_held(number, windows)]
        self._learned = [number for number in range(windows) if not is_held(number, windows)]
        self._judged = held or self._learned
        self._weights = list({id(each.weight): each.weight for each in every}.values())
        self._at_once = self._room(memory)
        self.best = [each.state() for each in every]
        self.first = self.least = self._error()

    def _room(self, memory: Steps) -> int:
        """Return how many windows run at once."""
        if memory.at_once is None:
            return memory.workers
        gradients = sum(weight.nbytes for weight in self._weights)
        fixed = gradients + sum(each.nbytes for each in self._every)
        return min(memory.workers, memory.at_once(fixed, gradients + self._window_bytes()))

    def _window_bytes(self) -> int:
        """Return the memory of a block's first window for gradients."""
        kept: dict[int, int] = {}
        own = {weight.untyped_storage().data_ptr() for weight in self._weights}

        def keep(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        def act(_: int, block: Callable[[], Any], wanted: Any) -> None:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
                error_of(block(), wanted)  # what it keeps lives until here

        self._run([0], act, 1)
        return int(sum(kept.values()) * _PASSING)

    def descend(self, steps: TrainingSteps) -> None:
        """Take all steps, and remember the best states."""
        every = max(1, steps.count // COMPARED)
        waiting: list[int] = []
        draw = torch.Generator().manual_seed(steps.seed)
        for step in range(steps.count):
            if len(waiting) < min(steps.windows, len(self._learned)):
                order = torch.randperm(len(self._learned), generator=draw)
                waiting = [self._learned[number] for number in order]
            numbers, waiting = sorted(waiting[: steps.windows]), waiting[steps.windows :]
            slopes = self._slopes(numbers)
            for each in self._every:
                slope = slopes.get(id(each.weight))
                if slope is not None:
                    each.step(slope, 1 - step / steps.count)
            if (step + 1) % every == 0:
                self._compare()

    def _compare(self) -> None:
        error = self._error()
        if error < self.least:
            self.least, self.best = error, [each.state() for each in self._every]

    def _error(self) -> float:
        """Return the block's mean error on the held-out windows."""
        found: dict[int, float] = {}

        def act(number: int, block: Callable[[], Any], wanted: Any) -> None:
            found[number] = float(error_of(block(), wanted))

        self._run(self._judged, act, self._at_once)
        return sum(found[number] for number in self._judged) / len(self._judged)

    def _slopes(self, numbers: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Return gradients on windows by parameter id; none without tokens."""
        total: dict[int, torch.Tensor] = {}
        for first in range(0, len(numbers), self._at_once):
            together = numbers[first : first + self._at_once]
            found: dict[int, Sequence[torch.Tensor | None]] = {}

            def act(
                number: int,
                block: Callable[[], Any],
                wanted: Any,
                found: dict[int, Sequence[torch.Tensor | None]] = found,
            ) -> None:
                with torch.enable_grad():
                    error = error_of(block(), wanted)
                if error.requires_grad:
                    found[number] = torch.autograd.grad(error, self._weights, allow_unused=True)

            self._run(together, act, len(together))
            for number in together:
                for weight, slope in zip(self._weights, found.pop(number, ()), strict=False):
                    if slope is not None:
                        before = total.get(id(weight))
                        total[id(weight)] = slope if before is None else before.add_(slope)
        return total


_PASSING = 1.5
"""Memory of a window while gradients are computed, relative to its saved tensors."""


def error_of(found: Any, wanted: Any) -> torch.Tensor:
    """Return squared output error as a share of the wanted squares.

    found: a block's output: a tensor, or a structure of tensors. wanted: the reference output, alike.
    """
    off = size = torch.zeros(())
    for own, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            wide = other.float()
            off = off + (own.float() - wide).square().sum()
            size = size + wide.square().sum()
    return off / size.clamp_min(torch.finfo(torch.float32).tiny)
