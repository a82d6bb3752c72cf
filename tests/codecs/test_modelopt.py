"""ModelOpt files: bytes that ModelOpt itself gave, configurations as it writes them, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import LLAMA, dequantized, save

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.modelopt import CODEC
from zeropoint.codecs.modelopt_config import ALGORITHMS, PRESETS, settings
from zeropoint.codecs.registry import DEFAULT
from zeropoint.errors import CheckpointError, UnsupportedError, ZeropointError

NVFP4, MXFP8 = PRESETS["nvfp4a16"].weight, PRESETS["mxfp8"].weight
Q, K, UP = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
HEAD = "lm_head"
SHAPE = (64, 128)


def vector() -> torch.Tensor:
    """Return blocks of eighths, of sixteenths, of tiny numbers and of zeros; the first number is -0.0."""
    eighths = [0, 53, 6, 28, 14, 50, -56, -25, -10, -11, 14, 55, -54, -29, -45, -31]
    sixteenths = [-49, 62, 16, -11, 41, 6, -20, -48, -47, 44, -6, 29, -40, -33, 35, 36]
    tiny = [48, -50, 10, -36, -57, -8, 26, -2, -25, -35, -52, 36, 12, 36, 41, 1]
    rows = torch.tensor([eighths, sixteenths, tiny, [0] * 16]).float()
    x = (rows * torch.tensor([2.0**-3, 2.0**-4, 2.0**-19, 1.0])[:, None]).reshape(1, 64)
    x[0, 0] = -0.0
    return x


def test_nvfp4_has_the_bytes_of_modelopt() -> None:
    # NVFP4QTensor.quantize(x, 16) of nvidia-modelopt 0.47 on a CPU. The scale of the second block is a tie,
    # which the order of its divisions decides; without the dialect it is 119.
    q = zp.quantize(vector(), NVFP4)
    assert q.scales[0].view(torch.uint8).tolist() == [[126, 120, 4, 56]]
    assert int(q.scales[1].view(torch.int32)) == 992651947
    wanted = "705173dfaa73dfde7ea316ec6e59de55e6d2af84dc5e52060000000000000000"
    assert q.data.numpy().tobytes().hex() == wanted
    ours = zp.quantize(vector(), NVFP4.removesuffix(":dialect=modelopt"))
    assert ours.scales[0].view(torch.uint8).tolist() == [[126, 119, 4, 0]]


def test_the_scales_of_blocks_of_zeros_are_one_and_others_at_least_the_smallest() -> None:
    x = torch.zeros(4, 16)
    x[0, 0], x[1, 0], x[2, 0] = 6.0 * 448, 6 * 2.0**-11, 2.0**-149
    q = zp.quantize(x, NVFP4)
    # _cast_per_block_scale_to_fp8 of nvidia-modelopt clamps to 2**-9; the quotient of the third block is 0.
    assert q.scales[0].float().flatten().tolist() == [448.0, 2.0**-9, 1.0, 1.0]


def test_mxfp8_has_the_bytes_of_modelopt() -> None:
    # MXFP8QTensor.quantize(x) of nvidia-modelopt 0.47 on a CPU.
    q = zp.quantize((torch.arange(-32, 32) * 7 / 4).reshape(1, 64), MXFP8)
    assert q.scales[0].view(torch.uint8).tolist() == [[124, 124]]
    assert q.data.numpy().tobytes().hex() == (
        "fefefdfdfcfcfbfbfafafaf9f9f8f8f7f6f5f4f3f2f2f1f0eeeceae9e6e2ded6"
        "00565e6266696a6c6e707172727374757677787879797a7a7a7b7b7c7c7d7d7e"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8_has_the_bytes_of_the_formula_of_modelopt(dtype: torch.dtype) -> None:
    # to_quantized_weight of nvidia-modelopt 0.47 (torch/export/quant_utils.py), whose one scale of a 16-bit
    # weight is no tensor with axes, so that torch rounds the quotient to 16 bits first.
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(8)).to(dtype)
    scale = x.abs().amax(1).float() / 448
    q = zp.quantize(x, PRESETS["fp8_dynamic"].weight)
    assert torch.equal(q.scales[0].reshape(-1), scale)
    assert torch.equal(q.data, (x / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8))
    wide, whole = x.float(), x.abs().max().float() / 448
    q = zp.quantize(wide, PRESETS["fp8"].weight)
    assert float(q.scales[0]) == float(whole)
    assert torch.equal(q.data, (wide / whole).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_package_itself_gives_the_same_bytes(dtype: torch.dtype) -> None:
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    mxfp8 = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp8_tensor").MXFP8QTensor
    generator = torch.Generator().manual_seed(5)
    for number in range(60):
        x = torch.randn(32, 64, generator=generator)
        if number % 3 == 1:
            x *= torch.exp(2 * torch.randn(32, 4, generator=generator)).repeat_interleave(16, 1)
        x = ((x * 8).round() / 8 if number % 3 == 2 else x).to(dtype)
        x[3], x[5, :16], x[6, :16] = 0.0, -0.0, 2.0**-20
        theirs, scale, whole = nvfp4.quantize(x.clone(), 16)
        q = zp.quantize(x, NVFP4)
        assert torch.equal(q.data, theirs._quantized_data)
        assert torch.equal(q.scales[0].view(torch.uint8), scale.view(torch.uint8))
        assert float(q.scales[1]) == float(whole)
        values = theirs.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
        assert torch.equal(q.dequantize(torch.float32), values)
        theirs, scale = mxfp8.quantize(x.clone())
        q = zp.quantize(x, MXFP8)
        assert torch.equal(q.scales[0].view(torch.uint8), scale)
        assert torch.equal(q.data, theirs._quantized_data.view(torch.uint8))


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def checkpoint(folder: Path, *, head: str = HEAD) -> Path:
    tensors = {f"{name}.weight": weight(*SHAPE) * (2 if name == K else 1) for name in (Q, K, UP)}
    return save(folder, tensors | {f"{head}.weight": weight(96, 128)}, LLAMA)


def written(top: Path, to: Any = "nvfp4a16") -> Path:
    run(make_plan(open_source(checkpoint(top / "in")), to, codec=CODEC), top / "out")
    (top / "out" / "zeropoint_manifest.json").unlink()
    return top / "out"


def both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    return section, json.loads((folder / "hf_quant_config.json").read_text())


def set_section(folder: Path, section: Mapping[str, Any] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    added = {} if section is None else {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config | added))


def test_the_tensors_and_both_configurations_are_as_modelopt_writes_them(tmp_path: Path) -> None:
    out = written(tmp_path)
    tensors = load_file(out / "model.safetensors")
    found = {name.removeprefix(f"{UP}."): t for name, t in tensors.items() if name.startswith(UP)}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
        "weight": (torch.uint8, (64, 64)), "weight_scale": (torch.float8_e4m3fn, (64, 8)),
        "weight_scale_2": (torch.float32, ()),
    }  # fmt: skip
    assert float(found["weight_scale_2"]) == float(weight(*SHAPE).abs().max().float() / (6 * 448))
    # Layers that engines run as one have one scale.
    assert float(tensors[f"{Q}.weight_scale_2"]) == float(tensors[f"{K}.weight_scale_2"])
    producer = {"name": "modelopt", "version": "0.47.0"}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    section, other = both(out)
    assert section == {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}, "ignore": [HEAD],
        "quant_algo": "W4A16_NVFP4", "producer": producer, "quant_method": "modelopt",
    }  # fmt: skip
    assert other == {
        "producer": producer,
        "quantization": {
            "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
            "exclude_modules": [HEAD],
        },
    }  # fmt: skip


MIXED = RecipeText(
    text="{default: nvfp4a16, rules: [{name: '*.up_proj', preset: fp8_dynamic}]}", name="mixed"
)


def test_several_algorithms_name_each_layer(tmp_path: Path) -> None:
    out = written(tmp_path, MIXED)
    four = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {Q: four, K: four, UP: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    section, other = both(out)
    assert section["quantized_layers"] == other["quantization"]["quantized_layers"] == layers
    assert section["quant_algo"] == other["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert [group["targets"] for group in section["config_groups"].values()] == [[UP], [K, Q]]
    assert not zp.verify_checkpoint(out, tmp_path / "in").problems
    assert {str(s.scheme) for s in zp.inspect_checkpoint(out).schemes} == {
        PRESETS["nvfp4a16"].weight, str(layer_scheme("fp8_dynamic", CODEC).weight),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_package_itself_makes_the_section_of_the_file(tmp_path: Path) -> None:
    module = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    for number, to in enumerate(("nvfp4a16", "fp8_dynamic", "mxfp8", MIXED)):
        (tmp_path / str(number)).mkdir()
        section, other = both(written(tmp_path / str(number), to))
        assert module.convert_hf_quant_config_format(other) == section


def static(folder: Path, algorithm: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint with scales of inputs, its numbers as lists of one; return the decoded weights."""
    scheme, tensors, wanted = ALGORITHMS[algorithm].weight, {}, {}
    for name in (Q, UP):
        q = zp.quantize(weight(*SHAPE), scheme)
        numbers = ("weight_scale", "weight_scale_2") if len(q.scales) > 1 else ("weight_scale",)
        data = q.data if len(q.scales) > 1 else q.data.view(torch.float8_e4m3fn)
        stored = [q.scales[0], q.scales[-1].reshape(1)] if len(q.scales) > 1 else [q.scales[0].reshape(1)]
        tensors |= {f"{name}.weight": data, f"{name}.input_scale": torch.tensor(0.25)}
        tensors |= {f"{name}.{number}": t for number, t in zip(numbers, stored, strict=True)}
        wanted[f"{name}.weight"] = q.dequantize(torch.bfloat16)
    save(folder, tensors, LLAMA)
    table = {"quant_algo": algorithm.lower(), "kv_cache_quant_algo": None, "exclude_modules": ["lm_*"]}
    other = {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": table}
    (folder / "hf_quant_config.json").write_text(json.dumps(other))
    return wanted


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_files_with_scales_of_inputs_are_read_where_one_configuration_stands_alone(
    algorithm: str, tmp_path: Path
) -> None:
    wanted = static(tmp_path / "in", algorithm)
    assert not zp.verify_checkpoint(tmp_path / "in").problems
    (seen,) = zp.inspect_checkpoint(tmp_path / "in").schemes
    assert (seen.layers, seen.layout) == (2, algorithm)
    found = dequantized(tmp_path / "in", tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert found.keys() == wanted.keys()
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_model_in_memory_has_the_scale_of_inputs_of_the_file(algorithm: str, tmp_path: Path) -> None:
    static(tmp_path / "in", algorithm)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    kept = {name.replace(UP, "a"): t for name, t in tensors.items() if name.startswith(UP)}
    save_file(kept, tmp_path / "in" / "model.safetensors")
    loaded = zp.load_checkpoint(Model(), tmp_path / "in").model
    x = torch.linspace(-200, 200, 128).reshape(1, 128)
    given = ALGORITHMS[algorithm].input
    assert given is not None
    step = zp.QuantizationParams.new(0.25, 0, given) if algorithm == "FP8" else None
    blocks = x.reshape(8, 16).abs().amax(1, keepdim=True) / (6 * 0.25)
    scale = blocks.to(torch.float8_e4m3fn).float() * 0.25
    quantized = (
        zp.fake_quantize(x, step)
        if step is not None
        else zp.quantize(x.reshape(8, 16) / scale, "float4_e2m1fn:cast").dequantize() * scale
    )
    decoded = zp.quantize(weight(*SHAPE), ALGORITHMS[algorithm].weight).dequantize(torch.float32)
    assert torch.allclose(loaded(x), quantized.reshape(1, 128) @ decoded.t(), rtol=1e-5, atol=1e-3)


def test_compressed_tensors_has_the_same_values_where_the_tensor_scale_has_a_reciprocal() -> None:
    x = torch.tensor([[6.0 * 448 / 2, 3.0, -4.0, 1.0] * 4])  # weight_scale_2 is 1/2
    ours, theirs = zp.quantize(x, NVFP4), zp.quantize(x, layer_scheme("nvfp4a16", DEFAULT).weight)
    assert float(ours.scales[1]) * float(theirs.scales[1]) == 1.0
    assert torch.equal(ours.data, theirs.data)
    assert torch.equal(ours.scales[0].float(), theirs.scales[0].float())
    assert torch.equal(ours.dequantize(), theirs.dequantize())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("float8_e4m3fn:tensor", "input None does not go with weights in FP8; use"),
        ("float8_e4m3fn:channel", "use float8_e4m3fn:token"),
        ("float4_e2m1fn:g32:scale=floor", "not what ModelOpt stores"),
        ("int4:g128", "not what ModelOpt stores"),
        (NVFP4.replace("modelopt", "compressed-tensors"), "whose tensor scales are factors"),
        ("float8_e4m3fn:cast", "not what ModelOpt stores"),
    ],
)
def test_a_scheme_that_has_no_place_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        layer_scheme(text, CODEC)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ' of ModelOpt is not read here; known are NVFP4, "),
        ({"quant_algo": None}, "quant_algo is None, but must be text"),
        ({"quantization": []}, "must be an object"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "must be lists of names"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32, but NVFP4 has 16"),
        ({"quant_algo": "FP8", "group_size": 32}, "group_size is 32, but FP8 has no groups"),
        (
            {"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "config_groups has weights of 8 bits, but NVFP4 has 4",
        ),
        ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "needs quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}}, "quant_algo is None"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(config: dict[str, Any], rule: str) -> None:
    with pytest.raises(ZeropointError, match=rule):
        settings({"quant_method": "modelopt", **config})


def without(part: str, tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{UP}.{part}"]


def changed(part: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{part}": value})


DAMAGES = [
    (lambda t: without("weight_scale_2", t), "weight_scale_2 is missing, which W4A16_NVFP4 needs"),
    (lambda t: without("weight_scale", t), "weight_scale is missing"),
    (lambda t: without("weight", t), "weight is missing"),
    (changed("weight_scale", torch.ones(64, 8)), "weight_scale is F32 of shape .* must be F8_E4M3"),
    (changed("weight_scale_2", torch.ones(2)), r"weight_scale_2 is F32 of shape \[2\], but must be F32"),
    (changed("weight_scale_2", torch.tensor(-1.0)), "scale"),
    (changed("weight_scale", torch.full((64, 8), -1.0).to(torch.float8_e4m3fn)), "a scale is negative"),
    (changed("weight", torch.zeros(64, 60, dtype=torch.uint8)), "not a multiple of the group, 16"),
    (changed("weight", torch.zeros(64, dtype=torch.uint8)), r"weight has shape \[64\], but must be a matrix"),
    (changed("weight", torch.zeros(64, 64, dtype=torch.int8)), "weight is I8 of shape"),
    (changed("pre_quant_scale", torch.ones(128)), "pre_quant_scale is there, so that its weight is not"),
    (changed("svdquant_lora_a", torch.ones(128)), "svdquant_lora_a is there"),
]


@pytest.mark.parametrize(("damage", "rule"), DAMAGES)
def test_damage_is_found_and_named(damage: Any, rule: str, tmp_path: Path) -> None:
    out = written(tmp_path)
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors")
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    problems = [p for p in zp.verify_checkpoint(out).problems if "index" not in p.where]
    assert {problem.where for problem in problems} == {UP}
    assert any(re.search(rule, problem.what) for problem in problems), problems


def test_fused_experts_are_refused_and_not_skipped(tmp_path: Path) -> None:
    out = written(tmp_path)
    tensors = load_file(out / "model.safetensors")
    tensors["m.experts.down_proj"] = torch.zeros(2, 32, 32, dtype=torch.uint8)
    tensors["m.experts.down_proj_weight_scale"] = torch.ones(2, 32, 4).to(torch.float8_e4m3fn)
    save_file(tensors, out / "model.safetensors")
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    problems = {p.where: p.what for p in zp.verify_checkpoint(out).problems}
    assert "fused experts of ModelOpt are not read here" in problems["m.experts.down_proj"]


def test_configurations_that_contradict_each_other_or_the_tensors_are_refused(tmp_path: Path) -> None:
    out = written(tmp_path)
    section, other = both(out)
    for ignore in ([UP], ["model.layers.0.mlp*"]):
        set_section(out, section | {"ignore": ignore})
        (problem, *_) = zp.verify_checkpoint(out).problems
        assert "the configuration ignores it" in problem.what
    set_section(out, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"says FP8, but hf_quant_config.json W4A16_NVFP4"):
        zp.verify_checkpoint(out)
    layers = {Q: {"quant_algo": "W4A16_NVFP4"}, UP: {"quant_algo": "W4A8_AWQ"}, "gone": {"quant_algo": "FP8"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    set_section(out, {"quant_method": "modelopt", **mixed})
    (out / "hf_quant_config.json").write_text(json.dumps(other | {"quantization": mixed}))
    problems = {p.where: p.what for p in zp.verify_checkpoint(out).problems}
    assert "quantized_layers of the configuration does not name it" in problems[K]
    assert "'W4A8_AWQ' of ModelOpt is not read here" in problems[UP]
    assert "it is not there" in problems["gone"]
    (out / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json' is not a JSON object"):
        zp.verify_checkpoint(out)


def test_a_linear_layer_that_is_neither_quantized_nor_ignored_is_found(tmp_path: Path) -> None:
    out = written(tmp_path)
    section, _ = both(out)
    set_section(out, section | {"ignore": []})
    (problem,) = zp.verify_checkpoint(out).problems
    assert (problem.where, problem.what) == (HEAD, "neither quantized nor ignored by the configuration")


def test_a_kept_name_that_is_part_of_a_quantized_one_is_an_error(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", head="model.layers.0.mlp.up")
    text = "{default: nvfp4a16, rules: [{name: '*.mlp.up', keep: true}]}"
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.up' is kept, but loaders"):
        make_plan(open_source(source), RecipeText(text=text, name="r"), codec=CODEC)
