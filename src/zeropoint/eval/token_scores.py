"""Scores of each token: likelihood under two models, and their divergence.

    nll = -ln q(t),  base_nll = -ln p(t),  kld = sum over all tokens v of p(v) (ln p(v) - ln q(v))

with q of the model, p of the reference, and t the token that follows in the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .estimates import Floats

_ROWS = 64
"""Positions that are scored at once, which bounds the memory of float64 numbers over a vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Numbers for each scored token, in nats.

    Args:
        nll: negative log-likelihood under the model: (n,).
        base_nll: under the reference: (n,).
        kld: KL divergence of the model from the reference, over the whole vocabulary: (n,).
        same_top: whether both find the same token the most likely: (n,).
    """

    nll: Floats
    base_nll: Floats
    kld: Floats
    same_top: NDArray[np.bool_]

    @property
    def p_diff(self) -> Floats:
        """Each token's probability under the model, minus the reference's."""
        found: Floats = np.exp(-self.nll) - np.exp(-self.base_nll)
        return found

    @staticmethod
    def join(parts: Iterable[TokenScores]) -> TokenScores:
        """Return the scores of several runs of tokens as one.

        Args:
            parts: at least one.
        """
        every = list(parts)
        return TokenScores(
            nll=np.concatenate([part.nll for part in every]),
            base_nll=np.concatenate([part.base_nll for part in every]),
            kld=np.concatenate([part.kld for part in every]),
            same_top=np.concatenate([part.same_top for part in every]),
        )


def scores_of(logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Return token scores from both models' logits, computed in float64.

    Args:
        logits: of the model at the positions before the tokens: (n, vocabulary), floats.
        base: of the reference: (n, vocabulary).
        tokens: the tokens that follow: (n,) integers.
    """
    parts = [
        _scores(logits[at : at + _ROWS].double(), base[at : at + _ROWS].double(), tokens[at : at + _ROWS])
        for at in range(0, len(tokens), _ROWS)
    ]
    return TokenScores.join(parts)


def _scores(logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    q, p = logits.log_softmax(-1), base.log_softmax(-1)
    own = tokens[:, None].to(logits.device)
    return TokenScores(
        nll=-q.gather(-1, own)[:, 0].cpu().numpy(),
        base_nll=-p.gather(-1, own)[:, 0].cpu().numpy(),
        kld=(p.exp() * (p - q)).sum(-1).cpu().numpy(),
        same_top=(logits.argmax(-1) == base.argmax(-1)).cpu().numpy(),
    )
