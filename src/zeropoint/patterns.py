"""Name patterns from untrusted files: globs, and time-bounded regular expressions.

Python's ``re`` backtracks, so that a few characters of a configuration could keep a process busy for years.
A regular expression is refused where a group that repeats holds repeats, optional parts or alternatives,
which takes exponential time, and where its other repeats and alternatives together could take more than
`MAX_STEPS` on a given name. All of them together, compiled and matched, draw on one `_Budget`.

Source: https://docs.python.org/3/library/re.html for the syntax; the cost is the number of ways to divide a
name of n characters among k repeats, ``comb(n + k, k)``, times the branches of each group.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import PatternError, closest, printable

REGEX = "re:"
"""What a pattern begins with that is a regular expression; any other is a glob."""
MAX_STEPS = 10**7
"""About a second of Python's matcher; patterns of published models take below 10**6."""
MAX_PATTERNS, MAX_CHARACTERS = 1 << 14, 1 << 20
"""Patterns of one list, and their characters: thousands of modules by name, as searches have them."""
MAX_SECONDS = 30.0
"""What compiling and all matches may take; names of 126,000 weights against ten take a few seconds."""
REFILL = 0.1
"""Share of the time that passes by which the budget grows again, for processes that live long."""

_PART = re.compile(
    r"\\. | \[\^?\]?(?:\\.|[^\]\\])*\] | (?P<open>\() | (?P<close>\)) | (?P<bar>\|)"
    r"| (?P<repeat>[*+?]|\{\d*,?\d*\})[?+]? | .",
    re.DOTALL | re.VERBOSE,
)
# A comment could hide brackets from the pattern above.
_COMMENT = re.compile(r"\(\?(?:#|[a-zA-Z-]*x)")
_PREFIX = re.compile(r"\?(?:[:=!>]|<[=!]|P?<\w+>|P=\w+|\(\w+\)|[a-zA-Z-]+:?)")

_ONE_PART = re.compile(r"(?<=\.)\*(?=\.)")
_END = fnmatch.translate("")[len("(?s:)") :]
_PLAIN = frozenset(("_", "-", "/", " ", "\\.", "\\-", "\\_"))


@dataclass(slots=True)
class _Budget:
    """Processor seconds that patterns may still take, in this process."""

    left: float = MAX_SECONDS
    at: float = field(default_factory=time.monotonic)

    def spend(self, seconds: float, pattern: str) -> None:
        """Take ``seconds`` out; raises PatternError where nothing is left."""
        now = time.monotonic()
        self.left = min(MAX_SECONDS, self.left + REFILL * (now - self.at)) - seconds
        self.at = now
        if self.left < 0:
            self.left = MAX_SECONDS  # for what comes after the error
            raise PatternError(
                f"pattern {printable(pattern)} is refused: it and those before it took more than "
                f"{MAX_SECONDS:.0f} s; name the modules with fewer or simpler patterns"
            )


