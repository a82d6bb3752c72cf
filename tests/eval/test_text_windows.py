"""Windows of a text: cut, begun and scored as llama-perplexity does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.oracles import tiny_models
from tests.oracles.tiny_tokenizers import TEXT
from tests.peers import transformers

from zeropoint.checkpoint.read.source import open_source
from zeropoint.errors import CalibrationError, UnsupportedError
from zeropoint.eval import TextTokenizer, TokenizedText
from zeropoint.eval.text_windows import ids_of, text_of


def test_the_second_half_of_a_window_is_scored_but_its_first_token() -> None:
    windows = TokenizedText(ids=torch.arange(30)).windows(8, None)
    assert windows.given.tolist() == torch.arange(24).reshape(3, 8).tolist()
    assert windows.targets.tolist() == [[5, 6, 7], [13, 14, 15], [21, 22, 23]]
    assert TokenizedText(ids=torch.arange(30)).windows(7, None).targets[0].tolist() == [4, 5, 6]
    assert len(TokenizedText(ids=torch.arange(30)).windows(8, 2).given) == 2


def test_each_window_begins_as_texts_do() -> None:
    windows = TokenizedText(ids=torch.arange(24), bos=99).windows(8, None)
    assert windows.given[:, 0].tolist() == [99, 99, 99]
    assert windows.tokens[:, 0].tolist() == [0, 8, 16]
    assert windows.given[:, 1:].tolist() == windows.tokens[:, 1:].tolist()


def test_too_little_text_is_an_error_with_what_would_do() -> None:
    with pytest.raises(CalibrationError, match=r"has 15 tokens, and two windows of 8 .* context=7"):
        TokenizedText(ids=torch.arange(15)).windows(8, None)
    with pytest.raises(CalibrationError, match=r"context \(=3\) must be at least 4"):
        TokenizedText(ids=torch.arange(15)).windows(3, None)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_text_gets_the_tokens_of_its_tokenizer_and_the_bytes_of_its_text(name: str, tmp_path: Path) -> None:
    tiny_models.write(tmp_path, name)
    text = TEXT * 2 + "naïve 日本"
    found = TextTokenizer(open_source(tmp_path))(text)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found.ids.tolist() == own(text)["input_ids"]
    assert found.bos == (own.bos_token_id if name == "mistral" else None)
    assert found.ends is not None
    assert int(found.ends[-1]) == len(text.encode())
    windows = found.windows(16, None)
    scored = [
        int(found.ends[16 * n + 15] - found.ends[16 * n + 8]) for n in range(len(windows.given))
    ]  # fmt: skip
    assert windows.nbytes == sum(scored)
    assert 0 < windows.nbytes < len(text.encode())


def test_token_ids_are_read_from_a_file_that_holds_nothing_else(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(8, dtype=torch.int32).reshape(2, 4)}, tmp_path / "ids.safetensors")
    assert ids_of(tmp_path / "ids.safetensors").tolist() == list(range(8))
    save_file({"a": torch.arange(8), "b": torch.arange(8)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "floats.safetensors")
    save_file({"a": torch.tensor([3, -1])}, tmp_path / "negative.safetensors")
    save_file({"a": torch.zeros(0, dtype=torch.int64)}, tmp_path / "none.safetensors")
    for name, message in (
        ("two", "holds 2 tensors; store the token ids alone"), ("floats", "must be token ids: integers"),
        ("none", "must hold one tensor of token ids; store some"),
    ):  # fmt: skip
        with pytest.raises(CalibrationError, match=message):
            ids_of(tmp_path / f"{name}.safetensors")
    with pytest.raises(CalibrationError, match="has token -1, and tokens begin at 0"):
        ids_of(tmp_path / "negative.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(CalibrationError, match=r"cannot be read: .*give text"):
        ids_of(tmp_path / "text.safetensors")


def test_a_text_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xd8")
    for name in ("image", "absent"):
        with pytest.raises(CalibrationError, match=f"text '{tmp_path / name}' cannot be read"):
            text_of(tmp_path / name)


def test_a_checkpoint_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    tiny_models.write(tmp_path, "llama")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UnsupportedError, match=r"no tokenizer that transformers reads .*token ids in a"):
        TextTokenizer(open_source(tmp_path))
