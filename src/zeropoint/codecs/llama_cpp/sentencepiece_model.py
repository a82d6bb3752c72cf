"""tokenizer.model, the file of sentencepiece: a message in protobuf.

    field 1, of each piece    text (1), score (2, float32), type (3)
    field 2, of the trainer   kind of the model (3): 1 Unigram, also where it is left out, 2 BPE, 3 words, 4
                              characters; whether a space ends words (24); whether bytes are tokens (35)
    field 3, of texts         compiled table of characters (2); whether a space is put before (3) and
                              runs of spaces become one (4), both yes where they are left out

Source: google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from ...errors import UnsupportedError
from .token_table import Count, TokenTable, TokenType, put_added
from .unigram import BYTES_UNLIKE, CHARSMAP, KIND, MERGED, UNKNOWN

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _FALLBACK = 3, 24, 35
_TABLE, _DUMMY_PREFIX, _EXTRA = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_NAMES = {3: "words", 4: "characters"}


def sentencepiece_table(raw: bytes, count: Count, added: Mapping[int, tuple[str, bool]]) -> TokenTable:
    """Return the tokens of a tokenizer.model.

    raw: the file. count: says how many tokens the model has. added: tokens by number, and whether each is
    special. Raises UnsupportedError for models of words and of characters; ValueError for a file that is
    damaged.
    """
    fields = [(number, value) for number, value in _fields(raw) if isinstance(value, bytes)]
    pieces = [_piece(value) for number, value in fields if number == _PIECE]
    trainer, normal = (
        {number: value for at, each in fields if at == part for number, value in _fields(each)}
        for part in (_TRAINER, _NORMALIZER)
    )
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedError(
            f"tokenizer.model is a model of {_NAMES.get(int(kind), kind)}, which llama.cpp does not have; "
            "move it out of the folder to write a file that takes numbers of tokens only"
        )
    found = TokenTable.blank("llama" if kind == _BPE else KIND, count(len(pieces)), scored=True)
    found.pre, found.prefix = "default", bool(normal.get(_DUMMY_PREFIX, 1))
    for number, (text, score, piece) in enumerate(pieces):
        found.put(number, text, piece, score)
    if kind == _UNIGRAM:
        _of_unigram(found, trainer, normal)
    return put_added(found, {n: each for n, each in added.items() if n != found.values.get(UNKNOWN)})


def _of_unigram(
    found: TokenTable, trainer: Mapping[int, bytes | int], normal: Mapping[int, bytes | int]
) -> None:
    """Put what the metadata says of a Unigram model."""
    if TokenType.UNKNOWN in found.types:
        found.values[UNKNOWN] = found.types.index(TokenType.UNKNOWN)
    found.values[MERGED] = bool(normal.get(_EXTRA, 1))
    table = normal.get(_TABLE)
    if isinstance(table, bytes) and table:
        found.values[CHARSMAP] = table
    if found.values[MERGED] and not found.prefix:
        found.unlike.append("a space is put before texts")
    if trainer.get(_FALLBACK):
        found.unlike.append(BYTES_UNLIKE)
    if trainer.get(_SUFFIX):
        found.unlike.append("a space begins words, and does not end them")


def _piece(raw: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, int(TokenType.NORMAL)
    for number, value in _fields(raw):
        if number == _TEXT and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == _SCORE and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == _TYPE and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a message in protobuf."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        size, at = _varint(raw, at) if wire == _BYTES else (_FIXED[wire], at)
        if at + size > len(raw):
            raise ValueError("tokenizer.model ends inside of a field")
        yield tag >> 3, raw[at : at + size]
        at += size


_BYTES = 2
_FIXED = {1: 8, 5: 4}
"""Bytes of fields by wire type: a length, or so many."""
_MAX_SHIFT = 63


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MAX_SHIFT + 1, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("tokenizer.model has a number of more than 64 bits")
