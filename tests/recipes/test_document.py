"""Recipes in YAML mean what the Python ones mean, and every mistake is reported with its line."""

import os
from pathlib import Path

import pytest

from zeropoint.errors import RecipeError
from zeropoint.recipes import Assignment, Recipe, Rule, load_recipe, model_preset, parse_recipe

DOCUMENT = """\
# what a team keeps next to its model
default: w4a16
rules:
  - name: "*.lm_head"
    keep: logits are sensitive
  - name: "re:.*\\\\.norm"
    keep: true
  - type: [Linear, Conv2d]
    shape: "...,%128"
    weight: int4:g128
    input: int8:token dynamic
  - type: Linear
    preset: w8a8
"""


def test_a_document_means_what_it_says_in_order() -> None:
    recipe = parse_recipe(DOCUMENT, name="r.yaml")
    head, norm, wide, rest = recipe.rules
    assert (head.name, head.gives, head.reason) == ("*.lm_head", None, "logits are sensitive")
    assert (norm.name, norm.reason) == ("re:.*\\.norm", "the recipe keeps it")
    assert (wide.types, wide.shape, wide.place) == (("Linear", "Conv2d"), "...,%128", "r.yaml, line 8")
    assert wide.gives == Assignment.of(weight="int4:g128", input="int8:token dynamic")
    assert rest.gives == model_preset("w8a8")
    assert recipe.default.gives == model_preset("w4a16")


def test_defaults_are_presets_assignments_or_keep() -> None:
    assert parse_recipe("default: keep").default.gives is None
    assert parse_recipe("default: {weight: 'int8:channel'}").default.gives == Assignment.of(
        weight="int8:channel"
    )
    assert parse_recipe("rules: [{name: a, preset: w8a16}]") == Recipe(
        rules=(Rule(name="a", gives=model_preset("w8a16"), place="recipe, line 1"),)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the recipe is empty"),
        ("default: w4a17", "line 1: preset 'w4a17' is unknown; did you mean w4a16"),
        ("rules:\n  - name: x\n    wieght: int4\n", "line 3: key 'wieght' is unknown; did you mean weight"),
        ("rules:\n  - name: x\n    name: y\n", "line 3: duplicate key 'name'"),
        ("rules:\n  - type: Linear\n    input: int8:token\n    weight: int4:g\n", "line 4: option 'g'"),
        ("rules:\n  - type: Linear\n    weight: int5000\n", "line 3: .*int5000"),
        ("rules:\n  - name: a\n\n    input: int8:token static\n", "line 4: static scheme"),
        ("a: [", "line 1: this is not valid YAML"),
        ("rules:\n  - name: 're:('\n    keep: true\n", "line 2: pattern .* is not a regular expression"),
        ("rules:\n  - shape: '3,x'\n    keep: true\n", "line 2: shape .* has an axis 'x'"),
        ("rules: 3", "line 1: rules must be a list"),
        ("- 1", "line 1: this must be a mapping with default, rules"),
        ("rules:\n  - 7", "line 2: this must be a mapping with name"),
        ("rules:\n  - weight: int4", "line 2: a rule needs a name, a type, a shape or a dtype"),
        ("rules:\n  - name: a\n", "line 2: a rule gives either a preset"),
        ("rules:\n  - name: a\n    preset: w8a8\n    keep: true\n", "line 2: .*exactly one"),
        ("rules:\n  - name: a\n    keep: no\n", "line 3: keep: false gives nothing"),
        ("rules:\n  - name: [a, b]\n    keep: true\n", "line 2: this must be one word"),
        ("default: [w4a16]", "line 1: this must be one word"),
        ("default: {}", "line 1: an assignment names no weight"),
        ("default: !!python/object/apply:os.system [ls]", "line 1: this must be one word"),
    ],
)
def test_every_mistake_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text)


def test_files_are_read_as_utf_8_and_name_themselves(tmp_path: Path) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(DOCUMENT, encoding="utf-8")
    assert load_recipe(path) == parse_recipe(DOCUMENT, name="team.yaml")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RecipeError, match=r"team\.yaml' cannot be read"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "absent.yaml")


def test_a_recipe_nested_too_deeply_is_an_error() -> None:
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse_recipe("default: " + "[" * 500 + "]" * 500)


@pytest.mark.parametrize("text", ["# " + "x" * (1 << 18), "{" * (1 << 19)], ids=["comment", "braces"])
def test_a_recipe_that_would_take_long_to_read_is_refused_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    for read in (lambda: parse_recipe(text), lambda: load_recipe(path)):
        with pytest.raises(RecipeError, match="longer than 256 KiB; write fewer rules"):
            read()


def test_a_pipe_is_read_when_somebody_writes_and_empty_when_nobody_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="the recipe is empty"):
        load_recipe(tmp_path / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b"default: w4a16")
    os.close(writing)
    assert load_recipe(f"/proc/self/fd/{reading}").default.gives is not None
    os.close(reading)
