"""Similarity of sentence embeddings to a reference, in place and order.

cosine(a, b) = a . b / (|a| |b|) for the two embeddings of each sentence; the rank correlation of all pairwise
similarities; and how many of the ten nearest sentences of each are the same.
"""

from __future__ import annotations

import numpy as np

from .estimates import Estimate, Floats, mean_of, percentile_of
from .language_statistics import Samples, Statistics

COSINE, RANKS, NEIGHBORS = "Mean cosine", "Spearman of similarities", "Top-10 neighbor overlap"
_NEIGHBORS = 10


def embedding_statistics(own: Floats, base: Floats) -> Statistics:
    """Return statistics of embeddings against a reference.

    own: of the model: (sentences, width), at least twelve sentences. base: of the reference: (sentences,
    width).
    """
    samples = embedding_samples(own, base)
    similar, base_similar = (_similarities(x) for x in (own, base))
    ordered = np.sort(samples[COSINE])
    pairs = np.triu_indices(len(own), 1)
    return {
        COSINE: mean_of(samples[COSINE]),
        "1.0% cosine": Estimate(value=percentile_of(ordered, 0.01)),
        "Minimum cosine": Estimate(value=float(ordered[0])),
        RANKS: Estimate(value=spearman(similar[pairs], base_similar[pairs])),
        NEIGHBORS: mean_of(samples[NEIGHBORS]),
    }


def embedding_samples(own: Floats, base: Floats) -> Samples:
    """Return the numbers of each sentence whose means are statistics.

    own: of the model: (sentences, width), at least twelve sentences. base: of the reference: (sentences,
    width).
    """
    similar, base_similar = (_similarities(x) for x in (own, base))
    own, base = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (own, base))
    return {COSINE: (own * base).sum(1), NEIGHBORS: neighbor_overlap(similar, base_similar, _NEIGHBORS)}


def _similarities(embeddings: Floats) -> Floats:
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    found: Floats = unit @ unit.T
    return found


def spearman(a: Floats, b: Floats) -> float:
    """Return Spearman's correlation: Pearson's of ranks, with averaged ties.

    a: (n,), not all equal. b: (n,), not all equal.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 1000.0, 20.0]))
    0.5
    """
    x, y = (ranks - ranks.mean() for ranks in (ranks_of(a), ranks_of(b)))
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def ranks_of(values: Floats) -> Floats:
    """Return ranks from 1 on, the mean rank for equal numbers.

    values: (n,).

    >>> ranks_of(np.array([5.0, 1.0, 5.0]))
    array([2.5, 1. , 2.5])
    """
    _, place, number = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(number)
    ranks: Floats = ((last - (number - 1) / 2)[place]).astype(np.float64)
    return ranks


def neighbor_overlap(own: Floats, base: Floats, number: int) -> Floats:
    """Return the common share of nearest neighbors, (sentences,).

    own: similarities of all pairs: (sentences, sentences). base: of the reference. number: how many nearest
    ones.
    """
    found = []
    for matrix in (own, base):
        others = matrix.copy()
        np.fill_diagonal(others, -np.inf)
        found.append(np.argsort(-others, axis=1, kind="stable")[:, :number])
    same = [len(set(a) & set(b)) for a, b in zip(found[0].tolist(), found[1].tolist(), strict=True)]
    return np.array(same, dtype=np.float64) / number
