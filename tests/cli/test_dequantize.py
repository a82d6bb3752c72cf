"""Quantized checkpoints as inputs of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.quantized_inputs import dequantized_by_others, to_fp8
from tests.checkpoint.written import digests, tensors_of
from tests.cli.conftest import Call
from tests.tensors import same_bytes

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run


@pytest.fixture
def fp8(model: Path, tmp_path: Path) -> Path:
    """The Llama of two layers with its projections in fp8 blocks."""
    return to_fp8(model, tmp_path / "fp8")


def test_a_quantized_checkpoint_is_refused_with_the_option_that_reads_it(
    call: Call, fp8: Path, tmp_path: Path
) -> None:
    called = call("quantize", fp8, tmp_path / "out", "--to", "mxfp4")
    assert called.status == 1
    assert called.err == (
        f"error: '{fp8}' is quantized already (quantization_config says 'fp8'); pass the original "
        "checkpoint, or what zeropoint dequantize makes of it; quantize and search do that themselves with "
        "--dequantize-first\n"
    )
    assert not (tmp_path / "out").exists()


def test_fp8_is_quantized_anew_planned_and_verified(call: Call, fp8: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "out", tmp_path / "plan.json"
    options = ("--to", "mxfp4", "--dequantize-first")
    assert call("plan", fp8, *options, "--out", plan).status == 0
    called = call("quantize", fp8, out, *options)
    assert called.status == 0, called.err
    assert "mxfp4-pack-quantized" in called.out
    assert call("quantize", fp8, tmp_path / "planned", "--plan", plan).status == 0
    assert tensors_of(out).keys() == tensors_of(tmp_path / "planned").keys()
    verified = call("verify", out, "--against", fp8, "--json")
    assert verified.status == 0, verified.err
    assert len(json.loads(verified.out)["layers"]) == 14


def test_layers_that_stay_in_fp8_are_refused_with_the_option_that_decodes_them(
    call: Call, fp8: Path, tmp_path: Path
) -> None:
    asked = ("--to", "mxfp4", "--ignore", "*.self_attn.*")
    called = call("quantize", fp8, tmp_path / "out", *asked, "--dequantize-first")
    assert called.status == 1
    assert "8 layers would keep their fp8 codes" in called.err
    assert "pass --dequantize-kept" in called.err
    assert called.err.count("\n") == 1
    decoded = call("quantize", fp8, tmp_path / "out", *asked, "--dequantize-kept")
    assert decoded.status == 0, decoded.err
    assert "kept: ignored by '*.self_attn.*', decoded to BF16" in decoded.out


@pytest.mark.parametrize(("option", "dtype"), [((), torch.bfloat16), (("--dtype", "float32"), torch.float32)])
def test_dequantize_writes_the_floats_that_others_find(
    option: tuple[str, ...], dtype: torch.dtype, call: Call, fp8: Path, tmp_path: Path
) -> None:
    called = call("dequantize", fp8, tmp_path / "out", *option)
    assert called.status == 0, called.err
    assert "in 14 tensors" in called.out
    assert "kept: decoded to " in called.out
    assert "x larger) in" in called.out
    found, expected = tensors_of(tmp_path / "out"), dequantized_by_others(fp8, dtype=dtype)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], values) for name, values in expected.items())
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert call("verify", tmp_path / "out", "--against", fp8).status == 0


def test_what_zeropoint_wrote_is_dequantized_and_json_says_how_much(
    call: Call, model: Path, tmp_path: Path
) -> None:
    assert call("quantize", model, tmp_path / "codes", "--to", "int4:g32:asym").status == 0
    called = call("dequantize", tmp_path / "codes", tmp_path / "out", "--json")
    document = json.loads(called.out)
    assert document["decoded_values"] == 2 * (4 * 128 * 128 + 3 * 256 * 128)
    assert document["quantized_values"] == 0
    found, expected = tensors_of(tmp_path / "out"), dequantized_by_others(tmp_path / "codes")
    assert all(same_bytes(found[name], values) for name, values in expected.items())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--dtype", "int8"), 2, "dtype 'int8' must be one of bfloat16, float16, float32"),
        ((), 1, "holds no codes to dequantize; pass a quantized checkpoint"),
    ],
)
def test_what_cannot_be_dequantized_is_one_line(
    arguments: tuple[str, ...], status: int, words: str, call: Call, model: Path, tmp_path: Path
) -> None:
    called = call("dequantize", model, tmp_path / "out", *arguments)
    assert called.status == status
    assert words in called.err
    assert called.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_interrupted_dequantization_resumes_or_begins_anew(call: Call, fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = make_plan(open_source(fp8), KEEP, selection=Selection(dequantize=DequantizePolicy.EVERY))
    with pytest.raises(KeyboardInterrupt):
        run(plan, out, on_progress=_interrupt)
    refused = call("dequantize", fp8, out, "--dtype", "float32")
    assert refused.status == 1
    assert "differs in 'dequantize': it has 'every', now 'every F32'" in refused.err
    anew = call("dequantize", fp8, out, "--dtype", "float32", "--restart")
    assert anew.status == 0, anew.err
    assert call("dequantize", fp8, tmp_path / "other", "--dtype", "float32").status == 0
    assert digests(out) == digests(tmp_path / "other")


def _interrupt(done: int, total: int, name: str) -> None:
    raise KeyboardInterrupt
