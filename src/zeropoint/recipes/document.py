"""Recipes in YAML: parsing and validation, with errors by line.

default: w4a16                 # a preset, an assignment, or keep; what no rule names
method: mse                    # how weights are quantized whose rule names no method; or fast, good, best
rules:
  - name: "*.lm_head"          # a glob, or re:REGEX
    keep: logits are sensitive # true, or the reason
  - type: [Linear, Conv2d]
    shape: "...,%128"
    dtype: bfloat16
    weight: int4:g128
    method: nearest
    input: int8:token dynamic

recipe.schema.json next to this module declares the same about keys and kinds of values for editors.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..errors import RecipeError, ZeropointError, near_misses, printable, size_of
from ..libraries import reading
from ..schemes import PRESETS
from .assignment import Assignment
from .model_preset import model_preset
from .rules import UNNAMED, Recipe, Rule

_NEEDED = ("default", "rules")
_TOP = (*_NEEDED, "method")
_MATCH = ("name", "type", "shape", "dtype")
_GIVE = ("weight", "input", "output")
_METHOD = "method"
_RULE = (*_MATCH, "preset", *_GIVE, _METHOD, "keep")
KEEP = "keep"
MAX_BYTES = 1 << 18
"""Bytes of the longest recipe: thousands of rules. PyYAML takes a second for so many, or a few."""
_PIECE = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Meaning of a document's words: presets, and schemes with codec defaults.

    Args:
        preset: the assignment of a preset, or of a scheme's text.
        spelled: the assignment of text forms by ``weight``, ``input`` and ``output``. Both raise a
            ZeropointError for what they do not take.
    """

    preset: Callable[[str], Assignment]
    spelled: Callable[[Mapping[str, str]], Assignment]


MODELS = Vocabulary(preset=model_preset, spelled=lambda texts: Assignment.of(**texts))
"""Words for the layers of a model in memory."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node stands, and what its words mean."""

    file: str
    words: Vocabulary
    node: Any

    def error(self, text: str) -> RecipeError:
        return RecipeError(f"{self}: {text}")

    def at(self, node: Any) -> _Place:
        return _Place(self.file, self.words, node)

    def __str__(self) -> str:
        return f"{self.file}, line {self.node.start_mark.line + 1}"


def load_recipe(path: Path | str) -> Recipe:
    """Return the recipe in the YAML file at ``path``.

    Args:
        path: of a YAML file.

    Raises:
        RecipeError: for a malformed recipe, with the line.
    """
    return parse_recipe(read_recipe(path), name=Path(path).name)


def read_recipe(path: Path | str) -> str:
    """Return the text of a YAML file, or raise RecipeError.

    Args:
        path: of a YAML file.
    """
    try:
        return read_bounded(path, MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(
            f"recipe {printable(str(path))} cannot be read: {reason}; check the file"
        ) from error


def read_bounded(path: Path | str, limit: int) -> bytes:
    """Return a file's content, at most ``limit`` + 1 bytes; raises OSError.

    A pipe is read as a shell gives one, ``<(...)``, but one that nobody writes to is empty: nothing waits.
    Memory is taken for what is read, a piece at a time, and a device is refused, as it has no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it is no path: {error}") from error
    os.set_blocking(descriptor, True)
    found = bytearray()
    with open(descriptor, "rb") as file:
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) or stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a device, and no file")
        while len(found) <= limit and (piece := file.read(min(_PIECE, limit + 1 - len(found)))):
            found += piece
    return bytes(found)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of recipes.

    For editors and other tools. It knows keys and kinds of values; whether a preset or scheme exists, only
    parsing tells.

    Example:
        >>> sorted(recipe_schema()["properties"])
        ['default', 'method', 'rules']
    """
    found: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("recipe.schema.json").read_text(encoding="utf-8")
    )
    return found


