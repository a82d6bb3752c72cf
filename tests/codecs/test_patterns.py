"""Patterns from files: they match as ``re.match`` does, or are refused before they cost anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.codecs.patterns import search_from_start
from zeropoint.errors import CheckpointError

NAMES = ("model.layers.10.self_attn.q_proj", "model.layers.0.mlp.experts.63.down_proj", "lm_head", "")
PUBLISHED = (
    "lm_head", ".*embed_tokens$", ".*mlp.gate$", ".*(q|k|v|o)_proj$", r".*\.layers\.[0-9]+\..*experts\..*",
    r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11)\.mlp\.(gate|up|down)_proj", "^(?!.*lm_head).*$",
    r"(?i)MODEL\.layers\.\d{1,3}\.self_attn\.[qkv]_proj(\.\d+)?", "model.*self_attn.*",
    ".*[.]gate$|.*router.*",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PUBLISHED)
@pytest.mark.parametrize("name", NAMES)
def test_what_models_use_matches_as_python_does(pattern: str, name: str) -> None:
    assert search_from_start(pattern, name) == (re.match(pattern, name) is not None)


def test_the_patterns_of_llm_compressor_are_matched() -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "llmcompressor.json").read_text())["cases"]
    found = {text for case in golden.values() for text in case["quantization_config"]["ignore"]}
    patterns = {text.removeprefix("re:") for text in found if text.startswith("re:")}
    assert patterns
    for pattern in patterns:
        assert search_from_start(pattern, "a.b") == (re.match(pattern, "a.b") is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a*)*", "(?:a+){2,}", "((a+))*b", "(a|a)*b", "(a|aa)+$", "(?P<x>a+)+", "(x(a|b+))*c",
     "((a?){9}a*){9}", "(?:(?:a|b)c)*"],
)  # fmt: skip
def test_repeats_inside_of_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="a group that repeats holds repeats or alternatives"):
        search_from_start(pattern, "a" * 40 + "c")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [(".*" * 9 + "b", 60), (".*.*.*b", 4096), ("a?" * 30 + "a" * 30, 30), ("(a|a)" * 30, 30)],
)
def test_too_many_ways_are_refused_with_their_number(pattern: str, length: int) -> None:
    with pytest.raises(CheckpointError, match=r"could take \de\+\d+ steps on a name of \d+ characters"):
        search_from_start(pattern, "a" * length)


@pytest.mark.parametrize("pattern", ["(?#()((a+)+)", "(?x)a # [\n(a+)+", "(?x:a)", "(?ix)a"])
def test_comments_that_could_hide_brackets_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="it has comments"):
        search_from_start(pattern, "a")


@pytest.mark.parametrize(
    "pattern", ["(", "*", "[", "a{1,99999999999}", "(?P<1>a)", "\\", "(" * 5000 + ")" * 5000]
)
def test_what_is_no_regular_expression_is_said(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no regular expression: .*; correct it"):
        search_from_start(pattern, "a")


@given(st.text("ab.(|)[]*+?{1,}\\^$-#:<=!x", max_size=14), st.text("ab.", max_size=10))
def test_any_text_is_matched_as_python_does_or_refused(pattern: str, name: str) -> None:
    try:
        found = search_from_start(pattern, name)
    except CheckpointError:
        return
    assert found == (re.match(pattern, name) is not None)


@pytest.mark.parametrize("others", ["", "|x"])
def test_a_list_of_many_layers_and_experts_is_no_danger_but_one_that_doubles_is(others: str) -> None:
    layers, experts = ("|".join(map(str, range(count))) for count in (128, 512))
    name = "model.language_model.layers.61.mlp.experts.384.down_proj"
    pattern = rf".*\blayers\.(?:{layers})\.mlp\.experts\.(?:{experts})\.(?:up|down)_proj$"
    assert search_from_start(pattern, name)
    doubled = "(?:" + "|".join([experts, *map(str, range(512))]) + ")"
    with pytest.raises(CheckpointError, match="is refused"):
        search_from_start(rf".*{doubled}{doubled}\.\d+.{doubled}{others}", name)


def test_a_class_or_escape_with_brackets_is_no_group() -> None:
    assert search_from_start(r"[(]+\)+[])]*[^\]]*", "((()))x")
    assert search_from_start(r"\(+x*\)+", "((xx))")
