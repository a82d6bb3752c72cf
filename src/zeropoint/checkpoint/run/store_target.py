"""An object store as a run's target: whole objects, index last.

A file is done in a local directory, the spool, proven, and uploaded while the next one is being done: the
spool never holds more than two files. Next to each object that is there, `.zeropoint/NAME.json` says what was
done for it, and `.zeropoint/identity.json` for what run: these records are the journal. A run that was
interrupted anywhere resumes at the file that it was at, on any machine, by the same command. When the index
is there, which comes last of all, the records are removed.

Stores have no locks. Two runs of one command write the same bytes; one of another command is refused by the
identity. Nothing is replaced that was there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...columns import LazySequence
from ...errors import CheckpointError, option
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import identity, require_same, stamps
from ..plan.texts import Text
from ..read import object_store
from ..read.file_names import require_outputs
from ..read.object_store import RemotePath
from ..read.problems import ObstacleError, is_of_data, listed
from ..read.source import MAX_JSON_BYTES
from ..read.storage import Place, read_small, shown
from .directory import OutputDirectory, partial_name
from .executor import Job
from .folder import Folder
from .journal import texts
from .manifest import last_files
from .read_back import holds, read_back, unproven
from .unit_results import ScanResult, UnitResult, UnitResults
from .units import Groups, Unit, Units

RECORDS = ".zeropoint"
_IDENTITY = f"{RECORDS}/identity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that units write: name, size, head, and units in order."""

    name: str
    size: int
    head: Text
    units: Sequence[Unit]

    @property
    def record(self) -> str:
        """The name of the object that says what was done for it."""
        return f"{RECORDS}/{self.name}.json"


def _require_apart(root: Place, out: RemotePath) -> None:
    if isinstance(root, RemotePath) and f"{out}/".startswith(f"{root}/"):
        raise CheckpointError(f"output {shown(out)} is the source or lies in it; write elsewhere")
    if isinstance(root, RemotePath) and f"{root}/".startswith(f"{out}/"):
        raise CheckpointError(f"output {shown(out)} holds the source; write elsewhere")


def _spool(out: RemotePath, spool: Path | None) -> Path:
    """Return this output's directory in the spool, the same in each run."""
    parent = Path(tempfile.gettempdir()) if spool is None else spool
    return parent / f"zeropoint-{hashlib.sha256(str(out).encode()).hexdigest()[:16]}"


def _require_own(folder: Path) -> None:
    """Raise CheckpointError for a spool of another user, or a link.

    Its name can be foreseen, and the system's directory for temporary files is everybody's.
    """
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CheckpointError(
                f"spool {shown(folder)} is not a directory of yours; choose another one with "
                f"{option('spool')}"
            )


