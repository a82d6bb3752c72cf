"""The output behind a URL: each object appears when it is whole, and what loaders open first comes last.

A file is done in a local directory, the spool, proven, and uploaded while the next one is being done: the
spool never holds more than two files, and `spool_bytes` says how much that is. Beside each object that is
there, `.zeropoint/NAME.json` says what was done for it, and `.zeropoint/identity.json` for what run: these
records are the journal. A run that ends anywhere goes on with the file that it was at, on any machine, by the
same command. When the index is there, which comes last of all, the records are removed.

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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...columns import Made
from ...errors import CheckpointError
from ..plan.checkpoint_plan import Plan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import identity, require_same, stamps
from ..plan.texts import Text
from ..read import object_store
from ..read.file_names import require_outputs
from ..read.object_store import RemotePath
from ..read.problems import ObstacleError
from ..read.source import MAX_JSON_BYTES
from ..read.storage import Place, read_small, shown
from .directory import OutputDirectory, Partials, partial_name
from .executor import Engine, Job, local
from .folder import Folder
from .journal import texts
from .loop import RunResult, is_of_data, last_files, outcomes, read_back, repeated
from .resume import holds, unproven
from .units import Unit, groups, units
from .work import Done, Results, Scanned
from .workers import Progress

RECORDS = ".zeropoint"
_IDENTITY = f"{RECORDS}/identity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that units write: its name, its size and its first bytes, and the units in their order."""

    name: str
    size: int
    head: Text
    units: Sequence[Unit]

    @property
    def record(self) -> str:
        """The name of the object that says what was done for it."""
        return f"{RECORDS}/{self.name}.json"


def spool_bytes(plan: Plan) -> int:
    """Return how much of a local disk a run takes: one file that is being done, and one on its way."""
    sizes = [shard.size for shard in plan.shards] + list(plan.companions.values())
    return sum(sorted(sizes)[-2:])


def run_to_store(
    plan: Plan, out: RemotePath, *, spool: Path | None = None, restart: bool = False, engine: Engine = local,
    on_progress: Progress | None = None,
) -> RunResult:  # fmt: skip
    """Write the checkpoint that ``plan`` describes below the URL ``out``: all of it, or nothing to load.

    spool: local directory for files on their way; None is the system's directory for temporary files.
    restart: remove what an interrupted run left instead of going on with it. Raises as
    :func:`zeropoint.checkpoint.run.loop.run` does, and CheckpointError when ``out`` holds anything else.

    After an error of the data nothing is left behind. After anything else, the same call goes on.
    """
    _require_apart(plan.source.root, out)
    run = _Run(plan, out, on_progress)
    there = run.repeated()
    if there is not None:
        return there
    run.begin(restart=restart)
    resumed = len(run.done)
    sizes = {file.name: file.size for file in run.files}
    folder = _spool(out, spool)
    _require_own(folder)
    try:
        with OutputDirectory(folder, plan.source.root, sizes, overwrite=True) as directory:
            _require_own(folder)
            try:
                run.do(directory, engine)
            finally:
                directory.discard()
        _remove_folders(folder, sizes)
        plan.source.check_unchanged()
        run.finish()
    except BaseException as error:
        run.leave(error)
        raise
    return RunResult(
        path=out, plan=plan, notes=(*plan.notes, *run.notes), units=len(run.units), resumed=resumed,
        outcomes=outcomes(plan, run.units, run.done), sync_seconds=0.0,
    )  # fmt: skip


def _require_apart(root: Place, out: RemotePath) -> None:
    if isinstance(root, RemotePath) and f"{out}/".startswith(f"{root}/"):
        raise CheckpointError(f"output {shown(out)} is the source or lies in it; write elsewhere")
    if isinstance(root, RemotePath) and f"{root}/".startswith(f"{out}/"):
        raise CheckpointError(f"output {shown(out)} holds the source; write elsewhere")


def _spool(out: RemotePath, spool: Path | None) -> Path:
    """Return the directory of this output in the spool: always the same, so that a kill leaves no litter."""
    parent = Path(tempfile.gettempdir()) if spool is None else spool
    return parent / f"zeropoint-{hashlib.sha256(str(out).encode()).hexdigest()[:16]}"


def _require_own(folder: Path) -> None:
    """Raise CheckpointError for a spool that somebody else made, or put a link in place of.

    Its name can be foreseen, and the system's directory for temporary files is everybody's.
    """
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CheckpointError(
                f"spool {shown(folder)} is not a directory of yours; choose another one with --spool"
            )


