"""Files of MLX: the bytes and values of mx.quantize, a model that mlx-lm runs, and files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.mlx import BITS, CODEC, GROUPS, affine
from zeropoint.codecs.registry import CODECS
from zeropoint.errors import UnsupportedError, ZeropointError
from zeropoint.layout import packing
from zeropoint.schemes import PRESETS
from zeropoint.schemes.presets import OF_LAYOUTS

M = "model.layers.0.mlp.up_proj"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Tensors = dict[str, torch.Tensor]


def weight(dtype: torch.dtype = torch.bfloat16, factor: float = 0.02) -> torch.Tensor:
    """Return numbers with rows of zeros, of one number, and of one sign."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(4)) * factor
    x[1], x[2], x[3] = 0, 5, -5
    x[4], x[5], x[6] = x[4].abs() + factor, -x[5].abs(), x[6].clamp(-factor, factor)
    x[7, ::2] = -x[7, 1::2]
    return x.to(dtype)


def formula(x: torch.Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and biases by the steps of mx.quantize in NumPy's float32."""
    blocks = x.float().numpy().reshape(len(x), -1, group)
    high, low, steps = blocks.max(-1), blocks.min(-1), np.float32(2**bits - 1)
    mask = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / steps, np.float32(1e-7))
    step, edge = np.where(mask, step, -step), np.where(mask, low, high)
    count = np.rint(edge / step)
    with np.errstate(all="ignore"):
        scale = np.where(count != 0, edge / count, step).astype(np.float32)
    bias = np.where(count != 0, edge, np.float32(0))
    codes = np.clip(np.rint((blocks - bias[..., None]) / scale[..., None]), 0, steps)
    return codes.reshape(x.shape), scale, bias


@pytest.mark.crossed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.02, 1.0, 1e-7])
def test_codes_scales_and_biases_follow_the_steps_of_mlx(
    bits: int, dtype: torch.dtype, factor: float
) -> None:
    x = weight(dtype, factor)
    for group in GROUPS:
        q = zp.quantize(x, affine(bits, group))
        codes, scale, bias = formula(x, bits, group)
        assert torch.equal(q.codes.int(), torch.from_numpy(codes).int())
        assert torch.equal(q.params.stored[0], torch.from_numpy(scale).to(dtype))
        assert torch.equal(q.params.stored[1], torch.from_numpy(bias).to(dtype))
        q.params.validate()


@pytest.mark.crossed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_values_are_within_the_bound(bits: int, group: int) -> None:
    for dtype in DTYPES:
        for factor in (0.02, 3.0, 1e-6):
            x = weight(dtype, factor)
            q = zp.quantize(x, affine(bits, group))
            off = (q.dequantize().double() - x.double()).abs().view(len(x), -1, group).amax(-1)
            assert bool((off <= q.error_bound(x)).all())
            assert bool((off <= q.error_bound()).all())
        steps = zp.quantize(weight(torch.float32), affine(bits, group))
        least = steps.params.stored[0].double().abs() * (
            3.1 if bits == 2 else 1.5
        )  # where the range is not known
        assert bool((steps.error_bound() < least)[8:].all())


@pytest.mark.crossed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_package_itself_gives_the_same_bytes_and_decodes_ours(bits: int, dtype: torch.dtype) -> None:
    mx = pytest.importorskip("mlx.core", reason="extra `slow`")
    own = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}[dtype]
    x = weight(dtype)
    for group in GROUPS:
        layer = layer_scheme(str(affine(bits, group)), CODEC)
        q = zp.quantize(x, layer.weight)
        ours = CODEC.encode(layer, q)
        theirs = mx.quantize(mx.array(x.float().numpy()).astype(own), group, bits)
        for part, found in zip(("weight", "scales", "biases"), theirs, strict=True):
            wide = found if part == "weight" else found.astype(mx.float32)
            tensor = ours[part] if part == "weight" else ours[part].float()
            assert np.array_equal(np.array(wide), tensor.numpy())
        wide = [mx.array(ours[part].float().numpy()) for part in ("scales", "biases")]
        decoded = mx.dequantize(mx.array(ours["weight"].numpy()), *wide, group, bits)
        assert np.array_equal(np.array(decoded), q.dequantize(torch.float32).numpy())


@pytest.mark.parametrize(("mode", "scheme"), [
    ("mxfp4", "mxfp4a16"), ("mxfp4", "mxfp4_e2m1"), ("mxfp8", "mxfp8_e4m3"),
    ("nvfp4", "float4_e2m1fn:g16:scale=float8_ue4m3fn"),
])  # fmt: skip
def test_the_package_decodes_float_codes_to_our_values(mode: str, scheme: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="extra `slow`")
    layer = layer_scheme(scheme, CODEC)
    q = zp.quantize(weight(torch.float32, 1.0), layer.weight)
    found = CODEC.encode(layer, q)
    words, scales = (mx.array(found[part].numpy()) for part in ("weight", "scales"))
    decoded = mx.dequantize(words, scales, mode=mode, dtype=mx.float32)
    assert layer.layout == mode
    assert np.array_equal(np.array(decoded), q.dequantize(torch.float32).numpy())


def model(folder: Path) -> Path:
    tiny_models.llama(layers=2, seed=6).bfloat16().save_pretrained(folder)
    return folder


