"""Protocol of output targets, which keep results and publish all or nothing.

A directory (directory_target.py) and a place in an object store (store_target.py) are the two that there are.
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from typing import Protocol

from ..read.storage import Place
from .executor import Job
from .unit_results import ScanResult, UnitResult


class Target(Protocol):
    """The output of a run: a context manager around the run.

    path: where it is. done: results of units, by number, only what is proven or was done by this run.
    notes: sentences for the report. sync_seconds: time spent waiting for the disk alone.
    """

    @property
    def path(self) -> Place:
        """See above."""

    @property
    def done(self) -> MutableMapping[int, UnitResult]:
        """Results of units by number; complete once the run has begun."""

    @property
    def notes(self) -> list[str]:
        """See above."""

    @property
    def sync_seconds(self) -> float:
        """See above."""

    def __enter__(self) -> Target:
        """Take possession of the place, where that can be."""

    def __exit__(self, *failure: object) -> None:
        """Close the target; after success, remove what only a resumed run needs."""

    def may_be_complete(self) -> bool:
        """Return whether a complete output may exist, worth comparing byte by byte."""

    def require_free(self) -> None:
        """Raise CheckpointError for files of others where no run began or ended."""

    def begin(self, *, restart: bool) -> None:
        """Begin a run, or resume the one that was interrupted here.

        restart: remove what an interrupted run left. Raises CheckpointError when that was another run, or the
        place holds files of others.
        """

    def jobs(self) -> Generator[Job, None, None]:
        """Yield the jobs; each is complete before the next is asked for."""

    def add(self, result: ScanResult | UnitResult) -> None:
        """Add a unit's result, and make it durable, now or later."""

    def publish(self) -> None:
        """Publish every file, the loaders' entry file last, after all units."""

    def leave(self, error: BaseException) -> None:
        """Keep finished units of a resumable run, else remove them."""
