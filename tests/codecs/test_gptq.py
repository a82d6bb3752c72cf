"""GPTQ files: decoded as GPTQModel decodes them, by a formula of its own here, and words that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.gptq import CODEC, weight_scheme
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.errors import UnsupportedError, ZeropointError

SCHEMES = (
    "int4:g128",
    "int4:g32:asym",
    "int8:g64",
    "int2:g128",
    "int3:g32",
    "int3:channel:asym",
    "int4:channel",
)
SHAPE = (96, 256)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def encoded(layer: LayerScheme, x: torch.Tensor) -> dict[str, torch.Tensor]:
    q = zp.quantize(x, layer.weight)
    return CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)


def stream(words: list[int], bits: int) -> list[int]:
    """Return the fields of a column of words: bit after bit, low ones first, as in a number of many words."""
    number = sum((word % 2**32) << (32 * at) for at, word in enumerate(words))
    return [(number >> (bits * at)) % 2**bits for at in range(32 * len(words) // bits)]


def dequantized(tensors: dict[str, torch.Tensor], bits: int, *, first_version: bool) -> torch.Tensor:
    """Return ``scales[g_idx] * (q - zeros[g_idx])``, as GPTQModel has it: (inputs, outputs)."""
    codes = torch.tensor([stream(column, bits) for column in tensors["qweight"].t().tolist()]).t()
    zeros = torch.tensor([stream(row, bits) for row in tensors["qzeros"].tolist()]) + first_version
    groups = tensors["g_idx"].long()
    return tensors["scales"].float()[groups] * (codes - zeros[groups]).float()


@pytest.mark.parametrize("text", SCHEMES)
def test_another_decoder_gives_the_same_values(text: str) -> None:
    layer = layer_scheme(text, CODEC)
    x = weight(*SHAPE)
    theirs = dequantized(encoded(layer, x), layer.weight.bits, first_version=layer.layout == "gptq")
    ours = zp.quantize(x, layer.weight).dequantize(torch.float32)
    assert torch.equal(ours, theirs.t())


def test_known_words() -> None:
    # Codes 0 to 7, from the lowest bits on; the zero point 8 of symmetric weights is stored as 7.
    layer = layer_scheme("int4:g8", CODEC)
    x = torch.arange(-8.0, 0.0).repeat(8, 1)
    x[:, 0] = -7.5
    tensors = encoded(layer, x)
    assert [hex(word % 2**32) for word in tensors["qweight"][0].tolist()] == ["0x76543210"] * 8
    assert [hex(word % 2**32) for word in tensors["qzeros"][0].tolist()] == ["0x77777777"]


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"bits": 4, "group_size": 128, "desc_act": True}, "out of order"),
        ({"bits": 5, "group_size": 128}, "of 5 bits"),
        ({"bits": 4, "group_size": 0}, "must be -1 or positive"),
        ({"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"bits": 4, "group_size": 128, "dynamic": {"+:up": {"bits": 8}}}, "other bits"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(config: dict[str, object], rule: str) -> None:
    with pytest.raises(ZeropointError, match=rule):
        weight_scheme(config)


@pytest.mark.parametrize(
    "text",
    ["uint4:g128", "int5:g128", "int4:block32x32", "int4:g128:scale=even", "int4:g128:narrow", "mxfp4"],
)
def test_a_scheme_that_has_no_place_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="GPTQ does not store"):
        layer_scheme(text, CODEC)


def test_a_weight_whose_outputs_fill_no_whole_words_is_kept() -> None:
    layer = layer_scheme("int4:g128", CODEC)
    assert CODEC.refusal(layer, (100, 256)) == "first axis 100 does not fill whole words, of 8 codes"
    assert CODEC.refusal(layer, (96, 200)) == "last axis 200 is not a multiple of the group, 128"


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    save_file(
        {"a.up_proj.weight": weight(*SHAPE), "a.down_proj.weight": weight(96, 200)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return folder


def test_the_configuration_says_what_loaders_ask_for(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    run(make_plan(open_source(source), "w4a16", codec=CODEC), tmp_path / "out")
    second = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == second
    wanted = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
    assert {key: second[key] for key in wanted} == wanted
    assert list(second["dynamic"]) == [r"-:^a\.down_proj$"]


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("qzeros", lambda t: t + 1, "a zero point is stored as 8, not 7"),
        ("scales", lambda t: t * 0 - 1, "scale"),
        ("g_idx", lambda t: t.flip(0), "out of order"),
    ],
)
def test_damage_is_found(tmp_path: Path, name: str, change: object, what: str) -> None:
    source = checkpoint(tmp_path / "in")
    run(make_plan(open_source(source), "w4a16", codec=CODEC), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"a.up_proj.{name}"] = change(tensors[f"a.up_proj.{name}"])  # type: ignore[operator]
    save_file(tensors, path)
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    problems = zp.verify_checkpoint(tmp_path / "out", source).problems
    assert any(what in str(problem) for problem in problems), problems
