"""What of a run is done already: read from its journal, and believed as far as the bytes on disk prove it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, printable
from .identity import identity, require_same, stamps
from .journal import JOURNAL, Header, Journal
from .output import OutputDirectory, partial_name
from .plan import Plan
from .quantize import Scratch
from .storage import open_regular, read_into, shown
from .units import Unit, groups
from .work import PIECE, Done, Scanned
from .workers import Task, run_tasks


@dataclass(slots=True, kw_only=True)
class State:
    """How far a run is.

    scanned, done: by the number of the unit. done: only what the files prove. publishing: whether files have
    begun to get their names. fresh: whether none of these names was there before, so that whatever has one
    is this run's. published: shards and companions that have theirs. notes: sentences for the report.
    """

    journal: Journal
    identity: Mapping[str, str]
    scanned: dict[int, Scanned] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    publishing: bool = False
    fresh: bool = False
    published: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def begin(directory: OutputDirectory, plan: Plan, units: Sequence[Unit], *, restart: bool) -> State:
    """Begin a run, or go on with the one in the journal; all files but those written last are prepared.

    restart: remove what an interrupted run left, whatever it was. Raises CheckpointError when the journal is
    that of another run, naming the first difference, and leaves that run as it is.
    """
    path = directory.path / JOURNAL
    if restart:
        _remove_leftovers(directory, path)
    new = not os.path.lexists(path)
    if new:
        directory.require_free(published=False)
    with directory.partials.io(JOURNAL):
        journal = Journal(path)
    state = State(journal=journal, identity=identity(plan))
    try:
        now = Header(identity=state.identity, stamps=stamps(plan), files=directory.names)
        if journal.records:
            _go_on(state, now, units, directory)
            directory.require_free(published=state.publishing)
        else:
            directory.require_free(published=False)
            with directory.partials.io(JOURNAL):
                journal.append([now.document()])
        _prepare(state, directory, plan, units)
        directory.sync_names()
    except BaseException:
        journal.close()
        if new:
            directory.discard(directory.names, published=False)
        raise
    return state


def _remove_leftovers(directory: OutputDirectory, path: Path) -> None:
    """Remove the files of an interrupted run, as far as its journal says which they are."""
    if not os.path.lexists(path):
        return
    with directory.partials.io(JOURNAL):
        journal = Journal(path)
    journal.close()
    header, fresh = _header(journal), any(record.get("publish") for record in journal.records)
    directory.discard(() if header is None else header.files, published=fresh)


def _header(journal: Journal) -> Header | None:
    try:
        return Header(**journal.records[0]) if journal.records else None
    except TypeError:
        return None


def _go_on(state: State, now: Header, units: Sequence[Unit], directory: OutputDirectory) -> None:
    """Take in what the journal says; raises CheckpointError when it is that of another run."""
    header, what = _header(state.journal), f"the interrupted run in {shown(directory.path)}"
    if header is None:
        raise CheckpointError(
            f"{what} was made by another version of zeropoint; add --restart, or use that one"
        )
    require_same(
        now.identity,
        header.identity,
        what=what,
        remedy="rerun the original command to resume, or add --restart to start over",
    )
    found = dict(header.stamps)
    for record in state.journal.records[1:]:
        if "stamps" in record:
            _forget(state, units, _changed(found, record["stamps"]))
            found = record["stamps"]
        _take_in(state, record)
    changed = _changed(found, now.stamps)
    if changed:
        lost = _forget(state, units, changed)
        listed = ", ".join(map(printable, changed[:3])) + (" and others" if len(changed) > 3 else "")
        state.notes.append(f"{listed} changed since the interrupted run; {lost} of its units are done again")
        with directory.partials.io(JOURNAL):
            state.journal.append([{"stamps": dict(now.stamps)}])


def _take_in(state: State, record: Mapping[str, Any]) -> None:
    if "unit" in record:
        found = Done.parse(record)
        state.done[found.number] = found
    elif "scan" in record:
        scanned = Scanned.parse(record)
        state.scanned[scanned.number] = scanned
    elif "publish" in record:
        state.publishing, state.fresh = True, record["publish"]


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in now if before.get(name) != now[name])


def _forget(state: State, units: Sequence[Unit], changed: Collection[str]) -> int:
    """Forget all that came of changed files, sets that hold a weight of theirs included; return how much."""
    changed = frozenset(changed)
    stale = {unit.number for unit in units if not changed.isdisjoint(unit.stamps)}
    for number in stale:
        state.scanned.pop(number, None)
    for members in groups(units).values():
        numbers = {unit.number for unit in members}
        if numbers & stale:
            stale |= numbers
    return sum(state.done.pop(number, None) is not None for number in stale)


def _prepare(state: State, directory: OutputDirectory, plan: Plan, units: Sequence[Unit]) -> None:
    """Make or take over every file, and keep of ``state.done`` what they prove."""
    files = [(shard.name, shard.size, shard.header) for shard in plan.shards]
    files += [(str(path), size, b"") for path, size in plan.companions.items()]
    named = {name for name, _, _ in files if state.publishing and directory.published(name)}
    for name, size, head in files:
        if name not in named:
            directory.prepare(name, size, head)
    state.done = _proven(state.done, directory, units, plan, named=named)
    missing = {unit.file for unit in units if unit.number not in state.done}
    for name, size, head in files:
        if name not in named:
            continue
        if name in missing or not holds(directory.path / name, head, size=size):
            directory.prepare(name, size, head)
            state.done = {
                unit.number: state.done[unit.number]
                for unit in units
                if unit.file != name and unit.number in state.done
            }
        else:
            state.published.add(name)


def holds(path: Path, head: bytes, *, size: int) -> bool:
    """Return whether a file has ``size`` bytes, the first of which are ``head``."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size != size:
            return False
        found = bytearray(len(head))
        read_into(descriptor, memoryview(found), 0, path=path)
    finally:
        os.close(descriptor)
    return found == head


