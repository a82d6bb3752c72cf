"""Scales of static inputs and of a cache in another layout: the same numbers, under its names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import CONFIG, ONE, save, tensors_of, weight
from tests.peers import Peer, transformers
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.checkpoint.plan.additions import with_added
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from zeropoint.checkpoint.plan.file import PlanFile, write_plan
from zeropoint.checkpoint.plan.row_reader import NewTensor
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, UnsupportedError

finegrained_fp8 = Peer("transformers.integrations.finegrained_fp8")

ATTENTION = "model.layers.0.self_attn"
MODULES = {f"{ATTENTION}.q_proj": 0.0123, f"{ATTENTION}.k_proj": 3.7}
"""Layers, and a number for the scale of their inputs."""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, whose tensor scales in NVFP4 are powers of two: the largest magnitude is 2688 / 4096."""
    tensors = {}
    for seed, name in enumerate(MODULES):
        tensors[f"{name}.weight"] = weight(128, 256, seed=seed, dtype=torch.bfloat16).clamp(-0.6, 0.6)
        tensors[f"{name}.weight"][0, 0] = 2688 / 4096
    config = {**CONFIG, "torch_dtype": "bfloat16"}
    return save(tmp_path_factory.mktemp("floats") / "model", tensors, config)


def static(
    floats: Path, out: Path, to: str, layout: str, scales: Mapping[str, float] = MODULES, *,
    zero: bool = False,
) -> Path:  # fmt: skip
    """Write a checkpoint with static inputs, whose scales are given."""
    codec = get_codec(layout)
    plan, names = make_plan(open_source(floats), to, codec=codec, limits=ONE), codec.input_names
    assert names is not None
    added = []
    for item in plan.weights:
        assert item.layer.input is not None
        value = torch.tensor(scales[item.module]).reshape(names.shape)
        suffix = names.needed(item.layer.input)
        added.append(NewTensor(f"{item.module}.{suffix}", item.source, value))
        if zero:
            point = torch.full(names.shape, -3, dtype=torch.int8)
            added.append(NewTensor(f"{item.module}.{names.zero_point}", item.source, point))
    run(with_added(plan, added), out)
    return out


def plan_of(source: Path, layout: str, to: str | None = None, **options: Any) -> CheckpointPlan:
    return conversion_plan(open_source(source), to, get_codec(layout), limits=ONE, **options)


def converted(source: Path, out: Path, layout: str, to: str | None = None, **options: Any) -> RunResult:
    return run(plan_of(source, layout, to, **options), out)


