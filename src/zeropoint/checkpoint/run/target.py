"""Where a run writes: the protocol of output targets, which keep what is done and publish all or nothing.

A directory (directory_target.py) and a place in an object store (store_target.py) are the two that there are.
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from typing import Protocol

from ..read.storage import Place
from .executor import Job
from .work import Done, Scanned


class Target(Protocol):
    """An output of one run: a context manager, whose end without an error is that of the run.

    path: where it is. done: results of units, by number, only what is proven or was done by this run.
    notes: sentences for the report. sync_seconds: time spent waiting for the disk alone.
    """

    @property
    def path(self) -> Place:
        """See above."""

    @property
    def done(self) -> MutableMapping[int, Done]:
        """See above; complete as far as an interrupted run left it, once the run began."""

    @property
    def notes(self) -> list[str]:
        """See above."""

    @property
    def sync_seconds(self) -> float:
        """See above."""

    def __enter__(self) -> Target:
        """Take possession of the place, where that can be."""

    def __exit__(self, *failure: object) -> None:
        """Give it up; without a failure, remove what only an interrupted run needs."""

    def may_be_complete(self) -> bool:
        """Return whether a run may have ended well here, so that it is worth comparing all bytes."""

    def require_free(self) -> None:
        """Raise CheckpointError where the place holds files of others, and no run has begun or ended here."""

    def begin(self, *, restart: bool) -> None:
        """Begin a run, or resume the one that was interrupted here.

        restart: remove what an interrupted run left. Raises CheckpointError when that was another run, or the
        place holds files of others.
        """

    def jobs(self) -> Generator[Job, None, None]:
        """Yield what is to do; asking for the next one means that all of the last one was added."""

    def add(self, result: Scanned | Done) -> None:
        """Take in the result of a unit, and make it durable, now or later."""

    def publish(self) -> None:
        """Give every file its name, the one that loaders look for last; all units are done."""

    def leave(self, error: BaseException) -> None:
        """Keep what is done when the same call can resume, and say so in a note; remove it otherwise."""
