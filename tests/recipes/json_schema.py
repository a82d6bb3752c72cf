"""As much of JSON Schema (draft 2020-12) as our schemas use; a keyword that is not known is an error."""

import re
from collections.abc import Callable
from typing import Any

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float),
}  # fmt: skip
_SILENT = ("$schema", "$defs", "title", "description")


def violations(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None) -> list[str]:
    """Return what of ``schema`` does not hold of ``value``."""
    root = schema if root is None else root
    found = []
    for keyword, rule in schema.items():
        if keyword not in _SILENT:
            if keyword not in _KEYWORDS:
                raise NotImplementedError(keyword)
            found += _KEYWORDS[keyword](rule, value, schema, root)
    return found


def _is(kind: str, value: Any) -> bool:
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))


def _said(holds: bool, text: str) -> list[str]:
    return [] if holds else [text]


def _passing(schemas: list[dict[str, Any]], value: Any, root: dict[str, Any]) -> int:
    return sum(not violations(schema, value, root) for schema in schemas)


def _reference(rule: str, value: Any, _: dict[str, Any], root: dict[str, Any]) -> list[str]:
    node: Any = root
    for part in rule.removeprefix("#/").split("/"):
        node = node[part]
    return violations(node, value, root)


def _each(schemas: list[tuple[dict[str, Any], Any]], root: dict[str, Any]) -> list[str]:
    return [text for schema, value in schemas for text in violations(schema, value, root)]


_Check = Callable[[Any, Any, dict[str, Any], dict[str, Any]], list[str]]
_KEYWORDS: dict[str, _Check] = {
    "$ref": _reference,
    "type": lambda rule, v, _s, _r: _said(_is(rule, v), f"{v!r} is no {rule}"),
    "const": lambda rule, v, _s, _r: _said(v is rule or (v == rule and type(v) is type(rule)), f"{v!r}"),
    "minLength": lambda rule, v, _s, _r: _said(not isinstance(v, str) or len(v) >= rule, "too short"),
    "pattern": lambda rule, v, _s, _r: _said(not isinstance(v, str) or re.search(rule, v) is not None, v),
    "minimum": lambda rule, v, _s, _r: _said(not _is("number", v) or v >= rule, f"{v} is too small"),
    "minItems": lambda rule, v, _s, _r: _said(not isinstance(v, list) or len(v) >= rule, "too few"),
    "minProperties": lambda rule, v, _s, _r: _said(not isinstance(v, dict) or len(v) >= rule, "too few"),
    "required": lambda rule, v, _s, _r: _said(not isinstance(v, dict) or set(rule) <= v.keys(), f"{rule}"),
    "items": lambda rule, v, _s, r: _each([(rule, item) for item in v] if isinstance(v, list) else [], r),
    "properties": lambda rule, v, _s, r: _each(
        [(rule[key], v[key]) for key in rule if key in v] if isinstance(v, dict) else [], r
    ),
    "additionalProperties": lambda rule, v, s, _r: _said(
        rule is not False or not isinstance(v, dict) or v.keys() <= s.get("properties", {}).keys(),
        "unknown key",
    ),
    "allOf": lambda rule, v, _s, r: _each([(schema, v) for schema in rule], r),
    "anyOf": lambda rule, v, _s, r: _said(_passing(rule, v, r) > 0, "none of several"),
    "not": lambda rule, v, _s, r: _said(_passing([rule], v, r) == 0, "what must not be"),
    "oneOf": lambda rule, v, _s, r: _said(_passing(rule, v, r) == 1, "not exactly one of several"),
}
