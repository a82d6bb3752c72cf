"""Fields of codes in 32-bit words, whole or interleaved, low bits first.

This module knows no layout.
"""

from __future__ import annotations

import functools
import math

import torch

from ..layout import packing
from ..layout.word_lines import WORD, WordLines
from ..ops.library import kernel
from ..ops.registry import Op, Request
from ..schemes import Scheme


def group_of(weight: Scheme, columns: int) -> int:
    """Return how many inputs have one scale."""
    return int(weight.granularity.block_shape((1, columns))[1])


def whole_words(bits: int) -> tuple[int, int]:
    """Return the fewest words of whole fields, and these fields' number."""
    common = math.gcd(bits, WORD)
    return bits // common, WORD // common


def to_words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes as 32-bit words, zero-padded."""
    padding = -rows.shape[-1] % (WORD // 8)
    padded = torch.nn.functional.pad(rows, (0, padding)) if padding else rows
    # By way of one axis: a single row may have any stride, and then counts as contiguous but not as words.
    return padded.reshape(-1).view(torch.int32).view(len(padded), -1)


def words_of(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned fields as int32 words, low bits first."""
    return to_words(packing.pack(fields, bits))


@functools.lru_cache(maxsize=8)
def words_of_one(field: int, rows: int, count: int, bits: int) -> torch.Tensor:
    """Return rows of one repeated field as words, the same tensor always."""
    return words_of(torch.full((rows, count), field), bits)


def fields_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of rows of words; the inverse of :func:`words_of`."""
    stream = words.contiguous().reshape(-1).view(torch.uint8).view(len(words), -1)
    return packing.unpack(stream, bits, words.shape[1] * WORD // bits)


_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""The place in its eight that each 4-bit field of a word of AWQ has, low bits first."""
_PLACE = torch.argsort(_ORDER)


def interleaved_words(fields: torch.Tensor) -> torch.Tensor:
    """Return rows of 4-bit fields, in eights, as words in AWQ's order."""
    shape = fields.shape
    return words_of(
        fields.reshape(shape[0], -1, len(_ORDER))[..., _ORDER].reshape(shape), WORD // len(_ORDER)
    )


def interleaved_fields(words: torch.Tensor) -> torch.Tensor:
    """Return the fields of rows of words; the inverse of :func:`interleaved_words`."""
    fields = fields_of(words, WORD // len(_ORDER))
    return fields.view(len(fields), -1, len(_ORDER))[..., _PLACE].reshape(fields.shape)


INTERLEAVED = WordLines(places=tuple(_ORDER.tolist()))
"""Lines of words in the order of AWQ, which have the fields of eight rows at one column."""


def words_of_rows(
    data: torch.Tensor, scheme: Scheme, shape: tuple[int, int], order: WordLines
) -> torch.Tensor:
    """Return packed rows, uint8 (rows, bytes), as int32 lines of words.

    shape: rows, and the fields of each. A row fills whole words, or rows come by eights.
    """
    lines: torch.Tensor = kernel(_request(Op.TO_LINES, data, scheme, shape)).run(order, data)
    return lines[: shape[1]] if order.places else lines


def rows_of_words(
    lines: torch.Tensor, scheme: Scheme, shape: tuple[int, int], order: WordLines
) -> torch.Tensor:
    """Return lines of words as packed rows: inverse of :func:`words_of_rows`."""
    if order.places and len(lines) % 2:
        lines = torch.nn.functional.pad(lines, (0, 0, 0, 1))
    rows: torch.Tensor = kernel(_request(Op.FROM_LINES, lines, scheme, shape)).run(order, lines)
    return rows


def _request(op: Op, stored: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> Request:
    kind = torch.float32
    return Request(op=op, scheme=scheme, shape=shape, dtype=kind, own_dtype=kind, device=stored.device)
