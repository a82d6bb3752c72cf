"""Calibration tokens that a model generates itself.

Each window begins with a random token, and each token that follows is drawn from what the model makes of
those before it, at temperature 1, with keys and values kept. Windows are generated a few at a
time, each few with random numbers of its own: tokens do not depend on how many threads there are. Source:
LLM-QAT (arXiv:2305.17888), section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from ...errors import CalibrationError, CheckpointError, UnsupportedError, option, size_of
from ...models.block_chain import in_threads
from ...ops.devices import device_of
from ..plan.limits import Limits
from .tokens import OWN

TOGETHER = 16
"""Windows that are generated together."""


def require_memory(
    model: Any, blocks: Sequence[str], windows: Sequence[torch.Tensor], limits: Limits, spare: int
) -> None:
    """Raise CheckpointError where generation exceeds the memory limit.

    model: with parameters. blocks: names of blocks, memory for two of which is counted already. windows:
    (1, length) each. spare: bytes that are left.
    """
    inside = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    config, item = model.config.get_text_config(), next(model.parameters()).dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values of a block are copied when a token is added.
    cache = 2 * (len(blocks) + 1) * heads * width * item * windows[0].numel()
    logits = 4 * 4 * model.get_input_embeddings().num_embeddings
    running = min(limits.batches_at_once, -(-len(windows) // TOGETHER)) * min(len(windows), TOGETHER)
    needed = sum(inside) - 2 * max(inside) + running * (cache + logits) - spare
    if needed > 0:
        raise CheckpointError(
            f"{option('calibration', OWN)} takes the whole model in memory, keys and values of "
            f"{running} windows with it, {size_of(needed)} {limits.short_of(needed)}, or use text"
        )


def generate(
    root: Any,
    loaded: Callable[[str], AbstractContextManager[Any]],
    blocks: Sequence[str],
    windows: Sequence[torch.Tensor],
    *,
    workers: int,
) -> None:
    """Continue each window from its first token to its end, in place.

    root: a model, whose layers outside of blocks have their weights. loaded: takes the name of a block and
    returns a context in which it has its weights. windows: (1, length) int64 each. workers: threads. Raises
    UnsupportedError for a model that predicts no next token.
    """
    groups = [windows[at : at + TOGETHER] for at in range(0, len(windows), TOGETHER)]
    with ExitStack() as stack:
        for name in blocks:
            stack.enter_context(loaded(name))
        in_threads(functools.partial(_continue, root, groups), range(len(groups)), min(workers, len(groups)))


def _continue(root: Any, groups: Sequence[Sequence[torch.Tensor]], number: int) -> None:
    ids = torch.cat(list(groups[number]))
    generator, cache = torch.Generator().manual_seed(number), None
    device = device_of(root)
    with torch.no_grad():
        for at in range(1, ids.shape[1]):
            found = root(input_ids=ids[:, at - 1 : at].to(device), past_key_values=cache, use_cache=True)
            logits, cache = getattr(found, "logits", None), getattr(found, "past_key_values", None)
            if logits is None or cache is None:
                raise UnsupportedError(
                    f"{type(root).__name__} predicts no next token from kept keys and values, so that it "
                    f"generates no calibration data; give {option('calibration', metavar='FILE')} with text"
                )
            chances = logits[:, -1].float().softmax(-1).cpu()
            if not bool(torch.isfinite(chances).all()):
                raise CalibrationError(
                    "the model gives logits that are not finite, and generates no tokens; give text, or "
                    "check the weights"
                )
            ids[:, at] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    for window, row in zip(groups[number], ids, strict=True):
        window[0] = row
