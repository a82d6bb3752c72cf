"""Tokenizer files from GGUF metadata: tokenizer.json and tokenizer_config.json.

They are what transformers loads as a fast tokenizer. Merges of sentencepiece follow from scores: a token is
made of two others, the highest score first. Source: huggingface/transformers, convert_slow_tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import CheckpointError
from .pre_tokenizers import PRE_TOKENIZERS
from .token_table import PREFIX, SPACE, TokenType
from .unigram import KIND, unigram_parts
from .vocabulary import SPECIAL_TOKENS, STORED_NAMES

_LIMIT = 1 << 24
"""Splits of tokens that are tried for merges; a model has some million."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return a tokenizer's files, by name; none if unknown.

    metadata: of a GGUF file, as Python values.
    """
    tokens, types = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}token_type")
    make = _MODELS.get(str(metadata.get(f"{PREFIX}model")))
    if (
        make is None
        or not isinstance(tokens, list)
        or not isinstance(types, list)
        or len(types) != len(tokens)
    ):
        return {}
    strange = next((token for token in tokens if not isinstance(token, str)), None)
    if strange is not None:
        raise CheckpointError(f"{PREFIX}tokens hold {strange!r:.40}, and no text; download the file again")
    special = {
        f"{name}_token": tokens[number]
        for name in SPECIAL_TOKENS
        if type(number := metadata.get(f"{PREFIX}{STORED_NAMES.get(name, name)}_token_id")) is int
        and 0 <= number < len(tokens)
    }
    added = [
        {
            "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind != TokenType.USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]  # fmt: skip
    parts = make(metadata, tokens, types)
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts,
        "post_processor": _ends(metadata, parts.get("post_processor"), tokens),
    }  # fmt: skip
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        settings["model_max_length"] = context
    return {
        "tokenizer.json": json.dumps(document, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def _ends(metadata: Mapping[str, Any], own: Any, tokens: Sequence[str]) -> Any:
    """Return the post-processor that adds special tokens to texts."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    used: dict[str, Any] = {}
    step: dict[str, Any]
    for name, place in (("bos", 0), ("eos", None)):
        number = metadata.get(f"{PREFIX}{name}_token_id")
        if name == "eos" and type(number) is not int:
            number = metadata.get(f"{PREFIX}seperator_token_id")
        usual = metadata.get(f"{PREFIX}model") == "bert" or (name == "bos" and own is None)
        if metadata.get(f"{PREFIX}add_{name}_token", usual) is not True or type(number) is not int:
            continue
        if not 0 <= number < len(tokens):
            continue
        token = tokens[number]
        used[token] = {"id": token, "ids": [number], "tokens": [token]}
        for sequence in (single, pair):
            step = {"SpecialToken": {"id": token, "type_id": 0}}
            sequence.insert(len(sequence) if place is None else place, step)
    if not used:
        return own
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}
    return template if own is None else {"type": "Sequence", "processors": [own, template]}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the parts of byte-level BPE."""
    pre = metadata.get(f"{PREFIX}pre", "default")
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": None, "pre_tokenizer": PRE_TOKENIZERS.get(pre, PRE_TOKENIZERS["default"]),
        "decoder": steps, "post_processor": {**steps, "trim_offsets": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre in ("llama-bpe", "llama3", "llama-v3", "lfm2"),
            "vocab": _numbers(tokens, types), "merges": metadata.get(f"{PREFIX}merges", []),
        },
    }  # fmt: skip


def _numbers(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    used = ((token, number) for number, (token, kind) in enumerate(zip(tokens, types, strict=True)))
    return {token: number for token, number in used if types[number] != TokenType.UNUSED}


_JOINS = ("ByteFallback", "Fuse")


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the parts of BPE in the manner of sentencepiece."""
    vocab = _numbers(tokens, types)
    scores = metadata.get(f"{PREFIX}scores", [0.0] * len(tokens))
    prefix = metadata.get(f"{PREFIX}add_space_prefix", True) is True
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    number = metadata.get(f"{PREFIX}unknown_token_id")
    unknown = tokens[number] if type(number) is int and 0 <= number < len(tokens) else unknown
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, to_mark]}, "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, *({"type": t} for t in _JOINS), *strip]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": list(_merges(vocab, types, scores)),
        },
    }  # fmt: skip


def _merges(vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> Iterator[list[str]]:
    """Yield the token pairs of merges, in merge order."""
    found, tried = [], 0
    for token, number in vocab.items():
        if types[number] != TokenType.NORMAL:
            continue
        tried += len(token)
        if tried > _LIMIT:
            return
        pairs = [
            (vocab[token[:at]], vocab[token[at:]])
            for at in range(1, len(token))
            if token[:at] in vocab and token[at:] in vocab
        ]
        found += [(-scores[number], *pair, number) for pair in pairs]
    found.sort()
    names = list(vocab)
    at = {number: place for place, number in enumerate(vocab.values())}
    for _, left, right, _ in found:
        yield [names[at[left]], names[at[right]]]


def _word_pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the parts of WordPiece."""
    lower = metadata.get(f"{PREFIX}normalizer.lowercase", True) is True
    vocab = {
        token if kind == TokenType.CONTROL else token[1:] if token.startswith(SPACE) else f"##{token}": number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lower,
            "strip_accents": metadata.get(f"{PREFIX}normalizer.strip_accents"),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    }  # fmt: skip


_MODELS = {"gpt2": _byte_level, "llama": _pieces, "bert": _word_pieces, KIND: unigram_parts}
