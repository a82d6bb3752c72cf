"""A text as windows of tokens, cut and scored as llama-perplexity does.

The text is tokenized as a whole, with the token that begins texts where its tokenizer adds one, and cut into
windows of n tokens that follow each other; what is left at the end is dropped. Where texts begin with that
token, so does each window, in the place of its first token. The first half of a window is context: of n
tokens, those after the first n // 2 + 1 are scored, each given all before it in its window.

Source: ggml-org/llama.cpp, tools/perplexity/perplexity.cpp, function perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.model.tokens import TEXT_BYTES, TEXT_OF_IDS, CheckpointTokenizer, read_ids, read_text
from ..checkpoint.read.source import Source
from ..checkpoint.read.storage import shown
from ..errors import CalibrationError, option


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindows:
    """Windows of a text.

    Args:
        given: the models' inputs: (windows, context) int64.
        tokens: of the text, which differ from ``given`` in the first of each window alone.
        nbytes: of the scored tokens in UTF-8, or None where the text is not known.
        bos: the token that begins each window, or None.
    """

    given: torch.Tensor
    tokens: torch.Tensor
    nbytes: int | None
    bos: int | None

    @property
    def context(self) -> int:
        """Tokens of a window."""
        return self.given.shape[1]

    @property
    def scored(self) -> int:
        """Tokens that are scored in a window."""
        return self.context - self.context // 2 - 1

    @property
    def targets(self) -> torch.Tensor:
        """The tokens that are scored: (windows, scored)."""
        return self.tokens[:, self.context - self.scored :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedText:
    """A text as tokens.

    Args:
        ids: (tokens,) int64.
        bos: the token that begins texts, which is the first of ``ids`` then, or None.
        ends: for each token, the bytes of the text up to its end: (tokens,), or None.
    """

    ids: torch.Tensor
    bos: int | None = None
    ends: torch.Tensor | None = None

    def windows(self, context: int, most: int | None) -> TextWindows:
        """Return the first windows of the text.

        Args:
            context: tokens of a window.
            most: how many windows at most, or None for all.

        Raises:
            CalibrationError: for less than two windows of text, and a window that is too short.
        """
        if context < 4:
            raise CalibrationError(
                f"context (={context}) must be at least 4, of which the last token is scored"
            )
        if len(self.ids) < 2 * context:
            raise CalibrationError(
                f"the text has {len(self.ids)} tokens, and two windows of {context} are needed; give "
                f"more text, or {option('context', max(4, len(self.ids) // 2))}"
            )
        number = min(len(self.ids) // context, most or len(self.ids))
        tokens = self.ids[: number * context].reshape(number, context)
        given = tokens.clone()
        if self.bos is not None:
            given[:, 0] = self.bos
        nbytes = None
        if self.ends is not None:
            ends = self.ends[: number * context].reshape(number, context)
            nbytes = int((ends[:, -1] - ends[:, context // 2]).sum())
        return TextWindows(given=given, tokens=tokens, nbytes=nbytes, bos=self.bos)


class TextTokenizer:
    """The tokenizer of a checkpoint, whose code is not executed.

    Args:
        source: a checkpoint.

    Raises:
        UnsupportedError: where it has none that transformers reads.
    """

    def __init__(self, source: Source) -> None:
        self._tokenizer = CheckpointTokenizer(source)

    def __call__(self, text: str) -> TokenizedText:
        """Return a text as tokens, with BOS and without EOS."""
        own = self._tokenizer
        before, _ = self._ends()
        found = own(text, add_special_tokens=False, return_offsets_mapping=own.is_fast)
        ids = [*before, *found["input_ids"]]
        ends = None
        if own.is_fast:
            ends = _byte_ends(text, [0] * len(before) + [end for _, end in found["offset_mapping"]])
        bos = before[0] if before else None
        return TokenizedText(ids=torch.tensor(ids, dtype=torch.int64), bos=bos, ends=ends)

    def _ends(self) -> tuple[list[int], list[int]]:
        """Return the tokens that are put before and after texts."""
        plain = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a")["input_ids"]
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def sentence(self, text: str) -> list[int]:
        """Return a sentence's tokens for an encoder, special ones included.

        Args:
            text: a sentence.
        """
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found


def _byte_ends(text: str, ends: list[int]) -> torch.Tensor:
    """Return, for places between characters, the bytes of UTF-8 before them."""
    lengths = torch.tensor([0, *(len(character.encode("utf-8", "replace")) for character in text)])
    found: torch.Tensor = lengths.cumsum(0)[torch.tensor(ends, dtype=torch.int64)]
    return found


def text_of(path: Path | str, tokens: int = 0) -> str:
    """Return the beginning of a UTF-8 file, or raise CalibrationError.

    path: of the file. tokens: that are scored of it; each is given 64 bytes, if they are many.
    """
    return read_text(path, remedy=_IDS, most=max(TEXT_BYTES, 64 * tokens))


def ids_of(path: Path | str) -> torch.Tensor:
    """Return the token ids of a .safetensors file, (tokens,) int64.

    Raises CalibrationError for any other file.
    """
    ids = read_ids(path, remedy="give text")
    if not ids.numel():
        raise CalibrationError(f"{shown(Path(path))} must hold one tensor of token ids; store some in it")
    if int(ids.min()) < 0:
        raise CalibrationError(f"{shown(Path(path))} has token {int(ids.min())}, and tokens begin at 0")
    return ids.reshape(-1)


_IDS = f"give text in UTF-8, or token ids in a {TEXT_OF_IDS} file"
