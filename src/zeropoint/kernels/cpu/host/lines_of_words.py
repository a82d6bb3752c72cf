"""Host side of word transposition: arrays, threads over panels of words."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ....layout import packing
from ....layout.word_lines import WORD, WordLines
from ....ops.registry import Op, Request
from ....ops.threads import share
from ..entries import turn_words
from ..machine.transposition import PANEL, ROWS
from . import memory
from .arrays import flat_array


def refusal(request: Request) -> str | None:
    """Reason why the kernel does not take these codes' rows, or None."""
    partial = packing.packed_length(request.shape[-1], request.scheme.bits) % (WORD // 8)
    return "rows that end within a word are known to the reference alone" if partial else None


class LinesKernel:
    """Packed rows as lines of words, and back."""

    def __init__(self, request: Request) -> None:
        self._back = request.op is Op.FROM_LINES

    def run(self, order: WordLines, stored: torch.Tensor) -> torch.Tensor:
        """See :class:`zeropoint.ops.registry.Op`."""
        per = len(order.places)
        if self._back:
            count, width = stored.shape[1] * max(1, per), len(stored) // max(1, per)
            found = memory.empty((count, width * WORD // 8), torch.uint8)
            rows, lines = found, stored
        else:
            count, width = len(stored), stored.shape[1] * 8 // WORD
            found = memory.empty((width * max(1, per), count // max(1, per)), torch.int32)
            rows, lines = stored, found
        sizes = np.array([count, width, per > 0, order.flip, self._back], np.uint64)
        args = _words(rows), _words(lines), _order(order.places), sizes
        share(turn_words, args, -(-width // PANEL), rows.numel())
        return found


def _words(x: torch.Tensor) -> Any:
    return flat_array(x).view(np.uint8).view(np.uint32)


@functools.lru_cache(maxsize=16)
def _order(places: tuple[int, ...]) -> Any:
    """Scratch places of row words: a field of all is contiguous."""
    if not places:
        return np.arange(ROWS, dtype=np.uint64)
    row = np.arange(ROWS)
    return (np.argsort(places)[row % len(places)] * (ROWS // len(places)) + row // len(places)).astype(
        np.uint64
    )
