r"""Distillation of scales, block by block, under fixed codes.

    minimize over m:   |f(X~; s) - f(X; w)|^2 / |f(X; w)|^2,    s = stored(s_0 (1 + m)),   value = unit s
    d / dm = sum of (d / dvalue) value over the values of a scale,     stored taken as the identity

f is a block of the model, X its inputs in the float model, X~ the inputs behind blocks that are trained
already. Only the finest scales of a weight move, by shares of themselves, in steps of running means of
gradients (:mod:`zeropoint.training.slope_means`). The block runs on scales rounded as they are stored.

Source: block-wise training as in BRECQ, arXiv:2102.05426; that scales alone are worth training, EfficientQAT,
arXiv:2407.11062, section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..formats import FloatFormat
from ..formats.torch_dtypes import format_of
from ..layout.blocks import sum_blocks
from ..params.stored import load_scale, store
from ..progress import counted
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from ..training.slope_means import SlopeMeans
from .block_chain import BlockChain, Steps, keeping
from .block_training import OnOutputs, RunsBlock, TrainingResult, TrainingSteps, trained
from .calibrate import evaluating
from .model_blocks import blocks_of
from .narrow_products import narrow_products


def scales_stay(scheme: Scheme) -> str | None:
    """Return the reason why finest scales cannot be trained, or None.

    >>> scales_stay(Scheme.parse("mxfp4"))
    'its scales are powers of two'
    """
    if not scheme.scales:
        return "it has none"
    fmt = scheme.scales[0].format
    if isinstance(fmt, FloatFormat) and fmt.mantissa_bits == 0:
        return "its scales are powers of two"
    if scheme.offsets or scheme.center is not None or scheme.element.per_scale > 1:
        return "its values are more than a code times a scale"
    return None


class TrainedScales:
    """Trainable finest scales of a weight's rows, under fixed codes.

    weight: the parameter of the layer, which has the values of the codes. rows: numbers of the rows that the
    codes are of; all if None. q: the codes, on the device of the parameter, of a scheme whose scales do not
    stay (:func:`scales_stay`). rate: the size of the first step, as a share of a scale.
    """

    def __init__(
        self, weight: nn.Parameter, rows: torch.Tensor | None, q: QuantizedTensor, rate: float
    ) -> None:
        self.weight, self._rows, self._q, self._rate = weight, rows, q, rate
        level = q.scheme.scales[0]
        self._format, self._granularity = level.format_for(format_of(q.dtype)), level.granularity
        self._first = load_scale(q.scales[0], self._format, torch.float32)
        self._moved = torch.zeros_like(self._first)
        self._means = SlopeMeans(self._first)

    @property
    def nbytes(self) -> int:
        """Bytes of gradient means, and the values of one step."""
        return self._first.numel() * (2 * 4 + SlopeMeans.NUMBER_BYTES) + 4 * self.weight.nbytes

    def state(self) -> torch.Tensor:
        """Return the scales as they are stored."""
        if not bool(self._moved.any()):
            return self._q.scales[0]
        read = load_scale(store(self._first * (1 + self._moved), self._format), self._format, torch.float32)
        # No scale becomes zero, infinite, or one of the other sign.
        good = torch.isfinite(read) & (read.sign() == self._first.sign())
        return store(torch.where(good, read, self._first), self._format)

    def codes(self, state: torch.Tensor) -> QuantizedTensor:
        """Return the same codes under other scales."""
        params = replace(self._q.params, scales=(state, *self._q.scales[1:]))
        return replace(self._q, params=params)

    def put(self, state: torch.Tensor) -> None:
        """Let the layer have the values of the codes under some scales."""
        own, values = self.weight.detach(), self.codes(state.to(self._first.device)).dequantize()
        if self._rows is None:
            own.copy_(values)
        else:
            own[self._rows] = values.to(own.dtype)

    def step(self, slope: torch.Tensor, size: float) -> None:
        """Move scales against a gradient."""
        own, values = slope, self.weight.detach()
        if self._rows is not None:
            own, values = slope[self._rows], values[self._rows]
        shares = sum_blocks(own.float() * values.float(), self._granularity)
        self._moved.sub_(self._means.direction(shares), alpha=self._rate * size)
        self.put(self.state())


class ScalesOfBlocks(Protocol):
    """What is trained of each block, and a store of the results."""

    def of(self, block: str) -> Sequence[TrainedScales]:
        """Return the scales of a block that is loaded."""

    def known(self, block: str) -> TrainingResult | None:
        """Return a block's earlier result, or None."""

    def add(self, block: str, found: TrainingResult) -> None:
        """Take the result of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOfBlocks:
    """A model that runs block by block: its root and blocks."""

    root: nn.Module
    steps: Steps


def distill(
    teacher: ModelOfBlocks, student: ModelOfBlocks, batches: Sequence[Any], training: TrainingSteps,
    scales: ScalesOfBlocks, *, progress: bool = False,
) -> None:  # fmt: skip
    """Train a quantized model's scales, block by block, toward a float model.

    Args:
        teacher: the float model.
        student: the quantized one, on decoded weights; a block's weights are read and changed while it is
            loaded.
        batches: of both; of eight and more, every eighth is held out.
        training: the steps for each block.
        scales: the trained scales, and results of an earlier run.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: for blocks that are not in both models.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    steps = student.steps
    with (
        evaluating(teacher.root),
        evaluating(student.root),
        narrow_products(),
        keeping(steps.folder, steps.dtype) as floats,
        keeping(steps.folder, steps.dtype) as deployed,
    ):
        of_teacher = BlockChain(teacher.root, blocks_of(teacher.root, steps.blocks), floats)
        of_student = BlockChain(student.root, blocks_of(student.root, steps.blocks), deployed)
        for step in counted(range(len(of_student.blocks)), "Training blocks", shown=progress):
            name, block = of_student.blocks[step]
            with ExitStack() as stack:
                stack.enter_context(teacher.steps.loaded(name))
                stack.enter_context(steps.loaded(name))
                of_teacher.run(step, batches, of_teacher.blocks[step][1], workers=steps.workers)
                every, found = scales.of(name), scales.known(name)
                if found is None and every:
                    run = _outputs(of_teacher, of_student, step, batches)
                    found = trained(every, run, len(batches), training, steps)
                    scales.add(name, found)
                for each, state in zip(every, () if found is None else found.states, strict=True):
                    each.put(state)
                of_student.run(step, batches, block, workers=steps.workers)


def _outputs(teacher: BlockChain, student: BlockChain, step: int, batches: Sequence[Any]) -> RunsBlock:
    """Return a function that runs a student block with teacher outputs."""
    block = student.blocks[step][1]

    def run(numbers: Sequence[int], act: OnOutputs, workers: int) -> None:
        def outputs(batch: int, *args: Any, **named: Any) -> None:
            act(batch, functools.partial(block, *args, **named), teacher.result(step, batch))

        student.visit(step, batches, outputs, numbers, workers=workers)

    return run
