"""Tokenizers, configurations and GGUF files of strangers: a sentence for each, and bounded memory."""

import json
import tracemalloc
from typing import Any

import pytest
from tests.oracles import tiny_tokenizers

from zeropoint.codecs.containers.gguf import GGUF, GgufValue
from zeropoint.codecs.llama_cpp.gguf_format import LlamaCppFormat
from zeropoint.codecs.llama_cpp.token_table import PREFIX
from zeropoint.codecs.llama_cpp.vocabulary import tokenizer_values
from zeropoint.codecs.model_format import ModelFiles
from zeropoint.errors import CheckpointError

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 8,
}  # fmt: skip
HEADS = ("byte_level", "sentencepiece", "word_pieces", "unigram")


def parsed(kind: str = "byte_level") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tiny_tokenizers.files(kind)["tokenizer.json"])
    return found


def files_of(document: Any, config: dict[str, Any] | None = None, rows: int = 8) -> ModelFiles:
    files = {"tokenizer.json": json.dumps(document).encode()}
    return ModelFiles(
        config=CONFIG if config is None else config, metadata={}, read=files.get,
        rows=lambda: rows,
    )  # fmt: skip


DOCUMENTS: list[dict[str, Any]] = [
    {"post_processor": "x"}, {"post_processor": {"processors": [1]}}, {"added_tokens": 5},
    {"added_tokens": [{"id": "x", "content": "a"}]}, {"added_tokens": [{"id": 1}]},
    {"added_tokens": [{"id": 1, "content": 7}]}, {"added_tokens": [{"id": 1, "content": "\ud800"}]},
    {"model": {"type": "BPE", "vocab": {"\ud800": 7}, "merges": []}}, {"model": []}, {"model": None},
    {"model": {"type": "BPE", "vocab": ["a"], "merges": []}},
    {"model": {"type": "BPE", "vocab": {}, "merges": [7]}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["\udfff a"]}}, {"pre_tokenizer": [1]},
    {"post_processor": {"single": [{"SpecialToken": {}}, 1]}}, {"normalizer": 5},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a"]]}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [[1, 2]]}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 1e39]]}},
    {"model": {"type": "WordPiece", "vocab": {"a": "b", "c": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("change", DOCUMENTS, ids=lambda change: ascii(change)[:60])
def test_a_damaged_tokenizer_is_a_sentence(change: dict[str, Any]) -> None:
    found = files_of({**parsed(), **change})
    with pytest.raises(CheckpointError, match=r"; download (it|the \w+) again$"):
        assert LlamaCppFormat().metadata(found) is LlamaCppFormat().remarks(found)


CONFIGS: list[dict[str, Any]] = [
    {"rope_theta": "x"}, {"rope_scaling": 5}, {"rope_parameters": [1]},
    {"rope_parameters": {"full_attention": 3}},
    {"head_dim": "x"}, {"max_position_embeddings": "x"}, {"rms_norm_eps": None, "num_key_value_heads": "x"},
    {"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, {"vocab_size": "x"}, {"vocab_size": 10**18},
    {"vocab_size": -1}, {"vocab_size": 9}, {"max_position_embeddings": 10**30}, {"rope_theta": 1e300},
]  # fmt: skip


@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_a_damaged_configuration_is_a_sentence(change: dict[str, Any]) -> None:
    found, family = files_of(parsed(), {**CONFIG, **change}), LlamaCppFormat()
    with pytest.raises(CheckpointError, match=r"; download the checkpoint again$"):
        assert family.metadata(found) is family.fixed(found.config)


@pytest.mark.parametrize("kind", HEADS)
def test_a_number_of_a_token_makes_no_token(kind: str) -> None:
    document = parsed(kind)
    document["added_tokens"] = [*document.get("added_tokens", []), {"id": 10**9, "content": "far"}]
    tracemalloc.start()
    values, _ = tokenizer_values({}, {"tokenizer.json": json.dumps(document).encode()}.get, lambda: 600)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = values[f"{PREFIX}tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) <= 600
    assert peak < 4 << 20


STORED: dict[str, dict[str, Any]] = {
    "numbers": {f"{PREFIX}tokens": [1.5, 2.5], f"{PREFIX}token_type": [1, 1]},
    "a token beyond": {f"{PREFIX}bos_token_id": (1 << 32) - 1, f"{PREFIX}add_bos_token": True},
    "charsmap of texts": {f"{PREFIX}model": "t5", f"{PREFIX}precompiled_charsmap": ["a", "b"]},
    "scores of texts": {f"{PREFIX}model": "t5", f"{PREFIX}scores": ["a", "b"]},
    "scores of few": {f"{PREFIX}model": "llama", f"{PREFIX}scores": [0.5]},
    "merges of numbers": {f"{PREFIX}merges": [1, 2]},
    "types of texts": {f"{PREFIX}token_type": ["a", "b"]},
}


@pytest.mark.parametrize("change", STORED.values(), ids=STORED.keys())
def test_a_damaged_tokenizer_of_a_gguf_file_is_a_sentence(change: dict[str, Any]) -> None:
    plain = {
        f"{PREFIX}model": "gpt2", f"{PREFIX}tokens": ["a", "b"], f"{PREFIX}token_type": [1, 1],
        f"{PREFIX}scores": [0.5, 0.5], f"{PREFIX}merges": [],
    }  # fmt: skip
    try:
        found = LlamaCppFormat().companions({k: GgufValue.of(v) for k, v in {**plain, **change}.items()})
        json.loads(found["tokenizer.json"])
    except CheckpointError as error:
        assert str(error).endswith(("download or export it again", "download the file again"))  # noqa: PT017


def test_rows_of_a_gguf_file_are_checked_as_they_are_read() -> None:
    """Rows of zeros are so many tensors without a name."""
    head = b"GGUF" + (3).to_bytes(4, "little") + (200_000).to_bytes(8, "little") + bytes(8)
    calls = []

    def read(at: int, count: int) -> bytes:
        calls.append(count)
        return (head + bytes(count))[at : at + count] if at < len(head) else bytes(count)

    with pytest.raises(CheckpointError, match="a tensor's name appears twice: ''"):
        GGUF.parse(read, 64 << 20)
    assert len(calls) == 1
    many = (1 << 20).to_bytes(8, "little")
    with pytest.raises(CheckpointError, match="which it has no room for"):
        GGUF.parse(lambda at, count: (head[:8] + many + bytes(8))[at : at + count], 1 << 40)
