"""A short run of a result against the original: the last thing that a command with calibration does."""

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
_ANOTHER = 2.0
"""Nats a token from which a result is another model, whatever its scheme."""


def compared(result: RunResult, source: Source, ids: torch.Tensor, limits: Limits) -> RunResult:
    """Return ``result`` with a sentence about its logits on some tokens, next to those of the original.

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
                logits.append(passed.logits(0)[0].double().log_softmax(-1))
    except ZeropointError as error:
        return _noted(result, f"the result was not run against the original: {error}")
    base, own = logits
    divergence = float((base.exp() * (base - own)).sum(-1).mean())
    same = float((base.argmax(-1) == own.argmax(-1)).double().mean())
    said = (
        f"KL divergence {divergence:.4f} from the original on {len(base)} tokens, same top token {same:.0%}"
    )
    if divergence > _ANOTHER:
        said = f"THE RESULT IS ANOTHER MODEL: {said}; use more bits, another method, or more calibration data"
    return _noted(result, said)


def _noted(result: RunResult, note: str) -> RunResult:
    return replace(result, notes=(*result.notes, note))
