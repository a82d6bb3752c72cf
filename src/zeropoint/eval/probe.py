"""What a model is asked, as a protocol: batches that it runs on, and what is learned of its outputs.

All probes of an evaluation share one pass of each model.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.running_model import Batches
from .estimates import Estimate, Floats
from .language_statistics import Samples, Statistics


class Answers(Protocol):
    """What one model answered to a probe, next to the reference."""

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:
        """Take what both models give for a batch of the probe.

        Args:
            batch: its number among those of the probe.
            own: of the model, what :meth:`Probe.read` returned.
            base: of the reference.
        """

    def statistics(self) -> Statistics:
        """Return the numbers that follow from all batches."""
        ...

    def samples(self) -> Samples:
        """Return the numbers whose means are among the statistics, so that models can be paired."""
        ...


class Probe(Protocol):
    """A question to models.

    Args:
        batches: what they run on.
    """

    @property
    def batches(self) -> Batches:
        """What they run on."""
        ...

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:
        """Return what is wanted of a model's output.

        Args:
            found: a model that has run.
            at: number of the batch in the pass.
            batch: its number among those of the probe.
        """
        ...

    def answers(self) -> Answers:
        """Return an empty record of a model's answers."""
        ...


def ask(own: ForwardPass, base: ForwardPass, probes: list[Probe]) -> tuple[Statistics, Samples]:
    """Return what probes learn of a model next to the reference, which have run on the batches of all.

    Args:
        own: the model.
        base: the reference.
        probes: in the order of their batches in the passes.
    """
    found: dict[str, Estimate] = {}
    samples: dict[str, Floats] = {}
    at = 0
    for probe in probes:
        answers = probe.answers()
        for batch in range(len(probe.batches)):
            answers.add(batch, probe.read(own, at, batch), probe.read(base, at, batch))
            at += 1
        found |= answers.statistics()
        samples |= answers.samples()
    return found, samples
