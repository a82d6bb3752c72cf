"""Problems of a checkpoint as values, and obstacles of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType

from ...errors import CheckpointError, ZeropointError, printable

MOST_LISTED = 50
"""So many names of each kind are spelled out in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    where: the module, tensor or file as it is named. what: the rest of the sentence.

    >>> str(Problem(where="model.norm.weight", what="it is missing"))
    "'model.norm.weight': it is missing"
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{printable(self.where)}: {self.what}"


def listed(items: Sequence[str], most: int = MOST_LISTED, *, mark: str = ",") -> str:
    """Return the first items in a row, and the number of others.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b", "c"], 2, mark=";")
    ('a, b and 1 more', 'a; b; and 1 more')
    """
    rest = len(items) - most
    more = f"{'' if mark == ',' else mark} and {rest} more" if rest > 0 else ""
    return f"{mark} ".join(items[:most]) + more


class ObstacleError(CheckpointError):
    """An obstacle outside the data; the same call resumes."""


def is_of_data(error: BaseException) -> bool:
    """Return whether the same call would fail again: faulty data or files."""
    if not isinstance(error, ZeropointError) or isinstance(error, ObstacleError):
        return False
    # What a system or a store said is the cause of what we say about it; an error of the data has only ours.
    return isinstance(error.__cause__, ZeropointError | NoneType)
