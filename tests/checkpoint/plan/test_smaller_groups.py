"""``--fit``: weights whose inputs the group of their scheme does not divide get a smaller group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import save, weight
from tests.peers import transformers

import zeropoint as zp
from zeropoint.schemes.smaller_groups import SMALLEST, group_of

BLOCK = "model.layers.0"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write layers of 192 inputs, with experts of 96, a square of 80 and one of 256 inputs."""
    attention = {f"{BLOCK}.self_attn.{name}_proj.weight": weight(64, 192) for name in "qkv"}
    experts = {
        f"{BLOCK}.mlp.experts.{number}.{name}.weight": weight(*shape)
        for number in range(2)
        for name, shape in (("gate_proj", (96, 192)), ("up_proj", (96, 192)), ("down_proj", (192, 96)))
    }
    others = {"odd.weight": weight(80, 80), f"{BLOCK}.self_attn.o_proj.weight": weight(192, 256)}
    return save(tmp_path / "source", {**attention, **experts, **others})


def groups(plan: zp.CheckpointPlan) -> dict[str, int]:
    """Return the group of each weight by the last parts of its name; 0 for one that is kept."""
    return {
        d.entry.name.removeprefix(f"{BLOCK}.").removesuffix(".weight"): 0
        if d.layer is None
        else group_of(d.layer.weight)
        for d in plan.decisions
    }


def test_the_largest_group_that_divides_the_inputs_is_one_for_what_engines_run_as_one(source: Path) -> None:
    kept, fitted = (groups(zp.plan_checkpoint(source, "w4a16", fit=fit)) for fit in (False, True))
    assert {name for name, group in kept.items() if group} == {"self_attn.o_proj"}
    assert kept["self_attn.o_proj"] == fitted.pop("self_attn.o_proj") == 128
    assert {fitted.pop(f"self_attn.{name}_proj") for name in "qkv"} == {64}
    assert fitted.pop("odd") == 0
    # down_proj has 96 inputs, and engines have one scheme for the experts of a layer.
    assert len(fitted) == 6
    assert set(fitted.values()) == {32}


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (
            "w4a16",
            f"not a multiple of the group, 128, and no smaller group of at least {SMALLEST} divides it",
        ),
        ("mxfp4", "not a multiple of the group, 32, and its format has no other group"),
        ("mxfp8a16", "not a multiple of the group, 32, and its format has no other group"),
    ],
)
def test_what_stays_in_floats_has_the_reason(source: Path, scheme: str, said: str) -> None:
    plan = zp.plan_checkpoint(source, scheme, fit=True)
    (odd,) = (d for d in plan.decisions if d.entry.name == "odd.weight")
    assert odd.reason == f"last axis 80 is {said}"
    with pytest.raises(zp.CheckpointError, match=r"would stay unquantized: 'odd\.weight'"):
        zp.plan_checkpoint(source, scheme, fit=True, strict=True)


def test_plan_manifest_and_plan_file_say_which_group_was_chosen(source: Path, tmp_path: Path) -> None:
    plan = zp.plan_checkpoint(source, "w4a16", fit=True, out=tmp_path / "plan.json")
    said = [note for note in plan.notes if note.startswith("quantized")]
    assert [note.partition("): ")[2] for note in said] == [
        "groups of 32 in place of 128, a linear weight, and 5 more for this reason",
        "groups of 64 in place of 128, a linear weight, and 2 more for this reason",
    ]
    zp.quantize_checkpoint(source, tmp_path / "by_plan", plan=tmp_path / "plan.json", report=False)
    zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", fit=True, report=False)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("by_plan", "out"))
    assert one == other
    weights = json.loads((tmp_path / "out" / "zeropoint_manifest.json").read_text())["weights"]
    chosen = {name.removeprefix(f"{BLOCK}."): about.get("group") for name, about in weights.items()}
    assert (chosen["self_attn.q_proj"], chosen["mlp.experts.0.up_proj"]) == (64, 32)
    assert chosen["self_attn.o_proj"] is None
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_rules_of_a_recipe_and_candidates_of_a_budget_are_fitted(source: Path, tmp_path: Path) -> None:
    recipe = "rules: [{name: '*_proj', preset: w4a16}]\ndefault: keep\n"
    plan = zp.plan_checkpoint(source, recipe=recipe, fit=True)
    assert groups(plan)["self_attn.q_proj"] == 64
    reason = next(d.reason for d in plan.decisions if d.fitted)
    assert reason.startswith("groups of 32 in place of 128, recipe, line 1")
    result = zp.quantize_checkpoint(
        source,
        tmp_path / "out",
        budget="6bpw",
        candidates="w4a16,w8a16",
        ignore="odd*",
        fit=True,
        report=False,
    )
    assert groups(result.plan)["self_attn.q_proj"] == 64


def test_a_layout_with_one_group_for_all_files_refuses_several(source: Path) -> None:
    with pytest.raises(
        zp.CheckpointError, match=r"AWQ has one scheme in a checkpoint, and here are .*int4:g32"
    ):
        zp.plan_checkpoint(source, "w4a16_asym", format="awq", fit=True, ignore="odd*")
    gptq = zp.plan_checkpoint(source, "w4a16", format="gptq", fit=True, ignore="odd*")
    assert {group_of(layer.weight) for layer in gptq.layers} == {32, 64, 128}


def test_transformers_loads_the_groups_of_its_layers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=256, num_hidden_layers=1, num_attention_heads=3, vocab_size=32,
        num_key_value_heads=3, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "source")
    zp.quantize_checkpoint(tmp_path / "source", tmp_path / "out", "w4a16", fit=True, report=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sizes = {group["weights"]["group_size"] for group in section["config_groups"].values()}
    assert sizes == {64, 128}
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        loaded, floats = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(
                tokens
            ).logits
            for name in ("out", "floats")
        )
    assert torch.equal(loaded, floats)


def test_a_search_takes_smaller_groups_and_says_so(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    found = zp.search_checkpoint(
        source, "6bpw", "w4a16,w8a16", out=recipe, ignore="odd*", fit=True, report=False
    )
    assert groups(found.plan)["self_attn.q_proj"] == 64
    assert any("in smaller groups" in note and "fit=True" in note for note in found.notes)
    assert "fit=True" in recipe.read_text()
    plan = zp.plan_checkpoint(source, recipe=recipe, fit=True)
    assert groups(plan) == groups(found.plan)
    without = zp.search_checkpoint(source, "6bpw", "w4a16,w8a16", ignore="odd*", report=False)
    assert groups(without.plan)["self_attn.q_proj"] == 0
