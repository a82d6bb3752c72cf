"""Host side of GGUF blocks and GPTQ/AWQ words: bit-move tables, tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...layout import code_rows
from ...layout.bit_places import Bits, Struct, field_size
from ...layout.word_lines import WORD, WordLines
from ...ops.registry import Op, Request
from ...ops.structs import grid_of, lines_refusal
from ...params.tensors import Params, parameter_tensors
from .starts import on_device, program

OPS = (Op.JOIN_BLOCKS, Op.SPLIT_BLOCKS, Op.TO_LINES, Op.FROM_LINES)
_BYTES = 1024
"""Bytes that a program writes."""
_WORDS, _FIELDS = 64, 32
"""Rows and columns of a tile: of whole words, and of words that hold codes of eight rows."""


def refusal(request: Request) -> str | None:
    """Return why the kernels do not move these codes, or None."""
    element, op = request.scheme.element, request.op
    if op in (Op.JOIN_BLOCKS, Op.SPLIT_BLOCKS):
        known = element.per_code == 1 and element.bits <= 8
        return None if known else f"{element.kind} codes are joined with scales by the reference"
    return lines_refusal(request)


class Bit(NamedTuple):
    """A bit of a block's number, and its place in the block."""

    number: int
    block: int
    flip: int


class Moves(NamedTuple):
    """Origins of a block's bytes, as the kernel takes them."""

    moves: torch.Tensor
    flips: torch.Tensor
    size: int
    terms: int


