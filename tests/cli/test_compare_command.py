"""``zeropoint compare`` on the command line: its table, its document, its exit status."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.cli.conftest import Call
from tests.cli.test_commands import document
from tests.cli.test_errors import assert_one_line


@pytest.fixture
def out(call: Call, model: Path, tmp_path: Path) -> Path:
    assert call("quantize", model, tmp_path / "out", "--to", "w8a16").status == 0
    return tmp_path / "out"


def test_a_model_and_its_codes_are_compared_in_a_table(call: Call, model: Path, out: Path) -> None:
    called = call("compare", model, out)
    assert (called.status, called.err) == (0, "")
    lines = called.out.splitlines()
    assert lines[0].split() == ["tensors", "n", "rel.err", "SQNR", "dB", "largest", "unequal"]
    assert "BF16 and int8:g128 (pack-quantized)" in lines
    assert "  model.layers.*.mlp.up_proj.weight        2   0.00" in called.out
    assert "18 tensors compared (344,320 values)" in lines
    assert "of these differ; relative error 0.00" in called.out
    assert "  model.layers.1.mlp.up_proj.weight " in call("compare", model, out, "--all").out


def test_the_document_has_each_tensor(call: Call, model: Path, out: Path) -> None:
    found = document(call("compare", model, out, "--json", "--workers", "1", "--max-memory", "1G"))
    assert (found["ok"], found["problems"], found["values"]) == (True, [], 344_320)
    assert 0 < found["relative"] < 0.01
    assert len(found["tensors"]) == 18
    embedding = next(t for t in found["tensors"] if t["name"] == "model.embed_tokens.weight")
    assert embedding == {
        "name": "model.embed_tokens.weight", "shape": [64, 128], "a": "BF16", "b": "BF16", "values": 8192,
        "unequal": 0, "zeros_of_other_sign": 0, "relative": 0.0, "sqnr_db": None, "largest": 0.0,
    }  # fmt: skip


def test_require_equal_fails_where_values_differ(call: Call, model: Path, out: Path, tmp_path: Path) -> None:
    assert call("dequantize", out, tmp_path / "floats", "--dtype", "float32").status == 0
    equal = call("compare", out, tmp_path / "floats", "--require", "equal")
    assert (equal.status, equal.err) == (0, "")
    assert "all values are equal bit for bit" in equal.out
    differ = call("compare", model, out, "--require", "equal")
    assert differ.status == 1
    assert differ.out
    assert differ.err.startswith("error: ")
    assert differ.err.endswith("but --require equal was given\n")


def test_what_could_not_be_compared_is_an_error_and_in_the_document(
    call: Call, model: Path, tmp_path: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    (tmp_path / "b").mkdir()
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    called = call("compare", model, tmp_path / "b", "--json")
    assert called.status == 1
    assert "1 tensor of " in called.err
    assert called.err.endswith("could not be compared, the first: 'lm_head.weight': only A has it\n")
    found = json.loads(called.out)
    assert found["problems"] == [{"where": "lm_head.weight", "what": "only A has it"}]
    assert found["notes"] == [f"B: '{tmp_path / 'b'}' has no config.json: weights only"]


def test_wrong_inputs_are_one_line(call: Call, model: Path, tmp_path: Path) -> None:
    assert_one_line(call("compare", model, model), 1, "A and B are one checkpoint", "; pass two")
    (tmp_path / "x").write_text("no checkpoint")
    assert_one_line(call("compare", model, tmp_path / "x"), 1, "x'", "safetensors")
    assert_one_line(call("compare", model, tmp_path / "nowhere"), 1, "nowhere' cannot be opened")
    assert_one_line(call("compare", model), 2, "Missing argument 'B'; see zeropoint compare --help")
    assert_one_line(call("compare", model, model, "--require", "bits"), 2, "'--require'", "'equal'")
    assert_one_line(call("compare", model, "", "--all"), 2, "Invalid value for 'B': it is empty")
