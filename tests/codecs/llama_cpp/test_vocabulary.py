"""Tokenizers: into the metadata of a GGUF file, and back to files that give the same numbers of tokens."""

import json
import struct

import pytest
from tests.oracles import tiny_tokenizers
from tokenizers import Tokenizer

from zeropoint.codecs.containers.gguf import GGUF
from zeropoint.codecs.llama_cpp.model_values import PlainValues
from zeropoint.codecs.llama_cpp.token_table import PREFIX
from zeropoint.codecs.llama_cpp.tokenizer_files import tokenizer_files
from zeropoint.codecs.llama_cpp.vocabulary import tokenizer_values
from zeropoint.errors import CheckpointError, UnsupportedError

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
PIECES = field(2, bytes([3 << 3, 2])) + PIECES
"""A tokenizer.model of BPE."""


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
    [
        "[]",
        "{",
        '{"model": 3}',
        "[" * 100_000,
        '{"model": {"type": "Unigram", "unk_id": 0, "vocab": [3]}}',
        '{"model": {"type": "BPE", "vocab": [], "merges": [], "byte_fallback": true}}',
    ],
)
def test_a_damaged_tokenizer_is_one_clear_sentence(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"damaged|is not a JSON object"):
        tokenizer_values({}, {"tokenizer.json": text.encode()}.get)


def test_a_unigram_model_of_sentencepiece_is_none_of_bpe() -> None:
    normal = field(2, b"table") + bytes([3 << 3, 1, 4 << 3, 0])
    raw = piece("<unk>", 0.0, 2) + piece("▁a", -1.5, 1) + field(3, normal)
    for trainer in (b"", field(2, bytes([3 << 3, 1]))):
        values, remarks = tokenizer_values({}, {"tokenizer.model": raw + trainer}.get)
        assert remarks == []
        assert values[f"{PREFIX}model"] == "t5"
        assert values[f"{PREFIX}precompiled_charsmap"] == b"table"
        assert (values[f"{PREFIX}add_space_prefix"], values[f"{PREFIX}remove_extra_whitespaces"]) == (
            True,
            False,
        )
        assert values[f"{PREFIX}unknown_token_id"] == 0
        assert (values[f"{PREFIX}add_bos_token"], values[f"{PREFIX}add_eos_token"]) == (False, False)


@pytest.mark.parametrize(("number", "kind"), [(3, "words"), (4, "characters")])
def test_models_that_llama_cpp_does_not_have_are_refused(number: int, kind: str) -> None:
    raw = piece("<unk>", 0.0, 2) + field(2, bytes([3 << 3, number]))
    with pytest.raises(
        UnsupportedError, match=rf"is a model of {kind}, which llama.cpp does not have; move it"
    ):
        tokenizer_values({}, {"tokenizer.model": raw}.get)


def unigram(**changes: object) -> dict[str, bytes]:
    """Return a Unigram tokenizer of which something is otherwise: of the model, or a step."""
    files = tiny_tokenizers.files("unigram")
    parsed = json.loads(files["tokenizer.json"])
    for key, value in changes.items():
        (parsed if key in parsed else parsed["model"])[key] = value
    return {"tokenizer.json": json.dumps(parsed).encode()}