def _remove_folders(folder: Path, names: Iterable[str]) -> None:
    """Remove empty folders of files in the spool, and the empty spool."""
    inner = {str(parent) for name in names for parent in PurePosixPath(name).parents[:-1]}
    with contextlib.suppress(OSError):  # left by a run that was killed, or gone already
        for name in sorted(inner, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                Folder(folder).remove(name)
        folder.rmdir()


def _files(plan: CheckpointPlan, all_units: Units) -> tuple[_File, ...]:
    """Return the files that units write, in the order of processing."""
    by_name: dict[str, array[int]] = {}
    for unit in all_units:
        by_name.setdefault(unit.file, array("I")).append(unit.number)

    def of_file(name: str) -> Sequence[Unit]:
        numbers = by_name.get(name, array("I"))
        return LazySequence(len(numbers), lambda n: all_units[numbers[n]])

    found = [(shard.name, shard.size, shard.head) for shard in plan.shards]
    found += [(str(path), size, Text.of("")) for path, size in plan.companions.items()]
    return tuple(_File(name=name, size=size, head=head, units=of_file(name)) for name, size, head in found)


class StoreTarget:
    """A :class:`~zeropoint.checkpoint.run.executor.Target` behind a URL.

    spool: local directory for files on their way; None is the system's directory for temporary files. done:
    of all files that are in the store with their records, and of the one that is being done.
    """

    sync_seconds = 0.0

    def __init__(self, plan: CheckpointPlan, all_units: Units, out: RemotePath, spool: Path | None) -> None:
        _require_apart(plan.source.root, out)
        self.path = out
        self.done = UnitResults(len(all_units))
        self.notes: list[str] = []
        self._files = _files(plan, all_units)
        require_outputs((*(file.name for file in self._files), *plan.texts))
        self._plan, self._units = plan, all_units
        self._spool = _spool(out, spool)
        self._identity = identity(plan)
        self._scanned: dict[int, ScanResult] = {}
        self._there: set[str] = set()

    def __enter__(self) -> StoreTarget:
        return self

    def __exit__(self, *failure: object) -> None:
        """Do nothing: stores have no locks."""

    def may_be_complete(self) -> bool:
        """See :class:`Target`; a complete output has no records."""
        found = set(object_store.everything(self.path))
        return _IDENTITY not in found and self._own_at_the_end() <= found

    def begin(self, *, restart: bool) -> None:
        """See :class:`Target`; leaves the record of this run.

        Raises CheckpointError when the run was another one, or the place holds objects of others.
        """
        found = set(object_store.everything(self.path))
        if restart and _IDENTITY in found:
            self._remove_own(found)
            found = set(object_store.everything(self.path))
        begun = _IDENTITY in found
        self._require_only(found, self._own() if begun else set())
        state = stamps(self._plan)
        if begun:
            self._resume(found, state)
        self._write(_IDENTITY, {"identity": self._identity, "stamps": state})
        _require_own(self._spool)

    def require_free(self) -> None:
        """See :class:`Target`."""
        found = set(object_store.everything(self.path))
        if not found & {_IDENTITY, MANIFEST}:
            self._require_only(found, set())

    def _require_only(self, found: set[str], own: set[str]) -> None:
        if found - own:
            names = listed([*map(shown, sorted(found - own))], 3)
            raise CheckpointError(f"output {shown(self.path)} holds {names}; remove them, or write elsewhere")

    def _resume(self, found: set[str], state: Mapping[str, str]) -> None:
        begun = self._read(_IDENTITY)
        try:
            then = {key: texts(begun.get(key)) for key in ("identity", "stamps")}
        except CheckpointError as error:
            raise self._no_record(_IDENTITY) from error
        require_same(
            self._identity,
            then["identity"],
            what=f"the interrupted run in {shown(self.path)}",
            remedy=f"rerun the original command to resume, or add {option('restart', True)} to start over",
        )
        changed = sorted(name for name in state if then["stamps"].get(name) != state[name])
        if changed:
            listed = ", ".join(map(shown, changed[:3])) + (" and others" if len(changed) > 3 else "")
            self.notes.append(f"{listed} changed since the interrupted run, so all is done again")
            return
        for file in self._files:
            if file.name in found and file.record in found:
                done = self._proven(file)
                if done is not None:
                    self._there.add(file.name)
                    self.done.update((unit.number, unit) for unit in done)

    def _proven(self, file: _File) -> list[UnitResult] | None:
        """Return the proven results of a file in the store, or None."""
        record, place = self._read(file.record), self.path / file.name
        listed = record.get("units")
        try:
            done = [
                UnitResult.parse(unit, self._units)
                for unit in (listed if isinstance(listed, list) else [record])
            ]
        except CheckpointError as error:
            raise self._no_record(file.record) from error
        if not holds(place, file.head.pieces(), size=file.size):
            return None
        found = {each.number: each for each in done}
        if unproven(found, file.units, self._plan, where=lambda _: place):
            return None
        return [found[unit.number] for unit in file.units]

    def jobs(self) -> Generator[Job, None, None]:
        """Yield a job for each missing file, while the previous file uploads."""
        sizes = {file.name: file.size for file in self._files}
        with OutputDirectory(self._spool, self._plan.source.root, sizes, overwrite=True) as directory:
            _require_own(self._spool)
            try:
                yield from self._file_jobs(directory)
            finally:
                directory.discard()
        _remove_folders(self._spool, sizes)

    def _file_jobs(self, directory: OutputDirectory) -> Generator[Job, None, None]:
        group = Groups(self._units)
        names = {file.name for file in self._files}
        with ThreadPoolExecutor(1, thread_name_prefix="zeropoint-upload") as uploads:
            under_way: Future[None] | None = None
            for file in self._files:
                if file.name in self._there:
                    continue
                directory.prepare(file.name, file.size, bytes(file.head))
                yield Job(
                    plan=self._plan,
                    partials=directory.partials,
                    todo=file.units,
                    groups=group,
                    scanned=dict(self._scanned),
                )
                read_back(self.done, directory, self._plan, file.units, published=names - {file.name})
                if under_way is not None:
                    under_way.result()
                under_way = uploads.submit(self._upload, file, directory.path / partial_name(file.name))
            if under_way is not None:
                under_way.result()

    def add(self, result: ScanResult | UnitResult) -> None:
        """See :class:`Target`; what was done is recorded with its file."""
        if isinstance(result, ScanResult):
            self._scanned[result.number] = result
        else:
            self.done[result.number] = result

    def _upload(self, file: _File, path: Path) -> None:
        """Upload a file, record it, and remove it from the spool."""
        now = object_store.upload(path, self.path / file.name)
        if now.size != file.size:
            raise CheckpointError(
                f"{shown(self.path / file.name)} has {now.size} bytes after its upload, but {file.size} were "
                "sent: somebody else writes there; stop it, and start the same command again"
            ) from OSError("another writer")
        done = [self.done[unit.number].document() for unit in file.units]
        self._write(file.record, {"units": done})
        self._there.add(file.name)
        os.unlink(path)

    def publish(self) -> None:
        """Write the closing files, the index last, and remove the records."""
        for name, text in last_files(self._plan, self._identity, self._units, self.done).items():
            place = self.path / name
            if object_store.exists(place) and not holds(place, text.pieces(), size=text.size):
                rule = "is not an object of this run; move it away, and run the same command again"
                raise ObstacleError(f"{shown(place)} {rule}")
            object_store.write(place, bytes(text))
        for record in (*(file.record for file in self._files), _IDENTITY):
            object_store.remove(self.path / record)

    def leave(self, error: BaseException) -> None:
        """See :class:`Target`."""
        if not is_of_data(error):
            error.add_note(
                f"the work so far is kept in {shown(self.path)}; run the same command again to resume"
            )
            return
        with contextlib.suppress(CheckpointError):
            # Files that this run has not put there may be somebody else's by now.
            kept = self._own_at_the_end() - self._there
            self._remove_own(set(object_store.everything(self.path)) - kept)

    def _own(self) -> set[str]:
        """Return the names of all objects that a run may write."""
        return self._own_at_the_end() | {_IDENTITY, *(file.record for file in self._files)}

    def _own_at_the_end(self) -> set[str]:
        return {MANIFEST, *self._plan.texts, *(file.name for file in self._files)}

    def _remove_own(self, found: set[str]) -> None:
        # The identity last: until then it says whose the others are.
        for name in (*sorted(found & self._own() - {_IDENTITY}), _IDENTITY):
            object_store.remove(self.path / name)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        object_store.write(self.path / name, json.dumps(record).encode("ascii"))

    def _read(self, name: str) -> dict[str, Any]:
        raw, _ = read_small(self.path / name, limit=MAX_JSON_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(raw)
            if isinstance(record, dict):
                return record
        raise self._no_record(name)

    def _no_record(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{shown(self.path / name)} is not a record of a run; add {option('restart', True)}, or "
            "write elsewhere"
        )
