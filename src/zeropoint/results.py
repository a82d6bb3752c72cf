"""Results of calls as text, dictionaries and JSON.

Every function about checkpoints returns one. Files of results are those of ``--json`` on the command line.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from .shown import plot, repr_html

_LINES, _COLUMNS = 25, 120
"""A screen, which no ``repr`` exceeds."""
PROBLEMS = 20
"""Problems that a ``repr`` has before the verdict, which says how many there are."""


class Result(ABC):
    """What a call found. Its ``repr`` has few lines; :meth:`to_dict` has everything."""

    __slots__ = ()
    _repr_html_ = repr_html
    plot = plot

    @property
    @abstractmethod
    def lines(self) -> Sequence[str]:
        """What there is to say, a sentence a line."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return all content as JSON values; non-finite numbers are None."""

    def to_json(self) -> str:
        """Return :meth:`to_dict` as a text of JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        return screen(self.lines)


def screen(lines: Iterable[str]) -> str:
    """Return lines as one text of at most a screen.

    >>> len(screen(map(str, range(100))).splitlines()), screen(["a" * 200])[-3:]
    (25, '...')
    """
    every = [part for line in lines for part in line.splitlines()]
    shown = every[: _LINES if len(every) <= _LINES else _LINES - 1]
    if len(shown) < len(every):
        shown.append(f"... and {len(every) - len(shown)} lines")
    return "\n".join(line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3]}..." for line in shown)
