"""Outputs of llm-compressor: whole ones have no problem, and each planted damage gives its sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.damage import (
    INDEX,
    as_llm_compressor,
    change_json,
    change_tensor,
    replace_tensors,
    shard_of,
)
from tests.oracles import llmcompressor_golden

from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, ZeropointError

pytestmark = pytest.mark.rotating

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SCALE, PACKED = f"{Q}.weight_scale", f"{Q}.weight_packed"
NAN, INF = float("nan"), float("inf")
NORM = "model.layers.0.input_layernorm.weight"
SHARDS = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
CASES = [
    pytest.param(*case, marks=() if case[1] == "bfloat16" else pytest.mark.slow)
    for case in llmcompressor_golden.CASES
]


def _problems(source: Path, out: Path) -> tuple[object, ...]:
    """Return what is wrong with an output, compared with its source and alone."""
    return (*verify(out, source).problems, *verify(out).problems)


@pytest.mark.parametrize(("preset", "dtype", "moe"), CASES)
def test_a_whole_output_of_llm_compressor_has_no_problem(
    preset: str, dtype: str, moe: bool, sources: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    out = as_llm_compressor(sources[dtype, moe], tmp_path / "out", preset, dtype, moe=moe)
    assert _problems(sources[dtype, moe], out) == ()


@pytest.fixture(scope="module")
def outputs(
    sources: dict[tuple[str, bool], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("outputs")
    presets = ("W4A16", "W8A8", "FP8_BLOCK", "MXFP4", "NVFP4A16")
    source = sources["bfloat16", False]
    return {p: as_llm_compressor(source, root / p, p, "bfloat16", moe=False) for p in presets}


Damage = Callable[[Path], object]


def _set(name: str, value: float, at: tuple[int, ...] = (0, 0)) -> Damage:
    return lambda out: change_tensor(out, name, lambda t: t.__setitem__(at, value))


def _bit(name: str, bit: int, at: tuple[int, ...]) -> Damage:
    def flip(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8)[at] ^= 1 << bit

    return lambda out: change_tensor(out, name, flip)


def _nonzero(out: Path) -> None:
    """Set the scale of a block of NVFP4 to 0 whose codes are not zeros."""
    packed = load_file(shard_of(out, f"{Q}.weight_packed"))[f"{Q}.weight_packed"]
    row, column = torch.nonzero(packed[7:] & 0x77)[0].tolist()
    _set(f"{Q}.weight_scale", 0.0, (row + 7, column // 8))(out)


def _drop(*names: str) -> Damage:
    return lambda out: replace_tensors(
        out, shard_of(out, names[0]), lambda t: [t.pop(name) for name in names]
    )


def _drop_layer(out: Path) -> None:
    names = [name for name in load_file(shard_of(out, f"{Q}.weight_scale")) if name.startswith(Q)]
    _drop(*names)(out)


def _add(name: str, tensor: torch.Tensor) -> Damage:
    return lambda out: replace_tensors(out, out / SHARDS[0], lambda t: t.__setitem__(name, tensor))


def _cache(first: torch.Tensor) -> Damage:
    """Add scales of keys and values of all layers, one of which is given."""
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    scales = {name: torch.tensor([0.5], dtype=torch.bfloat16) for name in names} | {names[0]: first}
    return lambda out: replace_tensors(out, out / SHARDS[0], lambda t: t.update(scales))


def _swap_names(out: Path) -> None:
    (out / SHARDS[0]).rename(out / "x")
    (out / SHARDS[1]).rename(out / SHARDS[0])
    (out / "x").rename(out / SHARDS[1])


def _one_twice(out: Path) -> None:
    shutil.copyfile(out / SHARDS[0], out / SHARDS[1])


def _swap_layers(out: Path) -> None:
    """Give two projections of the same shape each other's codes and scales."""
    k, v = "model.layers.0.self_attn.k_proj.", "model.layers.0.self_attn.v_proj."

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("weight_packed", "weight_scale"):
            tensors[k + suffix], tensors[v + suffix] = tensors[v + suffix], tensors[k + suffix]

    replace_tensors(out, shard_of(out, k + "weight_scale"), swap)


