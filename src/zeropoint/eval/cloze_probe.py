"""Cloze accuracy of models, and whether it differs from the reference's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.samples import Batches
from .cloze import ClozeItem
from .estimates import Estimate, Floats, mean_of, proportion_of
from .language_statistics import Samples, Statistics
from .mcnemar import mcnemar

ACCURACY, TEST = "Cloze accuracy", "Cloze McNemar p"


class ClozeProbe:
    """Asks models for the likelihood of sentences.

    items: pairs of sentences. tokens: gives the tokens of a sentence, with the one that begins texts where
    there is one. most: tokens of a batch, at most, unless one sentence has more.
    """

    def __init__(self, items: Sequence[ClozeItem], tokens: Callable[[str], list[int]], most: int) -> None:
        self._rows: list[list[int]] = []
        self._first: list[int] = []
        for item in items:
            right, wrong = tokens(item.right), tokens(item.wrong)
            same = next((n for n, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), 0)
            self._rows += [right, wrong]
            self._first += [same, same]
        self._groups = _grouped([len(row) for row in self._rows], most)

    @functools.cached_property
    def batches(self) -> Batches:
        """See :class:`~.probe.Probe`; what is behind a shorter sentence changes nothing before it."""
        found = []
        for group in self._groups:
            rows = torch.zeros(len(group), max(len(self._rows[n]) for n in group), dtype=torch.int64)
            for at, n in enumerate(group):
                rows[at, : len(self._rows[n])] = torch.tensor(self._rows[n])
            found.append({"input_ids": rows})
        return found

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:
        """Return sentences' log-likelihoods from the altered word on, (sentences,) float64."""
        logits = found.logits(at)
        likely = []
        for row, n in enumerate(self._groups[batch]):
            first, tokens = max(1, self._first[n]), torch.tensor(self._rows[n], device=logits.device)
            scored = logits[row, first - 1 : len(tokens) - 1].double().log_softmax(-1)
            likely.append(scored.gather(-1, tokens[first:, None]).sum())
        return torch.stack(likely)

    def answers(self) -> ClozeAnswers:
        """Return an empty record of a model's answers."""
        return ClozeAnswers(self._groups)


class ClozeAnswers:
    """Log-likelihoods of all sentences under two models.

    groups: the sentences of each batch, by number; even ones are right, the next one is the other.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._own = np.zeros(sum(map(len, groups)))
        self._base = np.zeros_like(self._own)

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:
        """Add log-likelihoods, (sentences,); see :class:`~.probe.Answers`."""
        group = list(self._groups[batch])
        self._own[group], self._base[group] = own.cpu().numpy(), base.cpu().numpy()

    def statistics(self) -> Statistics:
        """See :class:`~.probe.Answers`."""
        own, base = _right(self._own), _right(self._base)
        lost, gained = int((base & ~own).sum()), int((own & ~base).sum())
        return {
            ACCURACY: proportion_of(int(own.sum()), len(own)),
            "Cloze accuracy (base)": proportion_of(int(base.sum()), len(base)),
            "Cloze accuracy difference": mean_of(own.astype(np.float64) - base),
            "Cloze answers lost": Estimate(value=lost),
            "Cloze answers gained": Estimate(value=gained),
            TEST: Estimate(value=mcnemar(lost, gained)),
        }

    def samples(self) -> Samples:
        """See :class:`~.probe.Answers`: a number for each choice."""
        return {ACCURACY: _right(self._own).astype(np.float64)}


def _right(likely: Floats) -> NDArray[np.bool_]:
    """Return right choices, from alternating right and wrong log-likelihoods."""
    return likely[0::2] > likely[1::2]


def _grouped(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return row numbers grouped by length, at most ``most`` tokens each."""
    groups: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if not groups or lengths[n] * (len(groups[-1]) + 1) > most:
            groups.append([])
        groups[-1].append(n)
    return groups
