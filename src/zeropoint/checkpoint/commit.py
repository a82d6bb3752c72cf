"""Make results durable: first the bytes, then the record that they are there; many units at a time.

Waiting for the disk after each unit would cost more than the unit, and never waiting would lose everything,
so results are gathered until they are worth it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from .journal import JOURNAL, Journal
from .output import Partials
from .units import Unit
from .work import Done, Scanned

COMMIT_BYTES = 1 << 28
COMMIT_SECONDS = 2.0
"""A commit follows so many bytes or seconds of finished units, which is what a kill can cost."""


class Commit:
    """Gathers results and writes them to the journal after their bytes; the driver's thread uses it alone.

    seconds: time that was spent waiting for the disk, while the engine went on.
    """

    def __init__(self, journal: Journal, partials: Partials, units: Sequence[Unit]) -> None:
        self.seconds = 0.0
        self._journal = journal
        self._partials = partials
        self._units = units
        self._pending: list[Scanned | Done] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, result: Scanned | Done) -> None:
        """Take in a result, and make those that came together durable when it is time."""
        self._pending.append(result)
        if isinstance(result, Done):
            self._bytes += sum(span.size for span in self._units[result.number].spans)
        if self._bytes >= COMMIT_BYTES or time.monotonic() - self._since >= COMMIT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make all results durable. Raises CheckpointError when the disk fails; they are then forgotten.

        A later sync that succeeds would prove nothing about the bytes that an earlier one failed to write.
        """
        pending, self._pending = self._pending, []
        start = time.monotonic()
        for file in sorted({self._units[r.number].file for r in pending if isinstance(r, Done)}):
            with self._partials.open(file) as descriptor:
                os.fdatasync(descriptor)
        if pending:
            with self._partials.io(JOURNAL):
                self._journal.append(result.document() for result in pending)
        self._bytes, self._since = 0, time.monotonic()
        self.seconds += self._since - start
