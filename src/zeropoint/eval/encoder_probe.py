"""Sentence embeddings of encoder models, averaged over tokens.

Sentences of one length run together, so that nothing is padded and none changes the output of another.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.model.forward_pass import ForwardPass
from ..checkpoint.model.samples import Batches
from ..checkpoint.read.source import MAX_JSON_BYTES, Source
from ..checkpoint.read.storage import read_small
from ..errors import CalibrationError
from .embedding_similarity import embedding_samples, embedding_statistics
from .estimates import Floats
from .language_statistics import Samples, Statistics

_LEAST = 12
"""Sentences: one with ten neighbors, and another one."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_POOLING = Path("1_Pooling/config.json")
"""Where sentence-transformers says how vectors of tokens become one."""
_CLASS = "pooling_mode_cls_token"


def sentences_of(text: str, most: int) -> list[str]:
    r"""Return sentences of a text, each once, spread over it.

    text: lines are apart, and end sentences; so do marks at their end. most: how many at most. Raises
    CalibrationError for too few sentences.

    >>> sentences_of("one. two! three.\nfour\n" + "\n".join("abcdefghij"), 3)
    ['one.', 'a', 'f']
    """
    every = [part.strip() for line in text.splitlines() for part in _SENTENCE.split(line)]
    found = list(dict.fromkeys(part for part in every if part))
    if len(found) < _LEAST:
        raise CalibrationError(
            f"the text has {len(found)} sentences, and {_LEAST} are needed to compare neighbors; give more "
            "text, a sentence a line"
        )
    most = min(most, len(found))
    return [found[n * len(found) // most] for n in range(most)]


def takes_first_vector(source: Source) -> bool:
    """Return whether a checkpoint embeds by its first token's vector."""
    if _POOLING not in source.companions:
        return False
    said: Any = json.loads(read_small(source.root / _POOLING, limit=MAX_JSON_BYTES)[0])
    return isinstance(said, Mapping) and said.get(_CLASS) is True


class EncoderProbe:
    """Asks models for embeddings of sentences.

    sentences: tokens of each, special ones included. first: whether the vector of the first token is the
    embedding; otherwise the mean of all is. most: tokens of a batch, at most, unless one sentence has more.
    """

    def __init__(self, sentences: Sequence[list[int]], *, first: bool, most: int) -> None:
        self._first = first
        self._sentences = sentences
        self._groups: list[list[int]] = []
        for n in sorted(range(len(sentences)), key=lambda n: len(sentences[n])):
            size = len(sentences[n])
            last = self._groups[-1] if self._groups else []
            if not last or len(sentences[last[0]]) != size or size * (len(last) + 1) > most:
                self._groups.append([])
            self._groups[-1].append(n)

    @functools.cached_property
    def batches(self) -> Batches:
        """What models run on."""
        return [{"input_ids": torch.tensor([self._sentences[n] for n in group])} for group in self._groups]

    def read(self, found: ForwardPass, at: int, batch: int) -> torch.Tensor:  # noqa: ARG002 (the protocol's)
        """Return embeddings: (sentences of the batch, width)."""
        vectors: torch.Tensor = found.output(at).last_hidden_state.float()
        return vectors[:, 0] if self._first else vectors.mean(1)

    def answers(self) -> EncoderAnswers:
        """Return an empty record of a model's answers."""
        return EncoderAnswers(self._groups)


class EncoderAnswers:
    """Embeddings of all sentences by two models.

    groups: the sentences of each batch, by number.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._own: list[torch.Tensor] = []
        self._base: list[torch.Tensor] = []

    def add(self, batch: int, own: torch.Tensor, base: torch.Tensor) -> None:  # noqa: ARG002 (the protocol's)
        """Add embeddings, (sentences, width); see :class:`~.probe.Answers`."""
        self._own.append(own)
        self._base.append(base)

    def statistics(self) -> Statistics:
        """See :class:`~.probe.Answers`."""
        return embedding_statistics(_joined(self._own), _joined(self._base))

    def samples(self) -> Samples:
        """See :class:`~.probe.Answers`: a number for each sentence."""
        return embedding_samples(_joined(self._own), _joined(self._base))


def _joined(parts: Sequence[torch.Tensor]) -> Floats:
    return torch.cat(list(parts)).double().cpu().numpy().astype(np.float64)
