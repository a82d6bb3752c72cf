"""The command ``zeropoint rotate``."""

import json
from pathlib import Path

import pytest
from tests.checkpoint.written import digests
from tests.cli.conftest import Call
from tests.oracles import tiny_llama

import zeropoint as zp


@pytest.fixture
def model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A Llama of two layers, norms and all."""
    tiny_llama.save(tmp_path / "model")
    capsys.readouterr()  # transformers shows its progress
    return tmp_path / "model"


def test_a_model_is_rotated_with_what_happened_to_each_tensor(
    call: Call, model: Path, tmp_path: Path
) -> None:
    called = call("rotate", model, tmp_path / "out", "--seed", 7)
    assert called.status == 0, called.err
    assert "rotated: reads the residual stream" in called.out
    assert "rotated: a norm, folded into what reads it" in called.out
    assert "signs from seed 7" in called.out
    zp.rotate_checkpoint(model, tmp_path / "same", seed=7)
    assert digests(tmp_path / "out") == digests(tmp_path / "same")


def test_a_document_says_which_tensors_were_rotated(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("rotate", model, tmp_path / "out", "--block", 16, "--dtype", "float32", "--json")
    assert called.status == 0, called.err
    document = json.loads(called.out)
    assert {tensor["action"] for tensor in document["tensors"]} == {"rotated"}
    assert document["decoded_values"] == 0
    assert document["rotated_values"] > 0


def test_a_block_that_does_not_divide_is_refused_in_one_line(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("rotate", model, tmp_path / "out", "--block", 100)
    assert called.status == 1
    assert called.err.startswith("error: block (=100) must be a power of two that divides the hidden_size")
    assert called.err.count("\n") == 1
