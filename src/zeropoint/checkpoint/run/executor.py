"""Executors of the units of a job: the protocol, and local threads.

The driver (loop.py) alone journals and publishes; an executor does units in any order and anywhere, and says
the result of each.

Results go to a target: a directory (directory_target.py) or a place in an object store (store_target.py).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..measure.tiles import Scratch, widest
from ..measure.workers import Stopped, Task, done_tasks
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.learned_data import layer_data
from ..read.problems import ObstacleError
from ..read.storage import Place
from .directory import Partials
from .unit_results import ScanResult, UnitResult, mean_scale
from .units import Unit
from .work import buffer_bytes, process, scan

Results = Generator[ScanResult | UnitResult, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Remaining work of a plan.

    partials: the files to write into, all of which exist. todo: units, in their order. groups: all units of
    the sets that must be scanned as one, by name. scanned: what is known of them already, by number.
    """

    plan: CheckpointPlan
    partials: Partials
    todo: Sequence[Unit]
    groups: Mapping[str, tuple[Unit, ...]]
    scanned: Mapping[int, ScanResult]


class ExecutorError(ObstacleError):
    """An executor cannot continue, whatever the data: what is done stays done."""


@runtime_checkable
class Executor(Protocol):
    """Does a job."""

    def __call__(self, job: Job) -> Results:
        """Yield results of scans and units, as they come.

        Closing the generator ends all work first. Raises the error of the first unit, in their order, that
        failed.
        """


def local(job: Job) -> Results:
    """Do a job on this machine's threads; an :class:`Executor`."""
    stop = threading.Event()
    limits = job.plan.limits
    needed = buffer_bytes(job.todo, limits)
    done = done_tasks(
        _tasks(job, stop), workers=limits.workers, buffer_bytes=needed, stop=stop, device=limits.device
    )
    with closing(done) as finished:
        for task in finished:
            assert task.result is not None
            yield task.result


def _tasks(job: Job, stop: threading.Event) -> Iterator[_UnitTask]:
    """Yield all work in order.

    A set is scanned before the units ahead of it are done, so that no thread waits for another.
    """
    sets: dict[str, _Extremes] = {}
    ahead: list[_UnitTask] = []
    for unit in job.todo:
        if unit.group is not None and unit.group not in sets:
            members = job.groups[unit.group]
            sets[unit.group] = extremes = _Extremes(members, job.scanned, stop)
            yield from (_Scan(m, job, extremes) for m in members if m.number not in job.scanned)
            yield from ahead
            ahead.clear()
        found = None if unit.group is None else sets[unit.group]
        ahead.append(_Do(unit, job, found))
        if found is not None and unit.group is not None and found.is_last():
            del sets[unit.group]
        if len(ahead) > _AHEAD:
            yield from ahead
            ahead.clear()
    yield from ahead


_AHEAD = 64
"""Units that wait for the scans of the next set, at most."""


class _Extremes:
    """The extremes of a set, gathered from its units by several threads."""

    def __init__(
        self, members: tuple[Unit, ...], scanned: Mapping[int, ScanResult], stop: threading.Event
    ) -> None:
        self._stop = stop
        self._found = [scanned[unit.number] for unit in members if unit.number in scanned]
        self._count = self._left = len(members)
        self._guard = threading.Lock()
        self._complete = threading.Event()
        if len(self._found) == self._count:
            self._complete.set()

    def add(self, found: ScanResult) -> None:
        """Take in one unit's."""
        with self._guard:
            self._found.append(found)
            if len(self._found) == self._count:
                self._complete.set()

    def is_last(self) -> bool:
        """Count a waiting unit, and return whether it is the last."""
        self._left -= 1
        return not self._left

    def wait(self) -> tuple[float, float]:
        """Return the complete set's extremes; raises Stopped when the run ends."""
        while not self._complete.wait(timeout=0.1):
            if self._stop.is_set():
                raise Stopped
        return widest((found.low, found.high) for found in self._found)

    def mean(self) -> float | None:
        """Return the mean scale of the completely scanned set."""
        return mean_scale(self._found)


class _UnitTask(Task):
    """Work on one unit."""

    def __init__(self, unit: Unit, job: Job, extremes: _Extremes | None) -> None:
        super().__init__(unit.name, unit.nbytes)
        self.unit = unit
        self.job = job
        self.extremes = extremes
        self.result: ScanResult | UnitResult | None = None


class _Scan(_UnitTask):
    """Scan a unit."""

    def __init__(self, unit: Unit, job: Job, extremes: _Extremes) -> None:
        super().__init__(unit, job, extremes)
        self.rows, self.gathers = unit, extremes

    def run(self, scratch: Scratch) -> None:
        self.result = found = scan(self.rows, self.job.plan.limits, scratch)
        self.gathers.add(found)


class _Do(_UnitTask):
    """Do a unit, as soon as its set is scanned."""

    def run(self, scratch: Scratch) -> None:
        of, plan = self.extremes, self.job.plan
        found = (None, None) if of is None else (of.wait(), of.mean())
        data = layer_data(plan, self.unit.output, *found)
        self.result = process(self.unit, self.job.partials, plan.limits, scratch, data)


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
