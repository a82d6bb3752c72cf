"""Make results durable in batches: first the bytes, then their journal records.

Waiting for the disk after each unit would cost more than the unit, and never waiting would lose everything,
so results are gathered until they are worth it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ...errors import CheckpointError
from ..read.file_names import JOURNAL
from .directory import Partials
from .journal import Journal
from .unit_results import UnitResult
from .units import Unit

COMMIT_BYTES = 1 << 28
COMMIT_SECONDS = 2.0
"""A commit follows so many bytes or seconds of finished units, which is what a kill can cost."""


class Commit:
    """Collects results, and writes their journal records in a thread.

    Records follow once the bytes are on disk. seconds: time in which its caller waited for the disk, and for
    nothing else.
    """

    def __init__(self, journal: Journal, partials: Partials, units: Sequence[Unit]) -> None:
        self.seconds = 0.0
        self._journal = journal
        self._partials = partials
        self._units = units
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeropoint-sync")
        self._running: Future[None] | None = None
        self._pending: list[UnitResult] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, result: UnitResult) -> None:
        """Add a result, and start to make pending results durable when due.

        Raises CheckpointError when the disk has failed meanwhile.
        """
        self._pending.append(result)
        self._bytes += sum(span.size for span in self._units[result.number].spans)
        if self._running is not None and not self._running.done():
            return
        if self._bytes >= COMMIT_BYTES or time.monotonic() - self._since >= COMMIT_SECONDS:
            self.start()

    def start(self) -> None:
        """Start to make pending results durable; raises CheckpointError on failure."""
        if self._running is not None and self._running.done():
            self._finish()
        pending, self._pending = self._pending, []
        self._bytes, self._since = 0, time.monotonic()
        if not pending:
            return
        try:
            self._running = self._thread.submit(self._write, pending, self._running)
        except RuntimeError:  # the system gives no more threads
            self._finish()
            self._write(pending)

    def flush(self) -> None:
        """Wait until all results are durable. Raises CheckpointError when the disk fails."""
        begin = time.monotonic()
        self.start()
        self._finish()
        self.seconds += time.monotonic() - begin

    def _finish(self) -> None:
        """Wait for the running batch; after a failure, drop all pending results.

        A later sync that succeeds would prove nothing about the bytes that an earlier one failed to write.
        """
        if self._running is None:
            return
        try:
            self._running.result()
        except CheckpointError:
            self._pending.clear()
            self._running = None
            raise
        self._running = None

    def close(self) -> None:
        """Wait for what was begun, whatever comes of it."""
        self._thread.shutdown()

    def _write(self, pending: Sequence[UnitResult], before: Future[None] | None = None) -> None:
        if before is not None:
            before.result()  # in this thread, so it has ended; what follows a failure never counts
        for file in sorted({self._units[result.number].file for result in pending}):
            with self._partials.open(file) as descriptor:
                os.fdatasync(descriptor)
        with self._partials.io(JOURNAL):
            self._journal.append(result.document() for result in pending)
