"""Proof of written files: their first bytes, and each unit's hashes."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from ...columns import LazySequence
from ..measure.tiles import Scratch
from ..measure.workers import Task, done_tasks
from ..plan.checkpoint_plan import CheckpointPlan
from ..read.headers import read_header
from ..read.object_store import RemotePath
from ..read.problems import ObstacleError
from ..read.storage import OpenFile, Place, opened, read_bytes, shown
from .directory import OutputDirectory, partial_name
from .unit_results import SHA256, XXH3, Hash, UnitResult
from .units import Span, Unit
from .work import PIECE


def read_back(
    done: Mapping[int, UnitResult],
    directory: OutputDirectory,
    plan: CheckpointPlan,
    all_units: Sequence[Unit],
    *,
    published: Container[str],
) -> None:
    """Raise ReadBackError unless every unpublished file holds the written bytes."""
    for shard in plan.shards:
        if shard.name not in published:
            path = directory.path / partial_name(shard.name)
            if shard.header:
                read_header(path, shard.name)
            if not holds(path, shard.head.pieces(), size=shard.size):
                raise ReadBackError(f"{shown(path)} has not the header that was written; {_CHECK}")
    left = array("I", (at for at, unit in enumerate(all_units) if unit.file not in published))
    waiting = LazySequence(len(left), lambda n: all_units[left[n]])
    wrong = unproven(done, waiting, plan, where=lambda file: directory.path / partial_name(file))
    if wrong:
        span = wrong[0].spans[0]
        raise ReadBackError(
            f"{shown(directory.path / partial_name(span.file))} holds other bytes than were written at byte "
            f"{span.begin}, of {wrong[0].name}, and in {len(wrong) - 1} more places; {_CHECK}"
        )


_CHECK = "check the memory and the disk; nothing was published"


class ReadBackError(ObstacleError):
    """A file does not hold what was written into it."""


def holds(path: Place, head: Iterable[bytes], *, size: int) -> bool:
    """Return whether a file has ``size`` bytes and begins with ``head``."""
    with opened(path) as file:
        at = 0
        for piece in head if file.stamp.size == size else ():
            if read_bytes(file, at, len(piece)) != piece:
                return False
            at += len(piece)
        return file.stamp.size == size


def unproven(
    done: Mapping[int, UnitResult],
    units: Sequence[Unit],
    plan: CheckpointPlan,
    *,
    where: Callable[[str], Place],
) -> list[Unit]:
    """Return the units that are missing or fail their hashes."""
    failed = set(wrong(done, units, plan, where=where))
    return [unit for unit in units if unit.number not in done or unit.number in failed]


def wrong(
    done: Mapping[int, UnitResult],
    units: Sequence[Unit],
    plan: CheckpointPlan,
    *,
    where: Callable[[str], Place],
) -> list[int]:
    """Return the numbers of the finished units that fail their hashes."""
    first = next((unit for unit in units if unit.number in done), None)
    if first is None:
        return []
    proofs = (_Proof(u, done[u.number], where(u.file)) for u in units if u.number in done)
    piece = _REMOTE_PIECE if isinstance(where(first.file), RemotePath) else PIECE
    with contextlib.closing(done_tasks(proofs, workers=plan.limits.workers, buffer_bytes=piece)) as found:
        return sorted(proof.done.number for proof in found if not proof.ok)


_REMOTE_PIECE = 1 << 23
"""Bytes that are asked of a store at once: a request takes as long as reading megabytes of a disk."""


class _Proof(Task):
    """Hash what a unit wrote, and compare."""

    def __init__(self, unit: Unit, done: UnitResult, place: Place) -> None:
        super().__init__(unit.name, unit.nbytes)
        self.unit = unit
        self.done = done
        self.place = place
        self.ok = False

    def run(self, scratch: Scratch) -> None:
        # A record on disk may be forged or of another run; what this process wrote and remembers is not.
        make, known = (XXH3, self.done.checks) if self.done.checks else (SHA256, self.done.digests)
        spans = self.unit.spans
        if len(spans) != len(known):
            return
        with opened(self.place) as file:
            self.ok = all(
                span.begin + span.size <= file.stamp.size
                and self._digest(make(), file, span, scratch.buffer) == digest
                for span, digest in zip(spans, known, strict=True)
            )

    def _digest(self, found: Hash, file: OpenFile, span: Span, buffer: bytearray) -> str:
        for done in range(0, span.size, len(buffer)):
            part = memoryview(buffer)[: span.size - done]
            file.read_into(part, span.begin + done)
            found.update(part)
        return found.hexdigest()
