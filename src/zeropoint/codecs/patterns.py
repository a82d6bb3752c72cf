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


def _count(pattern: str) -> tuple[int, int]:
    """Return the repeats and the product of branches; raises CheckpointError for nested repeats."""
    repeats, branches = 0, 1
    # For each open group: its alternatives, and whether something in it repeats.
    groups: list[list[int]] = [[1, 0]]
    closed: list[int] | None = None
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        assert part is not None
        at = part.end()
        kind = part.lastgroup
        if kind == "repeat":
            loops = part["repeat"] != "?"
            if closed is not None and loops and (closed[0] > 1 or closed[1]):
                raise CheckpointError(
                    f"pattern {printable(pattern)} is refused: a group that repeats holds repeats or "
                    "alternatives, which can take forever; name the modules without it"
                )
            repeats += 1
            groups[-1][1] += loops
        closed = None
        if kind == "open":
            groups.append([1, 0])
            prefix = _PREFIX.match(pattern, at)
            at = at if prefix is None else prefix.end()
        elif kind == "bar":
            groups[-1][0] += 1
        elif kind == "close":
            closed = groups.pop()
            branches *= closed[0]
            groups[-1][1] += closed[1] + (closed[0] > 1)
    return repeats, branches * groups[0][0]