class Layouts:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def join_blocks(self, struct: Struct, data: torch.Tensor, params: Params) -> torch.Tensor:
        *rows, width = grid_of(struct, self._request.shape)
        lines = data.new_empty((*rows, width * struct.nbytes))
        sources = [each.contiguous().view(torch.uint8) for each in (data, *params)]
        sizes = _sizes(struct, self._request.scheme.bits)
        _move(sources, sizes, lines, _joining(struct, self._request.scheme.bits, data.device))
        return lines

    def split_blocks(self, struct: Struct, lines: torch.Tensor) -> tuple[torch.Tensor, Params]:
        scheme, shape = self._request.scheme, self._request.shape
        data = lines.new_empty(code_rows.packed_shape(scheme, shape))
        kinds = parameter_tensors(scheme, shape, self._request.own_dtype)
        params = [torch.empty(grid, dtype=dtype, device=lines.device) for grid, dtype in kinds]
        tables = _splitting(struct, scheme.bits, lines.device)
        for each, moves in zip((data, *params), tables, strict=True):
            _move([lines.contiguous()], (struct.nbytes,), each.view(torch.uint8), moves)
        return data, params

    def to_lines(self, order: WordLines, data: torch.Tensor) -> torch.Tensor:
        rows, width = data.shape
        if order.places:
            groups = rows // len(order.places)
            lines = torch.empty((2 * width, groups), dtype=torch.int32, device=data.device)
            _turn("fields_to_words", data.contiguous(), lines, (groups, width), order)
            return lines
        words = data.contiguous().view(-1).view(torch.int32)
        lines = torch.empty((width * 8 // WORD, rows), dtype=torch.int32, device=data.device)
        _turn("turn_words", words, lines, (rows, len(lines)), order)
        return lines

    def from_lines(self, order: WordLines, lines: torch.Tensor) -> torch.Tensor:
        count, words = lines.shape
        if order.places:
            shape = words * len(order.places), count // 2
            rows = torch.empty(shape, dtype=torch.uint8, device=lines.device)
            _turn("words_to_fields", lines.contiguous(), rows, (words, shape[1]), order)
            return rows
        rows = torch.empty((words, count * WORD // 8), dtype=torch.uint8, device=lines.device)
        _turn("turn_words", lines.contiguous(), rows.view(-1).view(torch.int32), (count, words), order)
        return rows


def _turn(
    name: str, source: torch.Tensor, out: torch.Tensor, sizes: tuple[int, int], order: WordLines
) -> None:
    """Launch on tiles of sizes; the flip is a signed 32-bit number."""
    size, flip = _FIELDS if order.places else _WORDS, (order.flip + (1 << 31)) % (1 << 32) - (1 << 31)
    programs = math.prod(-(-each // size) for each in sizes)
    more = (order.places, size) if order.places else (size,)
    if programs:
        with on_device(source.device):
            program(f"layouts.{name}")[(programs,)](source, out, *sizes, flip, *more, num_warps=4)


def _move(sources: Sequence[torch.Tensor], sizes: tuple[int, ...], out: torch.Tensor, moves: Moves) -> None:
    count = out.numel()
    if count:
        with on_device(out.device):
            program("layouts.move_bits")[(-(-count // _BYTES),)](
                tuple(sources), out, moves.moves, moves.flips, count, sizes, moves.size, moves.terms, _BYTES,
                num_warps=4,
            )  # fmt: skip


def _sizes(struct: Struct, bits: int) -> tuple[int, ...]:
    """Bytes of a block of packed codes, and of each level."""
    return field_size(struct.codes) * bits // 8, *(field_size(level) for level in struct.levels)


def _bits_of(struct: Struct, bits: int) -> list[list[Bit]]:
    """Bits of packed codes, and of each level."""
    found = [
        [bit for part in field if isinstance(part, Bits) for bit in _bits(part)] for field in struct.fields
    ]
    packed = [
        bit._replace(number=bit.number // 8 * bits + bit.number % 8)
        for bit in found[0]
        if bit.number % 8 < bits
    ]
    return [packed, *found[1:]]


def _bits(part: Bits) -> Iterator[Bit]:
    """Yield the bits of numbers, which are bytes."""
    for move in part.moves():
        for place in range(move.mask.bit_length()):
            for j in range(move.size):
                number, block = (move.number + j) * 8 + move.low, (move.at + j) * 8 + move.shift
                yield Bit(number + place, block + place, move.flip >> place & 1)


@functools.lru_cache(maxsize=64)
def _joining(struct: Struct, bits: int, device: torch.device) -> Moves:
    """Return the bit moves that make a block."""
    found = [
        (bit.block, number, bit.number, bit.flip)
        for number, field in enumerate(_bits_of(struct, bits))
        for bit in field
    ]
    return _moves(found, struct.nbytes, device)


@functools.lru_cache(maxsize=64)
def _splitting(struct: Struct, bits: int, device: torch.device) -> list[Moves]:
    """Return the bit moves that make packed codes, and each level."""
    fields = zip(_bits_of(struct, bits), _sizes(struct, bits), strict=True)
    return [
        _moves([(bit.number, 0, bit.block, bit.flip) for bit in field], size, device)
        for field, size in fields
    ]


def _moves(found: list[tuple[int, int, int, int]], size: int, device: torch.device) -> Moves:
    """Bit moves: a bit of ``size`` bytes, its source, bit there, flip."""
    masks: dict[tuple[int, int, int, int], int] = {}
    flips = [0] * size
    for bit, source, own, flip in found:
        key = bit // 8, source, own // 8, bit % 8 - own % 8
        masks[key] = masks.get(key, 0) | 1 << own % 8
        flips[bit // 8] |= flip << bit % 8
    terms: list[list[int]] = [[] for _ in range(size)]
    for (byte, source, own, left), mask in masks.items():
        shifts = max(left, 0) << 20 | max(-left, 0) << 23
        terms[byte].append(own | mask << 12 | shifts | source << 26)
    count = max(len(each) for each in terms)
    table = [[each[term] if term < len(each) else 0 for each in terms] for term in range(count)]
    moves, opposite = (torch.tensor(each, dtype=torch.int32, device="cpu") for each in (table, flips))
    return Moves(moves.to(device), opposite.to(device), size, count)