def _foreign_shard(out: Path) -> None:
    """Put in a shard of another model's output, with the same names and shapes."""
    path = out / SHARDS[1]
    tensors = load_file(path)
    packed = {name: tensor.flip(0) for name, tensor in tensors.items() if name.endswith("weight_packed")}
    save_file({**tensors, **{name: tensor.contiguous() for name, tensor in packed.items()}}, path)


def _weights(**fields: object) -> Damage:
    def change(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"].update(fields)

    return lambda out: change_json(out / "config.json", change)


def _quantization(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda out: change_json(out / "config.json", lambda c: change(c["quantization_config"]))


def _json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda out: change_json(out / name, change)


def _targets(config: dict[str, Any]) -> None:
    for group in config["config_groups"].values():
        group["targets"] = ["re:.*(q|k|v|o|gate|up)_proj$"]


DAMAGES: tuple[tuple[str, str, Damage, str, str], ...] = (
    ("a NaN scale", "W4A16", _set(SCALE, NAN), Q, "scale 1 (=nan) of block (0, 0) must"),
    ("an infinite scale", "W8A8", _set(SCALE, INF), Q, "scale 1 (=inf) of block (0, 0)"),
    ("a NaN of e4m3", "NVFP4A16", _set(SCALE, NAN, (9, 3)), Q, "(=nan) of block (9, 3)"),
    ("a NaN of e8m0", "MXFP4", _set(SCALE, 255, (9, 3)), Q, "(=nan) of block (9, 3) must"),
    ("a NaN of a block", "FP8_BLOCK", _set(SCALE, NAN, (1, 1)), Q, "(=nan) of block"),
    ("a negative scale", "W4A16", _set(SCALE, -1.0, (9, 1)), Q, "times the proven bound"),
    ("a negative e4m3", "NVFP4A16", _set(SCALE, -1.0), Q, "rows from 0 on: a scale is negative"),
    ("a zero scale", "W8A8", _set(SCALE, 0.0), Q, "(=0.0) of block (0, 0) must be finite"),
    ("a zero scale over codes", "NVFP4A16", _nonzero, Q, "is 0, but not all of its codes are"),
    ("a zero tensor scale", "NVFP4A16", _set(f"{Q}.weight_global_scale", 0.0, (0,)), Q, "scale 2 (=0.0)"),
    ("a flipped bit of a code", "FP8_BLOCK", _bit(f"{Q}.weight", 6, (1, 1)), Q, "times the proven bound"),
    ("a flipped bit of a nibble", "MXFP4", _bit(PACKED, 2, (1, 1)), Q, "times the proven bound"),
    ("a flipped bit of a word", "W4A16", _bit(PACKED, 3, (1, 1)), Q, "times the proven bound"),
    ("a flipped bit of a scale", "W8A8", _bit(SCALE, 7, (1, 0)), Q, "times the proven bound"),
    ("a flipped bit of a norm", "W8A8", _bit(NORM, 0, (0,)), NORM, "its bytes are not those of the original"),
    ("no scale", "W4A16", _drop(SCALE), Q, "weight_scale is missing, which"),
    ("no tensor scale", "NVFP4A16", _drop(f"{Q}.weight_global_scale"), Q, "weight_global_scale is missing"),
    ("no norm", "W8A8", _drop(NORM), NORM, "it is missing"),
    ("no layer", "W4A16", _drop_layer, f"{Q}.weight", "it is missing"),
    ("a tensor too many", "W8A8", _add("x.bias", torch.ones(3)), "x.bias", "the original has no such tensor"),
    ("columns reordered", "W4A16", _add(f"{Q}.weight_g_idx", torch.zeros(256, dtype=torch.int32)), Q,
     "its weight_g_idx puts columns into groups out of order, but actorder"),
    ("a layer that is ignored", "W8A8", _quantization(lambda c: c["ignore"].append(Q)), Q,
     "it is quantized, but the configuration ignores it, so loaders would not find it"),
    ("a head that is not ignored", "W8A8", _quantization(lambda c: c.update(ignore=[])), "lm_head",
     "neither quantized nor ignored by the configuration"),
    ("a model's size", "W8A8", _json("config.json", lambda c: c.update(hidden_size=255)), "config.json",
     "'hidden_size' is 255, but 256 in the original"),
    ("a total size", "W8A8", _json(INDEX, lambda i: i["metadata"].update(total_size=1)), INDEX,
     "total_size is 1, but the tensors have"),
    ("a scale of inputs", "W8A8", _add(f"{Q}.input_scale", torch.tensor([NAN])), f"{Q}.input_scale",
     "the scale nan must be finite and positive"),
    ("a scale of the cache", "W8A8", _cache(torch.zeros(1)),
     "model.layers.0.self_attn.k_scale", "the scale 0.0 must be finite and positive"),
)  # fmt: skip
# What more than one layer suffers from: the one that is looked at is among those that are named.
WIDE: tuple[tuple[str, str, Damage, str, str], ...] = (
    ("layers swapped", "MXFP4", _swap_layers, "model.layers.0.self_attn.k_proj", "times the proven bound"),
    ("a foreign shard", "MXFP4", _foreign_shard, "model.layers.0.mlp.down_proj", "times the proven bound"),
    ("a group size", "W4A16", _weights(group_size=64), Q, "but must be BF16 of shape [256, 4] for a weight"),
    ("a number of bits", "W4A16", _weights(num_bits=8), Q, "but must be I32 of shape [256, 64] for a weight"),
    ("a shape of blocks", "FP8_BLOCK", _weights(block_structure=[64, 128]), Q, "be BF16 of shape [4, 2]"),
    ("a layer of no group", "W8A8", _quantization(_targets), DOWN, "no group of the configuration names"),
)  # fmt: skip


@pytest.mark.parametrize("case", [*DAMAGES, *WIDE], ids=lambda case: case[0])
def test_a_planted_damage_is_found_with_its_sentence(
    case: tuple[str, str, Damage, str, str], sources: dict[tuple[str, bool], Path],
    outputs: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    _, preset, damage, where, what = case
    out = shutil.copytree(outputs[preset], tmp_path / "out")
    damage(out)
    problems = verify(out, sources["bfloat16", False]).problems
    assert any(problem.where == where and what in problem.what for problem in problems), problems
    if case in DAMAGES:
        assert {problem.where for problem in problems} == {where}


@pytest.mark.parametrize("damage", [_swap_names, _one_twice])
def test_shards_with_each_others_names_are_refused_by_the_index(
    damage: Damage, outputs: dict[str, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(outputs["W8A8"], tmp_path / "out")
    damage(out)
    with pytest.raises(CheckpointError, match=r"tensors in another shard: .* lies in|is in both"):
        verify(out)


def test_scales_of_inputs_and_of_the_cache_need_no_original(
    sources: dict[tuple[str, bool], Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    """The control: llm-compressor writes them where inputs are calibrated or the cache is quantized."""
    out = shutil.copytree(outputs["W8A8"], tmp_path / "out")
    _add(f"{Q}.input_scale", torch.tensor([0.5]))(out)
    _add(f"{Q}.input_zero_point", torch.zeros(1, dtype=torch.int8))(out)
    _cache(torch.tensor([0.25], dtype=torch.bfloat16))(out)
    assert verify(out, sources["bfloat16", False]).problems == ()


OTHERS: tuple[tuple[dict[str, object], str], ...] = (
    ({"quant_method": "spqr", "bits": 4}, "SpQR"),
    ({"quant_method": "eetq"}, "EETQ"),
    ({"quant_method": "vptq"}, "VPTQ"),
    ({"quant_algo": "FP8"}, "a tool that is not known here"),
)  # fmt: skip


@pytest.mark.parametrize(("config", "tool"), OTHERS)
def test_layouts_that_are_not_read_are_said_to_be_and_not_half_checked(
    config: dict[str, object], tool: str, tmp_path: Path
) -> None:
    save_file({"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    rule = rf"is quantized by {tool} \(.*\), whose layout is not read here, so nothing was checked"
    with pytest.raises(CheckpointError, match=rule):
        verify(tmp_path)
    assert inspect_checkpoint(tmp_path).schemes == ()


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_file_of_another_tool_is_named_where_the_configuration_says_nothing(
    name: str, tmp_path: Path
) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{}")
    with pytest.raises(ZeropointError, match=rf"is quantized by .*\({name}\), whose layout is not read here"):
        verify(tmp_path)
