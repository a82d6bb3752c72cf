"""Tokenizers: into the metadata of a GGUF file, and back to files that give the same numbers of tokens."""

from __future__ import annotations

import json
import struct

import pytest
from tests.oracles import tiny_tokenizers
from tokenizers import Tokenizer

from zeropoint.codecs.containers.gguf import GGUF
from zeropoint.codecs.llama_cpp.model_values import PlainValues
from zeropoint.codecs.llama_cpp.tokenizer_files import tokenizer_files
from zeropoint.codecs.llama_cpp.vocabulary import PREFIX, tokenizer_values
from zeropoint.errors import CheckpointError

SAMPLES = (tiny_tokenizers.TEXT, "unusual  spaces, 1234 and Größe 東京", "the the", "", " x")


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_a_tokenizer_comes_back_with_the_same_tokens(kind: str) -> None:
    files = tiny_tokenizers.files(kind)
    values, remarks = tokenizer_values({}, files.get)
    assert remarks == []
    head = GGUF.head([], values).data
    _, metadata = GGUF.parse(lambda begin, count: head[begin : begin + count], len(head))
    again = tokenizer_files(PlainValues(metadata))
    theirs = Tokenizer.from_str(files["tokenizer.json"].decode())
    ours = Tokenizer.from_str(again["tokenizer.json"])
    for text in SAMPLES:
        expected = theirs.encode(text).ids
        assert ours.encode(text).ids == expected
        assert ours.decode(expected) == theirs.decode(expected)
    settings = json.loads(again["tokenizer_config.json"])
    assert settings.items() >= json.loads(files["tokenizer_config.json"]).items()


def test_tokens_beyond_the_vocabulary_are_marked_unused() -> None:
    values, _ = tokenizer_values({"vocab_size": 500}, tiny_tokenizers.files("byte_level").get)
    tokens, types = values[f"{PREFIX}tokens"], values[f"{PREFIX}token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert (len(tokens), tokens[-1], types[-1], types[0]) == (500, "[PAD499]", 5, 3)


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def piece(text: str, score: float, kind: int) -> bytes:
    parts = field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + bytes([3 << 3, kind])
    return field(1, parts)


PIECES = piece("<unk>", 0.0, 2) + piece("<s>", 0.0, 3) + piece("▁a", -1.5, 1) + field(3, bytes([3 << 3, 0]))


def test_a_sentencepiece_model_is_read_with_what_is_added_to_it() -> None:
    settings = {
        "bos_token": {"content": "<s>"}, "add_bos_token": True,
        "added_tokens_decoder": {"3": {"content": "<extra>", "special": True}},
    }  # fmt: skip
    files = {"tokenizer.model": PIECES, "tokenizer_config.json": json.dumps(settings).encode()}
    values, _ = tokenizer_values({"vocab_size": 5}, files.get)
    assert values[f"{PREFIX}model"] == "llama"
    assert values[f"{PREFIX}tokens"] == ["<unk>", "<s>", "▁a", "<extra>", "[PAD4]"]
    assert values[f"{PREFIX}scores"] == [0.0, 0.0, -1.5, -1000.0, -10000.0]
    assert values[f"{PREFIX}token_type"] == [2, 3, 1, 3, 5]
    assert values[f"{PREFIX}add_space_prefix"] is False
    assert (values[f"{PREFIX}bos_token_id"], values[f"{PREFIX}add_bos_token"]) == (1, True)


@pytest.mark.parametrize("size", range(1, len(PIECES)))
def test_a_sentencepiece_model_that_ends_anywhere_is_refused_or_shorter(size: int) -> None:
    try:
        values, _ = tokenizer_values({}, {"tokenizer.model": PIECES[:size]}.get)
    except CheckpointError as error:
        assert "the tokenizer is damaged" in str(error)  # noqa: PT017 (a cut between fields leaves fewer)
    else:
        tokens = values[f"{PREFIX}tokens"]
        assert isinstance(tokens, list)
        assert len(tokens) <= 3


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"model": 3}', '{"model": {"type": "BPE", "vocab": [], "merges": []}}', "[" * 100_000],
)
def test_a_damaged_tokenizer_is_one_clear_sentence(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"damaged|is not a JSON object"):
        tokenizer_values({}, {"tokenizer.json": text.encode()}.get)


def test_a_checkpoint_without_a_tokenizer_says_so() -> None:
    values, remarks = tokenizer_values({}, {}.get)
    assert values == {f"{PREFIX}model": "none"}
    assert "no tokenizer that is known here" in remarks[0]


def test_a_way_to_cut_texts_without_a_name_is_a_remark() -> None:
    files = tiny_tokenizers.files("byte_level")
    parsed = json.loads(files["tokenizer.json"])
    parsed["pre_tokenizer"] = {"type": "Whitespace"}
    values, remarks = tokenizer_values({}, {**files, "tokenizer.json": json.dumps(parsed).encode()}.get)
    assert values[f"{PREFIX}pre"] == "default"
    assert "has no name here" in remarks[0]
