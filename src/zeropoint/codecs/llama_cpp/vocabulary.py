"""A checkpoint's tokenizer in GGUF metadata.

Tokens lie by their number, each with a type, and for sentencepiece with a score: merges happen in falling
order of scores. What there is decides: tokenizer.json with Unigram, tokenizer.model (sentencepiece), or
tokenizer.json with byte-level BPE, with BPE in the manner of sentencepiece, whose scores are the ranks of
merges, or with WordPiece; vocab.txt is read as the last. Other kinds are refused, as llama.cpp has none of
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ...architectures import Config, text_config
from ...errors import CheckpointError, UnsupportedError, printable
from ...libraries import reading
from ..containers.protocol import Scalar
from ..containers.safetensors import is_unicode
from .pre_tokenizers import pre_name
from .sentencepiece_model import sentencepiece_table
from .token_table import PREFIX, SPACE, Count, TokenTable, TokenType, piece_type, put_added
from .unigram import KIND as UNIGRAM
from .unigram import steps_of, unigram_of_json

FileReader = Callable[[str], bytes | None]
"""From the name of a file of the checkpoint to its bytes, or None where it is not there."""
_MOST = 1 << 24
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
STORED_NAMES = MappingProxyType({"unk": "unknown", "sep": "seperator", "pad": "padding"})
"""Metadata names of special tokens that differ from tokenizer_config.json."""


@reading("the tokenizer is damaged", "download it again")
def tokenizer_values(
    config: Config, read: FileReader, rows: Callable[[], int] = lambda: _MOST
) -> tuple[dict[str, Scalar | list[Any]], list[str]]:
    """Return the tokenizer metadata, and sentences about unsupported parts.

    config: config.json. read: gives the files of the checkpoint. rows: gives the most rows that a tensor of
    the checkpoint has, of which each token is one. Raises CheckpointError for a file that is not well-formed,
    and more tokens than rows.
    """
    settings = json_object(read, "tokenizer_config.json")
    parsed = json_object(read, "tokenizer.json")
    found = _vocabulary(partial(_count, config, rows), read, parsed, settings)
    if found is None:
        said = "no tokenizer that is known here (tokenizer.model, tokenizer.json or vocab.txt)"
        return {f"{PREFIX}model": "none"}, [f"{said}: llama.cpp will take numbers of tokens only"]
    values: dict[str, Any] = {
        f"{PREFIX}model": found.model,
        f"{PREFIX}tokens": found.tokens,
        f"{PREFIX}token_type": found.types,
    }
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
    if found.unlike:
        remarks.append(f"llama.cpp will make other tokens of some texts: {'; '.join(found.unlike)}")
    if found.model == UNIGRAM:  # at the end of a text it puts one where nothing is said
        values |= {f"{PREFIX}add_{name}_token": False for name in _ENDS_BY}
    values |= _specials(config, settings, parsed, {token: n for n, token in enumerate(found.tokens)})
    values |= found.values
    template = _chat_template(read, settings)
    if template is not None:
        values["tokenizer.chat_template"] = template
    for key, value in values.items():
        _require_text(key, value)
    return values, remarks


def _require_text(key: str, value: object) -> None:
    """Raise CheckpointError for text without a UTF-8 form."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not is_unicode(text):
            raise CheckpointError(
                f"{key} holds {printable(text)}, which is no text in Unicode; download the tokenizer again"
            )


def _count(config: Config, rows: Callable[[], int], needed: int) -> int:
    """Return the number of tokens, given the needed.

    Raises CheckpointError where config.json says more than there are rows.
    """
    size = text_config(config).get("vocab_size")
    if size is None:
        return min(needed, rows())
    if type(size) is not int or not 0 < size <= rows():
        raise CheckpointError(
            f"vocab_size is {size!r:.40} in config.json, and the largest tensor has {rows()} rows; "
            "download the checkpoint again"
        )
    return size


def json_object(read: FileReader, name: str) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file, or {}."""
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
    count: Count, read: FileReader, parsed: Mapping[str, Any], settings: Mapping[str, Any]
) -> TokenTable | None:
    raw = read("tokenizer.model")
    if raw is not None and _kind_of(parsed) != "Unigram":
        added = {**_added(json_object(read, "added_tokens.json")), **_decoder(settings)}
        return sentencepiece_table(raw, count, added)
    if parsed:
        return _of_json(parsed, count)
    words = read("vocab.txt")
    return None if words is None else _word_pieces(words.decode("utf-8").splitlines(), count, {})


def _kind_of(parsed: Mapping[str, Any]) -> str | None:
    """Return tokenizer.json's model type; older files omit BPE."""
    model = parsed.get("model")
    if not isinstance(model, Mapping):
        return None
    kind = model.get("type", "BPE" if "merges" in model else None)
    return kind if isinstance(kind, str) else None