def section(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


def scales_in(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    found = tensors_of(folder).items()
    return {name.removesuffix(f".{suffix}"): x for name, x in found if name.endswith(f".{suffix}")}


def test_a_static_scale_of_compressed_tensors_is_that_of_modelopt_and_back(
    floats: Path, tmp_path: Path
) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors")
    assert converted(source, tmp_path / "out", "modelopt").error.largest == 0
    assert section(tmp_path / "out")["quant_algo"] == "FP8"
    assert scales_in(tmp_path / "out", "input_scale") == {n: torch.tensor(x) for n, x in MODULES.items()}
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    assert converted(tmp_path / "out", tmp_path / "back", "compressed-tensors").error.largest == 0
    groups = section(tmp_path / "back")["config_groups"]
    (given,) = (group["input_activations"] for group in groups.values())
    assert (given["num_bits"], given["type"], given["strategy"], given["dynamic"]) == (
        8, "float", "tensor", False,
    )  # fmt: skip
    old, new = tensors_of(source), tensors_of(tmp_path / "back")
    assert all(torch.equal(old[f"{n}.input_scale"], new[f"{n}.input_scale"]) for n in MODULES)


def test_a_static_scale_goes_to_quark_and_back(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors")
    converted(source, tmp_path / "out", "quark")
    given = section(tmp_path / "out")["global_quant_config"]["input_tensors"]
    assert (given["dtype"], given["qscheme"], given["is_dynamic"]) == ("fp8_e4m3", "per_tensor", False)
    converted(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    found = scales_in(tmp_path / "back", "input_scale")
    assert found == {n: torch.tensor([x]) for n, x in MODULES.items()}


def test_a_zero_point_goes_with_its_scale(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "w8a8_static", "compressed-tensors", zero=True)
    converted(source, tmp_path / "out", "compressed-tensors", "int8:channel")
    assert not scales_in(tmp_path / "out", "input_zero_point")
    result = converted(source, tmp_path / "same", "compressed-tensors")
    assert result.error.largest == 0
    zeros = scales_in(tmp_path / "same", "input_zero_point")
    assert [(x.dtype, x.tolist()) for x in zeros.values()] == [(torch.int8, [-3])] * 2
    (group,) = section(tmp_path / "same")["config_groups"].values()
    assert (group["input_activations"]["symmetric"], group["input_activations"]["dynamic"]) == (False, False)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_both_names_of_static_scales_in_fp8_files_are_read(name: str, floats: Path, tmp_path: Path) -> None:
    source = fp8(floats, tmp_path / "source", {f"{n}.{name}": torch.tensor(x) for n, x in MODULES.items()})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    (source / "config.json").write_text(json.dumps(config))
    converted(source, tmp_path / "out", "compressed-tensors")
    assert scales_in(tmp_path / "out", "input_scale") == {n: torch.tensor([x]) for n, x in MODULES.items()}
    (group,) = section(tmp_path / "out")["config_groups"].values()
    assert group["input_activations"]["dynamic"] is False


def fp8(floats: Path, out: Path, more: Mapping[str, torch.Tensor], to: str = "float8_e4m3fn:tensor") -> Path:
    """Write a checkpoint in the fp8 layout, with more tensors."""
    run(make_plan(open_source(floats), to, codec=get_codec("fp8-block"), limits=ONE), out)
    save_file({**tensors_of(out), **more}, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_static_scale_goes_to_the_fp8_layout_as_transformers_has_it_and_back(
    floats: Path, tmp_path: Path
) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors")
    assert converted(source, tmp_path / "out", "fp8-block").error.largest == 0
    said, theirs = section(tmp_path / "out"), finegrained_fp8.FP8Linear(256, 128, None, "static").state_dict()
    assert (said["activation_scheme"], said["weight_block_size"]) == ("static", None)
    stored = tensors_of(tmp_path / "out")
    for module, number in MODULES.items():
        own = {name: stored[f"{module}.{name}"] for name in theirs}
        assert own["activation_scale"] == torch.tensor(number)
        assert own["activation_scale"].dtype is theirs["activation_scale"].dtype
        assert all(x.shape == theirs[name].shape for name, x in own.items())
    assert len(stored) == len(MODULES) * len(theirs)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    converted(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    assert scales_in(tmp_path / "back", "input_scale") == {n: torch.tensor([x]) for n, x in MODULES.items()}


def test_a_scale_of_inputs_that_is_missing_from_an_fp8_file_is_a_problem(
    floats: Path, tmp_path: Path
) -> None:
    source = static(floats, tmp_path / "source", "fp8", "fp8-block")
    name = f"{ATTENTION}.q_proj.activation_scale"
    save_file({n: x for n, x in tensors_of(source).items() if n != name}, source / "model.safetensors")
    found = [problem.what for problem in zp.verify_checkpoint(source).problems]
    assert "its inputs have a fixed scale in the configuration, but activation_scale is missing" in found


@pytest.mark.parametrize(
    ("grid", "block", "layout"),
    [
        ((1, 1), None, "compressed-tensors"), ((1, 1), None, "modelopt"), ((2, 1), None, "fp8-block"),
        ((2, 2), [128, 128], "compressed-tensors"), ((2, 2), [128, 128], "fp8-block"),
    ],
)  # fmt: skip
def test_static_scales_of_fused_experts_go_to_each_matrix(
    grid: tuple[int, int], block: list[int] | None, layout: str, tmp_path: Path
) -> None:
    source, tensors = fused_experts(tmp_path / "source", grid, block)
    plan = plan_of(source, layout)
    assert not any("left out" in note for note in plan.notes)
    assert run(plan, tmp_path / "out").error.largest == 0
    names = get_codec(layout).input_names
    assert names is not None
    stored, found = tensors_of(tmp_path / "out"), scales_in(tmp_path / "out", names.scale)
    for expert in range(EXPERTS):
        for kind, fused in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj",) * 2):
            number = tensors[f"{MOE}.{fused}_activation_scale"][expert]
            assert torch.equal(found.pop(f"{MOE}.{expert}.{kind}"), number.reshape(names.shape))
        gate = stored[f"{MOE}.{expert}.gate_proj.weight"]
        assert same_bytes(gate, tensors[f"{MOE}.gate_up_proj"][expert, :128])
    assert not found
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    said = json.dumps(section(tmp_path / "out"))
    assert ("128, 128" in said) is (block is not None)


def test_one_static_scale_for_all_experts_goes_to_each_and_other_counts_are_refused(tmp_path: Path) -> None:
    source, tensors = fused_experts(tmp_path / "source", (1, 1), None)
    for count in (1, 2):
        changed = {n: torch.full((count,), 0.5) if "activation" in n else x for n, x in tensors.items()}
        save_file(changed, source / "model.safetensors")
        if count == 1:
            converted(source, tmp_path / "out", "compressed-tensors")
            assert [float(x) for x in scales_in(tmp_path / "out", "input_scale").values()] == [0.5] * 9
            continue
        with pytest.raises(CheckpointError, match=r"must be one number, or one for each of 3 experts"):
            plan_of(source, "compressed-tensors")


EXPERTS, MOE = 3, "model.layers.0.mlp.experts"


def fused_experts(
    out: Path, grid: tuple[int, int], block: list[int] | None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write fused experts with static inputs under the names that transformers has; grid: of gate and up."""
    config = transformers.MixtralConfig(num_local_experts=EXPERTS, hidden_size=256, intermediate_size=128)
    theirs = finegrained_fp8.FP8Experts(config, block and (block[0], block[1]), "static").state_dict()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, x in theirs.items():
        one = name == "gate_up_proj_scale_inv" and block is None
        values = torch.rand((EXPERTS, *grid) if one else x.shape, generator=generator) + 0.01
        tensors[f"{MOE}.{name}"] = values.to(x.dtype)
    assert sum("activation_scale" in name for name in tensors) == 2
    quantized = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    return save(out, tensors, {"model_type": "mixtral", "quantization_config": quantized}), tensors


def test_dynamic_inputs_of_fp8_blocks_stay_dynamic_in_groups_of_their_columns(
    floats: Path, tmp_path: Path
) -> None:
    source = fp8(floats, tmp_path / "source", {}, "fp8_block")
    converted(source, tmp_path / "out", "compressed-tensors")
    (group,) = section(tmp_path / "out")["config_groups"].values()
    given = group["input_activations"]
    assert (given["num_bits"], given["type"], given["strategy"], given["group_size"], given["dynamic"]) == (
        8, "float", "group", 128, True,
    )  # fmt: skip
    whole = fp8(floats, tmp_path / "whole", {})
    converted(whole, tmp_path / "token", "compressed-tensors")
    (group,) = section(tmp_path / "token")["config_groups"].values()
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)


EXACT = dict(zip(MODULES, (2.0**-7, 2.0**3), strict=True))


def test_the_input_scale_of_nvfp4_is_the_reciprocal_where_that_is_exact(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "nvfp4", "modelopt", EXACT)
    assert converted(source, tmp_path / "out", "compressed-tensors").error.largest == 0
    found = scales_in(tmp_path / "out", "input_global_scale")
    assert found == {n: torch.tensor([1 / x]) for n, x in EXACT.items()}
    (group,) = section(tmp_path / "out")["config_groups"].values()
    assert group["input_activations"]["dynamic"] == "local"
    converted(tmp_path / "out", tmp_path / "back", "modelopt")
    assert scales_in(tmp_path / "back", "input_scale") == {n: torch.tensor(x) for n, x in EXACT.items()}
    assert section(tmp_path / "back")["quant_algo"] == "NVFP4"


def test_a_rounded_reciprocal_is_refused_before_the_run_unless_it_may_be_rounded(
    floats: Path, tmp_path: Path
) -> None:
    source = static(floats, tmp_path / "source", "nvfp4", "modelopt")
    with pytest.raises(UnsupportedError, match=r"input_scale' is .*, and .* would store its reciprocal"):
        plan_of(source, "compressed-tensors")
    converted(source, tmp_path / "out", "compressed-tensors", requantize=True)
    found = scales_in(tmp_path / "out", "input_global_scale")
    assert found == {n: 1 / torch.tensor([x]) for n, x in MODULES.items()}
    converted(source, tmp_path / "weights", "compressed-tensors", "nvfp4a16")
    assert not scales_in(tmp_path / "weights", "input_global_scale")


def test_what_has_no_place_is_left_out_and_said(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "w8a8_static", "compressed-tensors")
    plan = plan_of(source, "gptq", "int8:g128")
    assert "2 scales of quantized inputs are left out, such as" in " ".join(plan.notes)
    (said,) = (note for note in plan.notes if note.startswith("inputs of 2 layers are not quantized"))
    assert said.endswith(f"static in the source, such as those of '{ATTENTION}.k_proj.weight'")
    run(plan, tmp_path / "out")
    assert not scales_in(tmp_path / "out", "input_scale")


def test_static_inputs_need_a_scale_in_the_source(floats: Path, tmp_path: Path) -> None:
    source = fp8(floats, tmp_path / "source", {})
    with pytest.raises(UnsupportedError, match=r"have scales from data, and the source has none of them"):
        plan_of(source, "modelopt", "fp8")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"_proj' has no scale of its inputs, which are float8_e4m3fn"):
        plan_of(source, "compressed-tensors")
    two = {f"{n}.input_scale": torch.ones(2) for n in MODULES}
    save_file({**tensors_of(source), **two}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"input_scale' is F32 of shape \[2\], but must be one number"):
        plan_of(source, "compressed-tensors")


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(number: float, floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors", dict.fromkeys(MODULES, number))
    with pytest.raises(CheckpointError, match=r"input_scale' is .*, but a scale must be finite and positive"):
        plan_of(source, "modelopt")


def test_a_scale_of_a_cache_of_no_layer_is_left_out(floats: Path, tmp_path: Path) -> None:
    source = with_cache(fp8(floats, tmp_path / "source", {}, "fp8_block"), CACHE, "static")
    save_file({**tensors_of(source), "k_scale": torch.ones(1)}, source / "model.safetensors")
    plan = plan_of(source, "compressed-tensors")
    assert any(note.startswith("3 scales of a cache left out") for note in plan.notes)


CACHE = {"k_scale": torch.tensor(0.031), "v_scale": torch.tensor(0.27)}


def with_cache(source: Path, names: Mapping[str, torch.Tensor], scheme: object) -> Path:
    tensors = {**tensors_of(source), **{f"{ATTENTION}.{end}": x for end, x in names.items()}}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (source / "config.json").write_text(json.dumps(config))
    return source


def test_scales_of_a_cache_take_the_names_and_shapes_of_each_layout(floats: Path, tmp_path: Path) -> None:
    source = with_cache(fp8(floats, tmp_path / "source", {}, "fp8_block"), CACHE, "static")
    converted(source, tmp_path / "ct", "compressed-tensors")
    stored, said = tensors_of(tmp_path / "ct"), section(tmp_path / "ct")["kv_cache_scheme"]
    assert (said["num_bits"], said["type"]) == (8, "float")
    assert (said["strategy"], said["dynamic"]) == ("tensor", False)
    for end, value in CACHE.items():
        assert torch.equal(stored[f"{ATTENTION}.{end}"], value[None])
    converted(tmp_path / "ct", tmp_path / "fp8", "fp8-block")
    assert section(tmp_path / "fp8")["kv_cache_scheme"] == "static"
    assert zp.verify_checkpoint(tmp_path / "fp8", source).ok
    assert all(torch.equal(tensors_of(tmp_path / "fp8")[f"{ATTENTION}.{n}"], x) for n, x in CACHE.items())


def test_scales_of_a_cache_go_to_modelopt_and_back(floats: Path, tmp_path: Path) -> None:
    run(make_plan(open_source(floats), "fp8_dynamic", limits=ONE), tmp_path / "source")
    said = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    lists = {name: value[None].bfloat16() for name, value in CACHE.items()}
    source = with_cache(tmp_path / "source", lists, said)
    converted(source, tmp_path / "out", "modelopt")
    stored = tensors_of(tmp_path / "out")
    for letter in "kv":
        found = stored[f"{ATTENTION}.{letter}_proj.{letter}_scale"]
        assert torch.equal(found, lists[f"{letter}_scale"].float()[0])
    assert section(tmp_path / "out")["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert other["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    converted(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    assert all(torch.equal(scales_in(tmp_path / "back", n)[ATTENTION], x.float()) for n, x in lists.items())


@pytest.mark.parametrize(
    ("layout", "scheme"), [("gptq", "static"), ("compressed-tensors", None)], ids=["no place", "not said"]
)
def test_scales_of_a_cache_without_a_place_are_left_out_and_said(
    layout: str, scheme: object, floats: Path, tmp_path: Path
) -> None:
    source = with_cache(fp8(floats, tmp_path / "source", {}, "fp8_block"), CACHE, scheme)
    anew = layout == "gptq"
    plan = plan_of(source, layout, "int8:g128" if anew else None, requantize=anew)
    assert any(n.startswith(f"2 scales of a cache left out, such as '{ATTENTION}.k_") for n in plan.notes)
    run(plan, tmp_path / "out")
    assert not scales_in(tmp_path / "out", "k_scale")


def test_a_carried_scale_that_was_changed_or_lost_is_found(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors")
    converted(source, tmp_path / "out", "modelopt")
    name, tensors = f"{ATTENTION}.q_proj.input_scale", tensors_of(tmp_path / "out")
    for other in ({name: tensors[name] * 2}, {}):
        changed = {n: x for n, x in tensors.items() if n != name} | other
        save_file(changed, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
        problems = zp.verify_checkpoint(tmp_path / "out", source).problems
        words = "it is not what the original's becomes" if other else "it is missing"
        assert any(found.where == name and words in found.what for found in problems)


def test_a_plan_in_a_file_has_the_scales_too(floats: Path, tmp_path: Path) -> None:
    source = static(floats, tmp_path / "source", "fp8", "compressed-tensors")
    write_plan(plan_of(source, "modelopt"), tmp_path / "plan.json")
    plan = PlanFile.read(tmp_path / "plan.json").remake(open_source(source), limits=ONE)
    run(plan, tmp_path / "out")
    assert len(scales_in(tmp_path / "out", "input_scale")) == 2
