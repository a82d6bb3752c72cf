"""The published schema takes what the parser takes and refuses what it refuses, as far as it can tell."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.recipes.json_schema import violations

from zeropoint.errors import RecipeError
from zeropoint.recipes import parse_recipe, recipe_schema

VALID = [
    "default: w4a16",
    "default: keep",
    "default: {weight: int8:channel, input: int8:token dynamic}",
    "rules: []",
    "rules: [{name: '*.head', keep: true}]",
    "rules: [{name: 're:a.*', keep: logits are sensitive}]",
    "rules: [{type: Linear, preset: w8a8}]",
    "rules: [{type: [Linear, Conv2d], dtype: [bfloat16, float16], weight: int4:g32}]",
    "rules: [{shape: '...,%128', dtype: float32, weight: int4:g32, input: int8:token}]",
    "rules: [{shape: 384, output: int8:tensor}]",
    "rules: [{shape: '*, >=64, <=128', keep: true}]",
    "default: w4a16\nmethod: mse",
    "default: {weight: int4:g32, method: mse}",
    "rules: [{type: Linear, preset: w4a16, method: mse}]",
    "method: mse\nrules: [{type: Linear, weight: int4:g32, input: int8:token, method: nearest}]",
    "default: w8a8\nrules:\n  - {name: a, preset: w4a16}\n  - {name: b, keep: yes}\n",
]
INVALID = [
    "method: mse",
    "default: w4a16\nmethod: [mse]",
    "default: {method: mse}",
    "default: {input: int8:token, method: mse}",
    "rules: [{name: a, method: mse}]",
    "rules: [{name: a, keep: true, method: mse}]",
    "rules: [{name: a, input: int8:token, method: mse}]",
    "{}",
    "[]",
    "3",
    "defualt: w4a16",
    "default: [w4a16]",
    "default: {}",
    "default: {weights: int8:channel}",
    "rules: 3",
    "rules: {name: a, keep: true}",
    "rules: [7]",
    "rules: [{name: a}]",
    "rules: [{preset: w8a8}]",
    "rules: [{name: a, preset: w8a8, keep: true}]",
    "rules: [{name: a, preset: w8a8, weight: int8:channel}]",
    "rules: [{name: a, keep: false}]",
    "rules: [{name: [a, b], keep: true}]",
    "rules: [{name: a, wieght: int8:channel}]",
    "rules: [{name: a, weight: [int8]}]",
    "rules: [{shape: '3,x', keep: true}]",
    "rules: [{shape: '3,...', keep: true}]",
]


def by_jsonschema(schema: dict[str, Any], value: object) -> bool:
    """Return whether the validator of the package jsonschema takes a value."""
    import jsonschema

    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def by_ours(schema: dict[str, Any], value: object) -> bool:
    return not violations(schema, value)


VALIDATORS = [by_ours, *([by_jsonschema] if importlib.util.find_spec("jsonschema") else [])]


def parsed(text: str) -> bool:
    try:
        parse_recipe(text)
    except RecipeError:
        return False
    return True


@pytest.mark.crossed
@pytest.mark.parametrize("takes", VALIDATORS)
@pytest.mark.parametrize("text", [*VALID, *INVALID])
def test_schema_and_parser_agree(text: str, takes: Callable[[dict[str, Any], object], bool]) -> None:
    assert takes(recipe_schema(), yaml.safe_load(text)) is parsed(text) is (text in VALID)


@pytest.mark.parametrize(
    ("schema", "value", "count"),
    [
        ({"type": "object", "additionalProperties": False, "properties": {"a": {}}}, {"a": 1, "b": 2}, 1),
        ({"type": "integer", "minimum": 1}, 0, 1),
        ({"type": "integer"}, True, 1),
        ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, "x", 1),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "x", 0),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"c": 1}, 1),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"const": True}}}, 1, 1),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1}, ["a", 2], 1),
        ({"pattern": "^a+$"}, "aab", 1),
        ({"minProperties": 1}, {}, 1),
    ],
)
def test_our_validator_finds_what_is_wrong(schema: dict[str, Any], value: object, count: int) -> None:
    assert len(violations(schema, value)) == count


def test_our_validator_refuses_a_keyword_that_it_does_not_know() -> None:
    with pytest.raises(NotImplementedError, match="dependentSchemas"):
        violations({"dependentSchemas": {}}, {})