MARK = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
UNLIKE = {
    "bytes": ({"byte_fallback": True}, "characters without a token are unknown, not bytes"),
    "case": ({"normalizer": {"type": "Lowercase"}}, "its normalizer Lowercase is not applied"),
    "cuts": ({"pre_tokenizer": {"type": "Digits"}}, "its pre_tokenizer Digits does not cut texts"),
    "spaces": ({"pre_tokenizer": None}, "spaces become ▁"),
    "begins": ({"pre_tokenizer": MARK}, "a text that begins with a space gets another one"),
    "lines": ({"normalizer": None}, "line feeds and tabs are characters like others"),
    "ends": (
        {
            "normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            "pre_tokenizer": MARK,
        },
        "spaces at the ends of texts are dropped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_what_llama_cpp_does_otherwise_with_a_unigram_tokenizer_is_said(name: str) -> None:
    changes, said = UNLIKE[name]
    values, remarks = tokenizer_values({}, unigram(**changes).get)
    assert values[f"{PREFIX}model"] == "t5"
    assert any(
        remark.startswith("llama.cpp will make other tokens of some texts: ") and said in remark
        for remark in remarks
    )


def test_a_unigram_tokenizer_needs_an_unknown_token() -> None:
    with pytest.raises(UnsupportedError, match=r"with unk_id None, and llama.cpp needs a token for unknown"):
        tokenizer_values({}, unigram(unk_id=None).get)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "WordLevel"}, "'WordLevel'"),
        ({"end_of_word_suffix": "</w>"}, "BPE of characters, not of bytes"),
        ({"continuing_subword_prefix": "##"}, "BPE of characters, not of bytes"),
    ],
)
def test_other_kinds_of_tokenizers_are_refused(changes: dict[str, object], said: str) -> None:
    parsed = json.loads(tiny_tokenizers.files("byte_level")["tokenizer.json"])
    parsed["model"] |= changes
    with pytest.raises(
        UnsupportedError, match=rf"tokenizer.json is {said}, which llama.cpp does not have: it"
    ):
        tokenizer_values({}, {"tokenizer.json": json.dumps(parsed).encode()}.get)


def test_pieces_without_bytes_are_refused() -> None:
    parsed = json.loads(tiny_tokenizers.files("sentencepiece")["tokenizer.json"])
    parsed["model"]["byte_fallback"] = False
    with pytest.raises(
        UnsupportedError, match=r"is BPE of characters, not of bytes, which llama.cpp does not"
    ):
        tokenizer_values({}, {"tokenizer.json": json.dumps(parsed).encode()}.get)


def test_the_case_of_word_pieces_is_said_and_another_normalizer_is_a_remark() -> None:
    files = tiny_tokenizers.files("word_pieces_cased")
    values, remarks = tokenizer_values({}, files.get)
    assert (values[f"{PREFIX}normalizer.lowercase"], remarks) == (False, [])
    usual, _ = tokenizer_values({}, tiny_tokenizers.files("word_pieces").get)
    assert f"{PREFIX}normalizer.lowercase" not in usual
    parsed = json.loads(files["tokenizer.json"])
    parsed["normalizer"] = {"type": "NFC"}
    _, remarks = tokenizer_values({}, {"tokenizer.json": json.dumps(parsed).encode()}.get)
    assert "its normalizer NFC is that of BERT; letters are put in lower case" in remarks[0]


def test_a_normalizer_of_byte_level_bpe_is_a_remark() -> None:
    parsed = json.loads(tiny_tokenizers.files("byte_level")["tokenizer.json"])
    parsed["normalizer"] = {"type": "Lowercase"}
    _, remarks = tokenizer_values({}, {"tokenizer.json": json.dumps(parsed).encode()}.get)
    assert "its normalizer Lowercase is not applied" in remarks[0]


def test_a_checkpoint_without_a_tokenizer_says_so() -> None:
    values, remarks = tokenizer_values({}, {}.get)
    assert values == {f"{PREFIX}model": "none"}
    assert "no tokenizer that is known here" in remarks[0]


def test_a_way_to_cut_texts_without_a_name_is_a_remark() -> None:
    files = tiny_tokenizers.files("byte_level")
    parsed = json.loads(files["tokenizer.json"])
    parsed["pre_tokenizer"]["pretokenizers"][0] = {"type": "Whitespace"}
    values, remarks = tokenizer_values({}, {**files, "tokenizer.json": json.dumps(parsed).encode()}.get)
    assert values[f"{PREFIX}pre"] == "default"
    assert "has no name here" in remarks[0]


@pytest.mark.parametrize("name", tiny_tokenizers.CUTS)
def test_how_texts_are_cut_has_the_name_of_llama_cpp(name: str) -> None:
    files = tiny_tokenizers.files(name)
    values, remarks = tokenizer_values({}, files.get)
    assert (values["tokenizer.ggml.pre"], remarks) == (name, [])
    found = json.loads(files["tokenizer.json"])
    found["model"]["ignore_merges"] = True
    values, _ = tokenizer_values({}, {**files, "tokenizer.json": json.dumps(found).encode()}.get)
    assert values["tokenizer.ggml.pre"] == ("llama-bpe" if name == "dbrx" else name)
