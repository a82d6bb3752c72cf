"""Resumption of an interrupted run, and detection of a finished one.

What journal records say is done is taken over where the bytes prove it.

A manifest says what was made of what, but knows of the source only its headers. So where all files are there
with their sizes, headers and texts, the numbers are made once more, without being written, and every byte is
compared: a retrained model of the same shapes is never taken for the one that was quantized.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, option, printable
from ...progress import Progress
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import ASKED, identity, require_same, stamps
from ..plan.texts import Text
from ..read.file_names import JOURNAL
from ..read.storage import Place, failures, opened, read_bytes, shown, stamp
from . import read_back
from .directory import OutputDirectory, Partials, partial_name
from .executor import Job, local
from .journal import Journal, JournalHeader, require_output, texts
from .manifest import last_files
from .read_back import holds, unproven
from .unit_results import UnitResult, UnitResults
from .units import Groups, Unit, Units


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
    for members in Groups(units).values():
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


def done_already(
    plan: CheckpointPlan, units: Units, path: Place, on_progress: Progress | None
) -> UnitResults | None:
    """Return a run's results if ``path`` holds its bytes, else None.

    Raises as a run does for data that cannot be quantized.
    """
    heads = {str(path): (Text.of(""), size) for path, size in plan.companions.items()}
    heads |= {shard.name: (shard.head, shard.size) for shard in plan.shards}
    heads |= {name: (text, text.size) for name, text in plan.texts.items()}
    try:
        if not all(holds(path / name, head.pieces(), size=size) for name, (head, size) in heads.items()):
            return None
    except CheckpointError:  # one is missing, or cannot be read
        return None
    done = UnitResults(len(units))
    nowhere = _Nowhere(path=Path(), needed=0)
    job = Job(plan=plan, partials=nowhere, todo=units, groups=Groups(units), scanned={})
    total, finished = sum(unit.nbytes for unit in units), 0
    with closing(local(job)) as results:
        for result in results:
            if isinstance(result, UnitResult):
                done[result.number] = result
                finished += units[result.number].nbytes
                if on_progress is not None:
                    on_progress(finished, total, units[result.number].name)
    plan.source.check_unchanged()
    if unproven(done, units, plan, where=lambda name: path / name):
        return None
    try:
        last = last_files(plan, identity(plan), units, done).items()
        same = all(holds(path / name, text.pieces(), size=text.size) for name, text in last)
    except CheckpointError:  # the manifest is missing
        return None
    return done if same else None


_MOST_HEAD = 1 << 26
"""Bytes of a manifest in which what was made of what, and all files, must stand."""


def finished(plan: CheckpointPlan, path: Place) -> bool:
    """Return whether an output's manifest has the identity of a plan.

    The identity of the run and the sizes of all files are compared, of a plan whose weights are still to be
    solved what it was asked for; no weight is read. A source with the headers of the one that was quantized,
    and other numbers, is taken for it.
    """
    of_text = (CheckpointError, ValueError, KeyError, TypeError, AttributeError)
    with contextlib.suppress(*of_text, *failures(path)), opened(path / MANIFEST) as file:
        head = read_bytes(file, 0, min(file.stamp.size, _MOST_HEAD))
        said = json.loads(head.partition(b',\n"tensors"')[0] + b"}")
        sizes = {name: about["size"] for name, about in said["files"].items()}
        unsolved = plan.asked and not plan.solved
        wanted = {ASKED: plan.asked} if unsolved else identity(plan)
        known = {name: text for name, text in said["identity"].items() if name in wanted or not unsolved}
        return known == wanted and all(stamp(path / name).size == size for name, size in sizes.items())
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nowhere(Partials):
    """Partial files that take everything and hold nothing."""

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        with self.io(name):
            descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
