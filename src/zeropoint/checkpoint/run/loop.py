"""Carry out a plan: do its units, journal what is on disk, prove it, and give the files their names.

The driver here decides nothing about numbers: units.py says what there is to do, an engine does it, and the
journal says what is done. Whatever ends a run, the same call goes on where it was, and the bytes are those of
a run that nothing ended.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from ...columns import Made
from ...errors import CheckpointError, ZeropointError
from ..plan.checkpoint_plan import Plan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import identity
from ..plan.placement import Weight
from ..plan.texts import Text
from ..read.file_names import JOURNAL
from ..read.headers import read_header
from ..read.object_store import RemotePath
from ..read.problems import ObstacleError
from ..read.source import INDEX_SUFFIX
from ..read.storage import Place, place, shown
from .commit import Commit
from .directory import OutputDirectory, Partials, partial_name, write_at
from .executor import Engine, Job, local
from .existing import done_already
from .manifest import error_of, manifest
from .resume import State, begin, holds, unproven
from .tensor_error import TensorError
from .units import Unit, Units, groups, units
from .work import Done
from .workers import Progress

_RECORD_BYTES = 1 << 10
"""Room for a unit in the journal and in the manifest together: four digests and its statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one weight: its module, and the error that quantization made."""

    weight: Weight
    error: TensorError

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were written for it."""
        return sum(placed.nbytes for placed in self.weight.outputs)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult:
    """What a run wrote, and the error of each weight, in the order of the plan.

    notes: sentences for the report, the plan's first. units, resumed: units of the plan, and how many of them
    an interrupted run had done. sync_seconds: time in which there was nothing to do but wait for the disk.
    """

    path: Place
    plan: Plan
    outcomes: Sequence[Outcome]
    notes: tuple[str, ...]
    units: int
    resumed: int
    sync_seconds: float

    @property
    def error(self) -> TensorError:
        """The error of all quantized weights taken as one."""
        return TensorError.merge(outcome.error for outcome in self.outcomes)

    @property
    def summary(self) -> tuple[str, ...]:
        """The sizes, bits and error of the whole, a line each."""
        return (*self.plan.summary, str(self.error)) if self.plan.weights else self.plan.summary

    def __repr__(self) -> str:
        return "\n".join((shown(self.path), *self.summary))


def run(
    plan: Plan, out: Path | str, *, overwrite: bool = False, restart: bool = False, engine: Engine = local,
    on_progress: Progress | None = None,
) -> RunResult:  # fmt: skip
    """Write the checkpoint that ``plan`` describes to the directory ``out``: all of it, or nothing to load.

    overwrite: whether ``out`` may hold files; those with other names stay. restart: remove what an
    interrupted run left there instead of going on with it. engine: what does the units. on_progress: called
    in this thread. Raises NonFiniteError naming tensor, file and first index; RangeError when a scale fits no
    format; CheckpointError for everything about files, and when ``out`` holds an interrupted run of something
    else.

    After an error of the data nothing is left behind. After Ctrl-C, and when the system fails, what was done
    stays in hidden files, and the same call goes on with it; a note of the exception says so. Where all is
    there already, to the byte, nothing is written, which is among the notes of the result.
    """
    path, all_units = place(out), units(plan)
    if isinstance(path, RemotePath):
        raise CheckpointError(f"{shown(path)} is a URL; use run_to_store")
    with OutputDirectory(path, plan.source.root, _sizes(plan, all_units), overwrite=overwrite) as directory:
        if not overwrite and not os.path.lexists(directory.path / JOURNAL):
            there = repeated(plan, all_units, directory.path, directory.partials, on_progress)
            if there is not None:
                return there
        state = begin(directory, plan, all_units, restart=restart)
        resumed = len(state.done)
        commit = Commit(state.journal, directory.partials, all_units)
        try:
            _do(state, Job(
                plan=plan, partials=directory.partials, groups=groups(all_units), scanned={},
                todo=left_of(all_units, state.done),
            ), all_units, engine, commit, on_progress)  # fmt: skip
            plan.source.check_unchanged()
            commit.start()  # the last bytes go to the disk while all are read back from memory
            read_back(state.done, directory, plan, all_units, published=state.published)
            commit.flush()
            _publish(state, directory, plan, all_units)
        except BaseException as error:
            _leave(error, state, directory, commit)
            raise
        finally:
            commit.close()
            state.journal.close()
        directory.finish()
    return RunResult(
        path=directory.path, plan=plan, notes=(*plan.notes, *state.notes), units=len(all_units),
        outcomes=outcomes(plan, all_units, state.done), resumed=resumed, sync_seconds=commit.seconds,
    )  # fmt: skip


def repeated(
    plan: Plan, all_units: Units, path: Place, partials: Partials, on_progress: Progress | None
) -> RunResult | None:
    """Return the result of a run whose files are all there already, or None."""
    done = done_already(plan, all_units, lambda name: path / name, partials, on_progress)
    if done is None:
        return None
    for name, text in last_files(plan, identity(plan), all_units, done).items():
        try:
            if not holds(path / name, text.pieces(), size=text.size):
                return None
        except CheckpointError:  # the manifest is missing
            return None
    note = f"{shown(path)} is complete already: it holds what this command writes, so nothing was written"
    return RunResult(
        path=path, plan=plan, notes=(*plan.notes, note), outcomes=outcomes(plan, all_units, done),
        units=len(all_units), resumed=len(all_units), sync_seconds=0.0,
    )  # fmt: skip


