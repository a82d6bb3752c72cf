"""Short comparison of a result's logits with the original's."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import ZeropointError
from ..plan.limits import Limits
from ..read.source import Source, open_source
from ..run.loop import RunResult
from .forward_pass import forward_pass

TOKENS = 200
"""Tokens of the short run."""
_ROWS = 16
"""Tokens whose probabilities are held at once in float64: vocabularies are large."""
_ANOTHER = 2.0
"""Nats a token from which a result is another model, whatever its scheme."""


def compared(result: RunResult, source: Source, ids: torch.Tensor, limits: Limits) -> RunResult:
    """Return ``result`` with a note on its KL divergence from the original.

    Args:
        result: what was written.
        source: what it was made of.
        ids: (1, tokens) that nothing was learned from; the first `TOKENS` are run.
        limits: of memory.
    """
    batches = [{"input_ids": ids[:, :TOKENS]}]
    try:
        logits = []
        for each in (source, open_source(result.path)):
            with forward_pass(each, batches, limits) as passed:
                logits.append(passed.logits(0)[0].float())
    except ZeropointError as error:
        return _noted(result, f"the result was not run against the original: {error}")
    base, own = logits
    divergence, same = 0.0, float((base.argmax(-1) == own.argmax(-1)).double().mean())
    for ours, theirs in zip(torch.split(own, _ROWS), torch.split(base, _ROWS), strict=True):
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum()) / len(base)
    said = (
        f"KL divergence {divergence:.4f} from the original on {len(base)} tokens, same top token {same:.0%}"
    )
    if divergence > _ANOTHER:
        said = f"THE RESULT IS ANOTHER MODEL: {said}; use more bits, another method, or more calibration data"
    return _noted(result, said)


def _noted(result: RunResult, note: str) -> RunResult:
    return replace(result, notes=(*result.notes, note))
