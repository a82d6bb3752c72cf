"""Experts in files of mlx-lm: stacked on the way there, apart on the way back, and run by mlx-lm itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.mlx import affine
from zeropoint.codecs.mlx_experts import MlxFormat, stacked
from zeropoint.errors import CheckpointError, NonFiniteError, ZeropointError

pytestmark = pytest.mark.rotating

EXPERTS, INNER, HIDDEN = 3, 64, 128
BLOCKS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
MLX_NAMES = ("gate_proj", "up_proj", "down_proj")
SHAPES = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
Tensors = dict[str, torch.Tensor]


def expert(family: str, number: int, at: int, layer: int = 0) -> str:
    """Return the module of a projection of an expert, as transformers has it."""
    block, names = BLOCKS[family]
    return f"model.layers.{layer}.{block}.experts.{number}.{names[at]}"


def stack(family: str, at: int, layer: int = 0) -> str:
    """Return the module that has it in mlx-lm."""
    return f"model.layers.{layer}.{BLOCKS[family][0]}.switch_mlp.{MLX_NAMES[at]}"


def tensors(family: str) -> Tensors:
    """Return the weights of a layer: the experts, a router, a projection of attention and a norm."""
    stream = torch.Generator().manual_seed(2)
    found = {
        f"{expert(family, n, at)}.weight": torch.randn(shape, generator=stream) * (n + 1)
        for n in range(EXPERTS)
        for at, shape in enumerate(SHAPES)
    }
    prefix = f"model.layers.0.{BLOCKS[family][0]}"
    found[f"{prefix}.gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=stream)
    found["model.layers.0.self_attn.q_proj.weight"] = torch.randn(HIDDEN, HIDDEN, generator=stream)
    found["model.layers.0.input_layernorm.weight"] = torch.ones(HIDDEN)
    return {name: x.bfloat16() for name, x in found.items()}


def checkpoint(
    folder: Path, family: str, *, shards: int = 1, said: dict[str, Any] | None = None, apart: bool = False
) -> Path:
    """Write such a layer, its tensors dealt out to files; apart: the second has later experts alone."""
    folder.mkdir()
    every = tensors(family)
    places = {name: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(every)}
    if apart:
        later = {name: ".experts." in name and ".experts.0." not in name for name in every}
        files = [f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")]
        places = {name: files[1 if later[name] else 2 * ("norm" in name)] for name in every}
    for place in set(places.values()):
        file = "model.safetensors" if shards == 1 else place
        save_file({name: x for name, x in every.items() if places[name] == place}, folder / file)
    if shards > 1:
        index = {"metadata": {"total_size": sum(x.nbytes for x in every.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = (
        {"model_type": family, "num_local_experts": EXPERTS, "dtype": "bfloat16"} if said is None else said
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def written(folder: Path) -> Tensors:
    """Return the tensors of all files, each of which may be in one."""
    found: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        more = load_file(file)
        assert not found.keys() & more.keys()
        found |= more
    return found


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("shards", [1, 3])
def test_each_expert_is_quantized_as_a_matrix_and_stacked(tmp_path: Path, family: str, shards: int) -> None:
    source = checkpoint(tmp_path / "in", family, shards=shards)
    zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")
    found, original = written(tmp_path / "out"), tensors(family)
    assert not [name for name in found if ".experts." in name]
    for at, (rows, columns) in enumerate(SHAPES):
        parts = {part: found.pop(f"{stack(family, at)}.{part}") for part in ("weight", "scales", "biases")}
        assert parts["weight"].shape == (EXPERTS, rows, columns * 4 // 32)
        assert parts["weight"].dtype == torch.uint32
        assert parts["scales"].shape == parts["biases"].shape == (EXPERTS, rows, columns // 64)
        for number in range(EXPERTS):
            q = zp.quantize(original[f"{expert(family, number, at)}.weight"], affine(4, 64))
            assert torch.equal(parts["weight"][number].view(torch.uint8).view(rows, -1), q.data)
            assert torch.equal(parts["scales"][number], q.params.stored[0])
            assert torch.equal(parts["biases"][number], q.params.stored[1])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written(tmp_path / "out").keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in written(tmp_path / "out").values())
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_a_shard_whose_experts_all_go_elsewhere_is_left_out(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral", shards=3, apart=True)
    zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")
    assert [file.name for file in sorted((tmp_path / "out").glob("*.safetensors"))] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="bfloat16")
    assert written(tmp_path / "floats").keys() == tensors("mixtral").keys()


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize(("layout", "scheme"), [
    ("compressed-tensors", "int4:g64:asym"), ("gptq", "int4:g64:asym"), ("gguf", "q4_1"), ("gguf", "q5_1"),
])  # fmt: skip
def test_experts_of_other_layouts_are_converted_without_loss(
    tmp_path: Path, family: str, layout: str, scheme: str
) -> None:
    source = checkpoint(tmp_path / "in", family)
    run(zp.plan_checkpoint(source, scheme, format=layout), tmp_path / "theirs")
    zp.convert_checkpoint(tmp_path / "theirs", tmp_path / "mlx", "mlx")
    assert zp.verify_checkpoint(tmp_path / "mlx").ok
    assert written(tmp_path / "mlx")[f"{stack(family, 0)}.weight"].shape[0] == EXPERTS
    for name in ("theirs", "mlx"):
        zp.convert_checkpoint(tmp_path / name, tmp_path / f"{name}-floats", to="float32")
    ours, theirs = written(tmp_path / "mlx-floats"), written(tmp_path / "theirs-floats")
    assert ours.keys() == theirs.keys() == tensors(family).keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)


def test_mlx_layers_are_converted_to_experts_of_other_layouts(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral")
    zp.quantize_checkpoint(source, tmp_path / "mlx", "mxfp4_e2m1", format="mlx")
    zp.convert_checkpoint(tmp_path / "mlx", tmp_path / "out", "compressed-tensors")
    found = written(tmp_path / "out")
    for number in range(EXPERTS):
        for at in range(3):
            q = zp.quantize(tensors("mixtral")[f"{expert('mixtral', number, at)}.weight"], "mxfp4_e2m1")
            assert torch.equal(found[f"{expert('mixtral', number, at)}.weight_packed"], q.data)
    zp.convert_checkpoint(tmp_path / "out", tmp_path / "back", "mlx")
    ours, theirs = written(tmp_path / "back"), written(tmp_path / "mlx")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_kept_experts_are_stacked_as_floats_and_come_back(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "qwen3_moe")
    recipe = "rules:\n  - {name: '*.experts.*', keep: true}\n  - {type: Linear, preset: mlx_int8}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    zp.quantize_checkpoint(source, tmp_path / "out", RecipeText.read(tmp_path / "recipe.yaml"), format="mlx")
    found = written(tmp_path / "out")[f"{stack('qwen3_moe', 2)}.weight"]
    assert found.shape == (EXPERTS, HIDDEN, INNER)
    assert torch.equal(found[1], tensors("qwen3_moe")[f"{expert('qwen3_moe', 1, 2)}.weight"])
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="float32")
    assert written(tmp_path / "floats").keys() == tensors("qwen3_moe").keys()


def test_schemes_of_stacks_are_named_as_mlx_lm_names_them(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral")
    recipe = "rules:\n  - {name: '*.w2', preset: mlx_int8}\n  - {type: Linear, preset: mlx_int4}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    zp.quantize_checkpoint(source, tmp_path / "out", RecipeText.read(tmp_path / "recipe.yaml"), format="mlx")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    eight = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert said == {"group_size": 64, "bits": 4, "mode": "affine", stack("mixtral", 2): eight}
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_one_stack_has_one_scheme(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral")
    recipe = "rules:\n  - {name: '*.experts.1.w2', preset: mlx_int8}\n  - {type: Linear, preset: mlx_int4}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(CheckpointError, match=r"switch_mlp.down_proj.weight' holds 3 experts in one shape"):
        zp.quantize_checkpoint(
            source, tmp_path / "out", RecipeText.read(tmp_path / "recipe.yaml"), format="mlx"
        )


def changed(folder: Path, part: str, value: torch.Tensor | None) -> Path:
    """Change a part of the first stack of a file of MLX, or leave it out; there is no manifest."""
    found = load_file(folder / "model.safetensors")
    name = f"{stack('mixtral', 0)}.{part}"
    stored = found.pop(name, None)
    if value is not None:
        assert stored is None or value.dtype == stored.dtype
        found[name] = value
    save_file(found, folder / "model.safetensors")
    for left in ("zeropoint_manifest.json", "model.safetensors.index.json"):
        (folder / left).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize(("part", "shape", "value", "message"), [
    ("weight", (1, 3, 64, 16), 0, "weight has shape [1, 3, 64, 16]; only matrices are read, and experts as"),
    ("weight", (2, 64, 16), 0, "'model.layers.0.block_sparse_moe.experts.2.w1': weight is missing"),
    ("weight", (3, 64, 0), 0, "'model.layers.0.block_sparse_moe.experts.0.w1': weight is missing"),
    ("weight", (3, 64, 12), 0, "last axis 96 is not a multiple of the group, 64"),
    ("scales", (2, 64, 2), 1, "'model.layers.0.block_sparse_moe.experts.2.w1': scales is missing"),
    ("scales", (3, 64, 3), 1, "scales is BF16 of shape [64, 3], but must be BF16 of shape [64, 2]"),
    ("scales", (3, 64, 2), float("nan"), "scale 1 (=nan) of block (0, 0) must be finite"),
    ("biases", (3, 64, 2), float("inf"), "offset 1 must be finite in every block"),
    ("biases", (4, 64, 2), 0, "'model.layers.0.block_sparse_moe.experts.3.w1': weight is missing"),
    ("scales", None, 0, "'model.layers.0.block_sparse_moe.experts.0.w1': scales is missing"),
    ("biases", None, 0, "'model.layers.0.block_sparse_moe.experts.0.w1': biases is missing"),
])  # fmt: skip
def test_what_is_wrong_with_a_stack_is_one_sentence(
    tmp_path: Path, part: str, shape: tuple[int, ...] | None, value: float, message: str
) -> None:
    zp.quantize_checkpoint(checkpoint(tmp_path / "in", "mixtral"), tmp_path / "out", "mlx_int4", format="mlx")
    dtype = torch.uint32 if part == "weight" else torch.bfloat16
    wrong = None if shape is None else torch.full(shape, value, dtype=dtype)
    folder = changed(tmp_path / "out", part, wrong)
    assert any(message in str(problem) for problem in zp.verify_checkpoint(folder).problems)
    with pytest.raises(ZeropointError):
        zp.convert_checkpoint(folder, tmp_path / "again", "mlx")
    with pytest.raises(ZeropointError):
        zp.convert_checkpoint(folder, tmp_path / "floats", to="float32")
    unread = "missing" in message or "shape" in message or "last axis" in message
    assert ("some layers cannot be read" in "".join(zp.inspect_checkpoint(folder).summary)) == unread


def test_numbers_that_are_not_finite_are_not_carried_into_another_file(tmp_path: Path) -> None:
    zp.quantize_checkpoint(checkpoint(tmp_path / "in", "mixtral"), tmp_path / "out", "mlx_int4", format="mlx")
    folder = changed(tmp_path / "out", "biases", torch.full((3, 64, 2), float("inf"), dtype=torch.bfloat16))
    with pytest.raises(NonFiniteError, match="contains 8,192 non-finite values, first at row 0, column 0"):
        zp.convert_checkpoint(folder, tmp_path / "again", "mlx")


def test_scales_of_whole_experts_are_refused_and_not_left_out(tmp_path: Path) -> None:
    source, scheme = checkpoint(tmp_path / "in", "mixtral"), "float4_e2m1fn:g16:scale=float8_ue4m3fn"
    zp.quantize_checkpoint(source, tmp_path / "out", scheme, format="mlx")
    found = load_file(tmp_path / "out" / "model.safetensors")
    found[f"{stack('mixtral', 0)}.global_scale"] = torch.ones(EXPERTS)  # of quantize_model(global_scale=True)
    save_file(found, tmp_path / "out" / "model.safetensors")
    for left in ("zeropoint_manifest.json", "model.safetensors.index.json"):
        (tmp_path / "out" / left).unlink(missing_ok=True)
    problems = [str(problem) for problem in zp.verify_checkpoint(tmp_path / "out").problems]
    assert len(problems) == EXPERTS
    assert all("global_scale has no place in nvfp4" in problem for problem in problems)
    with pytest.raises(ZeropointError, match="global_scale has no place in nvfp4"):
        zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="float32")


def test_experts_that_the_configuration_does_not_count_are_named(tmp_path: Path) -> None:
    zp.quantize_checkpoint(checkpoint(tmp_path / "in", "mixtral"), tmp_path / "out", "mlx_int4", format="mlx")
    folder = changed(tmp_path / "out", "nothing", None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 2}))
    problems = [str(problem) for problem in zp.verify_checkpoint(folder).problems]
    assert len(problems) == 3
    assert all("of expert 2, but config.json counts 2 experts" in problem for problem in problems)


@pytest.mark.parametrize(("said", "number"), [
    ({"model_type": "mixtral"}, "nothing"), ({"model_type": "mixtral", "num_local_experts": 2}, "2"),
    ({"model_type": "mixtral", "num_local_experts": [3]}, "nothing"),
])  # fmt: skip
def test_the_configuration_must_count_the_experts(tmp_path: Path, said: dict[str, Any], number: str) -> None:
    source = checkpoint(tmp_path / "in", "mixtral", said=said)
    with pytest.raises(CheckpointError, match=f"config.json says of their number {number}"):
        zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    said = {"model_type": "mixtral", "num_local_experts": 4}
    source = checkpoint(tmp_path / "in", "mixtral", said=said)
    with pytest.raises(CheckpointError, match=r"holds 4 experts, and 3 is not in the checkpoint"):
        zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")


def test_an_expert_alone_and_in_a_stack_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral")
    zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")
    found = written(tmp_path / "out")
    twice = {f"{expert('mixtral', 1, 0)}.scales": torch.ones(INNER, 2)}
    (tmp_path / "bad").mkdir()
    save_file(found | twice, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(CheckpointError, match="there twice, alone and among all experts"):
        zp.inspect_checkpoint(tmp_path / "bad")


def test_names_that_are_no_stacks_are_left_as_they_are() -> None:
    form = MlxFormat()
    for name, shape in [
        ("a.switch_mlp.fc1.weight", (2, 4, 4)), ("a.switch_mlp.up_proj.weight", (4, 4)),
        ("switch_mlp.up_proj.weight", (2, 4, 4)), ("a.switch_mlp.up_proj.weight", (0, 4, 4)),
        ("a.switch_mlp.up_proj.weight", (1 << 20, 1, 1)), ("a.switch_mlp.up_proj.scales", (2, 4)),
    ]:  # fmt: skip
        assert form.parts(name, shape) == (), name
    for name in (
        "a.experts.gate_up_proj",
        "a.experts.3.w9.weight",
        "a.mlp.experts.0.w1.weight",
        "a.w1.weight",
    ):
        assert stacked(name) is None, name


def model(kind: str, folder: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    inner = {"moe_intermediate_size": 64, "num_experts": 4}
    config, causal, more = {
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM, inner),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            inner | {"head_dim": 16},
        ),
        "olmoe": (
            transformers.OlmoeConfig,
            transformers.OlmoeForCausalLM,
            {"num_experts": 4, "eos_token_id": 2},
        ),
    }[kind]
    torch.manual_seed(6)
    causal(config(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=64,
        num_key_value_heads=2, num_experts_per_tok=2, **more,
    )).bfloat16().save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("preset", ["mlx_int4", "mxfp4_e2m1"])
def test_mlx_lm_runs_stacks_as_transformers_runs_their_floats(tmp_path: Path, kind: str, preset: str) -> None:
    mx, utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    zp.quantize_checkpoint(model(kind, tmp_path / "in"), tmp_path / "out", preset, format="mlx")
    zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="float32")
    ids = [[1, 5, 9, 33, 2]]
    theirs, _ = utils.load_model(tmp_path / "out")
    theirs.set_dtype(mx.float32)
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    with torch.no_grad():
        wanted = floats(torch.tensor(ids)).logits.numpy()
    found = np.array(theirs(mx.array(ids)).astype(mx.float32))
    assert np.abs(wanted).max() > 0.05
    assert np.abs(found - wanted).max() < 2e-6  # sums of floats in another order


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_files_that_mlx_lm_writes_have_our_bytes(tmp_path: Path, kind: str) -> None:
    mx, utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    source = model(kind, tmp_path / "in")
    zp.quantize_checkpoint(source, tmp_path / "out", "mlx_int4", format="mlx")
    config = json.loads((source / "config.json").read_text()) | {"rope_theta": 1e6}
    config["num_experts"] = 4
    (source / "config.json").write_text(json.dumps(config))
    theirs, config = utils.load_model(source)
    theirs, config = utils.quantize_model(
        theirs, config, 64, 4, quant_predicate=lambda path, _: path[-4:] != "gate"
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(utils.tree_flatten(theirs.parameters())))
    found, ours = load_file(tmp_path / "model.safetensors"), written(tmp_path / "out")
    stacks = [name for name in found if ".switch_mlp." in name]
    assert len(stacks) == 2 * 3 * 3
    assert all(torch.equal(found[name], ours[name]) for name in stacks)
