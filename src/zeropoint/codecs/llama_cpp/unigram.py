"""Unigram tokenizers as llama.cpp has them, under the name ``t5``.

A text becomes the tokens with the largest sum of scores. Before that, characters are replaced by a compiled
table (``precompiled_charsmap``), a space is put before the text (``add_space_prefix``), runs of spaces become
one and those at both ends are dropped (``remove_extra_whitespaces``). tokenizer.json says the same as steps
of a normalizer and a pre-tokenizer. What it says besides has no counterpart, and the table of tokens says so.

Source: ggml-org/llama.cpp, src/llama-vocab.cpp (llm_tokenizer_ugm_session) and conversion/bert.py; tokenizers
0.23 (Unigram, Precompiled, Metaspace, WhitespaceSplit).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from .token_table import PREFIX, SPACE, Count, TokenTable, TokenType, piece_type, put_added

KIND = "t5"
CHARSMAP, MERGED = f"{PREFIX}precompiled_charsmap", f"{PREFIX}remove_extra_whitespaces"
UNKNOWN = f"{PREFIX}unknown_token_id"
BYTES_UNLIKE = "characters without a token are unknown, not bytes"
_RUN = " {2,}"


def unigram_of_json(
    parsed: Mapping[str, Any], count: Count, added: Mapping[int, tuple[str, bool]]
) -> TokenTable:
    """Return the tokens of a tokenizer.json whose model is Unigram.

    parsed: the whole file. count: says how many tokens the model has. added: tokens by number, and whether
    each is special. Raises UnsupportedError where it has no token for what is unknown.
    """
    model = parsed["model"]
    unknown, vocab, fallback = model.get("unk_id"), model["vocab"], model.get("byte_fallback") is True
    if type(unknown) is not int or not 0 <= unknown < len(vocab):
        raise UnsupportedError(
            f"tokenizer.json is a Unigram tokenizer with unk_id {unknown!r:.20}, and llama.cpp needs a token "
            "for unknown characters; name one as unk_id, or move tokenizer.json out of the folder to write a "
            "file that takes numbers of tokens only"
        )
    found = TokenTable.blank(KIND, count(max((len(vocab), *(n + 1 for n in added)))), scored=True)
    for number, (token, score) in enumerate(vocab):
        kind = piece_type(token, None) if fallback else TokenType.NORMAL
        found.put(number, token, TokenType.UNKNOWN if number == unknown else kind, float(score))
    found.values[UNKNOWN] = unknown
    found.unlike += [BYTES_UNLIKE] if fallback else []
    steps = _Steps(parsed)
    if steps.charsmap:
        found.values[CHARSMAP] = steps.charsmap
    found.values[MERGED] = steps.merged
    found.pre, found.prefix = "default", steps.prefix
    found.unlike += steps.unlike
    return put_added(found, {number: each for number, each in added.items() if number != unknown})


class _Steps:
    """Effects of a tokenizer.json's steps before its model.

    charsmap: the table of characters. prefix: whether a space is put before texts. merged: whether runs of
    spaces become one. unlike: what llama.cpp does otherwise.
    """

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        self.charsmap, self.prefix, self.merged = b"", False, False
        self.unlike: list[str] = []
        self._marked = self._stripped = self._by_whitespace = self._late = False
        for step in steps_of(parsed.get("normalizer")):
            self._normalize(step)
        for step in steps_of(parsed.get("pre_tokenizer")):
            self._cut(step)
        self._differences()

    def _normalize(self, step: Mapping[str, Any]) -> None:
        kind, pattern = step["type"], step.get("pattern", {})
        if kind == "Precompiled" and not self.charsmap:
            self.charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif kind == "Replace" and pattern == {"String": " "} and step["content"] == SPACE:
            self._marked = True
        elif kind == "Replace" and pattern == {"Regex": _RUN} and step["content"] in (" ", SPACE):
            self.merged = True
        elif kind == "Prepend" and step["prepend"] == SPACE:
            self.prefix = True
        elif kind == "Strip":
            self._stripped = step.get("strip_right", step.get("right")) is True
        else:
            self.unlike.append(f"its normalizer {kind} is not applied")

    def _cut(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "WhitespaceSplit":
            self.merged = self._by_whitespace = True
        elif kind == "Metaspace" and step.get("replacement", SPACE) == SPACE:
            self._marked = self._late = True
            always = "always" if step.get("add_prefix_space", True) is True else "never"
            self.prefix |= step.get("prepend_scheme", always) != "never"
        else:
            self.unlike.append(f"its pre_tokenizer {kind} does not cut texts")

    def _differences(self) -> None:
        if not self._marked:
            self.unlike.append(f"spaces become {SPACE}")
        if self.merged and not self.prefix:
            self.unlike.append("a space is put before texts")
        if self.merged and not self._by_whitespace and not self._stripped:
            self.unlike.append("spaces at the ends of texts are dropped")
        if self._by_whitespace and not self.charsmap:
            self.unlike.append("line feeds and tabs are characters like others")
        if self._late and self.prefix and not self.merged:
            self.unlike.append("a text that begins with a space gets another one")


def steps_of(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the flattened steps of a normalizer or pre-tokenizer."""
    if step is None:
        return
    inner = step.get("normalizers", step.get("pretokenizers"))
    if inner is None:
        yield step
        return
    for each in inner:
        yield from steps_of(each)


def unigram_parts(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the tokenizer.json parts of a GGUF file's Unigram tokenizer.

    metadata: of the file, as Python values. tokens: texts, by number. types: of them. Raises CheckpointError
    for scores that are missing.
    """
    scores = metadata.get(f"{PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{PREFIX}scores are not one number for each token; download the file again")
    last = max((n for n, kind in enumerate(types) if kind != TokenType.UNUSED), default=-1)
    unknown = metadata.get(UNKNOWN)
    first = next((n for n, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    charsmap, merged = metadata.get(CHARSMAP), metadata.get(MERGED, False) is True
    prefix = merged or metadata.get(f"{PREFIX}add_space_prefix", False) is True
    mark = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefix else "never",
        "split": True,
    }
    normalizers: list[dict[str, Any]] = []
    if isinstance(charsmap, list) and charsmap:
        table = base64.b64encode(bytes(each & 0xFF for each in charsmap)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": table})
    if not merged:
        normalizers += [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    cut = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, mark]}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": cut if merged else None,
        "decoder": mark,
        "model": {
            "type": "Unigram",
            "unk_id": unknown if type(unknown) is int and 0 <= unknown <= last else first,
            "vocab": [[tokens[n], _short(scores[n])] for n in range(last + 1)],
            "byte_fallback": TokenType.BYTE in types,
        },
    }


def _short(score: float) -> float:
    """Return a float32 number with no more digits than mean it."""
    return float(f"{score:.9g}")
