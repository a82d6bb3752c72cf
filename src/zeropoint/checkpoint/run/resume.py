"""Resumption of a run from journal records that the bytes prove."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, option, printable
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.identity import identity, require_same, stamps
from ..plan.texts import Text
from ..read.file_names import JOURNAL
from ..read.storage import shown
from . import read_back
from .directory import OutputDirectory, partial_name
from .journal import Journal, JournalHeader, require_output, texts
from .unit_results import UnitResult, UnitResults
from .units import Unit, groups


@dataclass(slots=True, kw_only=True)
class State:
    """State of a run.

    done: by the number of the unit, only what the files prove. publishing: whether files have begun to get
    their names. published: shards and companions that have theirs. notes: sentences for the report.
    """

    journal: Journal
    identity: Mapping[str, str]
    done: MutableMapping[int, UnitResult]
    publishing: bool = False
    published: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def begin(directory: OutputDirectory, plan: CheckpointPlan, units: Sequence[Unit], *, restart: bool) -> State:
    """Begin or resume the run in the journal, and prepare its files.

    restart: remove what an interrupted run left, whatever it was. Raises CheckpointError when the journal
    belongs to another run, naming the first difference, and leaves that run as it is.
    """
    path = directory.path / JOURNAL
    if restart:
        _remove_leftovers(directory, path)
    new = not os.path.lexists(path)
    if new:
        directory.require_free(published=False)
    with directory.partials.io(JOURNAL):
        journal = Journal(path)
    state = State(journal=journal, identity=identity(plan), done=UnitResults(len(units)))
    try:
        now = JournalHeader(identity=state.identity, stamps=stamps(plan), files=directory.names)
        if journal.records:
            _resume(state, now, units, directory)
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
            directory.discard()
        raise
    return state


def _remove_leftovers(directory: OutputDirectory, path: Path) -> None:
    """Remove the files of an interrupted run that its journal names."""
    if not os.path.lexists(path):
        return
    with directory.partials.io(JOURNAL):
        journal = Journal(path)
    journal.close()
    files: Collection[str] = ()
    published: dict[str, str] = {}
    # What is no record of ours says nothing about files: then only files of this command's names go.
    with contextlib.suppress(CheckpointError):
        files = JournalHeader.parse(journal.records[0]).files if journal.records else ()
        for record in journal.records[1:]:
            if "publish" in record:
                published |= _published(record)
    directory.discard(files, published)


def _published(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that were about to be published, with their states."""
    found = texts(record["publish"])
    for name in found:
        require_output(name)
    return found


def _resume(state: State, now: JournalHeader, units: Sequence[Unit], directory: OutputDirectory) -> None:
    """Replay the journal; raises CheckpointError when another run wrote it."""
    what = f"the interrupted run in {shown(directory.path)}"
    try:
        header = JournalHeader.parse(state.journal.records[0])
    except CheckpointError as error:
        raise _foreign(what, error) from error
    require_same(
        now.identity,
        header.identity,
        what=what,
        remedy=f"rerun the original command to resume, or add {option('restart', True)} to start over",
    )
    try:
        found = _replay(state, header, units)
    except CheckpointError as error:
        raise _foreign(what, error) from error
    changed = _changed(found, now.stamps)
    if changed:
        lost = _forget(state, units, changed)
        listed = ", ".join(map(printable, changed[:3])) + (" and others" if len(changed) > 3 else "")
        state.notes.append(f"{listed} changed since the interrupted run; {lost} of its units are done again")
        with directory.partials.io(JOURNAL):
            state.journal.append([{"stamps": dict(now.stamps)}])


def _foreign(what: str, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"{what} was made by another version of zeropoint, or by somebody else: {error}; add "
        f"{option('restart', True)}"
    )


def _replay(state: State, header: JournalHeader, units: Sequence[Unit]) -> Mapping[str, str]:
    """Replay all records after the header; return the latest stamps.

    Raises CheckpointError for one that no run of these units writes.
    """
    stamps = header.stamps
    for record in state.journal.records[1:]:
        if "unit" in record:
            found = UnitResult.parse(record, units)
            state.done[found.number] = found
        elif "publish" in record:
            _published(record)
            state.publishing = True
        else:
            now = texts(record.get("stamps"))
            _forget(state, units, _changed(stamps, now))
            stamps = now
    return stamps


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in now if before.get(name) != now[name])


def _forget(state: State, units: Sequence[Unit], changed: Collection[str]) -> int:
    """Drop results of changed files and their weight sets; return how many."""
    changed = frozenset(changed)
    stale = {unit.number for unit in units if not changed.isdisjoint(unit.output.stamps)}
    for members in groups(units).values():
        numbers = {unit.number for unit in members}
        if numbers & stale:
            stale |= numbers
    return sum(state.done.pop(number, None) is not None for number in stale)


def _prepare(state: State, directory: OutputDirectory, plan: CheckpointPlan, units: Sequence[Unit]) -> None:
    """Create or reuse every file, and drop unproven results."""
    files = [(shard.name, shard.size, shard.head) for shard in plan.shards]
    files += [(str(path), size, Text.of("")) for path, size in plan.companions.items()]
    named = {name for name, _, _ in files if state.publishing and directory.published(name)}
    for name, size, head in files:
        if name not in named:
            directory.prepare(name, size, bytes(head))
    place = {name: directory.path / (name if name in named else partial_name(name)) for name, _, _ in files}
    for number in read_back.wrong(state.done, units, plan, where=lambda file: place[file]):
        del state.done[number]
    missing = {unit.file for unit in units if unit.number not in state.done}
    for name, size, head in files:
        if name not in named:
            continue
        if name in missing or not read_back.holds(directory.path / name, head.pieces(), size=size):
            directory.prepare(name, size, bytes(head))  # or refuse, where it replaces what may be another's
            for number in [unit.number for unit in units if unit.file == name]:
                state.done.pop(number, None)
        else:
            directory.adopt(name)
            state.published.add(name)
