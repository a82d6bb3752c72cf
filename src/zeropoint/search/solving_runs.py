"""Runs that learn from data or statistics before they write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..checkpoint.call_options import LOCAL, SKIP, Writing
from ..checkpoint.model.calibration import calibrated
from ..checkpoint.model.forward_pass import compared
from ..checkpoint.model.importance import with_importance
from ..checkpoint.model.running_model import digest_without_a_run
from ..checkpoint.model.saved_solving import solved_from, with_mean_squares
from ..checkpoint.model.solved_weights import folder_for, in_order, solved
from ..checkpoint.model.statistics_file import SavedStatistics
from ..checkpoint.model.tokens import Windows
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.identity import request_digest
from ..checkpoint.read.storage import Place
from ..checkpoint.run.loop import RunResult, finished_before, require_free
from ..errors import OptionError, count, option
from ..methods import method_named
from .inputs import InputSource, with_ranges


def written_by_data(
    plan: CheckpointPlan, inputs: InputSource, out: Place | str, writing: Writing
) -> RunResult:
    """Write a plan, once its methods and static inputs have their data.

    inputs: the data. Raises OptionError where other machines would write solved weights,
    CalibrationError and CheckpointError as :func:`~zeropoint.quantize_checkpoint` has them.
    """
    data = inputs.calibration
    if data is not None and in_order(plan):
        return _solving(plan, data, inputs.input_range, out, writing)
    if inputs.statistics:
        return _by_statistics(plan, inputs.statistics, out, writing)
    if data is not None:
        plan = calibrated(plan, data, ranges=inputs.input_range, progress=writing.progress is True)
    elif inputs.imatrix is not None:
        plan = _important(plan, inputs.imatrix)
    return writing.write(plan, out, "quantizing")


def _solving(
    plan: CheckpointPlan, data: Windows, ranges: str | None, out: Place | str, writing: Writing
) -> RunResult:
    """Solve the weights of a plan, write them, and compare the result."""
    target, progress = writing.require_target(out), writing.progress is True
    _require_local(writing, plan)
    plan = replace(plan, asked=_asked(plan, data, ranges))
    if (before := _finished_before(plan, out, writing)) is not None:
        return before
    with folder_for(target, writing.spool, restart=writing.restart) as folder:
        plan, held_out = solved(plan, data, folder, progress=progress)
        plan = with_ranges(plan, data, ranges=ranges, progress=progress)
        result = writing.write(plan, out, "quantizing")
    return compared(result, plan.source, held_out, plan.limits)


def _by_statistics(
    plan: CheckpointPlan, files: Iterable[Path], out: Place | str, writing: Writing
) -> RunResult:
    """Write a plan by statistics, solving weights where methods ask."""
    target, progress = writing.require_target(out), writing.progress is True
    with SavedStatistics(files, plan.source) as saved:
        made = with_mean_squares(plan, saved)
        if not in_order(made):
            return writing.write(made, out, "quantizing")
        _require_local(writing, made)
        made = replace(made, asked=request_digest(made, saved.digest))
        before = _finished_before(made, out, writing)
        if before is not None:
            return before
        with folder_for(target, writing.spool, restart=writing.restart) as folder:
            return writing.write(solved_from(made, saved, folder, progress=progress), out, "quantizing")


def _finished_before(plan: CheckpointPlan, out: Place | str, writing: Writing) -> RunResult | None:
    """Return an earlier result to keep, or None, before solving.

    Raises CheckpointError where the output is not free.
    """
    spool = None if writing.spool is None else Path(writing.spool)
    found = None
    if writing.if_exists == SKIP:
        found = finished_before(plan, out, overwrite=writing.overwrite, spool=spool)
    if found is None:
        require_free(plan, writing.require_target(out), overwrite=writing.overwrite, spool=spool)
    return found


def _require_local(writing: Writing, plan: CheckpointPlan) -> None:
    """Raise OptionError where weights are solved and other machines would write them."""
    if writing.executor != LOCAL:
        method = next(weight.method for weight in plan.weights if method_named(weight.method).takes)
        raise OptionError(
            f"method {method} solves weights on one machine, where their codes are; leave "
            f"{option('executor', str(writing.executor))} out"
        )


def _important(plan: CheckpointPlan, path: Path | str) -> CheckpointPlan:
    """Return a plan with importance, and a note on weights without."""
    made, missing = with_importance(plan, path)
    if not missing:
        return made
    found = f"{len(missing)} of {count(len(plan.weights), 'weight')} have no importance in {str(path)!r}"
    return replace(made, notes=(*made.notes, f"{found}, {missing[0]} the first"))


def _asked(plan: CheckpointPlan, data: Windows, input_range: str | None) -> str:
    """Return the digest of a plan, its data and input range."""
    return request_digest(plan, f"{digest_without_a_run(plan.source, data, plan.limits)}{input_range or ''}")
