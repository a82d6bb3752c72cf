"""Rules, tried in order: the first match decides, and unmatched ones fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import RecipeError, near_misses, printable
from ..methods import method_named
from ..patterns import name_pattern, near_patterns
from .assignment import Assignment
from .quality import Quality

# As safetensors and others spell dtypes: BF16, F32, fp16.
_SHORT_DTYPE = re.compile(r"(B?)FP?(16|32|64)", re.IGNORECASE)
_AXIS = re.compile(r"\*|(?P<op>>=|<=|%|)(?P<number>[1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A module as rules see it: names, type, shape and dtype.

    Args:
        name: the module's dotted name.
        type: the name of its class.
        shape: of its weight, empty where it has none.
        dtype: as torch spells it, or empty where none is known.
        parameter: another name of the module, such as its weight's in a file; empty for none.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    dtype: str = ""
    parameter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: conditions on a module, and its assignment.

    Args:
        name: a glob for the whole name, or ``re:`` and a regular expression that must match from its start.
        types: names of classes, any if empty.
        shape: one entry an axis, joined by commas: ``*``, ``N``, ``>=N``, ``<=N`` or ``%N`` (a multiple of
            N); a leading ``...`` matches any number of axes; empty for any shape.
        dtypes: of weights, as torch spells them, any if empty.
        gives: schemes, or None to keep the module in floats.
        reason: why it is kept.
        place: where the rule is written, for messages.

    Raises:
        RecipeError: for malformed patterns.

    Example:
        >>> rule = Rule(types=("Linear",), shape="...,%128", gives=Assignment.of(weight="int4:g128"))
        >>> rule.matches(Subject(name="up", type="Linear", shape=(11, 256)))
        True
    """

    name: str = "*"
    types: tuple[str, ...] = ()
    shape: str = ""
    dtypes: tuple[str, ...] = ()
    gives: Assignment | None
    reason: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        _require_names("types", self.types)
        _require_names("dtypes", self.dtypes)
        if not isinstance(self.gives, Assignment | None):
            raise RecipeError(
                f"gives (={self.gives!r}) must be an Assignment or None; write Assignment.of(weight=...), or "
                "model_preset(name)"
            )
        name_pattern(self.name)
        _axes(self.shape)

    def matches(self, subject: Subject) -> bool:
        """Return whether the rule is about ``subject``.

        Args:
            subject: name, type and shape of a module.
        """
        return (
            _called_so(self, subject)
            and _of_type(self, subject)
            and _of_shape(self, subject)
            and _of_dtype(self, subject)
        )

    def __str__(self) -> str:
        kinds, dtypes = " ".join(self.types), " ".join(self.dtypes)
        parts = [("name", self.name), ("type", kinds), ("shape", self.shape), ("dtype", dtypes)]
        return ", ".join(f"{key} {value}" for key, value in parts if value)


@functools.lru_cache(maxsize=1024)
def _axes(text: str) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """Return whether leading axes are free, and (comparison, number) per axis."""
    entries = [entry.strip() for entry in text.split(",")] if text else ["..."]
    open_ended = entries[0] == "..."
    found = [(entry, _AXIS.fullmatch(entry)) for entry in entries[open_ended:]]
    for entry, match in found:
        if match is None:
            raise RecipeError(
                f"shape {printable(text)} has an axis {printable(entry)}; each must be *, N, >=N, <=N or %N"
            )
    axes = [(m["op"] or "=", int(m["number"])) if m and m["number"] else ("*", 0) for _, m in found]
    return open_ended, tuple(axes)


def _require_names(field: str, names: object) -> None:
    """Raise RecipeError for a bare name or classes, not a tuple."""
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        given = (names,) if isinstance(names, str) else names if isinstance(names, tuple | list) else ()
        spelled = tuple(name if isinstance(name, str) else getattr(name, "__name__", "?") for name in given)
        raise RecipeError(
            f"{field} (={names!r}) must be a tuple of names; write {field}={spelled or ('Linear',)!r}"
        )


def _fits(text: str, shape: tuple[int, ...]) -> bool:
    open_ended, axes = _axes(text)
    if len(shape) < len(axes) or (len(shape) > len(axes) and not open_ended):
        return False
    last = shape[len(shape) - len(axes) :]
    return all(_holds(op, number, length) for (op, number), length in zip(axes, last, strict=True))


def _holds(op: str, number: int, length: int) -> bool:
    if op == "%":
        return length % number == 0
    return {"*": True, "=": length == number, ">=": length >= number, "<=": length <= number}[op]


def _called_so(rule: Rule, subject: Subject) -> bool:
    if rule.name == "*":
        return True
    matches = name_pattern(rule.name).matches
    return matches(subject.name) or (subject.parameter != "" and matches(subject.parameter))


def _of_type(rule: Rule, subject: Subject) -> bool:
    return not rule.types or subject.type in rule.types


def _of_shape(rule: Rule, subject: Subject) -> bool:
    return not rule.shape or _fits(rule.shape, subject.shape)


def _of_dtype(rule: Rule, subject: Subject) -> bool:
    return not rule.dtypes or subject.dtype in rule.dtypes


def _closest_names(rule: Rule, subjects: Sequence[Subject]) -> str:
    names = [subject.name for subject in subjects[:_COMPARED]]
    more = f" and {len(subjects) - _SHOWN:,} more" if len(subjects) > _SHOWN else ""
    return near_patterns(rule.name, names) or f"known are {', '.join(names[:_SHOWN])}{more}"