_BUDGET = _Budget()


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A compiled pattern with its repeats and product of branches."""

    text: str
    compiled: re.Pattern[str]
    repeats: int = 0
    branches: int = 1

    def matches(self, name: str) -> bool:
        """Return whether a glob matches all, an expression from the start.

        The latter is ``re.match``, what compressed-tensors and vLLM take ``re:`` for; ``$`` asks for all.

        Raises PatternError where this could take too long, or all matches together took too long.
        """
        steps = math.comb(len(name) + self.repeats, self.repeats) * self.branches
        if steps > MAX_STEPS:
            raise PatternError(
                f"pattern {printable(self.text)} is refused: it could take {steps:.0e} steps on a name of "
                f"{len(name)} characters; name the modules with fewer repeats"
            )
        begun = time.thread_time()
        found = self.compiled.match(name) is not None
        _BUDGET.spend(time.thread_time() - begun, self.text)
        return found


def name_patterns(texts: Iterable[str]) -> list[NamePattern]:
    """Return the patterns of a list, or PatternError for too many."""
    found, characters = list(texts), 0
    for number, text in enumerate(found):
        characters += len(text)
        if number >= MAX_PATTERNS or characters > MAX_CHARACTERS:
            raise PatternError(
                f"{len(found)} patterns from {printable(found[0])} on are refused: a list has at most "
                f"{MAX_PATTERNS} of {MAX_CHARACTERS} characters together; name the modules with fewer"
            )
    return [name_pattern(text) for text in found]


def _compiled(source: str, text: str) -> re.Pattern[str]:
    """Return a compiled expression, timed against the match budget."""
    begun = time.thread_time()
    try:
        return re.compile(source)
    finally:
        _BUDGET.spend(time.thread_time() - begun, text)


@functools.lru_cache(maxsize=MAX_PATTERNS)
def name_pattern(text: str) -> NamePattern:
    """Return the pattern of a text: a glob, or ``re:`` expression.

    In a glob ``*`` between two dots is one part of a name, as reports print the layers of a model, and ``**``
    any number of parts; elsewhere ``*`` is any characters, dots too. ``?`` and ``[...]`` are one character.

    Raises PatternError for what is not a regular expression, and for one that could take forever.

    >>> name_pattern("*.q_proj").matches("model.layers.0.self_attn.q_proj")
    True
    >>> [name_pattern("layer.*.dense").matches(name) for name in ("layer.0.dense", "layer.0.output.dense")]
    [True, False]
    """
    if text.startswith(REGEX):
        return regular_expression(text.removeprefix(REGEX))
    pieces = _ONE_PART.split(text)
    # A piece's last star tries all places, the others the first that fits.
    repeats = sum("*" in piece for piece in pieces)
    source = r"[^.]+".join(fnmatch.translate(piece).removesuffix(_END) for piece in pieces)
    return NamePattern(text, _compiled(source + _END, text), repeats)


@functools.lru_cache(maxsize=MAX_PATTERNS)
def regular_expression(pattern: str) -> NamePattern:
    """Return the compiled regular expression; raises PatternError as :func:`name_pattern` does.

    >>> regular_expression(r".*(q|k|v)_proj$").matches("model.layers.0.self_attn.q_proj")
    True
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets such as [[a], which mean what they meant
            compiled = _compiled(pattern, pattern)
    except (re.error, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PatternError(
            f"pattern {printable(pattern)} is not a regular expression: {reason}; correct it"
        ) from error
    if _COMMENT.search(pattern) is not None:
        raise PatternError(f"pattern {printable(pattern)} is refused: it has comments; leave them out")
    return NamePattern(pattern, compiled, *_count(pattern))


@dataclass(slots=True)
class _Group:
    """A group while it is read.

    literal: whether it holds characters and bars alone. varies: whether one place can be matched in several
    ways, but for its own alternatives.
    """

    start: int
    alternatives: int = 1
    varies: bool = False
    literal: bool = True

    def branches(self, text: str) -> int:
        """Return the most ways in which a group matches one place.

        Of different literals, only those that begin each other match at one place: as many as are long.
        """
        options = text.casefold().split("|")
        if self.literal and len(set(options)) == len(options):
            return min(self.alternatives, max(map(len, options)) + 1)
        return self.alternatives


def _count(pattern: str) -> tuple[int, int]:
    """Return repeats and branches, or PatternError for nested repeats."""
    repeats, branches = 0, 1
    groups = [_Group(0)]
    closed: _Group | None = None
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        assert part is not None
        kind, begin, at = part.lastgroup, at, part.end()
        if kind == "repeat":
            if closed is not None and part["repeat"] != "?" and (closed.alternatives > 1 or closed.varies):
                raise PatternError(
                    f"pattern {printable(pattern)} is refused: a group that repeats holds repeats, optional "
                    "parts or alternatives, which can take forever; name the modules without it"
                )
            repeats += 1
            groups[-1].varies = True
        closed = None
        if kind == "open":
            prefix = _PREFIX.match(pattern, at)
            at = at if prefix is None else prefix.end()
            groups[-1].literal = False
            groups.append(_Group(at))
        elif kind == "bar":
            groups[-1].alternatives += 1
        elif kind == "close":
            closed = groups.pop()
            branches *= closed.branches(pattern[closed.start : begin])
            groups[-1].varies |= closed.varies or closed.alternatives > 1
        elif kind is not None or part[0] == "." or not (part[0].isalnum() or part[0] in _PLAIN):
            groups[-1].literal = False
    return repeats, branches * groups[0].branches(pattern[groups[0].start :])


def near_patterns(pattern: str, names: Iterable[str]) -> str:
    """Return a clause of close patterns that match, or "".

    >>> near_patterns("lm_head", ["model.lm_head", "model.layers.0.up_proj"])
    'did you mean *.lm_head?'
    """
    known = dict[str, str]()
    for name in names:
        *before, last = name.split(".")
        for place, part in enumerate(before):
            if not part.isdigit():
                known.setdefault(part, f"*.{part}.*" if place else f"{part}.*")
        known |= {last: f"*.{last}", name: name}
    close = closest(pattern.removeprefix(REGEX).strip(".*^$"), known)
    return f"did you mean {' or '.join(known[word] for word in close)}?" if close else ""