def left_of(all_units: Sequence[Unit], done: Collection[int]) -> Sequence[Unit]:
    """Return the units that are not done, in their order."""
    left = array("I", (number for number in range(len(all_units)) if number not in done))
    return Made(len(left), lambda n: all_units[left[n]])


def outcomes(plan: Plan, all_units: Units, done: Mapping[int, Done]) -> Sequence[Outcome]:
    """Return what became of each weight, in the order of the plan, when all units are done."""
    return Made(
        len(plan.weights), lambda n: Outcome(weight=plan.weights[n], error=error_of(n, all_units, done))
    )


def _sizes(plan: Plan, all_units: Sequence[Unit]) -> dict[str, int]:
    """Return the bytes of every file that is written; those of the manifest are an estimate from above."""
    return {
        **{shard.name: shard.size for shard in plan.shards},
        **{str(path): size for path, size in plan.companions.items()},
        **{name: text.size for name, text in plan.texts.items()},
        MANIFEST: _RECORD_BYTES * (len(all_units) + len(plan.weights) + len(plan.restored) + len(plan.kept)),
    }


def _do(
    state: State, job: Job, all_units: Units, engine: Engine, commit: Commit, on_progress: Progress | None
) -> None:
    """Do what is still to do, and make it durable."""
    total = job.plan.worked_bytes + sum(job.plan.companions.values())
    left = sum(unit.nbytes for unit in job.todo)
    with contextlib.closing(engine(job)) as results:
        for result in results:
            if not isinstance(result, Done):
                continue
            commit.add(result)
            state.done[result.number] = result
            unit = all_units[result.number]
            left -= unit.nbytes
            if on_progress is not None:
                on_progress(total - left, total, unit.name)


def read_back(
    done: Mapping[int, Done], directory: OutputDirectory, plan: Plan, all_units: Sequence[Unit],
    *, published: Container[str],
) -> None:  # fmt: skip
    """Raise ReadBackError unless every file that is not published holds what was written into it."""
    for shard in plan.shards:
        if shard.name not in published:
            path = directory.path / partial_name(shard.name)
            read_header(path, shard.name)
            if not holds(path, shard.head.pieces(), size=shard.size):
                raise ReadBackError(f"{shown(path)} has not the header that was written; {_CHECK}")
    left = array("I", (at for at, unit in enumerate(all_units) if unit.file not in published))
    waiting = Made(len(left), lambda n: all_units[left[n]])
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


def last_files(
    plan: Plan, made_of: Mapping[str, str], all_units: Units, done: Mapping[int, Done]
) -> dict[str, Text]:
    """Return the files that say what the others are, by name; the index, the commit, is last."""
    index = next((name for name in plan.texts if name.endswith(INDEX_SUFFIX)), None)
    texts = {MANIFEST: manifest(plan, made_of, all_units, done)}
    texts |= {name: text for name, text in plan.texts.items() if name != index}
    return texts if index is None else {**texts, index: plan.texts[index]}


def _publish(state: State, directory: OutputDirectory, plan: Plan, all_units: Units) -> None:
    """Write the files that say what the others are, and give every file its name."""
    texts = last_files(plan, state.identity, all_units, state.done)
    for name, text in texts.items():
        path = directory.path / name
        if state.publishing and directory.published(name) and holds(path, text.pieces(), size=text.size):
            directory.adopt(name)
            state.published.add(name)
        else:
            directory.prepare(name, text.size)
            _write(text, name, directory)
    states = directory.settle(skip=state.published)
    with directory.partials.io("."):
        state.journal.append([{"publish": {} if directory.overwrite else states}])
    directory.publish([name for name in texts if name not in state.published], skip=state.published)


def _write(text: Text, name: str, directory: OutputDirectory) -> None:
    """Write a text into a file that was prepared for it."""
    at = 0
    with directory.partials.open(name) as descriptor:
        for piece in text.pieces():
            write_at(descriptor, memoryview(piece), at)
            at += len(piece)


def is_of_data(error: BaseException) -> bool:
    """Return whether the same call would fail again: the data or the files are wrong, not this machine."""
    if not isinstance(error, ZeropointError) or isinstance(error, ObstacleError):
        return False
    # What a system or a store said is the cause of what we say about it; an error of the data has only ours.
    return isinstance(error.__cause__, ZeropointError | NoneType)


def _leave(error: BaseException, state: State, directory: OutputDirectory, commit: Commit) -> None:
    """Keep what is done when the same call can go on with it, and say so; remove it otherwise."""
    if is_of_data(error):
        directory.discard()
        return
    with contextlib.suppress(CheckpointError):
        commit.flush()
    if len(state.journal) > 1:
        error.add_note(
            f"the work so far is kept in {shown(directory.path)}; run the same command again to resume"
        )
    else:
        directory.discard()
