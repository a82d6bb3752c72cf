"""Recipes on the command line: one of --to and --recipe, and every mistake in one line."""

import json
from pathlib import Path

from tests.cli.conftest import Call

RECIPE = """\
default: w4a16
rules:
  - {name: "*.self_attn.*_proj", preset: w8a8}
  - {name: "*.layers.0.mlp.down_proj", keep: its inputs have outliers}
"""


def test_a_recipe_gives_each_part_its_scheme(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    called = call("quantize", model, tmp_path / "out", "--recipe", tmp_path / "mixed.yaml")
    assert (called.status, called.err) == (0, "")
    assert "quantized to w8a8: mixed.yaml, line 3" in called.out
    assert "quantized to w4a16: a linear weight" in called.out
    assert "kept: its inputs have outliers (mixed.yaml, line 4)" in called.out
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"].keys() == {"W4A16", "W8A8"}
    assert call("verify", tmp_path / "out", "--against", model).status == 0


def test_include_and_ignore_work_with_a_recipe(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    options = ("--recipe", tmp_path / "r.yaml", "--include", "lm_head", "--ignore", "*.v_proj", "--json")
    called = call("quantize", model, tmp_path / "out", *options)
    schemes = {t["name"]: t["scheme"] for t in json.loads(called.out)["tensors"]}
    assert schemes["lm_head.weight"] == "w4a16"
    assert schemes["model.layers.1.self_attn.v_proj.weight"] is None
    assert schemes["model.layers.1.self_attn.k_proj.weight"] == "w8a8"


def test_exactly_one_of_scheme_and_recipe_is_given(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    none = call("quantize", model, tmp_path / "out")
    assert (none.status, none.out) == (2, "")
    assert "give exactly one of --to, --recipe" in none.err
    assert "none is given" in none.err
    both = call("quantize", model, tmp_path / "out", "--to", "w8a8", "--recipe", tmp_path / "r.yaml")
    assert both.status == 2
    assert "--to and --recipe are given" in both.err
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_a_recipe_is_one_line_with_its_place(call: Call, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for text, status, message in (
        (
            RECIPE + "  - {name: '*.up_porj', preset: w8a8}\n",
            1,
            "r.yaml, line 5: rule (name *.up_porj) matches",
        ),
        (
            RECIPE + "  - {name: up, prset: w8a8}\n",
            2,
            "r.yaml, line 5: key 'prset' is unknown; did you mean preset",
        ),
        ("default: [", 2, "r.yaml, line 1: this is not valid YAML"),
    ):
        recipe.write_text(text)
        called = call("quantize", model, tmp_path / "out", "--recipe", recipe)
        assert (called.status, called.out) == (status, "")
        assert message in called.err
        assert called.err.count("\n") == 1
    absent = call("quantize", model, tmp_path / "out", "--recipe", tmp_path / "absent.yaml")
    assert absent.status == 2
    assert "absent.yaml' cannot be read" in absent.err


def test_rules_of_one_scheme_share_a_headline_with_their_lines(
    call: Call, model: Path, tmp_path: Path
) -> None:
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rules = [f"  - {{name: '*.{name}', preset: {'w8a16' if name < 'l' else 'w4a16'}}}" for name in names]
    (tmp_path / "r.yaml").write_text("\n".join(["default: keep", "rules:", *rules]))
    out = call("plan", model, "--recipe", tmp_path / "r.yaml").out
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("quantized to")] == [
        "quantized to w8a16: r.yaml, lines 4 and 6", "quantized to w4a16: r.yaml, lines 3, 5 and 7",
    ]  # fmt: skip