def _closest_dtypes(rule: Rule, subjects: Sequence[Subject]) -> str:
    short = _SHORT_DTYPE.fullmatch(rule.dtypes[0])
    if short:
        return f"write {short[1].lower()}float{short[2]}, as torch spells it"
    return near_misses(rule.dtypes[0], {s.dtype for s in subjects if s.dtype})


# The closest name is found by comparing with each, at some microseconds a name.
_COMPARED, _SHOWN = 2000, 4
_Condition = Callable[[Rule, Subject], bool]
_Hint = Callable[[Rule, Sequence[Subject]], str]
_CONDITIONS: tuple[tuple[str, _Condition, _Hint], ...] = (
    ("name", _called_so, _closest_names),
    ("type", _of_type, lambda rule, subjects: near_misses(rule.types[0], {s.type for s in subjects})),
    (
        "shape",
        _of_shape,
        lambda _, subjects: "the weights have " + ", ".join(sorted({str(s.shape) for s in subjects})[:4]),
    ),
    ("dtype", _of_dtype, _closest_dtypes),
)
"""What must hold for a rule to match, in this order, and what to say where it holds of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one module, and which rule said so.

    Args:
        subject: the module that was looked at.
        rule: the rule that matched.
    """

    subject: Subject
    rule: Rule

    @property
    def gives(self) -> Assignment | None:
        """The schemes, or None for a module that is kept."""
        return self.rule.gives


UNNAMED = Rule(gives=None, reason="no rule names it")
"""What decides about a module that no rule matches, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Ordered rules, and the one that decides where none of them matches.

    Args:
        rules: in order; the first that matches decides.
        default: decides where none of them matches.
        quality: picked the methods of weights whose rule named none, or None.

    Example:
        >>> recipe = Recipe(
        ...     rules=(Rule(name="head", gives=None),), default=Rule(gives=Assignment.of(weight="int4"))
        ... )
        >>> modules = [Subject(name=name, type="Linear", shape=(8, 8)) for name in ("head", "up")]
        >>> [decision.gives is None for decision in recipe.decide(modules)]
        [True, False]
    """

    rules: tuple[Rule, ...] = ()
    default: Rule = UNNAMED
    quality: Quality | None = None

    def first(self, subject: Subject) -> Rule:
        """Return the rule that decides about ``subject``.

        Args:
            subject: name, type and shape of a module.
        """
        return next((rule for rule in self.rules if rule.matches(subject)), self.default)

    def decide(self, subjects: Iterable[Subject]) -> list[Decision]:
        """Return a decision for each subject, in their order.

        Args:
            subjects: modules in the order of the model.

        Raises:
            RecipeError: when a rule decides about none of them.
        """
        known = list(subjects)
        decisions = [Decision(subject=subject, rule=self.first(subject)) for subject in known]
        used = {id(decision.rule) for decision in decisions}
        for rule in self.rules:
            if id(rule) not in used:
                raise RecipeError(_idle(rule, known))
        return decisions

    def __post_init__(self) -> None:
        rules: object = self.rules
        if not isinstance(rules, tuple) or not all(isinstance(rule, Rule) for rule in rules):
            raise RecipeError(f"rules (={self.rules!r}) must be a tuple of Rule; read YAML with parse_recipe")
        if not isinstance(self.default, Rule):
            raise RecipeError(
                f"default (={self.default!r}) must be a Rule; write Rule(gives=model_preset(name)), or pass "
                "the name of a preset itself as the recipe"
            )

    def ignoring(self, patterns: Iterable[str] | str) -> Recipe:
        """Return the recipe with patterns kept, before any rule decides.

        Args:
            patterns: globs, or ``re:`` and a regular expression, or one of them.

        Example:
            >>> [rule.name for rule in Recipe().ignoring("*.head").rules]
            ['*.head']
        """
        names = (patterns,) if isinstance(patterns, str) else patterns
        keep = (Rule(name=name, gives=None, reason=f"ignored by {name!r}") for name in names)
        return replace(self, rules=(*keep, *self.rules))

    def with_method(self, method: str | None) -> Recipe:
        """Return the recipe with ``method`` for rules that name none.

        Args:
            method: for rules that name none; a quality picks one for the scheme of each.

        Raises:
            RecipeError: for an unknown method.
        """
        if method is None:
            return self
        if method not in set(Quality):
            method_named(method)
        rules = [
            rule if rule.gives is None else replace(rule, gives=rule.gives.or_method(method))
            for rule in (*self.rules, self.default)
        ]
        quality = Quality(method) if method in set(Quality) else None
        return replace(self, rules=tuple(rules[:-1]), default=rules[-1], quality=quality)

    @property
    def needs_calibration(self) -> bool:
        """Whether some parameters come from data."""
        rules = (*self.rules, self.default)
        return any(rule.gives is not None and rule.gives.needs_calibration for rule in rules)


def _idle(rule: Rule, subjects: Sequence[Subject]) -> str:
    place = f"{rule.place}: " if rule.place else ""
    matched = [subject.name for subject in subjects if rule.matches(subject)]
    if matched:
        names = ", ".join(matched[:3]) + (f" and {len(matched) - 3} more" if len(matched) > 3 else "")
        return f"{place}rule ({rule}) has no effect: earlier rules match {names} first; move it up"
    left = subjects
    for word, holds, hint in _CONDITIONS:
        candidates = [subject for subject in left if holds(rule, subject)]
        if not candidates:
            return f"{place}rule ({rule}) matches no module by {word}; {hint(rule, left)}"
        left = candidates
    raise AssertionError("a rule that matches nothing fails in some condition")
