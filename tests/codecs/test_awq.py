"""AWQ files: decoded by AutoAWQ's formula and by compressed-tensors' converter, and a word that is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import dequantized, save
from tests.peers import Peer

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs import registry
from zeropoint.codecs.awq import CODEC, weight_settings
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.errors import CheckpointError, UnsupportedError, ZeropointError

converters = Peer("compressed_tensors.entrypoints.convert.converters")

SCHEMES = ("w4a16_asym", "int4:g32:asym", "int4:channel:asym", "int4:g64:asym:scale=bfloat16")
SHAPE = (96, 256)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def weight(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    return (x + torch.linspace(-1, 1, shape[1])).bfloat16()


def encoded(layer: LayerScheme, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return CODEC.encode(layer, zp.quantize(x, layer.weight))


def fields(words: torch.Tensor) -> torch.Tensor:
    """Return the fields of lines of words, word by word and in the order of AutoAWQ."""
    found = torch.empty(len(words), words.shape[1] * 8, dtype=torch.int64)
    for at, order in enumerate(ORDER):
        found[:, order::8] = words.long() >> (4 * at) & 15
    return found


@pytest.mark.parametrize("text", SCHEMES)
def test_another_decoder_gives_the_same_values(text: str) -> None:
    layer, x = layer_scheme(text, CODEC), weight(*SHAPE)
    tensors = encoded(layer, x)
    group = SHAPE[1] // len(tensors["scales"])
    zeros, scales = fields(tensors["qzeros"]), tensors["scales"].float()
    steps = fields(tensors["qweight"]) - zeros.repeat_interleave(group, 0)
    theirs = steps.float() * scales.repeat_interleave(group, 0)
    ours = zp.quantize(x, layer.weight)
    assert ours.zero_point is not None
    assert len(set(ours.zero_point.flatten().tolist())) > 1
    assert torch.equal(ours.dequantize(torch.float32), theirs.t())


@pytest.mark.parametrize("text", SCHEMES[:3])
def test_the_converter_of_compressed_tensors_makes_the_bytes_of_our_other_codec(text: str) -> None:
    layer, x = layer_scheme(text, CODEC), weight(*SHAPE)
    q = zp.quantize(x, layer.weight)
    config = {"group_size": 128, "version": "gemm"}
    given = {f"m.{name}": tensor for name, tensor in CODEC.encode(layer, q).items()}
    theirs = converters.AutoAWQConverter.from_autoawq_config(config).process(given)
    other = layer_scheme(str(layer.weight), registry.DEFAULT)
    ours = registry.DEFAULT.encode(other, q)
    for name in ("weight_packed", "weight_scale", "weight_zero_point"):
        assert ours[name].dtype == theirs[f"m.{name}"].dtype
        assert torch.equal(ours[name], theirs[f"m.{name}"])


def test_a_known_word() -> None:
    # The vector of AutoAWQ's packing: outputs 0 to 7 hold the fields 0 to 7.
    layer = layer_scheme("int4:g2:asym", CODEC)
    x = torch.stack([torch.arange(8.0), torch.full((8,), 15.0)], dim=1)
    x[0, 0] = 0.0
    assert hex(encoded(layer, x)["qweight"][0, 0].item() % 2**32) == "0x75316420"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"bits": 8, "group_size": 128}, "bits 8"),
        ({"bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'"),
        ({"bits": 4, "group_size": 128, "format": "gemv"}, "version 'gemv'"),
        ({"bits": 4, "group_size": 128, "zero_point": False}, "zero_point False"),
        ({"bits": 4, "group_size": "128"}, "must be -1 or positive"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(config: dict[str, object], rule: str) -> None:
    with pytest.raises(ZeropointError, match=rule):
        weight_settings(config)


@pytest.mark.parametrize(
    "text", ["int4:g128", "uint4:g128:asym", "int8:g128:asym", "int4:block32x32:asym", "nf4:g64", "mxfp4"]
)
def test_a_scheme_that_has_no_place_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="not what AWQ stores"):
        layer_scheme(text, CODEC)


def checkpoint(folder: Path, *, kept: str = "a.down_proj") -> Path:
    return save(
        folder,
        {"a.up_proj.weight": weight(*SHAPE), f"{kept}.weight": weight(96, 200)},
        {"model_type": "llama", "dtype": "float16"},
    )


def test_a_checkpoint_is_written_read_and_verified(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    run(make_plan(open_source(source), "w4a16_asym", codec=CODEC), tmp_path / "out")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section == {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["a.down_proj"],
    }  # fmt: skip
    assert not zp.verify_checkpoint(tmp_path / "out", source).problems


def test_files_of_autoawq_have_no_manifest_and_are_read_all_the_same(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    run(make_plan(open_source(source), "int4:g32:asym", codec=CODEC), tmp_path / "out")
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    found = dequantized(tmp_path / "out", tmp_path / "floats")["a.up_proj.weight"]
    wanted = zp.quantize(weight(*SHAPE), "int4:g32:asym:scale=float16").dequantize(torch.float16)
    assert torch.equal(found, wanted)


def test_a_kept_name_that_is_part_of_a_quantized_one_is_an_error(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", kept="a.up")
    with pytest.raises(CheckpointError, match=r"'a\.up' is kept, but loaders"):
        make_plan(open_source(source), "w4a16_asym", codec=CODEC)


def test_damage_is_found(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    run(make_plan(open_source(source), "w4a16_asym", codec=CODEC), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["a.up_proj.scales"] *= 0
    save_file(tensors, path)
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    assert any("scale" in str(problem) for problem in zp.verify_checkpoint(tmp_path / "out", source).problems)
