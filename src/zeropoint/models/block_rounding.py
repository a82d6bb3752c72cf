"""Joint rounding of a block's weights for its output.

:mod:`zeropoint.methods.signround` has the mathematics; :mod:`.block_training` takes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..methods import LayerResult, Loss, Scope
from ..methods.signround import Sides
from .block_chain import Steps
from .block_training import RunsBlock, TrainingSteps, trained
from .solutions import WeightTask

STEPS = 100


@dataclass(frozen=True, slots=True)
class BegunWeight:
    """A weight that is rounded together with others.

    task: it. weight: the parameter of its layer. sides: the values that its numbers may take. result: the
    codes at the start, and what goes with them, such as a corrected bias. loss: how far its outputs were.
    """

    task: WeightTask
    weight: nn.Parameter
    sides: Sides
    result: LayerResult
    loss: Loss

    @property
    def nbytes(self) -> int:
        """Memory of the sides."""
        return self.weight.numel() * Sides.NUMBER_BYTES

    def state(self) -> torch.Tensor:
        """Return which numbers take the higher value."""
        return self.sides.goes_up

    def put(self, state: torch.Tensor) -> None:
        """Let the layer have the values of some sides."""
        own, values = self.weight.detach(), self.sides.values(state)
        if self.task.rows is None:
            own.copy_(values)
        else:
            own[self.task.rows] = values.to(own.dtype)

    def step(self, slope: torch.Tensor, size: float) -> None:
        """Move numbers against a gradient."""
        self.sides.step(slope if self.task.rows is None else slope[self.task.rows], size / STEPS)
        self.put(self.state())


def of_block(task: WeightTask) -> bool:
    """Return whether a weight is rounded jointly with its block."""
    return task.method.scope(task.scheme) is Scope.BLOCK


def rounded_together(
    begun: Sequence[BegunWeight], run: RunsBlock, windows: int, steps: Steps
) -> Iterator[tuple[BegunWeight, LayerResult, Loss]]:
    """Round a block's weights jointly; yield and install each one's codes.

    begun: the weights. run: runs the block. windows: how many there are; of eight and more, every eighth is
    held out. steps: says how many run at once.
    """
    found = trained(begun, run, windows, TrainingSteps(count=STEPS), steps)
    note = f"output of the block off by {found.first:.3%} of its squares, then {found.least:.3%}"
    for each, state in zip(begun, found.states, strict=True):
        loss = replace(
            each.loss, outputs=None, notes=(*each.loss.notes, note), together=(found.first, found.least)
        )
        result = replace(each.result, q=each.sides.codes(state), notes=loss.notes, outputs=None)
        yield each, result, loss
