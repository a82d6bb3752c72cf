"""Length of a model's agreement with the reference's greedy continuation.

The reference continues each prompt once, always by its most likely token. A model then runs on this
continuation: up to the first place where its own most likely token is another one, its own continuation is
the same, so that one pass finds where they part.

Source: the measure of A. Dutta et al., Accuracy is Not All You Need (arXiv:2407.09141), is how many answers
flip; this is the same for free text.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack

import numpy as np
import torch

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.running_model import RunningModel
from ..checkpoint.model.samples import Batches
from ..models.calibrate import evaluating
from .estimates import Estimate, proportion_of
from .language_statistics import Samples, Statistics

LENGTH, SAME = "Median divergence length", "Same continuations"


def greedy_continuations(model: RunningModel, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return prompts with greedy continuations, (prompts, length + tokens).

    The whole model is in memory meanwhile. model: a causal language model. prompts: (prompts, length) int64,
    the same length for all. tokens: how many tokens are added.
    """
    cache, whole = None, prompts.to(model.device)
    given = whole
    with ExitStack() as stack, evaluating(model.root):
        for name in model.steps.blocks:
            stack.enter_context(model.steps.loaded(name))
        for _ in range(tokens):
            found = model.root(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
            whole = torch.cat([whole, given], 1)
    return whole.cpu()


def prompts_of(ids: torch.Tensor, number: int, length: int) -> torch.Tensor:
    """Return runs of tokens at equal distances over a text: (number, length).

    ids: (tokens,) of the text, at least ``length``. number: how many prompts. length: tokens of a prompt.
    """
    starts = torch.linspace(0, len(ids) - length, number).long()
    return torch.stack([ids[start : start + length] for start in starts])


class ContinuationProbe:
    """Probe of the most likely token at each continuation place.

    sequences: prompts with the continuations of the reference: (prompts, length + tokens). tokens: how many
    of these are continuation. most: tokens of a batch, at most.
    """

    def __init__(self, sequences: torch.Tensor, tokens: int, most: int) -> None:
        self.sequences, self.tokens = sequences, tokens
        self._rows = max(1, most // sequences.shape[1])

    @functools.cached_property
    def batches(self) -> Batches:
        """What models run on."""
        return [{"input_ids": rows} for rows in torch.split(self.sequences, self._rows)]

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:  # noqa: ARG002 (the protocol's)
        """Return the most likely tokens: (sequences of the batch, tokens)."""
        return found.logits(at, last=self.tokens + 1)[:, :-1].argmax(-1)

    def answers(self) -> ContinuationAnswers:
        """Return an empty record of a model's answers."""
        return ContinuationAnswers()


class ContinuationAnswers:
    """How many tokens of each continuation are the same."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._tokens = 0

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:  # noqa: ARG002 (the protocol's)
        """Add tokens, (sequences, tokens); see :class:`~.probe.Answers`."""
        self._lengths += divergence_lengths(own, base)
        self._tokens = own.shape[1]

    def statistics(self) -> Statistics:
        """See :class:`~.probe.Answers`."""
        same = sum(length == self._tokens for length in self._lengths)
        return {
            LENGTH: Estimate(value=float(np.median(self._lengths))),
            SAME: proportion_of(same, len(self._lengths)),
        }

    def samples(self) -> Samples:
        """See :class:`~.probe.Answers`: a number for each continuation."""
        return {SAME: (np.array(self._lengths) == self._tokens).astype(np.float64)}


def divergence_lengths(own: torch.Tensor, base: torch.Tensor) -> list[int]:
    """Return the number of equal tokens at the beginning of each row.

    own: (rows, tokens) integers. base: (rows, tokens).

    >>> divergence_lengths(torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 5, 3], [1, 2, 3]]))
    [1, 3]
    """
    found: list[int] = (own == base).long().cumprod(1).sum(1).tolist()
    return found
