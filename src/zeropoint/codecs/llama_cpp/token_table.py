"""Tokens by number, with types and scores, in GGUF metadata.

This module knows no files of tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ...errors import CheckpointError
from ..containers.protocol import Scalar

Count = Callable[[int], int]
"""Function from the tokens that a tokenizer needs to the tokens of the model."""
PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
"""Spelling of a space in tokens."""
_NO_SCORE, _ADDED_SCORE = -10000.0, -1000.0


class TokenType(IntEnum):
    """Types of tokens, in the numbers of llama.cpp and of sentencepiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class TokenTable:
    """Tokens by number.

    model: what llama.cpp calls the kind. scores: of sentencepiece alone. merges: pairs of byte-level BPE.
    pre: how texts are cut first. prefix: whether a space is put before texts; of sentencepiece. values: what
    else the metadata says. unlike: what llama.cpp does otherwise, in words.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str | None = None
    prefix: bool | None = None
    values: dict[str, Scalar | bytes] = field(default_factory=dict)
    unlike: list[str] = field(default_factory=list)

    @staticmethod
    def blank(model: str, size: int, *, scored: bool = False) -> TokenTable:
        """Return one of ``size`` tokens that are not used."""
        tokens = [f"[PAD{number}]" for number in range(size)]
        scores = [_NO_SCORE] * size if scored else []
        return TokenTable(model, tokens, [TokenType.UNUSED] * size, scores)

    def put(self, number: int, token: str, kind: int, score: float = 0.0) -> None:
        """Put a token, unless its number exceeds the model's.

        llama.cpp's converter leaves such out, too. Raises CheckpointError for a token that is no text.
        """
        if not isinstance(token, str):
            raise CheckpointError(
                f"token {number} is {token!r:.40}, and no text; download the tokenizer again"
            )
        if 0 <= number < len(self.tokens):
            self.tokens[number], self.types[number] = token, kind
            if self.scores:
                self.scores[number] = score


def _added_kind(token: str, *, special: bool) -> TokenType:
    """Return the type of an added token, by flag or look."""
    marked = (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<\uff5c") and token.endswith("\uff5c>"))
        or (token.startswith("<unused") and token.endswith(">"))
    )
    return TokenType.CONTROL if special or marked else TokenType.USER_DEFINED


def put_added(found: TokenTable, added: Mapping[int, tuple[str, bool]]) -> TokenTable:
    """Put added tokens, by number, with their special flags."""
    for number, (token, special) in added.items():
        kind = _added_kind(token, special=special)
        text = token if kind is TokenType.CONTROL else token.replace(SPACE, " ")
        found.put(number, text, kind, _ADDED_SCORE)
    return found


def piece_type(token: str, unknown: object) -> TokenType:
    """Return the type of a token of sentencepiece, by its look."""
    if token == unknown:
        return TokenType.UNKNOWN
    return TokenType.BYTE if len(token) == len("<0x00>") and token.startswith("<0x") else TokenType.NORMAL
