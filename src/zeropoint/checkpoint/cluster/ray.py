"""Executor on a Ray cluster whose nodes share a file system.

The driver hands out batches of units and takes their results; it alone journals and publishes, so a run that
ends on a cluster continues locally, and the other way round. A batch whose node dies is done again elsewhere.
Ray is asked to do little: start `work` (worker.py) somewhere, and say when it is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from ...errors import UnsupportedError, option, printable
from ..measure.tiles import widest
from ..plan.identity import identity
from ..run.executor import ExecutorError, Job, Results
from ..run.unit_results import ScanResult, UnitResult, mean_scale
from ..run.units import Unit
from .worker import TOKEN_FILE, Failed, PlanRequest, UnitBatch, work

BATCH_BYTES = 1 << 28
"""Bytes of the source in a batch, at most: seconds of work, so that distributing it takes little time."""
_BATCHES_A_CPU = 4
"""So many batches come to each CPU at least, where there are units enough, so that all end together."""
_IN_FLIGHT = 2
"""Batches at each CPU: one that is being done, one that waits there."""
RETRIES = 3
"""Retries of a batch whose node or process died; more is no accident."""
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """Executor on the Ray cluster at ``address``, HOST:PORT.

    None: a cluster that Ray finds or starts. patience: seconds until a worker must see the output's files,
    and until a cluster without any CPU is given up.
    """

    address: str | None = None
    patience: float = 60.0

    def __call__(self, job: Job) -> Results:
        """See :class:`Executor`; raises ExecutorError where cluster or nodes do not fit."""
        if not job.todo:
            return
        if job.plan.outputs.added:
            raise UnsupportedError(
                "workers of a cluster do not know the scales that were learned here; leave out "
                f"{option('executor', 'ray')}"
            )
        with connected(self.address) as ray, _token(job) as token:
            plan = job.plan
            request = PlanRequest(
                token=token, source=plan.source.given, recipe=plan.recipe, selection=plan.selection,
                codec=plan.codec, limits=replace(plan.limits, workers=1), partials=job.partials,
                identity=tuple(identity(plan).items()), patience=self.patience,
                statistics=plan.statistics,
            )  # fmt: skip
            with contextlib.closing(_Run(ray, job, ray.put(request), self.patience).results()) as results:
                yield from results


class _Run:
    """The batches of a job, on their way."""

    def __init__(self, ray: Any, job: Job, request: Any, patience: float) -> None:
        self._ray = ray
        self._request = request
        self._patience = patience
        self._remote = ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        self._schedule = Schedule(job, cpus=self._cpus())
        self._pending: dict[Any, UnitBatch] = {}
        self._failed: list[Failed] = []

    def results(self) -> Results:
        """Yield results until all work, or after a failure running work, ends."""
        try:
            while self._pending or not (self._failed or self._schedule.empty):
                self._hand_out()
                ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=_POLL_SECONDS)
                for handle in ready:
                    yield from self._add_result(handle)
        finally:
            self._end()
        if self._failed:
            first = min(self._failed, key=lambda failed: failed.number)
            raise first.error from first.cause

    def _hand_out(self) -> None:
        cpus = self._cpus() if not self._failed else 0
        while len(self._pending) < _IN_FLIGHT * cpus:
            batch = self._schedule.next()
            if batch is None:
                return
            self._pending[self._remote.remote(self._request, batch)] = batch

    def _add_result(self, handle: Any) -> Iterator[ScanResult | UnitResult]:
        batch = self._pending.pop(handle)
        try:
            found = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            raise failure_of(f"units {batch.numbers[0]} to {batch.numbers[-1]}", error) from error
        for result in found:
            if isinstance(result, Failed):
                self._failed.append(result)
                continue
            if isinstance(result, ScanResult):
                self._schedule.add(result)
            yield result

    def _cpus(self) -> int:
        """Return the cluster's CPUs; raises ExecutorError after long without any."""
        end = time.monotonic() + self._patience
        while True:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            if cpus:
                return cpus
            if time.monotonic() >= end:
                rule = "has no node with a CPU; add one, and run the same command again to resume"
                raise ExecutorError(f"the Ray cluster {rule}")
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        """Stop what still runs, and wait until it has."""
        for handle in self._pending:
            # By force: an interrupt could leave a worker with half an import, and the next run in it.
            self._ray.cancel(handle, force=True)
        if self._pending:
            self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=self._patience)
        self._pending.clear()


