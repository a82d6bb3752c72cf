"""Packed rows as lines of 32-bit words, for transposed layouts.

Words hold codes next to each other in a row, and a line has the words that all rows have at one place; or
words hold one code of each of several rows, and a line has all codes of a column:

    along    line j, word i     word j of row i
    across   line k, word i     the codes of rows ``8 i + places`` at column k, of 4 bits, low bits first

Plain torch, any device; this module knows no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORD = 32
_NIBBLE = 0xF


@dataclass(frozen=True, slots=True)
class WordLines:
    """How codes fill the words of lines.

    places: which row of its eight each field of a word is from; none where its codes are of one row. flip:
    what each word differs by from codes, by an exclusive or.
    """

    places: tuple[int, ...] = ()
    flip: int = 0


def to_lines(data: torch.Tensor, order: WordLines) -> torch.Tensor:
    """Return packed rows, uint8 (rows, bytes), as lines of words, int32.

    Rows fill whole words along; across, they are a multiple of eight, and lines cover all codes that bytes
    hold.

    >>> to_lines(torch.tensor([[1, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.uint8), WordLines())
    tensor([[1, 2]], dtype=torch.int32)
    """
    if not order.places:
        return (
            _flipped(data.contiguous().reshape(-1).view(torch.int32).view(len(data), -1), order)
            .t()
            .contiguous()
        )
    rows = data.view(-1, len(order.places), data.shape[1])
    out = torch.empty(data.shape[1], 2, len(rows), 4, dtype=torch.uint8, device=data.device)
    for byte, (low, high) in enumerate(zip(order.places[::2], order.places[1::2], strict=True)):
        first, second = rows[:, low], rows[:, high]
        out[:, 0, :, byte] = (first & _NIBBLE | second << 4).t()
        out[:, 1, :, byte] = (first >> 4 | second & ~_NIBBLE).t()
    return _flipped(out.view(torch.int32).view(-1, len(rows)), order)


def from_lines(lines: torch.Tensor, order: WordLines) -> torch.Tensor:
    """Return lines of words as packed rows; across, the lines are even."""
    words = _flipped(lines, order)
    if not order.places:
        return words.t().contiguous().view(torch.uint8).reshape(lines.shape[1], -1)
    parts = words.contiguous().view(torch.uint8).view(-1, 2, lines.shape[1], 4)
    rows = torch.empty(lines.shape[1], len(order.places), len(parts), dtype=torch.uint8, device=lines.device)
    for byte, (low, high) in enumerate(zip(order.places[::2], order.places[1::2], strict=True)):
        first, second = parts[:, 0, :, byte].t(), parts[:, 1, :, byte].t()
        rows[:, low] = first & _NIBBLE | second << 4
        rows[:, high] = first >> 4 | second & ~_NIBBLE
    return rows.view(-1, len(parts))


def _flipped(words: torch.Tensor, order: WordLines) -> torch.Tensor:
    """Return words of codes as they are stored, or back."""
    # As a signed number of 32 bits, which is what torch has.
    return words ^ ((order.flip + (1 << 31)) % (1 << 32) - (1 << 31)) if order.flip else words