def parse_recipe(text: str, *, name: str = "recipe", words: Vocabulary = MODELS) -> Recipe:
    """Return the recipe that YAML ``text`` spells; ``name`` stands in messages.

    Args:
        text: YAML.
        name: of the text in messages.
        words: which words the text may use.

    Raises:
        RecipeError: for a malformed text, with the line.

    Example:
        >>> print(parse_recipe("default: w4a16").default.gives)
        weight int4:g128:scale=input:dialect=compressed-tensors
    """
    if len(text) > MAX_BYTES:
        raise RecipeError(
            f"{name}: the recipe is longer than {size_of(MAX_BYTES)}; write fewer rules, with globs"
        )
    root = _composed(text, name)
    if root is None:
        raise RecipeError(f"{name}: the recipe is empty; it needs default or rules")
    place = _Place(name, words, root)
    fields = _mapping(place, _TOP)
    if not {*_NEEDED} & fields.keys():
        raise place.error(f"the recipe is empty; it needs {' or '.join(_NEEDED)}")
    rules = tuple(_rule(place.at(node)) for node in _items(place, fields.get("rules")))
    default = _default(place.at(fields["default"])) if "default" in fields else UNNAMED
    recipe = Recipe(rules=rules, default=default)
    if _METHOD not in fields:
        return recipe
    chosen = place.at(fields[_METHOD])
    return _guarded(chosen, lambda: recipe.with_method(_text(chosen)))


def recipe_text(recipe: Recipe) -> str:
    r"""Return the YAML of a recipe; :func:`parse_recipe` reads it back.

    Args:
        recipe: with rules for weights, inputs and outputs, which keep the text forms of their schemes.

    Example:
        >>> text = recipe_text(parse_recipe("default: keep\nrules: [{name: '*.up', weight: int4:g64}]"))
        >>> print(text)
        {"rules": [{"name": "*.up", "weight": "int4:g64"}], "default": "keep"}
    """
    document: dict[str, Any] = {"rules": [_of_rule(rule) for rule in recipe.rules]}
    if recipe.default is not UNNAMED:
        gives = recipe.default.gives
        document["default"] = KEEP if gives is None else _of_assignment(gives)
    return json.dumps(document)


def _of_rule(rule: Rule) -> dict[str, Any]:
    match = {"type": list(rule.types), "shape": rule.shape, "dtype": list(rule.dtypes)}
    found: dict[str, Any] = {"name": rule.name} | {key: value for key, value in match.items() if value}
    return found | ({KEEP: rule.reason or True} if rule.gives is None else _of_assignment(rule.gives))


def _of_assignment(gives: Assignment) -> dict[str, str]:
    texts = {key: getattr(gives, key) for key in (*_GIVE, _METHOD)}
    return {key: str(value) for key, value in texts.items() if value is not None}


def method_in(text: str) -> str | None:
    r"""Return a YAML recipe's ``method:`` for all weights, or None.

    Args:
        text: YAML, well-formed.

    Example:
        >>> method_in("method: mse\ndefault: w4a16"), method_in("default: w4a16")
        ('mse', None)
    """
    return next(
        (str(value.value) for key, value in _composed(text, "recipe").value if key.value == _METHOD), None
    )


def with_method(text: str, method: str) -> str:
    r"""Return a YAML recipe with another ``method:``, rules unchanged.

    Args:
        text: YAML; one that is malformed stays so.
        method: a name, of a method or a quality.

    Example:
        >>> with_method("method: mse\ndefault: w4a16", "nearest")
        'method: "nearest"\ndefault: w4a16'
    """
    word = json.dumps(method)
    try:
        root = _composed(text, "recipe")
    except RecipeError:
        root = None
    if not isinstance(root, yaml.MappingNode):
        return f"{text}\n{_METHOD}: {word}"
    for key, value in root.value:
        if key.value == _METHOD:
            return f"{text[: value.start_mark.index]}{word}{text[value.end_mark.index :]}"
    if root.flow_style:
        start = root.start_mark.index + 1
        return f'{text[:start]}"{_METHOD}": {word}, {text[start:]}'
    return f"{text}\n{' ' * root.start_mark.column}{_METHOD}: {word}"


def _composed(text: str, name: str) -> Any:
    """Return a YAML text's nodes, None if empty; RecipeError with line."""
    with reading(f"{name}: this is not valid YAML", "correct it", RecipeError):
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError as error:
            raise RecipeError(
                f"{name}: the recipe is nested too deeply; a rule needs three levels"
            ) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark is not None else ""
            reason = getattr(error, "problem", None) or "it cannot be parsed"
            raise RecipeError(f"{name}{line}: this is not valid YAML: {reason}") from error


