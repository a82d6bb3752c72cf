"""The tokenizer of a checkpoint as the metadata of a GGUF file has it.

Tokens lie by their number, each with a type, and for sentencepiece with a score: merges happen in falling
order of scores. What there is decides: tokenizer.model (sentencepiece), or tokenizer.json with byte-level
BPE, with BPE in the manner of sentencepiece, whose scores are the ranks of merges, or with WordPiece;
vocab.txt is read as the last.

tokenizer.model is a message in protobuf: its fields 1 are pieces, each with text (1), score (2) and type (3),
and its field 3 says in field 3 whether texts begin with a space. Source: google/sentencepiece,
src/sentencepiece_model.proto.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from ...architectures import Config
from ...errors import CheckpointError
from ..containers.protocol import Scalar
from .families import text_config
from .pre_tokenizers import pre_name

FileReader = Callable[[str], bytes | None]
"""From the name of a file of the checkpoint to its bytes, or None where it is not there."""
PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
"""What tokens have for a space."""
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
STORED_NAMES = MappingProxyType({"unk": "unknown", "sep": "seperator", "pad": "padding"})
"""What the metadata calls special tokens where tokenizer_config.json has another word."""
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
    pre: how texts are cut first. prefix: whether a space is put before texts; of sentencepiece.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str | None = None
    prefix: bool | None = None

    @staticmethod
    def blank(model: str, size: int, *, scored: bool = False) -> TokenTable:
        """Return one of ``size`` tokens that are not used."""
        tokens = [f"[PAD{number}]" for number in range(size)]
        scores = [_NO_SCORE] * size if scored else []
        return TokenTable(model, tokens, [TokenType.UNUSED] * size, scores)

    def put(self, number: int, token: str, kind: int, score: float = 0.0) -> None:
        """Put a token; one whose number is beyond the model's is left out, as llama.cpp's converter does."""
        if 0 <= number < len(self.tokens):
            self.tokens[number], self.types[number] = token, kind
            if self.scores:
                self.scores[number] = score


def tokenizer_values(config: Config, read: FileReader) -> tuple[dict[str, Scalar | list[Any]], list[str]]:
    """Return the values of the tokenizer of a checkpoint, and sentences about what it lacks.

    Args:
        config: config.json.
        read: gives the files of the checkpoint.

    Raises:
        CheckpointError: for a file that is not well-formed.
    """
    settings = json_object(read, "tokenizer_config.json")
    parsed = json_object(read, "tokenizer.json")
    found = _vocabulary(config, read, parsed, settings)
    if found is None:
        said = "no tokenizer that is known here (tokenizer.model, tokenizer.json or vocab.txt)"
        return {f"{PREFIX}model": "none"}, [f"{said}: llama.cpp will take numbers of tokens only"]
    values: dict[str, Scalar | list[Any]] = {
        f"{PREFIX}model": found.model, f"{PREFIX}tokens": found.tokens, f"{PREFIX}token_type": found.types,
    }  # fmt: skip
    for key, each in (("scores", found.scores), ("merges", found.merges)):
        if each:
            values[PREFIX + key] = each
    remarks = []
    if found.pre is None:
        remarks.append(
            "pre_tokenizer of tokenizer.json has no name here: llama.cpp will cut texts like GPT-2"
        )
    values[f"{PREFIX}pre"] = found.pre or "default"
    if found.prefix is not None:
        values[f"{PREFIX}add_space_prefix"] = found.prefix
    values |= _specials(config, settings, parsed, {token: n for n, token in enumerate(found.tokens)})
    template = _chat_template(read, settings)
    if template is not None:
        values["tokenizer.chat_template"] = template
    return values, remarks


def json_object(read: FileReader, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of the checkpoint; an empty one where the file is not there."""
    raw = read(name)
    if raw is None:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a JSON object: {error}; download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is not a JSON object; download it again")
    return found


