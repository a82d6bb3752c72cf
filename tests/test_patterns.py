"""Patterns from files: they match as ``re.match`` does, or are refused before they cost anything."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.errors import PatternError
from zeropoint.patterns import (
    MAX_CHARACTERS,
    MAX_PATTERNS,
    _Budget,
    name_pattern,
    name_patterns,
    regular_expression,
)
from zeropoint.report.wording import pattern as printed

NAMES = ("model.layers.10.self_attn.q_proj", "model.layers.0.mlp.experts.63.down_proj", "lm_head", "")
PUBLISHED = (
    "lm_head", ".*embed_tokens$", ".*mlp.gate$", ".*(q|k|v|o)_proj$", r".*\.layers\.[0-9]+\..*experts\..*",
    r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11)\.mlp\.(gate|up|down)_proj", "^(?!.*lm_head).*$",
    r"(?i)MODEL\.layers\.\d{1,3}\.self_attn\.[qkv]_proj(\.\d+)?", "model.*self_attn.*",
    ".*[.]gate$|.*router.*",
)  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("pattern", PUBLISHED)
@pytest.mark.parametrize("name", NAMES)
def test_what_models_use_matches_as_python_does(pattern: str, name: str) -> None:
    assert regular_expression(pattern).matches(name) == (re.match(pattern, name) is not None)


def test_the_patterns_of_llm_compressor_are_matched() -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "llmcompressor.json").read_text())["cases"]
    found = {text for case in golden.values() for text in case["quantization_config"]["ignore"]}
    patterns = {text.removeprefix("re:") for text in found if text.startswith("re:")}
    assert patterns
    for pattern in patterns:
        assert regular_expression(pattern).matches("a.b") == (re.match(pattern, "a.b") is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(?:.?.?)*!", "(?:a?){30}b", "(a?){60}$b", "(?:aa?)*b", r"(?:\w\w?)*!", "(?:.(?:.)?)*!", "(?=(?:aa?)*b)",
     "(?P<x>aa?)*b", "(a+)+$",
     "(a*)*", "(?:a+){2,}", "((a+))*b", "(a|a)*b", "(a|aa)+$", "(?P<x>a+)+", "(x(a|b+))*c",
     "((a?){9}a*){9}", "(?:(?:a|b)c)*"],
)  # fmt: skip
def test_repeats_inside_of_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="a group that repeats holds repeats, optional"):
        regular_expression(pattern).matches("a" * 40 + "c")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [(".*" * 9 + "b", 60), (".*.*.*b", 4096), ("a?" * 30 + "a" * 30, 30), ("(a|a)" * 30, 30)],
)
def test_too_many_ways_are_refused_with_their_number(pattern: str, length: int) -> None:
    with pytest.raises(PatternError, match=r"could take \de\+\d+ steps on a name of \d+ characters"):
        regular_expression(pattern).matches("a" * length)


def test_many_patterns_just_below_the_limit_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeropoint.patterns._BUDGET", _Budget(left=0.01))
    patterns = [f"re:.*.*b{number}" for number in range(10_000)]
    with pytest.raises(PatternError, match=r"it and those before it took more than \d+ s"):
        any(name_pattern(pattern).matches("a" * 300) for pattern in patterns)


def test_what_compiling_takes_comes_out_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeropoint.patterns._BUDGET", _Budget(left=0.05))
    monkeypatch.setattr("zeropoint.patterns.REFILL", 0.0)
    patterns = [f"re:(?i)[\x00-\U0010ffff]a{number}" for number in range(100)]
    with pytest.raises(PatternError, match=r"it and those before it took more than \d+ s"):
        name_patterns(patterns)


@pytest.mark.parametrize("texts", [["*"] * (MAX_PATTERNS + 1), ["a" * (MAX_CHARACTERS + 1)]])
def test_a_list_has_so_many_patterns_and_characters_and_no_more(texts: list[str]) -> None:
    with pytest.raises(PatternError, match=r"are refused: a list has at most \d+ of \d+ characters together"):
        name_patterns(texts)
    assert len(name_patterns(["*"] * MAX_PATTERNS)) == MAX_PATTERNS


def test_a_budget_grows_again_with_time() -> None:
    budget = _Budget(left=1.0, at=time.monotonic() - 100)
    for _ in range(10):
        budget.spend(1.0, "a")
    assert budget.left > 0


@pytest.mark.parametrize("pattern", ["(?#()((a+)+)", "(?x)a # [\n(a+)+", "(?x:a)", "(?ix)a"])
def test_comments_that_could_hide_brackets_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="it has comments"):
        regular_expression(pattern).matches("a")


@pytest.mark.parametrize(
    "pattern", ["(", "*", "[", "a{1,99999999999}", "(?P<1>a)", "\\", "(" * 5000 + ")" * 5000]
)
def test_what_is_no_regular_expression_is_said(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"is not a regular expression: .*; correct it"):
        regular_expression(pattern).matches("a")


@given(st.text("ab.(|)[]*+?{1,}\\^$-#:<=!x", max_size=14), st.text("ab.", max_size=10))
def test_any_text_is_matched_as_python_does_or_refused(pattern: str, name: str) -> None:
    try:
        found = regular_expression(pattern).matches(name)
    except PatternError:
        return
    assert found == (re.match(pattern, name) is not None)


@pytest.mark.parametrize("others", ["", "|x"])
def test_a_list_of_many_layers_and_experts_is_no_danger_but_one_that_doubles_is(others: str) -> None:
    layers, experts = ("|".join(map(str, range(count))) for count in (128, 512))
    name = "model.language_model.layers.61.mlp.experts.384.down_proj"
    pattern = rf".*\blayers\.(?:{layers})\.mlp\.experts\.(?:{experts})\.(?:up|down)_proj$"
    assert regular_expression(pattern).matches(name)
    doubled = "(?:" + "|".join([experts, *map(str, range(512))]) + ")"
    with pytest.raises(PatternError, match="is refused"):
        regular_expression(rf".*{doubled}{doubled}\.\d+.{doubled}{others}").matches(name)


def test_a_class_or_escape_with_brackets_is_no_group() -> None:
    assert regular_expression(r"[(]+\)+[])]*[^\]]*").matches("((()))x")
    assert regular_expression(r"\(+x*\)+").matches("((xx))")


@pytest.mark.parametrize(
    ("glob", "named", "other"),
    [
        ("layer.*.output.dense", "layer.3.output.dense", "layer.3.attention.output.dense"),
        ("*.layers.*.mlp.*", "model.layers.0.mlp.experts.3.up_proj", "model.layers.0.block.mlp.up_proj"),
        ("a.*.*.b", "a.0.x.b", "a.0.b"),
        ("a.**.b", "a.0.x.y.b", "a.b"),
        ("*.down_proj", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.bias"),
        ("*down*", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"),
        ("*a*b.*.c*d*e", "xaxaxb.0.cxdxdxe", "xaxaxb.0.1.cxdxe"),
        ("layer.[0-3].up?", "layer.2.up1", "layer.4.up1"),
        ("a.*.b", "a.x-y.b", "a..b"),
    ],
)
def test_a_star_between_dots_is_one_part_of_a_name_and_any_characters_elsewhere(
    glob: str, named: str, other: str
) -> None:
    assert name_pattern(glob).matches(named)
    assert not name_pattern(glob).matches(other)


def test_what_a_report_prints_for_many_layers_names_these_and_no_others() -> None:
    names = [
        f"encoder.layer.{layer}.{part}.weight"
        for layer in range(12)
        for part in (
            "output.dense",
            "attention.output.dense",
            "attention.self.query",
            "experts.3.up",
            "experts.4.up",
        )
    ]
    for label in set(map(printed, names)):
        found = [name for name in names if name_pattern(label).matches(name)]
        assert found == [name for name in names if printed(name) == label]
