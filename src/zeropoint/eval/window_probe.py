"""Perplexity and KL divergence over windows of a text: llama.cpp's statistics."""

from __future__ import annotations

import functools

import torch

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.samples import Batches
from .language_statistics import Samples, Statistics, language_samples, language_statistics
from .text_windows import TextWindows
from .token_scores import TokenScores, scores_of


class WindowProbe:
    """Asks how likely models find the tokens of a text.

    Args:
        windows: of the text; each is a batch.
    """

    def __init__(self, windows: TextWindows) -> None:
        self.windows = windows

    @functools.cached_property
    def batches(self) -> Batches:
        """What models run on."""
        return [{"input_ids": window[None]} for window in self.windows.given]

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:  # noqa: ARG002 (the protocol's)
        """Return logits at the positions before scored tokens: (scored, vocabulary).

        Args:
            found: a model that has run.
            at: number of the batch in the pass.
            batch: number of the batch in the probe.
        """
        return found.logits(at, last=self.windows.scored + 1)[0, :-1]

    def answers(self) -> WindowAnswers:
        """Return an empty record of a model's answers."""
        return WindowAnswers(self.windows)


class WindowAnswers:
    """How likely two models found the tokens."""

    def __init__(self, windows: TextWindows) -> None:
        self._windows = windows
        self._scores: list[TokenScores] = []

    @property
    def scores(self) -> TokenScores:
        """The scores of all tokens so far."""
        return TokenScores.join(self._scores)

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:
        """Add logits, (scored, vocabulary); see :class:`~.probe.Answers`."""
        self._scores.append(scores_of(own, base, self._windows.targets[batch]))

    def statistics(self) -> Statistics:
        """See :class:`~.probe.Answers`."""
        return language_statistics(self.scores, self._windows.nbytes)

    def samples(self) -> Samples:
        """See :class:`~.probe.Answers`: a number for each scored token."""
        return language_samples(self.scores)
