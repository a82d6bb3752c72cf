"""The probe protocol: batches that a model runs on, and answers.

All probes of an evaluation share one pass of each model.
"""

from typing import Protocol

import torch

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.samples import Batches
from .estimates import Estimate, Floats
from .language_statistics import Samples, Statistics


class Answers(Protocol):
    """What one model answered to a probe, next to the reference."""

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:
        """Add both models' results for a batch of the probe.

        batch: number of the batch in the probe. own: of the model, a result of :meth:`Probe.read`. base: of
        the reference.
        """

    def statistics(self) -> Statistics:
        """Return the numbers that follow from all batches."""

    def samples(self) -> Samples:
        """Return the numbers behind the mean statistics, for pairing models."""


class Probe(Protocol):
    """A question to models."""

    @property
    def batches(self) -> Batches:
        """What they run on."""

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:
        """Return a probe's part of a model's output.

        found: a model that has run. at: number of the batch in the pass. batch: number of the batch in the
        probe.
        """

    def answers(self) -> Answers:
        """Return an empty record of a model's answers."""


def ask(own: ForwardPass, base: ForwardPass, probes: list[Probe]) -> tuple[Statistics, Samples]:
    """Return statistics of two passes over all probes' batches.

    own: the model. base: the reference. probes: in the order of their batches in the passes.
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