def _mapping(place: _Place, known: tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping's value nodes by key; unknown keys are errors."""
    if not isinstance(place.node, yaml.MappingNode):
        raise place.error(f"this must be a mapping with {', '.join(known)}")
    found: dict[str, Any] = {}
    for key, value in place.node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value not in known:
            raise place.at(key).error(f"key {key.value!r} is unknown; {_key_meant(key, value, known)}")
        if key.value in found:
            raise place.at(key).error(f"duplicate key {key.value!r}; keep one")
        found[key.value] = value
    return found


def _key_meant(key: Any, value: Any, known: tuple[str, ...]) -> str:
    """Return the replacement of an unknown key; others say ``scheme``."""
    if key.value != "scheme" or not isinstance(value, yaml.ScalarNode):
        return near_misses(str(key.value), known)
    return f"write {'preset' if known == _RULE else 'default'}: {value.value}"


def _items(place: _Place, node: Any) -> list[Any]:
    if node is None:
        return []
    if not isinstance(node, yaml.SequenceNode):
        raise place.at(node).error("rules must be a list, each item beginning with '- '")
    return list(node.value)


def _text(place: _Place) -> str:
    if not isinstance(place.node, yaml.ScalarNode):
        raise place.error("this must be one word or text in quotes")
    return str(place.node.value)


def _texts(place: _Place) -> tuple[str, ...]:
    if isinstance(place.node, yaml.SequenceNode):
        return tuple(_text(place.at(node)) for node in place.node.value)
    return (_text(place),)


def _rule(place: _Place) -> Rule:
    fields = _mapping(place, _RULE)
    if not any(key in fields for key in _MATCH):
        raise place.error(
            "a rule needs a name, a type, a shape or a dtype; what is left over belongs to default"
        )
    gives, reason = _given(place, fields)
    name = _text(place.at(fields["name"])) if "name" in fields else "*"
    shape = _text(place.at(fields["shape"])) if "shape" in fields else ""
    types, dtypes = (_texts(place.at(fields[key])) if key in fields else () for key in ("type", "dtype"))
    return _guarded(
        place,
        lambda: Rule(
            name=name, types=types, shape=shape, dtypes=dtypes, gives=gives, reason=reason, place=str(place)
        ),
    )


def _given(place: _Place, fields: dict[str, Any]) -> tuple[Assignment | None, str]:
    """Return a rule's assignment, or None and the reason to keep."""
    ways = [key for key in ("preset", "keep") if key in fields]
    schemes = [key for key in _GIVE if key in fields]
    if len(ways) + bool(schemes) != 1:
        raise place.error("a rule gives either a preset, or weight, input and output, or keep: exactly one")
    if "keep" in fields:
        if _METHOD in fields:
            raise place.at(fields[_METHOD]).error("method is for what is quantized; leave out method or keep")
        text = _text(place.at(fields["keep"]))
        if text.lower() in ("false", "no"):
            raise place.at(fields["keep"]).error("keep: false gives nothing; name a preset or a weight")
        return None, "the recipe keeps it" if text.lower() in ("true", "yes") else text
    if "preset" in fields:
        chosen = place.at(fields["preset"])
        preset = _guarded(chosen, lambda: place.words.preset(_text(chosen)))
        return _with_method(place, fields, preset), ""
    return _assignment(place, fields), ""


def _assignment(place: _Place, fields: dict[str, Any]) -> Assignment:
    """Return the schemes, parsed one by one for errors by line."""
    texts = {key: _text(place.at(fields[key])) for key in _GIVE if key in fields}
    for key, text in texts.items():
        preset = PRESETS.get(text.lower())
        if preset is not None and preset.input is not None:
            word = "preset" if any(match in fields for match in _MATCH) else "default"
            raise place.at(fields[key]).error(
                f"{text!r} is a preset, which says more than the scheme of a {key}; write {word}: {text}"
            )
        _guarded(place.at(fields[key]), functools.partial(Assignment.of, **{key: text}))
    return _with_method(place, fields, _guarded(place, lambda: place.words.spelled(texts)))


def _with_method(place: _Place, fields: dict[str, Any], given: Assignment) -> Assignment:
    """Return an assignment with the method that the fields name, if any."""
    if _METHOD not in fields:
        return given
    chosen = place.at(fields[_METHOD])
    return _guarded(chosen, lambda: replace(given, method=_text(chosen)))


def _default(place: _Place) -> Rule:
    if isinstance(place.node, yaml.MappingNode):
        return Rule(gives=_assignment(place, _mapping(place, (*_GIVE, _METHOD))), place=str(place))
    text = _text(place)
    if text == KEEP:
        return Rule(gives=None, reason="the recipe keeps what it does not name", place=str(place))
    return Rule(gives=_guarded(place, lambda: place.words.preset(text)), place=str(place))


def _guarded(place: _Place, make: Callable[[], T]) -> T:
    """Return ``make()``, whose errors get the line."""
    try:
        return make()
    except ZeropointError as error:
        raise place.error(str(error)) from error
