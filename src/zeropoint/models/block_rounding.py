"""Round the weights of a block together, by signs of the gradients of its output's error.

The mathematics of a step is that of :mod:`zeropoint.methods.signround`; here the block runs, one window after
the other or several at once. Gradients of the windows of a step are added in their order, so that how many
run at once changes no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..methods import LayerResult, Loss, Scope
from ..methods.signround import Sides
from .block_chain import Steps
from .site_inputs import is_held
from .solutions import WeightTask

STEPS = 100
WINDOWS = 2
"""Windows whose gradients are added for a step."""
COMPARED = 10
"""How often the loss on windows that are held out is compared, evenly over the steps."""
OnOutputs = Callable[[int, Callable[[], Any], Any], None]
"""Takes the number of a window, what runs the block on it, and the output that is wanted."""


class RunsBlock(Protocol):
    """What calls a function for windows of a block, in threads."""

    def __call__(self, numbers: Sequence[int], act: OnOutputs, workers: int) -> None:
        """Call ``act`` for each window.

        Args:
            numbers: of the windows.
            act: raises what this raises.
            workers: number of threads.
        """


@dataclass(frozen=True, slots=True)
class BegunWeight:
    """A weight that is rounded together with others.

    task: it. weight: the parameter of its layer. sides: the values that its numbers may take. result, loss:
    its codes as they are before, and how far its outputs were then.
    """

    task: WeightTask
    weight: nn.Parameter
    sides: Sides
    result: LayerResult
    loss: Loss

    def put(self, goes_up: torch.Tensor) -> None:
        """Let the layer have the values of some sides.

        Args:
            goes_up: the numbers that take the higher value.
        """
        own, values = self.weight.detach(), self.sides.values(goes_up)
        if self.task.rows is None:
            own.copy_(values)
        else:
            own[self.task.rows] = values.to(own.dtype)


def of_block(task: WeightTask) -> bool:
    """Return whether a weight is rounded together with the others of its block."""
    return task.method.scope(task.scheme) is Scope.BLOCK


def rounded_together(
    begun: Sequence[BegunWeight], run: RunsBlock, windows: int, steps: Steps
) -> Iterator[tuple[BegunWeight, LayerResult, Loss]]:
    """Round weights of a block together; yield each with its codes, which its layer then has.

    Of the codes that are compared on windows that are held out, the first ones among them, those of least
    error are taken.

    Args:
        begun: the weights.
        run: runs the block.
        windows: how many there are; of eight and more, every eighth is held out.
        steps: says how many run at once.
    """
    with _learning(begun):
        search = _Search(begun, run, windows, steps)
        search.descend()
    note = f"output of the block off by {search.first:.3%} of its squares, then {search.least:.3%}"
    for each, goes_up in zip(begun, search.best, strict=True):
        each.put(goes_up)
        loss = replace(
            each.loss, outputs=None, notes=(*each.loss.notes, note), together=(search.first, search.least)
        )
        yield each, LayerResult(q=each.sides.codes(goes_up), notes=loss.notes), loss


@contextmanager
def _learning(begun: Sequence[BegunWeight]) -> Iterator[None]:
    """Let weights take gradients, until the end."""
    before = [each.weight.requires_grad for each in begun]
    try:
        for each in begun:
            each.weight.requires_grad_(True)
        yield
    finally:
        for each, learns in zip(begun, before, strict=True):
            each.weight.requires_grad_(learns)


class _Search:
    """The search for the codes of a block. first, least: its error before, and with the ``best`` sides."""

    def __init__(self, begun: Sequence[BegunWeight], run: RunsBlock, windows: int, steps: Steps) -> None:
        self._begun, self._run = begun, run
        held = [number for number in range(windows) if is_held(number, windows)]
        self._learned = [number for number in range(windows) if not is_held(number, windows)]
        self._judged = held or self._learned
        self._weights = list({id(each.weight): each.weight for each in begun}.values())
        self._at_once = self._room(steps)
        self.best = [each.sides.goes_up for each in begun]
        self.first = self.least = self._error()

    def _room(self, steps: Steps) -> int:
        """Return how many windows run at once."""
        if steps.at_once is None:
            return steps.workers
        gradients = sum(weight.nbytes for weight in self._weights)
        fixed = gradients + sum(each.weight.numel() * Sides.NUMBER_BYTES for each in self._begun)
        return min(steps.workers, steps.at_once(fixed, gradients + self._window_bytes()))

    def _window_bytes(self) -> int:
        """Return the memory of what a block keeps of the first window for gradients."""
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

    def descend(self) -> None:
        """Take all steps, and remember the best sides."""
        every = max(1, STEPS // COMPARED)
        waiting: list[int] = []
        draw = torch.Generator().manual_seed(0)
        for step in range(STEPS):
            if len(waiting) < min(WINDOWS, len(self._learned)):
                order = torch.randperm(len(self._learned), generator=draw)
                waiting = [self._learned[number] for number in order]
            numbers, waiting = sorted(waiting[:WINDOWS]), waiting[WINDOWS:]
            slopes = self._slopes(numbers)
            for each in self._begun:
                slope = slopes.get(id(each.weight))
                if slope is not None:
                    own = slope if each.task.rows is None else slope[each.task.rows]
                    each.sides.step(own, (1 - step / STEPS) / STEPS)
                    each.put(each.sides.goes_up)
            if (step + 1) % every == 0:
                self._compare()

    def _compare(self) -> None:
        error = self._error()
        if error < self.least:
            self.least, self.best = error, [each.sides.goes_up for each in self._begun]

    def _error(self) -> float:
        """Return the mean error of the block on the windows by which sides are judged."""
        found: dict[int, float] = {}

        def act(number: int, block: Callable[[], Any], wanted: Any) -> None:
            found[number] = float(error_of(block(), wanted))

        self._run(self._judged, act, self._at_once)
        return sum(found[number] for number in self._judged) / len(self._judged)

    def _slopes(self, numbers: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Return the gradients of weights, by their ids, on some windows; none where no token reached one."""
        total: dict[int, torch.Tensor] = {}
        for first in range(0, len(numbers), self._at_once):
            together = numbers[first : first + self._at_once]
            found: dict[int, Sequence[torch.Tensor | None]] = {}

            def act(
                number: int, block: Callable[[], Any], wanted: Any,
                found: dict[int, Sequence[torch.Tensor | None]] = found,
            ) -> None:  # fmt: skip
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
"""Memory of a window while gradients are computed, over that of what is kept for them."""


def error_of(found: Any, wanted: Any) -> torch.Tensor:
    """Return the squared error of outputs, as a share of the squares of those that are wanted.

    Args:
        found: what a block gives: a tensor, or a structure of tensors.
        wanted: the same of another one.
    """
    off = size = torch.zeros(())
    for own, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            wide = other.float()
            off = off + (own.float() - wide).square().sum()
            size = size + wide.square().sum()
    return off / size.clamp_min(torch.finfo(torch.float32).tiny)
