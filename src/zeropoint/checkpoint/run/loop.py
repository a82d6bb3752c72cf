"""Carry out a plan: one loop over units for all targets.

The driver here decides nothing about numbers: units.py says what there is to do, an executor does it, and a
target keeps what is done (executor.py). Whatever ends a run, the same call resumes it, to the bytes of a run
that nothing ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...columns import LazySequence, PackedBytes
from ...errors import CheckpointError, count
from ...progress import Progress
from ...results import Result
from ..measure.tensor_error import TensorError
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.learned_data import require_statistics
from ..plan.limits import give_back
from ..plan.output_tensors import Output
from ..read.object_store import RemotePath
from ..read.storage import Place, place, shown
from .directory_target import DirectoryTarget
from .executor import Executor, Target, local
from .manifest import error_of
from .resume import done_already, finished
from .run_document import run_document
from .store_target import StoreTarget
from .unit_results import UnitResult
from .units import Units, left_of


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """The result for one weight: its module and its quantization error."""

    weight: Output
    error: TensorError

    def __repr__(self) -> str:
        return f"{self.weight.module}: {self.error}"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were written for it."""
        return sum(tensor.nbytes for tensor in self.weight.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult(Result):
    """Result of a run: the output, and each weight's error.

    notes: sentences for the report, the plan's first. units, resumed: units of the plan, and how many of them
    an interrupted run had done. sync_seconds: time in which there was nothing to do but wait for the disk.
    page: the report next to the manifest, or None where none was written.
    """

    path: Place
    plan: CheckpointPlan
    outcomes: Sequence[Outcome]
    notes: tuple[str, ...]
    units: int
    resumed: int
    sync_seconds: float = 0.0
    page: Place | None = None

    @property
    def error(self) -> TensorError:
        """The error of all quantized weights taken as one."""
        return TensorError.merge(outcome.error for outcome in self.outcomes)

    @property
    def summary(self) -> tuple[str, ...]:
        """The sizes, bits and error of the whole, a line each."""
        return (*self.plan.summary, *self._converted, str(self.error)) if self.outcomes else self.plan.summary

    @property
    def _converted(self) -> tuple[str, ...]:
        """The line about converted layers, whose values should be unchanged."""
        found = [outcome.error.largest == 0 for outcome in self.outcomes if outcome.weight.of_codes]
        if not found:
            return ()
        layers = count(len(found), "converted layer")
        if not any(found):
            return (f"none of {layers} decodes to the values that it had",)
        same = "all" if all(found) else f"{sum(found):,}"
        return (f"{same} of {layers} decode to the values that they had",)

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (shown(self.path), *self.summary)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return run_document(self)


def run(
    plan: CheckpointPlan, out: Place | str, *, overwrite: bool = False, spool: Path | None = None,
    restart: bool = False, skip_finished: bool = False, executor: Executor = local,
    on_progress: Progress | None = None,
) -> RunResult:  # fmt: skip
    """Write a plan's checkpoint to a directory or URL, all or nothing.

    overwrite: whether a directory may hold files; those with other names stay. spool: for a URL, the local
    directory for files on their way; None is the system's directory for temporary files. restart: remove what
    an interrupted run left there instead of resuming it. skip_finished: whether the manifest of such a run is
    enough to leave the output as it is; without it, the numbers are made once more and compared. executor:
    what does the units. on_progress: called in this thread. Raises NonFiniteError naming tensor, file and
    first index; RangeError when a scale fits no
    format; CalibrationError where a method lacks data;
    CheckpointError for everything about files, and when ``out`` holds an interrupted run of something
    else.

    After an error of the data nothing is left behind. After Ctrl-C, and when the system fails, what was done
    stays, and the same call resumes; a note of the exception says so. Where all is there already, to the
    byte, nothing is written, which is among the notes of the result.
    """
    require_statistics(plan)
    all_units = Units(plan)
    with _target(plan, all_units, place(out), overwrite=overwrite, spool=spool) as target:
        if skip_finished and target.may_be_complete() and finished(plan, target.path):
            return _as_it_is(plan, target.path, len(all_units))
        if target.may_be_complete():
            done = done_already(plan, all_units, target.path, on_progress)
            if done is not None:
                found = _as_it_is(plan, target.path, len(all_units), _COMPLETE)
                return replace(found, outcomes=outcomes(plan, all_units, done))
        target.begin(restart=restart)
        resumed = len(target.done)
        try:
            _do(plan, all_units, target, executor, on_progress)
            give_back()
            plan.source.check_unchanged()
            target.publish()
        except BaseException as error:
            target.leave(error)
            raise
    return RunResult(
        path=target.path,
        plan=plan,
        notes=(*plan.notes, *target.notes),
        units=len(all_units),
        outcomes=outcomes(plan, all_units, target.done),
        resumed=resumed,
        sync_seconds=target.sync_seconds,
    )


def require_free(
    plan: CheckpointPlan, out: Place | str, *, overwrite: bool = False, spool: Path | None = None
) -> None:
    """Raise CheckpointError where :func:`run` would refuse the output.

    For callers that solve or measure for a long time first. overwrite, spool: as for :func:`run`.
    """
    with _target(plan, Units(plan), place(out), overwrite=overwrite, spool=spool) as target:
        target.require_free()


def finished_before(
    plan: CheckpointPlan, out: Place | str, *, overwrite: bool = False, spool: Path | None = None
) -> RunResult | None:
    """Return an earlier run's result for an unsolved plan, or None.

    overwrite, spool: as for :func:`run`, whose ``skip_finished`` it is.
    """
    all_units = Units(plan)
    with _target(plan, all_units, place(out), overwrite=overwrite, spool=spool) as target:
        if target.may_be_complete() and finished(plan, target.path):
            return _as_it_is(plan, target.path, len(all_units))
    return None


_FINISHED = "was finished by an earlier run, by its manifest; nothing was read"
_COMPLETE = "is complete already: it holds what this command writes, so nothing was written"


def _as_it_is(plan: CheckpointPlan, path: Place, units: int, said: str = _FINISHED) -> RunResult:
    """Return the result for an output that an earlier run finished."""
    notes = (*plan.notes, f"{shown(path)} {said}")
    return RunResult(path=path, plan=plan, notes=notes, outcomes=(), units=units, resumed=units)


def _target(
    plan: CheckpointPlan, all_units: Units, out: Place, *, overwrite: bool, spool: Path | None
) -> DirectoryTarget | StoreTarget:
    if not isinstance(out, RemotePath):
        if spool is not None:
            raise CheckpointError(f"spool (={shown(spool)}) is for an output behind a URL; leave it out")
        return DirectoryTarget(plan, all_units, out, overwrite=overwrite)
    if overwrite:
        raise CheckpointError(f"overwrite is for a directory; objects behind {shown(out)} are never replaced")
    if spool is not None:
        place(spool)  # raises for a path that cannot be
    return StoreTarget(plan, all_units, out, spool)


def _do(
    plan: CheckpointPlan, all_units: Units, target: Target, executor: Executor, on_progress: Progress | None
) -> None:
    """Run the remaining units, a job of the target at a time."""
    total = plan.processed_bytes + sum(plan.companions.values())
    left = sum(unit.nbytes for unit in left_of(all_units, target.done))
    with contextlib.closing(target.jobs()) as jobs:
        for job in jobs:
            with contextlib.closing(executor(job)) as results:
                for result in results:
                    target.add(result)
                    if not isinstance(result, UnitResult):
                        continue
                    unit = all_units[result.number]
                    left -= unit.nbytes
                    if on_progress is not None:
                        on_progress(total - left, total, unit.name)


def outcomes(plan: CheckpointPlan, all_units: Units, done: Mapping[int, UnitResult]) -> Sequence[Outcome]:
    """Return the result for each weight in plan order, after all units.

    Only the errors are kept: the digests take most of the memory, and the manifest has them by now.
    """
    errors, weights = PackedBytes(len(plan.weights)), plan.weights
    for number in range(len(weights)):
        errors[number] = error_of(number, all_units, done).pack()
    return LazySequence(
        len(weights), lambda n: Outcome(weight=weights[n], error=TensorError.unpack(errors[n]))
    )