def _remove_folders(folder: Path, names: Iterable[str]) -> None:
    """Remove the folders of files in the spool, and the spool, where they are empty."""
    inner = {str(parent) for name in names for parent in PurePosixPath(name).parents[:-1]}
    with contextlib.suppress(OSError):  # left by a run that was killed, or gone already
        for name in sorted(inner, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                Folder(folder).remove(name)
        folder.rmdir()


def _files(plan: Plan, all_units: Sequence[Unit]) -> tuple[_File, ...]:
    """Return the files that units write, in the order in which they are done."""
    by_name: dict[str, array[int]] = {}
    for unit in all_units:
        by_name.setdefault(unit.file, array("I")).append(unit.number)

    def of_file(name: str) -> Sequence[Unit]:
        numbers = by_name.get(name, array("I"))
        return Made(len(numbers), lambda n: all_units[numbers[n]])

    found = [(shard.name, shard.size, shard.head) for shard in plan.shards]
    found += [(str(path), size, Text.of("")) for path, size in plan.companions.items()]
    return tuple(_File(name=name, size=size, head=head, units=of_file(name)) for name, size, head in found)


class _Run:
    """A run and how far it is.

    done: by the number of the unit, of all files that are in the store with their records, and of the one
    that is being done. there: the names of these files.
    """

    def __init__(self, plan: Plan, out: RemotePath, on_progress: Progress | None) -> None:
        self.units = units(plan)
        self.files = _files(plan, self.units)
        require_outputs((*(file.name for file in self.files), *plan.texts))
        self.done = Results(len(self.units))
        self.notes: list[str] = []
        self._plan = plan
        self._out = out
        self._identity = identity(plan)
        self._scanned: dict[int, Scanned] = {}
        self._there: set[str] = set()
        self._on_progress = on_progress
        self._total = sum(unit.nbytes for unit in self.units)
        self._bytes = 0

    def repeated(self) -> RunResult | None:
        """Return the result where a run that ended well has left all of it, or None."""
        found = set(object_store.everything(self._out))
        if _IDENTITY in found or not self._own_at_the_end() <= found:
            return None
        partials = Partials(path=Path(), needed=0)
        return repeated(self._plan, self.units, self._out, partials, self._on_progress)

    def begin(self, *, restart: bool) -> None:
        """Take in what an interrupted run left, and leave the record of this one.

        Raises CheckpointError when the run was another one, or the place holds objects of others.
        """
        found = set(object_store.everything(self._out))
        if restart and _IDENTITY in found:
            self._remove_own(found)
            found = set(object_store.everything(self._out))
        begun = _IDENTITY in found
        own = self._own() if begun else set()
        if found - own:
            listed = ", ".join(map(shown, sorted(found - own)[:3]))
            rest = f" and {len(found - own) - 3} more" if len(found - own) > 3 else ""
            raise CheckpointError(
                f"output {shown(self._out)} holds {listed}{rest}; remove them, or write elsewhere"
            )
        state = stamps(self._plan)
        if begun:
            self._go_on(found, state)
        self._write(_IDENTITY, {"identity": self._identity, "stamps": state})

    def _go_on(self, found: set[str], state: Mapping[str, str]) -> None:
        begun = self._read(_IDENTITY)
        try:
            then = {key: texts(begun.get(key)) for key in ("identity", "stamps")}
        except CheckpointError as error:
            raise self._no_record(_IDENTITY) from error
        require_same(
            self._identity, then["identity"], what=f"the interrupted run in {shown(self._out)}",
            remedy="rerun the original command to resume, or add --restart to start over",
        )  # fmt: skip
        changed = sorted(name for name in state if then["stamps"].get(name) != state[name])
        if changed:
            listed = ", ".join(map(shown, changed[:3])) + (" and others" if len(changed) > 3 else "")
            self.notes.append(f"{listed} changed since the interrupted run, so all is done again")
            return
        for file in self.files:
            if file.name in found and file.record in found:
                done = self._proven(file)
                if done is not None:
                    self._there.add(file.name)
                    for unit in done:
                        self._add(unit)

    def _proven(self, file: _File) -> list[Done] | None:
        """Return what was done for a file in the store, or None where its bytes do not prove it."""
        record, place = self._read(file.record), self._out / file.name
        listed = record.get("units")
        try:
            done = [
                Done.parse(unit, self.units) for unit in (listed if isinstance(listed, list) else [record])
            ]
        except CheckpointError as error:
            raise self._no_record(file.record) from error
        if not holds(place, file.head.pieces(), size=file.size):
            return None
        found = {each.number: each for each in done}
        if unproven(found, file.units, self._plan, where=lambda _: place):
            return None
        return [found[unit.number] for unit in file.units]

    def do(self, directory: OutputDirectory, engine: Engine) -> None:
        """Do the files that are not there, each uploaded while the next one is being done."""
        group = groups(self.units)
        names = {file.name for file in self.files}
        with ThreadPoolExecutor(1, thread_name_prefix="zeropoint-upload") as uploads:
            under_way: Future[None] | None = None
            for file in self.files:
                if file.name in self._there:
                    continue
                directory.prepare(file.name, file.size, bytes(file.head))
                job = Job(
                    plan=self._plan, partials=directory.partials, todo=file.units, groups=group,
                    scanned=dict(self._scanned),
                )  # fmt: skip
                with contextlib.closing(engine(job)) as results:
                    for result in results:
                        self._add(result)
                read_back(self.done, directory, self._plan, file.units, published=names - {file.name})
                if under_way is not None:
                    under_way.result()
                under_way = uploads.submit(self._publish, file, directory.path / partial_name(file.name))
            if under_way is not None:
                under_way.result()

    def _add(self, result: Scanned | Done) -> None:
        if isinstance(result, Scanned):
            self._scanned[result.number] = result
            return
        unit = self.units[result.number]
        self.done[result.number] = result
        self._bytes += unit.nbytes
        if self._on_progress is not None:
            self._on_progress(self._bytes, self._total, unit.name)

    def _publish(self, file: _File, path: Path) -> None:
        """Upload a file, record it, and give its bytes in the spool back."""
        now = object_store.upload(path, self._out / file.name)
        if now.size != file.size:
            raise CheckpointError(
                f"{shown(self._out / file.name)} has {now.size} bytes after its upload, but {file.size} were "
                "sent: somebody else writes there; stop it, and start the same command again"
            ) from OSError("another writer")
        done = [self.done[unit.number].document() for unit in file.units]
        self._write(file.record, {"units": done})
        self._there.add(file.name)
        os.unlink(path)

    def finish(self) -> None:
        """Write the files that say what the others are, the index last, and remove the records."""
        for name, text in last_files(self._plan, self._identity, self.units, self.done).items():
            place = self._out / name
            if object_store.exists(place) and not holds(place, text.pieces(), size=text.size):
                rule = "is not an object of this run; move it away, and run the same command again"
                raise ObstacleError(f"{shown(place)} {rule}")
            object_store.write(place, bytes(text))
        for record in (*(file.record for file in self.files), _IDENTITY):
            object_store.remove(self._out / record)

    def leave(self, error: BaseException) -> None:
        """Keep what is done when the same call can go on with it, and say so; remove it otherwise."""
        if not is_of_data(error):
            error.add_note(
                f"the work so far is kept in {shown(self._out)}; run the same command again to resume"
            )
            return
        with contextlib.suppress(CheckpointError):
            # Files that this run has not put there may be somebody else's by now.
            kept = self._own_at_the_end() - self._there
            self._remove_own(set(object_store.everything(self._out)) - kept)

    def _own(self) -> set[str]:
        """Return the names of all objects that a run may write."""
        return self._own_at_the_end() | {_IDENTITY, *(file.record for file in self.files)}

    def _own_at_the_end(self) -> set[str]:
        return {MANIFEST, *self._plan.texts, *(file.name for file in self.files)}

    def _remove_own(self, found: set[str]) -> None:
        # The identity last: until then it says whose the others are.
        for name in (*sorted(found & self._own() - {_IDENTITY}), _IDENTITY):
            object_store.remove(self._out / name)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        object_store.write(self._out / name, json.dumps(record).encode("ascii"))

    def _read(self, name: str) -> dict[str, Any]:
        raw, _ = read_small(self._out / name, limit=MAX_JSON_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(raw)
            if isinstance(record, dict):
                return record
        raise self._no_record(name)

    def _no_record(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{shown(self._out / name)} is not a record of a run; add --restart, or write elsewhere"
        )