def _vocabulary(
    config: Config, read: FileReader, parsed: Mapping[str, Any], settings: Mapping[str, Any]
) -> TokenTable | None:
    size = text_config(config).get("vocab_size")
    raw = read("tokenizer.model")
    try:
        if raw is not None:
            return _sentencepiece(
                raw, size, {**_added(json_object(read, "added_tokens.json")), **_decoder(settings)}
            )
        if parsed:
            return _of_json(parsed, size)
        words = read("vocab.txt")
        return None if words is None else _word_pieces(words.decode("utf-8").splitlines(), size, {})
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"the tokenizer is damaged: {error!r:.200}; download it again") from error


def _decoder(settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return the tokens that tokenizer_config.json adds, by number, and whether each is special."""
    found = settings.get("added_tokens_decoder", {})
    return {int(n): (token["content"], token.get("special") is True) for n, token in found.items()}


def _added(found: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    return {int(number): (token, False) for token, number in found.items()}


def _kind(token: str, *, special: bool) -> TokenType:
    """Return the type of an added token; some that are not called special are, by their look."""
    marked = (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<\uff5c") and token.endswith("\uff5c>"))
        or (token.startswith("<unused") and token.endswith(">"))
    )
    return TokenType.CONTROL if special or marked else TokenType.USER_DEFINED


def _put_added(found: TokenTable, added: Mapping[int, tuple[str, bool]]) -> TokenTable:
    for number, (token, special) in added.items():
        kind = _kind(token, special=special)
        text = token if kind is TokenType.CONTROL else token.replace(SPACE, " ")
        found.put(number, text, kind, _ADDED_SCORE)
    return found


def _of_json(parsed: Mapping[str, Any], size: int | None) -> TokenTable | None:
    model = parsed["model"]
    added = {t["id"]: (t["content"], t.get("special") is True) for t in parsed.get("added_tokens") or []}
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind == "WordPiece":
        words = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return _word_pieces(words, size, added)
    if kind != "BPE":
        return None
    merges = [merge if isinstance(merge, str) else " ".join(_spelled(merge)) for merge in model["merges"]]
    highest = max((*model["vocab"].values(), *added), default=-1)
    sentencepiece = model.get("byte_fallback") is True
    found = TokenTable.blank("llama" if sentencepiece else "gpt2", size or highest + 1, scored=sentencepiece)
    if sentencepiece:
        ranks = {merge.replace(" ", "", 1): -float(n) for n, merge in reversed(list(enumerate(merges)))}
        for token, number in model["vocab"].items():
            found.put(number, token, _piece_type(token, model.get("unk_token")), ranks.get(token, 0.0))
        found.pre, found.prefix = "default", _begins_with_space(parsed)
        return _put_added(found, added)
    for token, number in model["vocab"].items():
        found.put(number, token, TokenType.NORMAL)
    found.merges, found.pre = merges, pre_name(parsed.get("pre_tokenizer"))
    return _put_added(found, added)


def _begins_with_space(parsed: Mapping[str, Any]) -> bool:
    """Return whether a space is put before texts, as a normalizer or as a step that cuts them."""
    steps = [parsed.get("normalizer") or {}, parsed.get("pre_tokenizer") or {}]
    steps += [inner for step in steps for inner in step.get("normalizers", step.get("pretokenizers", []))]
    metaspace = (step for step in steps if step.get("type") == "Metaspace")
    return any(step.get("type") == "Prepend" for step in steps) or any(
        step.get("prepend_scheme", "always") != "never" for step in metaspace
    )


def _spelled(merge: list[str]) -> Iterator[str]:
    """Yield the parts of a merge, in which a space is spelled as byte-level BPE does."""
    return (part.replace(" ", "\u0120") for part in merge)


def _piece_type(token: str, unknown: object) -> TokenType:
    if token == unknown:
        return TokenType.UNKNOWN
    return TokenType.BYTE if len(token) == len("<0x00>") and token.startswith("<0x") else TokenType.NORMAL


def _word_pieces(words: list[str], size: int | None, added: Mapping[int, tuple[str, bool]]) -> TokenTable:
    """Return WordPiece tokens as llama.cpp has them: the begins of words are marked, and not what follows."""
    found = TokenTable.blank("bert", size or len(words))
    special = {token for token, control in added.values() if control}
    special |= {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    for number, word in enumerate(words):
        if word in special:
            found.put(number, word, TokenType.CONTROL)
        else:
            found.put(number, word[2:] if word.startswith("##") else SPACE + word, TokenType.NORMAL)
    found.pre = "default"
    return found


def _sentencepiece(raw: bytes, size: int | None, added: Mapping[int, tuple[str, bool]]) -> TokenTable:
    fields = [(number, value) for number, value in _fields(raw) if isinstance(value, bytes)]
    pieces = [_piece(value) for number, value in fields if number == _PIECE]
    found = TokenTable.blank("llama", size or len(pieces), scored=True)
    normal = [dict(_fields(value)) for number, value in fields if number == _NORMALIZER]
    found.prefix = all(spec.get(_DUMMY_PREFIX, 1) for spec in normal)
    for number, (text, score, kind) in enumerate(pieces):
        found.put(number, text, kind, score)
    found.pre = "default"
    return _put_added(found, added)


_PIECE, _NORMALIZER, _DUMMY_PREFIX = 1, 3, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3


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


def _specials(
    config: Config, settings: Mapping[str, Any], parsed: Mapping[str, Any], numbers: Mapping[str, int]
) -> dict[str, Scalar | list[Any]]:
    """Return the numbers of special tokens, and which of them are added to texts."""
    values: dict[str, Scalar | list[Any]] = {}
    text = text_config(config)
    firsts, lasts = _template_ends(parsed)
    for name in SPECIAL_TOKENS:
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        number = numbers.get(content) if isinstance(content, str) else None
        number = text.get(f"{name}_token_id") if number is None else number
        if isinstance(number, list):
            number = next(iter(number), None)
        stored = STORED_NAMES.get(name, name)
        if type(number) is int and 0 <= number < len(numbers):
            values[f"{PREFIX}{stored}_token_id"] = number
    for name, instead in (("bos", "cls"), ("eos", "seperator")):
        if f"{PREFIX}{instead}_token_id" in values:
            values.setdefault(f"{PREFIX}{name}_token_id", values[f"{PREFIX}{instead}_token_id"])
    for name, ends in (("bos", firsts), ("eos", lasts)):
        added = settings.get(f"add_{name}_token")
        if isinstance(added, bool) or parsed.get("post_processor"):
            tokens = {values.get(f"{PREFIX}{each}_token_id") for each in _ENDS_BY[name]}
            by_template = any(numbers.get(end) in tokens for end in ends)
            values[f"{PREFIX}add_{name}_token"] = added if isinstance(added, bool) else by_template
    return values


_ENDS_BY = {"bos": ("bos", "cls"), "eos": ("eos", "seperator")}


def _template_ends(parsed: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the special tokens with which the post-processor begins a text, and with which it ends one."""
    found = parsed.get("post_processor") or {}
    firsts, lasts = [], []
    for each in found.get("processors", [found]):
        single = each.get("single") or []
        if len(single) > 1:
            firsts += [single[0]["SpecialToken"]["id"]] if "SpecialToken" in single[0] else []
            lasts += [single[-1]["SpecialToken"]["id"]] if "SpecialToken" in single[-1] else []
        elif each.get("type") in ("BertProcessing", "RobertaProcessing"):
            firsts.append(each["cls"][0])
            lasts.append(each["sep"][0])
    return firsts, lasts


def _chat_template(read: FileReader, settings: Mapping[str, Any]) -> str | None:
    """Return the template of chats, that of its own file first; of several, the default one."""
    raw = read("chat_template.jinja")
    if raw is not None:
        return raw.decode("utf-8", "replace")
    found = settings.get("chat_template", json_object(read, "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
