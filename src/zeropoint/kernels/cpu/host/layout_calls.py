"""Host side of layouts: rows of blocks, and lines of words."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ....formats import DigitsFormat, Format
from ....formats.codes import encode_codebook
from ....layout import code_rows
from ....layout.bit_places import Bits, Digits, Field, Struct, field_size, whole
from ....layout.word_lines import WORD, WordLines
from ....ops.registry import Op, Request
from ....ops.structs import grid_of
from ....ops.threads import share
from ....params.tensors import Params, parameter_tensors
from ..machine.base3 import FEW, FIVE, FRACTIONS
from ..machine.bit_moves import LEVELS, BitMove, BlockBytes, move_rows
from ..machine.intrinsics import LINE
from ..machine.named_records import pack
from ..machine.transposition import PANEL, ROWS, turn_panels
from . import memory
from .arrays import NO_BYTES, flat_array


class JoinKernel:
    """Blocks from codes and parameters."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def run(self, struct: Struct, data: torch.Tensor, params: Params) -> torch.Tensor:
        *rows, width = grid_of(struct, self._request.shape)
        lines = memory.empty((*rows, width * struct.nbytes), torch.uint8)
        _run(self._request, struct, (data, params), lines)
        return lines


class SplitKernel:
    """Codes and parameters from blocks."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def run(self, struct: Struct, lines: torch.Tensor) -> tuple[torch.Tensor, Params]:
        scheme, shape = self._request.scheme, self._request.shape
        data = memory.empty(code_rows.packed_shape(scheme, tuple(shape)), torch.uint8)
        kinds = parameter_tensors(scheme, shape, self._request.own_dtype)
        params = [torch.empty(grid, dtype=dtype, device="cpu") for grid, dtype in kinds]
        _run(self._request, struct, (data, params), lines)
        return data, params


def _run(request: Request, struct: Struct, parts: tuple[torch.Tensor, Params], lines: torch.Tensor) -> None:
    """Move the bits of all blocks."""
    data, params = parts
    moves, sizes, tables = _numbers(struct, request.scheme.element, request.op is Op.JOIN_BLOCKS)
    levels = [flat_array(level).view(np.uint8) for level in params]
    levels += [NO_BYTES] * (LEVELS - len(levels))
    args = flat_array(data), (*levels,), flat_array(lines), moves, sizes, tables
    share(move_rows, args, math.prod(grid_of(struct, request.shape)), math.prod(request.shape))


@functools.lru_cache(maxsize=64)
def _numbers(struct: Struct, element: Format, joins: bool) -> tuple[Any, Any, Any]:
    """Packed moves and sizes, and tables of digits."""
    codes, zero, held, tables = _as_bytes(struct.codes, element.bits), 0, 0, NO_BYTES
    runs = [part for part in codes if isinstance(part, Digits)]
    bits = element.bits if codes is struct.codes else 8
    fields = codes, *struct.levels
    parts = [(n, part) for n, field in enumerate(fields) for part in field]
    moves = [BitMove(n, *move) for n, part in parts for move in _moves(part)]
    block, *levels = (field_size(field) for field in fields)
    one, two, three, four = levels + [0] * (LEVELS - len(levels))
    if isinstance(element, DigitsFormat):
        bits, zero = 0, int(encode_codebook(torch.zeros(1, device="cpu"), element.digit))
        held, tables = _tables(runs, block, joins)
    sizes = BlockBytes(
        joins=joins,
        bits=bits,
        nbytes=struct.nbytes,
        block=block,
        one=one,
        two=two,
        three=three,
        four=four,
        zero=zero,
        digits=min((run.at for run in runs), default=0),
        held=held,
    )
    return pack(*moves), pack(sizes), tables


def _tables(runs: Sequence[Digits], block: int, joins: bool) -> tuple[int, Any]:
    """Bits of the bytes with digits, and tables to regroup them.

    No bits where a vector does not hold all. What comes from its last byte fills the last code.
    """
    begin, digits, last = min(run.at for run in runs), int(FIVE), LINE - 1
    held = {run.at - begin + j for run in runs for j in range(run.run)}
    if max(*held, (block - 1) // digits) >= last:
        return 0, NO_BYTES
    places = np.full((digits, LINE), last, np.uint8)
    factors = np.full((digits, LINE), 0 if joins else 1 << 8, np.uint16)
    for run in runs:
        for number in range(run.first, run.end):
            s, j = divmod(number - run.first, run.run)
            (code, k), byte = divmod(number, digits), run.at - begin + j
            if joins:
                places[s, byte], factors[s, byte] = code, FRACTIONS[k]
            else:
                places[k, code], factors[k, code] = byte, 3**s << 8
    return sum(1 << byte for byte in held), _halved(places, factors)


def _halved(places: Any, factors: Any) -> Any:
    """Interleave tables of even and odd bytes: places twice, then factors."""
    pairs = ((a[half::2], b[half::2]) for a, b in zip(places, factors, strict=True) for half in (0, 1))
    return np.concatenate([part for a, b in pairs for part in (np.repeat(a, 2), b.copy().view(np.uint8))])


def _as_bytes(codes: Field, bits: int) -> Field:
    """Field of whole bytes if codes are stored packed, else itself."""
    part, *others = codes
    if isinstance(part, Bits) and not others and part == Bits(part.at, part.size, 1, bits):
        return whole(part.at, part.size)
    return codes


def _moves(part: Bits | Digits) -> Iterable[Sequence[int]]:
    """Bit or digit moves; numbers bit by bit go 8 together.

    Or 32 signs.
    """
    if isinstance(part, Digits):
        few = int(FEW)
        assert (part.run, part.places) == (few, few) or (part.run % 16, part.places) == (0, int(FIVE))
        return [(part.at, part.first, part.run, 0, 0, 0, 0)]
    many = 32 if part.width == 1 else 8
    if part.run > 1 or part.shifts or (part.end - part.first) % many:
        return part.moves()
    flip = sum(part.flip << n * part.width for n in range(many))
    starts = range(part.at, part.at + part.size, part.width * many // 8)
    return [(at, part.first + n * many, 0, 0, part.low, part.width, flip) for n, at in enumerate(starts)]


class LinesKernel:
    """Packed rows as lines of words, and back."""

    def __init__(self, request: Request) -> None:
        self._back = request.op is Op.FROM_LINES

    def run(self, order: WordLines, stored: torch.Tensor) -> torch.Tensor:
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
        share(turn_panels, args, -(-width // PANEL), rows.numel())
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