def unproven(
    done: Mapping[int, Done], directory: OutputDirectory, units: Sequence[Unit], plan: Plan
) -> list[Unit]:
    """Return the units whose bytes in the partial files are not those that they wrote."""
    proven = _proven(done, directory, units, plan, named=())
    return [unit for unit in units if unit.number not in proven]


def _proven(
    done: Mapping[int, Done], directory: OutputDirectory, units: Sequence[Unit], plan: Plan,
    *, named: Collection[str],
) -> dict[int, Done]:  # fmt: skip
    """Return the part of ``done`` whose bytes hash to what it says; ``named`` files have their names."""
    proofs = [
        _Proof(unit, done[unit.number], directory.path / _name(unit.file, named))
        for unit in units
        if unit.number in done
    ]
    run_tasks(proofs, workers=plan.limits.workers, buffer_bytes=PIECE)
    return {proof.done.number: proof.done for proof in proofs if proof.ok}


def _name(file: str, named: Collection[str]) -> str:
    return file if file in named else partial_name(file)


class _Proof(Task):
    """Hash what a unit wrote, and compare."""

    def __init__(self, unit: Unit, done: Done, path: Path) -> None:
        super().__init__(unit.name, unit.nbytes)
        self.unit = unit
        self.done = done
        self.path = path
        self.ok = False

    def run(self, scratch: Scratch) -> None:
        """See :class:`Task`."""
        spans = self.unit.spans
        if len(spans) != len(self.done.digests):
            return
        descriptor = open_regular(self.path)
        try:
            size = os.fstat(descriptor).st_size
            self.ok = all(
                span.begin + span.size <= size
                and self._digest(descriptor, span.begin, span.size, scratch.buffer) == digest
                for span, digest in zip(spans, self.done.digests, strict=True)
            )
        finally:
            os.close(descriptor)

    def _digest(self, descriptor: int, begin: int, size: int, buffer: bytearray) -> str:
        found = hashlib.sha256()
        for done in range(0, size, PIECE):
            part = memoryview(buffer)[: min(PIECE, size - done)]
            read_into(descriptor, part, begin + done, path=self.path)
            found.update(part)
        return found.hexdigest()
