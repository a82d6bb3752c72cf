"""Edits of a configuration's text that keep everything but quantization."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...codecs.known import CONFIG_KEYS

CONFIG_KEY = CONFIG_KEYS[0]
WEIGHTS_ONLY_CONFIG = "quantization_config.json"
"""File of the configuration when the source has no config.json to extend."""


def insert_config(
    text: str,
    addition: Mapping[str, Any],
    keys: Sequence[str] = (CONFIG_KEY,),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return a configuration text with a quantization section at its end.

    All other text stays as it is. keys: under which it is said. more: members that the text has not, which
    come before.

    >>> print(insert_config('{"a": 1e-05}', {}))
    {"a": 1e-05,
      "quantization_config": {}
    }
    """
    return _with_more(without_keys(text), {**more, **dict.fromkeys(keys, addition)})


def with_members(text: str, members: Mapping[str, Any]) -> str:
    """Return a JSON text with changed members, all else untouched.

    >>> print(with_members('{"a": 1e-05, "b": true}', {"b": False, "c": "d"}))
    {"a": 1e-05, "b": false,
      "c": "d"
    }
    """
    left = dict(members)
    for key, begin, end in reversed(_members(text)):
        if key in members:
            text = f"{text[:begin]}{json.dumps(key)}: {json.dumps(members[key])}{text[end:]}"
            left.pop(key, None)
    return _with_more(text, left) if left else text


def _with_more(text: str, members: Mapping[str, Any]) -> str:
    """Return a JSON object's text with new members at its end."""
    end = text.rindex("}")
    head = text[:end].rstrip()
    comma = "" if head.endswith("{") else ","
    bodies = {key: json.dumps(value, indent=2).replace("\n", "\n  ") for key, value in members.items()}
    more = ",".join(f'\n  "{key}": {body}' for key, body in bodies.items())
    return f"{head}{comma}{more}\n}}{text[end + 1 :]}"


def without_keys(text: str) -> str:
    """Return a configuration text without quantization sections, all else untouched.

    >>> without_keys('{"a": 1e-05, "quantization_config": {"bits": [8]}, "b": 2}')
    '{"a": 1e-05, "b": 2}'
    >>> without_keys('{"a": 1e-05, "compression_config": null }')
    '{"a": 1e-05 }'
    """
    members = _members(text)
    last = len(members) - 1
    for number, (key, begin, end) in reversed(list(enumerate(members))):
        if key in CONFIG_KEYS:
            if number < last:
                text = text[:begin] + text[members[number + 1][1] :]
            else:
                text = text[: members[number - 1][2] if number else begin] + text[end:]
                last -= 1
    return text


def _members(text: str) -> list[tuple[str, int, int]]:
    """Return each key of a JSON object, its start and value end."""
    decoder = json.JSONDecoder()
    found = []
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        key, colon = decoder.raw_decode(text, at)
        _, end = decoder.raw_decode(text, _skip(text, _skip(text, colon) + 1))
        found.append((key, at, end))
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _skip(text: str, at: int) -> int:
    """Return the first place from ``at`` on that holds no JSON space."""
    while text[at] in " \t\n\r":
        at += 1
    return at
