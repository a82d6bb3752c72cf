"""Regular expressions from files that others wrote: matched only where that takes bounded time.

Python's ``re`` backtracks, so that a few characters of a configuration could keep a process busy for years.
A pattern is refused where a group that repeats holds repeats or alternatives, which takes exponential time,
and where its other repeats and alternatives together could take more than `MAX_STEPS` on a given name.

Source: https://docs.python.org/3/library/re.html for the syntax; the cost is that of trying all ways to
divide a name of n characters among k repeats, ``comb(n + k, k)``, times the branches of each group.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from dataclasses import dataclass

from ..errors import CheckpointError, printable

MAX_STEPS = 10**8
"""Some seconds of Python's matcher; patterns of published models take below 10**6."""

_PART = re.compile(
    r"\\. | \[\^?\]?(?:\\.|[^\]\\])*\] | (?P<open>\() | (?P<close>\)) | (?P<bar>\|)"
    r"| (?P<repeat>[*+?]|\{\d*,?\d*\})[?+]? | .",
    re.DOTALL | re.VERBOSE,
)
# A comment could hide brackets from the pattern above.
_COMMENT = re.compile(r"\(\?(?:#|[a-zA-Z-]*x)")
_PREFIX = re.compile(r"\?(?:[:=!>]|<[=!]|P?<\w+>|P=\w+|\(\w+\)|[a-zA-Z-]+:?)")

_PLAIN = frozenset(("_", "-", "/", " ", "\\.", "\\-", "\\_"))


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A compiled pattern with what bounds its time: how many repeats, and the product of all branches."""

    compiled: re.Pattern[str]
    repeats: int
    branches: int


def search_from_start(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches ``name`` from its first character on, as ``re.match`` does.

    Raises CheckpointError for what is no regular expression, and for what could take too long on ``name``.

    >>> search_from_start(r".*(q|k|v)_proj$", "model.layers.0.self_attn.q_proj")
    True
    """
    bounded = _bounded(pattern)
    steps = math.comb(len(name) + bounded.repeats, bounded.repeats) * bounded.branches
    if steps > MAX_STEPS:
        raise CheckpointError(
            f"pattern {printable(pattern)} is refused: it could take {steps:.0e} steps on a name of "
            f"{len(name)} characters; name the modules with fewer repeats"
        )
    return bounded.compiled.match(name) is not None


@functools.lru_cache(maxsize=1024)
def _bounded(pattern: str) -> _Bounded:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets such as [[a], which mean what they meant
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"pattern {printable(pattern)} is no regular expression: {reason}; correct it"
        ) from error
    if _COMMENT.search(pattern) is not None:
        raise CheckpointError(f"pattern {printable(pattern)} is refused: it has comments; leave them out")
    repeats, branches = _count(pattern)
    return _Bounded(compiled, repeats, branches)


@dataclass(slots=True)
class _Group:
    """A group while it is read. literal: whether it holds characters and bars alone."""

    start: int
    alternatives: int = 1
    loops: bool = False
    literal: bool = True

    def branches(self, text: str) -> int:
        """Return in how many ways the group, whose content is ``text``, can match at one place at most.

        Of different literals, only those that begin each other match at one place: as many as are long.
        """
        options = text.casefold().split("|")
        if self.literal and len(set(options)) == len(options):
            return min(self.alternatives, max(map(len, options)) + 1)
        return self.alternatives


def _count(pattern: str) -> tuple[int, int]:
    """Return the repeats and the product of branches; raises CheckpointError for nested repeats."""
    repeats, branches = 0, 1
    groups = [_Group(0)]
    closed: _Group | None = None
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        assert part is not None
        kind, begin, at = part.lastgroup, at, part.end()
        if kind == "repeat":
            loops = part["repeat"] != "?"
            if closed is not None and loops and (closed.alternatives > 1 or closed.loops):
                raise CheckpointError(
                    f"pattern {printable(pattern)} is refused: a group that repeats holds repeats or "
                    "alternatives, which can take forever; name the modules without it"
                )
            repeats += 1
            groups[-1].loops |= loops
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
            groups[-1].loops |= closed.loops or closed.alternatives > 1
        elif kind is not None or part[0] == "." or not (part[0].isalnum() or part[0] in _PLAIN):
            groups[-1].literal = False
    return repeats, branches * groups[0].branches(pattern[groups[0].start :])