def test_mlx_lm_runs_what_is_written(tmp_path: Path) -> None:
    mx, utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    recipe = "rules:\n  - {name: '*.down_proj', preset: mxfp4_e2m1}\n  - {type: Linear, preset: mlx_int4}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    source = model(tmp_path / "in")
    zp.quantize_checkpoint(source, tmp_path / "out", RecipeText.read(tmp_path / "recipe.yaml"), format="mlx")
    zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="float32")
    ids = mx.array([[1, 5, 9, 33, 2]])
    logits = [
        np.array(utils.load_model(tmp_path / name)[0](ids).astype(mx.float32)) for name in ("out", "floats")
    ]
    assert np.abs(logits[1]).max() > 0.05
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[1]).max()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, {"rope_theta": 1e5}),
        (
            {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "rope_theta": 7.0},
            {"rope_theta": 7.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        ({}, {}),
    ],
)
def test_rotary_positions_are_said_where_mlx_lm_looks_for_them(
    tmp_path: Path, config: dict[str, Any], said: dict[str, Any]
) -> None:
    source = model(tmp_path / "in")
    text = json.loads((source / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        text.pop(key, None)
    (source / "config.json").write_text(json.dumps(text | config))
    zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: found[key] for key in ("rope_theta", "rope_scaling") if key in found} == said
    assert found["quantization"] == found["quantization_config"]


def theirs(folder: Path, **said: Any) -> Path:
    """Write a layer as mlx-lm writes it."""
    folder.mkdir()
    codes, scale, bias = formula(weight(), 4, 64)
    fields = torch.from_numpy(codes).to(torch.uint8)
    save_file({
        f"{M}.weight": packing.pack(fields, 4).view(torch.int32).view(torch.uint32),
        f"{M}.scales": torch.from_numpy(scale).bfloat16(), f"{M}.biases": torch.from_numpy(bias).bfloat16(),
    }, folder / "model.safetensors")  # fmt: skip
    found = {"group_size": 64, "bits": 4, "mode": "affine"} | said
    config = {"model_type": "llama", "quantization": found, "quantization_config": found}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("said", [
    {}, {M: {"group_size": 64, "bits": 4}, "bits": 8, "mode": "affine"},
])  # fmt: skip
def test_files_of_mlx_lm_are_read_with_its_values(tmp_path: Path, said: dict[str, Any]) -> None:
    folder = theirs(tmp_path / "in", **said)
    assert not zp.verify_checkpoint(folder).problems
    zp.convert_checkpoint(folder, tmp_path / "out", to="float32")
    codes, scale, bias = formula(weight(), 4, 64)
    wide = [torch.from_numpy(np.repeat(each, 64, 1)).bfloat16().float() for each in (scale, bias)]
    wanted = torch.from_numpy(codes).float() * wide[0] + wide[1]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{M}.weight"], wanted)
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(("said", "message"), [
    ({"bits": 7}, "mode 'affine' with bits 7 and group_size 64 is not read"),
    ({"group_size": 48}, "and group_size 48 is not read"),
    ({"bits": "4"}, "with bits '4' and"),
    ({"bits": True}, "with bits True and"),
    ({"mode": ["x"]}, r"mode \['x'\] with"),
    ({"mode": "mxfp4"}, "mode 'mxfp4' with bits 4 and group_size 64"),
    ({"mode": "mxfp4", "group_size": 32}, "scales is BF16 of shape"),
    ({"bits": 8}, r"scales is BF16 of shape \[32, 4\], but must be BF16 of shape \[32, 2\]"),
    ({M: False}, "the configuration says False of it, but it has scales"),
    ({M: {"bits": 4}}, "bits 4 and group_size None is not read"),
])  # fmt: skip
def test_configurations_that_contradict_the_tensors_are_said(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    folder = theirs(tmp_path / "in", **said)
    with pytest.raises(ZeropointError, match=message):
        zp.convert_checkpoint(folder, tmp_path / "out", to="float32")
    assert not (tmp_path / "out").exists()


def test_what_it_cannot_hold_is_refused() -> None:
    for text in (
        "int4:g64",
        "q4_1:g16",
        "mlx_int4:g256",
        "uint7:g64:offset=float32",
        "mxfp6_e2m3",
    ):
        with pytest.raises(UnsupportedError, match="is not what MLX stores; use mlx_int2"):
            layer_scheme(text, CODEC)


def test_a_scale_of_the_tensor_is_refused_in_both_directions(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="has a scale of the tensor, which linear layers of MLX lack; use"
    ):
        layer_scheme("nvfp4a16", CODEC)
    folder = theirs(tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{M}.global_scale": torch.ones(())}, folder / "model.safetensors")
    with pytest.raises(ZeropointError, match="global_scale has no place in"):
        zp.convert_checkpoint(folder, tmp_path / "out", to="float32")


def test_rule_edge_is_refused_where_it_means_nothing() -> None:
    for text in ("uint4:g64:scale=edge", "int4:g64:scale=edge/float32:asym", "uint4:g64:offset=edge/float32"):
        with pytest.raises(ZeropointError, match=r"rule edge is for|not for offsets"):
            zp.Scheme.parse(text)


def test_presets_of_one_layout_alone_are_known_to_the_command_line() -> None:
    own = {name for codec in CODECS.values() for name in codec.presets} - PRESETS.keys()
    assert own == OF_LAYOUTS
