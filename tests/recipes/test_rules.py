"""Rules decide in order, by name, type and shape, and none of them may match nothing."""

from typing import Any

import pytest
from torch import nn

from zeropoint.errors import RecipeError
from zeropoint.recipes import Activation, Assignment, Recipe, Rule, Subject, model_preset, parse_recipe
from zeropoint.schemes import PRESETS, Scheme

FOUR, EIGHT = Assignment.of(weight="int4:g128"), Assignment.of(weight="int8:channel")
MODEL = (
    Subject(name="encoder.0.up", type="Linear", shape=(1536, 384)),
    Subject(name="encoder.0.down", type="Linear", shape=(384, 1536)),
    Subject(name="encoder.1.up", type="Linear", shape=(1536, 384)),
    Subject(name="stem", type="Conv2d", shape=(16, 3, 3, 3)),
    Subject(name="head", type="Linear", shape=(10, 384)),
)


def given(recipe: Recipe) -> list[Assignment | None]:
    return [decision.gives for decision in recipe.decide(MODEL)]


def test_the_first_rule_that_matches_decides() -> None:
    rules = (Rule(name="encoder.0.*", gives=EIGHT), Rule(name="encoder.*", gives=FOUR))
    assert given(Recipe(rules=rules)) == [EIGHT, EIGHT, FOUR, None, None]


def test_the_default_decides_about_the_rest_and_may_match_nothing() -> None:
    assert given(Recipe(rules=(Rule(name="head", gives=None),), default=Rule(gives=FOUR)))[3:] == [FOUR, None]
    everything = Recipe(rules=(Rule(gives=FOUR),), default=Rule(gives=EIGHT))
    assert given(everything) == [FOUR] * 5


def test_a_module_that_no_rule_names_says_so() -> None:
    decisions = Recipe(rules=(Rule(name="head", gives=FOUR),)).decide(MODEL)
    assert [d.rule.reason for d in decisions] == ["no rule names it"] * 4 + [""]


def test_regular_expressions_match_from_the_start_as_in_compressed_tensors() -> None:
    """compressed_tensors.utils.match.match_name takes ``re.match``; one meaning of ``re:`` everywhere."""
    assert given(Recipe(rules=(Rule(name="re:encoder\\.[0-9]+\\.up", gives=FOUR),)))[:3] == [FOUR, None, FOUR]
    assert given(Recipe(rules=(Rule(name="re:encoder", gives=FOUR),)))[:3] == [FOUR] * 3
    assert given(Recipe(rules=(Rule(name="re:encoder.*down$", gives=FOUR),)))[:3] == [None, FOUR, None]
    with pytest.raises(RecipeError, match="matches no module by name"):
        given(Recipe(rules=(Rule(name="re:up", gives=FOUR),)))


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("*,384", 3), ("...,384", 3), ("...,%128", 4), ("16,*,3,3", 1), (">=1000,*", 2), ("<=10,*", 1),
        ("*,*,*,*", 1), ("...", 5), ("", 5), ("...,3", 1), ("%16,...", None), ("*,>=", None), ("a", None),
        ("*,0", None), ("*,-1", None),
    ],
)  # fmt: skip
def test_shapes_are_matched_axis_by_axis(shape: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(RecipeError, match="each must be"):
            Rule(shape=shape, gives=FOUR)
    else:
        assert (
            sum(item is not None for item in given(Recipe(rules=(Rule(shape=shape, gives=FOUR),)))) == count
        )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(name="encoder.0.uq", gives=FOUR), r"matches no module by name; did you mean encoder\.0\.up"),
        (
            Rule(name="*.qqq.?", gives=FOUR),
            r"by name; known are encoder\.0\.up, encoder\.0\.down, encoder\.1\.up, stem and 1 more$",
        ),
        (Rule(name="*.encodre.*", gives=FOUR), r"by name; did you mean encoder\.\*"),
        (Rule(types=("Lineal",), gives=FOUR), "matches no module by type; did you mean Linear"),
        (
            Rule(shape="*,7", gives=FOUR, place="r.yaml, line 3"),
            r"^r\.yaml, line 3: .* by shape; the weights have",
        ),
    ],
)
def test_a_rule_that_matches_nothing_names_what_comes_close(rule: Rule, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(rules=(rule,)).decide(MODEL)


def test_a_rule_behind_a_wider_one_must_move_up() -> None:
    rules = (Rule(name="encoder.*", gives=FOUR), Rule(name="encoder.0.up", gives=EIGHT))
    with pytest.raises(RecipeError, match=r"earlier rules match encoder\.0\.up first; move it up"):
        Recipe(rules=rules).decide(MODEL)


def test_blocks_that_follow_the_batch_are_dynamic_and_others_static_unless_said() -> None:
    assert Activation.parse("int8:token").dynamic
    assert Activation.parse("mxfp8_e4m3").dynamic
    assert not Activation.parse("uint8:tensor:asym").dynamic
    assert not Activation.parse("int8:channel-1").dynamic
    assert Activation.parse("int8:tensor dynamic").dynamic
    with pytest.raises(RecipeError, match="number depends on the batch"):
        Activation.parse("int8:token static")
    with pytest.raises(RecipeError, match="must be dynamic or static"):
        Activation.parse("int8:token later")


def test_activations_and_assignments_round_trip_through_their_text() -> None:
    for name in PRESETS:
        assignment = model_preset(name)
        for part in (assignment.input, assignment.output):
            assert part is None or Activation.parse(str(part)) == part
        assert assignment.weight is None or Scheme.parse(str(assignment.weight)) == assignment.weight


def test_an_assignment_of_nothing_and_an_unknown_preset_are_errors() -> None:
    with pytest.raises(RecipeError, match="to leave a module alone, keep it"):
        Assignment()
    with pytest.raises(RecipeError, match="preset 'w4a9' is unknown; did you mean w4a8"):
        model_preset("w4a9")


def test_static_parts_need_calibration() -> None:
    assert model_preset("w8a8_static").needs_calibration
    assert not model_preset("w8a8").needs_calibration
    assert Recipe(default=Rule(gives=model_preset("int8_power_of_two"))).needs_calibration
    assert not Recipe(rules=(Rule(gives=None),)).needs_calibration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": "Linear"}, r"types \(='Linear'\) must be a tuple of names; write types=\('Linear',\)"),
        ({"types": (nn.Linear,)}, r"must be a tuple of names; write types=\('Linear',\)"),
        ({"dtypes": ["float16"]}, r"write dtypes=\('float16',\)"),
        ({"gives": "w8a8"}, r"gives \(='w8a8'\) must be an Assignment or None"),
    ],
)
def test_arguments_of_a_rule_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Rule(**{"gives": None, **fields})


def test_arguments_of_a_recipe_are_checked() -> None:
    with pytest.raises(RecipeError, match=r"default \(='w4a16'\) must be a Rule"):
        Recipe(default="w4a16")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="must be a tuple of Rule; read YAML with parse_recipe"):
        Recipe(rules=["x"])  # type: ignore[arg-type]


def test_an_error_in_a_rule_names_its_line_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe("rules:\n  - shape: [128, 64]\n    weight: int8:channel")
    assert str(caught.value) == "recipe, line 2: this must be one word or text in quotes"