class Schedule:
    """Batches of a job; none waits for a later one.

    cpus: of the cluster, when it begins. Sets are scanned ahead of the units that are done, by so much that
    all CPUs are busy meanwhile.
    """

    def __init__(self, job: Job, *, cpus: int) -> None:
        total = sum(unit.nbytes for unit in job.todo)
        self._batch_bytes = min(BATCH_BYTES, total // (_BATCHES_A_CPU * cpus))
        self._groups = job.groups
        self._scanned = dict(job.scanned)
        self._steps = deque(steps(job, ahead=_IN_FLIGHT * cpus * self._batch_bytes))

    @property
    def empty(self) -> bool:
        """Whether all batches were handed out."""
        return not self._steps

    def add(self, found: ScanResult) -> None:
        """Take in the extremes of a unit."""
        self._scanned[found.number] = found

    def next(self) -> UnitBatch | None:
        """Return the next batch, or None while it lacks extremes."""
        numbers: list[int] = []
        size, extremes, means = 0, {}, {}
        scans = bool(self._steps) and self._steps[0][0]
        while self._steps and self._steps[0][0] == scans and (not numbers or size < self._batch_bytes):
            unit = self._steps[0][1]
            if not scans and unit.group is not None and unit.group not in extremes:
                members = self._groups[unit.group]
                if any(member.number not in self._scanned for member in members):
                    break
                found = [self._scanned[member.number] for member in members]
                extremes[unit.group] = widest((each.low, each.high) for each in found)
                means[unit.group] = mean_scale(found)
            numbers.append(unit.number)
            size += unit.nbytes
            self._steps.popleft()
        batch = UnitBatch(numbers=tuple(numbers), scans=scans, extremes=extremes, means=means)
        return batch if numbers else None


def steps(job: Job, *, ahead: int) -> list[tuple[bool, Unit]]:
    """Return the work in order, as (whether it is a scan, unit).

    The scans of a set come before its units, and ``ahead`` bytes of the units that need scans earlier.
    """
    waiting = deque(
        (name, member)
        for name in dict.fromkeys(unit.group for unit in job.todo if unit.group is not None)
        for member in job.groups[name]
        if member.number not in job.scanned
    )
    missing = Counter(name for name, _ in waiting)
    found: list[tuple[bool, Unit]] = []
    lead = 0
    for unit in job.todo:
        while waiting and (lead < ahead or (unit.group is not None and missing[unit.group])):
            name, member = waiting.popleft()
            missing[name] -= 1
            found.append((True, member))
            lead += member.nbytes
        found.append((False, unit))
        lead -= unit.nbytes if unit.group is not None else 0
    return found


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect Ray for the block; keep an existing connection."""
    try:
        import ray  # an extra, and slow to load
    except ImportError as error:
        rule = "needs the package ray, which is not installed; pip install 'zeropoint[ray]'"
        raise ExecutorError(f"executor ray {rule}") from error
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        _require_answer(address)
    try:
        _join_or_start(ray, address)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        place = "here" if address is None else f"at {printable(address)}"
        reason = " ".join(str(error).split())
        raise ExecutorError(f"no Ray cluster can be used {place}: {reason}; {_START}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _join_or_start(ray: Any, address: str | None) -> None:
    """Connect to a given, found or new local cluster.

    A process that reaches the ports of a cluster can run code on it, so that ours listens on the loopback
    interface and asks for a token.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError:
        if address is not None:
            raise
        # Ray 2.60 replaces a loopback address by another one of the machine, but where clusters are disabled.
        alone = mock.patch("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        with mock.patch.dict(os.environ, {_CLUSTERS: "0"}), alone:
            ray.init(include_dashboard=False, **quiet)  # without an address it makes a token


_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The variable of Ray that its processes learn from whether they are reached from other machines."""
_START = "pass the HOST:PORT that `ray start --head` says, with one version of ray and Python on all nodes"


def _require_answer(address: str) -> None:
    """Raise ExecutorError unless HOST:PORT answers; Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if address.startswith("ray://") or not colon or not port.isdigit():
        raise ExecutorError(f"address {printable(address)} must be HOST:PORT of a Ray cluster; {_START}")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise ExecutorError(f"no Ray cluster answers at {printable(address)}: {reason}; {_START}") from error


@contextlib.contextmanager
def _token(job: Job) -> Iterator[str]:
    """Write a random token, which workers look for, next to partial files."""
    token = secrets.token_hex(16)
    path = job.partials.path / TOKEN_FILE
    with job.partials.io(TOKEN_FILE):
        # A new file, because what has the name may have another one too, whose bytes are not ours to change.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            os.write(descriptor, token.encode("ascii"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def failure_of(what: str, error: BaseException) -> ExecutorError:
    """Return the error of work that the cluster lost."""
    # A failure inside a worker carries its traceback as text; its cause says it in a line.
    inner = getattr(error, "cause", None) or error
    reason = printable(" ".join(f"{type(inner).__name__}: {inner}".split()), limit=500)[1:-1]
    return ExecutorError(
        f"the Ray cluster could not do {what}: {reason}; look at its nodes and their logs, and "
        "start the same command again"
    )
