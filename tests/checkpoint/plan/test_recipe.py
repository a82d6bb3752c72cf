"""Recipes decide about the tensors of a checkpoint: after the user's patterns, before the default rules."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import CONFIG, LINEAR, ONE, quantize, save, tensors_of, weight
from tests.oracles import synthetic_llama
from tests.tables import each

from zeropoint.architectures import fused_set, merged, shared_scale_set
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.compressed_tensors import layer_scheme
from zeropoint.codecs.engines import Loads
from zeropoint.errors import CheckpointError, RecipeError

MIXED = """\
rules:
  - name: "*.layers.0.mlp.down_proj"
    keep: its inputs have outliers
  - name: "*.self_attn.*_proj"
    preset: w8a8
  - name: "*.mlp.*_proj"
    preset: mxfp4
"""


def planned(folder: Path, recipe: str, **selection: object) -> CheckpointPlan:
    text = RecipeText(text=recipe, name="r.yaml")
    return make_plan(open_source(folder), text, selection=Selection(**selection), limits=ONE)  # type: ignore[arg-type]


def actions(plan: CheckpointPlan) -> dict[str, tuple[str | None, str]]:
    """Return scheme and reason by name."""
    found = {}
    for d in plan.decisions:
        scheme = None if d.layer is None else str(d.layer)
        found[d.entry.name.removeprefix("model.")] = (scheme, d.reason)
    return found


def test_each_part_of_a_model_gets_its_scheme_or_the_reason_why_not(tmp_path: Path) -> None:
    found = actions(planned(synthetic_llama.write(tmp_path), MIXED))
    assert found["layers.0.mlp.down_proj.weight"] == (None, "its inputs have outliers (r.yaml, line 2)")
    assert found["layers.1.mlp.down_proj.weight"] == ("mxfp4", "r.yaml, line 6")
    assert found["layers.1.self_attn.k_proj.weight"] == ("w8a8", "r.yaml, line 4")
    assert found["lm_head.weight"] == (None, "a head")


def test_a_rule_whose_weights_are_all_ignored_is_no_error(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path)
    found = actions(planned(source, MIXED, ignore=("*.self_attn.*",)))
    assert found["layers.1.self_attn.k_proj.weight"] == (None, "ignored by '*.self_attn.*'")
    assert found["layers.1.mlp.down_proj.weight"] == ("mxfp4", "r.yaml, line 6")


def test_each_weight_has_the_bytes_that_its_scheme_alone_would_give(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    run(planned(source, MIXED), tmp_path / "mixed")
    mixed = {path.name for path in (tmp_path / "mixed").glob("*.safetensors")}
    assert len(mixed) == 3
    found, expected = tensors_of(tmp_path / "mixed"), {}
    for scheme, part in (("w8a8", ".self_attn."), ("mxfp4", ".mlp.")):
        quantize(source, tmp_path / scheme, scheme, limits=ONE)
        alone = tensors_of(tmp_path / scheme)
        expected |= {name: t for name, t in alone.items() if part in name and "0.mlp.down" not in name}
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert {name for name in found.keys() - expected.keys() if "down_proj" in name} == {
        "model.layers.0.mlp.down_proj.weight"
    }
    assert verify(tmp_path / "mixed", source, limits=ONE).ok


def test_one_scheme_by_recipe_is_the_same_as_by_name(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    quantize(source, tmp_path / "a", "nvfp4a16", limits=ONE)
    run(planned(source, "default: nvfp4a16"), tmp_path / "b")
    sums = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / out).glob("model*")}
        for out in "ab"
    ]
    assert sums[0] == sums[1]
    configs = [json.loads((tmp_path / out / "config.json").read_text()) for out in "ab"]
    assert configs[0] == configs[1]


def test_schemes_of_a_recipe_take_what_files_take_by_default(tmp_path: Path) -> None:
    folder = save(tmp_path, {LINEAR: weight(8, 128)})
    for text in ("weight: int4:g64", "preset: int4:g64", "weight: int4:g64:scale=input"):
        (made,) = planned(folder, f"rules: [{{name: '*up_proj', {text}}}]").weights
        assert made.layer == layer_scheme("int4:g64")
    (made,) = planned(folder, "default: {weight: 'int8:channel', input: 'int8:token'}").weights
    assert made.layer == layer_scheme("w8a8")
    assert str(made.layer) == "w8a8"


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        ("name: 'a.b.*'", ["a.b.0"]),
        ("name: 'a.b.0.weight'", ["a.b.0"]),
        ("name: 're:a\\.[bc]\\.[01]'", ["a.b.0", "a.c.1"]),
        ("shape: '8,*'", ["a.b.0"]),
        ("shape: '...,%64'", ["a.b.0", "a.c.1"]),
        ("dtype: bfloat16", ["a.c.1"]),
        ("dtype: [bfloat16, float32]", ["a.b.0", "a.c.1", "head.lm_head"]),
        ("type: Linear", ["a.b.0", "a.c.1"]),
        ("type: [Head]", ["head.lm_head"]),
    ],
)
def test_rules_look_at_names_types_shapes_and_dtypes(rule: str, chosen: list[str], tmp_path: Path) -> None:
    tensors = {
        "a.b.0.weight": weight(8, 64),
        "a.b.0.bias": weight(8),
        "a.c.1.weight": weight(16, 64, dtype=torch.bfloat16),
        "head.lm_head.weight": weight(16, 32),
    }
    made = planned(save(tmp_path, tensors), f"rules: [{{{rule}, preset: 'int8:channel'}}]")
    assert sorted(w.module for w in made.weights) == chosen


def test_the_default_rules_decide_about_what_no_rule_names(tmp_path: Path) -> None:
    tensors = {LINEAR: weight(8, 64), "b.down.weight": weight(8, 64), "lm_head.weight": weight(8, 64)}
    folder = save(tmp_path, tensors)
    by_default = actions(planned(folder, "default: mxfp4a16\nrules: [{name: '*up_proj', preset: w8a8}]"))
    assert by_default["b.down.weight"] == ("mxfp4a16", "a linear weight")
    assert by_default["lm_head.weight"] == (None, "a head")
    named = actions(planned(folder, "rules: [{name: lm_head, preset: w8a8}]"))
    assert named["lm_head.weight"] == ("w8a8", "r.yaml, line 1")
    assert named["b.down.weight"] == (None, "no rule names it")


def test_patterns_of_the_command_line_come_before_the_rules(tmp_path: Path) -> None:
    folder = save(
        tmp_path, {LINEAR: weight(8, 64), "b.weight": weight(8, 64), "lm_head.weight": weight(8, 64)}
    )
    recipe = "default: mxfp4\nrules: [{name: '*', shape: '8,64', type: Linear, preset: w8a8}]"
    found = actions(planned(folder, recipe, ignore=("b",), include=("lm_head",)))
    assert found["b.weight"] == (None, "ignored by 'b'")
    assert found["lm_head.weight"] == ("mxfp4", "included by a pattern")


def test_strict_asks_for_a_word_about_every_linear_weight(tmp_path: Path) -> None:
    folder = save(tmp_path, {LINEAR: weight(8, 64), "b.weight": weight(8, 64)})
    rules = "rules: [{name: '*up_proj', preset: w8a8}]"
    assert [d.entry.name for d in planned(folder, rules).unfit] == ["b.weight"]
    with pytest.raises(CheckpointError, match=r"1 linear .* unquantized: 'b.weight' .*no rule names"):
        planned(folder, rules, strict=True)
    assert planned(folder, "default: keep\n" + rules, strict=True).unfit == ()
    assert planned(folder, rules, strict=True, ignore=("b",)).unfit == ()


def test_strict_asks_about_transposed_weights_too(tmp_path: Path) -> None:
    tensors = {LINEAR: weight(8, 64), "h.0.attn.c_attn.weight": weight(64, 64)}
    folder = save(tmp_path, tensors, CONFIG | {"model_type": "imagegpt", "architectures": ["ImageGPTModel"]})
    with pytest.raises(CheckpointError, match=r"'h.0.attn.c_attn.weight' .*: weights of Conv1D are read"):
        planned(folder, "default: w8a8", strict=True)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "rules:\n  - name: '*.up_porj'\n    preset: w8a8\n",
            r"^r.yaml, line 2: rule .* by name; did you mean \*\.up_proj",
        ),
        ("rules:\n  - dtype: bfloat61\n    preset: w8a8\n", "by dtype; did you mean float32"),
        ("rules:\n  - dtype: BF16\n    preset: w8a8\n", "by dtype; write bfloat16, as torch spells it"),
        ("rules:\n  - dtype: F16\n    preset: w8a8\n", "by dtype; write float16, as torch spells it"),
        ("rules:\n  - name: c\n    scheme: w8a8\n", "line 3: key 'scheme' is unknown; write preset: w8a8"),
        ("scheme: int4:g32\n", "line 1: key 'scheme' is unknown; write default: int4:g32"),
        ("default: {scheme: w8a8}\n", "line 1: key 'scheme' is unknown; write default: w8a8"),
        (
            "rules:\n  - name: c\n    weight: W8A8\n",
            "line 3: 'W8A8' is a preset, which says more than .* a weight; write preset: W8A8",
        ),
        ("default: {weight: mxfp4}\n", "'mxfp4' is a preset, .*; write default: mxfp4"),
        ("rules:\n  - dtype: bfloat16\n    preset: w8a8\n", "line 2: .* by dtype; did you mean float32"),
        ("rules:\n  - type: Lineal\n    preset: w8a8\n", "line 2: .* by type; did you mean Linear"),
        ("rules:\n  - shape: '7,*'\n    preset: w8a8\n", r"line 2: .* by shape; the weights have \(8, 64\)"),
        (
            "rules:\n  - name: '*.bias'\n    preset: w8a8\n",
            r"line 2: .* only to such as 'c.bias' \(F32, shape \[8\]\)",
        ),
        ("default: w4a61", "line 1: 'w4a61' is neither a preset nor a format; did you mean w4a16"),
        ("default:\n  weight: uint4:g32\n", "line 2: scheme .* has unsigned codes"),
        ("default:\n  weight: int8:channel\n  output: int8:token\n", "line 2: .* cannot be written"),
        ("default:\n  input: int8:token\n", "line 2: .* give a weight"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_their_line(recipe: str, message: str, tmp_path: Path) -> None:
    folder = save(tmp_path, {LINEAR: weight(8, 64), "c.bias": weight(8)})
    with pytest.raises(RecipeError, match=message):
        planned(folder, recipe)


def test_fused_layers_of_several_schemes_are_a_warning_and_under_strict_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, {f"m.self_attn.{x}_proj.weight": weight(8, 64) for x in "qkv"})
    recipe = "default: w8a8\nrules: [{name: '*.v_proj', preset: mxfp4}]"
    rule = (
        "'m.self_attn.k_proj.weight' is quantized to w8a8 and 'm.self_attn.v_proj.weight' is quantized to "
        "mxfp4, but engines run them as one layer"
    )
    assert rule in planned(folder, recipe).notes
    with pytest.raises(CheckpointError, match=rule + "; give each set one scheme, or leave out strict=True"):
        planned(folder, recipe, strict=True)


def test_experts_of_several_schemes_are_a_warning(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path, moe=True)
    made = planned(source, "default: w4a16\nrules: [{name: '*.experts.down_proj', preset: mxfp4a16}]")
    assert sum("engines run them as one layer" in note for note in made.notes) == synthetic_llama.LAYERS


def test_fused_layers_share_a_tensor_scale_only_where_both_are_nvfp4(tmp_path: Path) -> None:
    folder = save(tmp_path, {f"m.self_attn.{x}_proj.weight": weight(8, 64) for x in "qkv"})
    made = planned(folder, "default: nvfp4a16\nrules: [{name: '*.v_proj', preset: mxfp4}]")
    assert [w.share for w in made.weights] == ["m.self_attn.qkv_proj", "m.self_attn.qkv_proj", None]


@each(
    "parent, members, other",
    [
        ("encoder.layer.0.attention.self", "query key value", "dense"),  # BERT, RoBERTa
        ("vit.encoder.layer.0.attention.attention", "query key value", "dense"),
        ("layers.0.attention", "wq wk wv", "wo"),
        ("blocks.0.attn", "to_q to_k to_v", "to_out"),
        ("layer.0.attention", "q_lin k_lin v_lin", "out_lin"),
        ("layers.0.self_attn", "q_proj k_proj v_proj", "o_proj"),
        ("layers.0.mlp.shared_experts", "gate_proj up_proj", "down_proj"),
        ("layers.0.feed_forward", "w1 w3", "w2"),
        ("layers.0.linear_attn", "in_proj_qkv in_proj_z", "in_proj_b"),
        ("layers.0.linear_attn", "in_proj_b in_proj_a", "in_proj_z"),
        ("layers.0.self_attn", "q_a_proj kv_a_proj_with_mqa", "q_b_proj"),
    ],
)
def test_one_table_says_what_engines_run_as_one(parent: str, members: str, other: str) -> None:
    sets = {fused_set(f"{parent}.{name}") for name in members.split()}
    assert len(sets) == 1
    assert None not in sets
    assert fused_set(f"{parent}.{other}") not in sets
    assert sets != {fused_set(f"{parent}x.{name}") for name in members.split()}
    assert len({merged(f"{parent}.{name}") for name in members.split()}) == 1
    assert {shared_scale_set(f"{parent}.{name}") for name in members.split()} in (sets, {None})


def test_query_key_and_value_of_an_encoder_need_one_scheme(tmp_path: Path) -> None:
    names = [f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    folder = save(tmp_path, {f"{name}.weight": weight(8, 128) for name in names})
    made = planned(folder, "default: w4a16\nrules: [{name: '*.self.key', preset: w8a16}]")
    assert any("engines run them as one layer" in note for note in made.notes)
    (vllm,) = (verdict for verdict in verdicts(made) if verdict.engine == "vLLM")
    assert vllm.loads is Loads.NO


def test_many_weights_left_for_one_reason_are_one_note(tmp_path: Path) -> None:
    tensors = {f"a.{n}.weight": weight(8, 48) for n in range(5)} | {LINEAR: weight(8, 32)}
    made = planned(save(tmp_path, tensors), "default: int4:g32")
    (note,) = [note for note in made.notes if "48" in note]
    assert note.startswith("kept 'a.0.weight' (F32, shape [8, 48]): last axis 48 is not a multiple")
    assert note.endswith("and 4 more for this reason")
