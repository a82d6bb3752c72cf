"""Weights to solve, and where the results are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from ..errors import UnsupportedError
from ..methods import LayerResult, Loss, Method
from ..methods.channels import corrections_of
from ..methods.nearest import METHOD as NEAREST
from ..schemes import Scheme
from .rescale import RescaledBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTask:
    """A weight to quantize: a linear layer's, or some rows of it.

    name: of the weight, for results. number: of the weight among others. layer: of the module in the model.
    without_data: the method where no input reaches the layer. rows: numbers of
    its rows; all if None. dtype: of the weight as it is quantized; the module's if None. share: weights with
    the same text take one scale of the whole tensor. source: how inputs are quantized where the model runs,
    or None. exact: whether codes are written with the scales that they were solved with.
    """

    name: str
    number: int = 0
    layer: str
    scheme: Scheme
    method: Method
    without_data: Method = NEAREST
    rows: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    share: str | None = None
    source: nn.Module | None = None
    exact: bool = True


def without_data(tasks: Iterable[WeightTask], layers: Collection[str]) -> list[WeightTask]:
    """Return tasks, in ``layers`` with a method that needs no data."""
    return [
        replace(task, method=task.without_data) if task.layer in layers and task.method.needs else task
        for task in tasks
    ]


def require_corrected(asked: Iterable[Method], tasks: Iterable[WeightTask]) -> None:
    """Raise UnsupportedError for bias corrections without any bias.

    asked: the methods of all weights, of which tasks have the corrections that their layers can hold.
    """
    wanted = next((method for method in asked if corrections_of(method)), None)
    if wanted is not None and not any(corrections_of(task.method) for task in tasks):
        rest = wanted.name.removesuffix("".join(f"+{part.name}" for part in corrections_of(wanted)))
        raise UnsupportedError(
            f"method {wanted.name} corrects biases, and no layer that it quantizes has a bias; use {rest}"
        )


class Solutions(Protocol):
    """A store of quantized weights."""

    def known(self, task: WeightTask) -> LayerResult | None:
        """Return a task's earlier result, or None."""

    def add(self, task: WeightTask, result: LayerResult, loss: Loss) -> None:
        """Take the result of a task, with the method that it has."""

    def known_rescaling(self, block: str) -> RescaledBlock | None:
        """Return a block's earlier rescaling, or None."""

    def add_rescaling(self, block: str, found: RescaledBlock) -> None:
        """Take how the channels of a block are rescaled."""


class Solved(dict[str, LayerResult]):
    """Quantized weights in memory, by the names of tasks.

    losses: by the same names. methods: that have chosen them, by the same names. rescaled: how the channels
    of blocks are rescaled, by the names of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Loss] = {}
        self.methods: dict[str, Method] = {}
        self.rescaled: dict[str, RescaledBlock] = {}

    def known(self, task: WeightTask) -> LayerResult | None:
        """Return the result of a task, or None."""
        return self.get(task.name)

    def add(self, task: WeightTask, result: LayerResult, loss: Loss) -> None:
        """Keep a result and its loss."""
        self[task.name], self.losses[task.name], self.methods[task.name] = result, loss, task.method

    def known_rescaling(self, block: str) -> RescaledBlock | None:
        """Return how a block is rescaled, or None."""
        return self.rescaled.get(block)

    def add_rescaling(self, block: str, found: RescaledBlock) -> None:
        """Keep how a block is rescaled."""
        self.rescaled[block] = found


def by_block(tasks: Iterable[WeightTask], blocks: Sequence[str]) -> list[list[WeightTask]]:
    """Return the tasks of each block, then tasks outside of blocks."""
    groups: list[list[WeightTask]] = [[] for _ in range(len(blocks) + 1)]
    for task in tasks:
        inside = (n for n, name in enumerate(blocks) if f"{task.layer}.".startswith(f"{name}."))
        groups[next(inside, len(blocks))].append(task)
    return groups