def _decoder(settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return tokenizer_config.json's added tokens by number, with special flags."""
    found = settings.get("added_tokens_decoder", {})
    return {int(n): (token["content"], token.get("special") is True) for n, token in found.items()}


def _added(found: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    return {int(number): (token, False) for token, number in found.items()}


def _of_json(parsed: Mapping[str, Any], count: Count) -> TokenTable:
    model, kind = parsed["model"], _kind_of(parsed)
    added = {t["id"]: (t["content"], t.get("special") is True) for t in parsed.get("added_tokens") or []}
    if kind == "Unigram":
        return unigram_of_json(parsed, count, added)
    if kind == "WordPiece":
        words = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return _in_case(
            parsed, _word_pieces(words, count, added, model.get("continuing_subword_prefix", "##"))
        )
    sentencepiece = model.get("byte_fallback") is True
    parts = [model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")]
    if kind != "BPE" or any(parts) or not (sentencepiece or _is_byte_level(parsed)):
        named = "BPE of characters, not of bytes" if kind == "BPE" else f"{kind!r:.40}"
        raise UnsupportedError(
            f"tokenizer.json is {named}, which llama.cpp does not have: it has byte-level BPE, BPE and "
            "Unigram in the manner of sentencepiece, and WordPiece; move tokenizer.json out of the folder to "
            "write a file that takes numbers of tokens only"
        )
    merges = [merge if isinstance(merge, str) else " ".join(_spelled(merge)) for merge in model["merges"]]
    highest = max((*model["vocab"].values(), *added), default=-1)
    found = TokenTable.blank("llama" if sentencepiece else "gpt2", count(highest + 1), scored=sentencepiece)
    if sentencepiece:
        ranks = {merge.replace(" ", "", 1): -float(n) for n, merge in reversed(list(enumerate(merges)))}
        for token, number in model["vocab"].items():
            found.put(number, token, piece_type(token, model.get("unk_token")), ranks.get(token, 0.0))
        found.pre, found.prefix = "default", _begins_with_space(parsed)
        return put_added(found, added)
    for token, number in model["vocab"].items():
        found.put(number, token, TokenType.NORMAL)
    found.merges = merges
    found.pre = pre_name(parsed.get("pre_tokenizer"), merging=model.get("ignore_merges") is not True)
    found.unlike += [f"its normalizer {kind} is not applied" for kind in _changing(parsed)]
    return put_added(found, added)


def _is_byte_level(parsed: Mapping[str, Any]) -> bool:
    steps = (step for part in ("normalizer", "pre_tokenizer") for step in steps_of(parsed.get(part)))
    return any(step.get("type") == "ByteLevel" for step in steps)


def _changing(parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the steps that change characters; NFC rarely does."""
    kinds = (str(step.get("type")) for step in steps_of(parsed.get("normalizer")))
    return (kind for kind in kinds if kind not in ("NFC", "ByteLevel"))


def _begins_with_space(parsed: Mapping[str, Any]) -> bool:
    """Return whether a space is put before texts, in any step."""
    steps = [parsed.get("normalizer") or {}, parsed.get("pre_tokenizer") or {}]
    steps += [inner for step in steps for inner in step.get("normalizers", step.get("pretokenizers", []))]
    metaspace = (step for step in steps if step.get("type") == "Metaspace")
    return any(step.get("type") == "Prepend" for step in steps) or any(
        step.get("prepend_scheme", "always") != "never" for step in metaspace
    )


def _spelled(merge: list[str]) -> Iterator[str]:
    """Yield a merge's parts, spaces spelled as in byte-level BPE."""
    return (part.replace(" ", "\u0120") for part in merge)


def _word_pieces(
    words: list[str], count: Count, added: Mapping[int, tuple[str, bool]], inside: str = "##"
) -> TokenTable:
    """Return WordPiece tokens in llama.cpp's spelling: word beginnings are marked."""
    found = TokenTable.blank("bert", count(len(words)))
    special = {token for token, control in added.values() if control}
    special |= {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    for number, word in enumerate(words):
        if word in special:
            found.put(number, word, TokenType.CONTROL)
        else:
            text = word.removeprefix(inside) if word.startswith(inside) else SPACE + word
            found.put(number, text, TokenType.NORMAL)
    found.pre = "default"
    return found


def _in_case(parsed: Mapping[str, Any], found: TokenTable) -> TokenTable:
    """Return WordPiece tokens with unusual case and accent flags."""
    for step in steps_of(parsed.get("normalizer")):
        if step.get("type") == "BertNormalizer":
            lower = step.get("lowercase", True) is True
            strip = step.get("strip_accents")
            found.values |= {} if lower else {f"{PREFIX}normalizer.lowercase": False}
            if (lower if strip is None else strip) is not lower:
                found.values[f"{PREFIX}normalizer.strip_accents"] = strip is True
        else:
            found.unlike.append(f"its normalizer {step.get('type')} is that of BERT")
    if not any(step.get("type") == "BertNormalizer" for step in steps_of(parsed.get("normalizer"))):
        found.unlike.append("letters are put in lower case")
    cuts = [step.get("type") for step in steps_of(parsed.get("pre_tokenizer"))]
    if cuts != ["BertPreTokenizer"]:
        found.unlike.append("texts are cut as BERT does")
    return found


def _specials(
    config: Config, settings: Mapping[str, Any], parsed: Mapping[str, Any], numbers: Mapping[str, int]
) -> dict[str, Scalar | list[Any]]:
    """Return special token numbers, and which of them texts get."""
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
    """Return the post-processor's first and last special tokens."""
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
    """Return the chat template, by file, settings, or default name."""
    raw = read("chat_template.jinja")
    if raw is not None:
        return raw.decode("utf-8", "replace")
    found = settings.get("chat_template", json_object(read, "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
