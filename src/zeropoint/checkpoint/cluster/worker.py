"""Worker of a Ray cluster: rebuild the plan, check it, run units.

A worker knows nothing but the request. It reads the source and writes into the partial files by itself, so
nothing but the request, numbers of units and their results travels between machines. Doing a unit twice, on
any two machines, writes the same bytes to the same place: a worker that was given up for lost does no harm.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...codecs.protocol import Codec
from ...errors import CheckpointError, ZeropointError
from ...ops.threads import thread_limit
from ...stats import Statistics
from ..measure.tiles import Scratch
from ..plan.checkpoint_plan import CheckpointPlan, make_plan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import identity, require_same
from ..plan.learned_data import layer_data
from ..plan.limits import Limits
from ..plan.recipe import RecipeText
from ..plan.selection import Selection
from ..read.source import open_source
from ..read.storage import Place, shown
from ..run.directory import Partials, partial_name
from ..run.executor import ExecutorError
from ..run.unit_results import ScanResult, UnitResult
from ..run.units import Unit, Units
from ..run.work import buffer_bytes, process, scan

TOKEN_FILE = partial_name(MANIFEST)
"""Hidden file with the driver's token, the last file that a run writes."""
_GLANCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Inputs and identity of a plan to rebuild on another machine.

    token: random text, which stands in ``TOKEN_FILE`` of the output: a worker that does not find it there
    sees another file system. patience: seconds until it must be seen, since file systems on a network look
    again only now and then. limits: of a worker, which has one thread. statistics: of the plan.
    """

    token: str
    source: Place = field(compare=False)
    recipe: RecipeText = field(compare=False)
    codec: Codec = field(compare=False)
    selection: Selection = field(compare=False)
    limits: Limits = field(compare=False)
    partials: Partials = field(compare=False)
    identity: tuple[tuple[str, str], ...] = field(compare=False)
    patience: float = field(compare=False)
    statistics: Mapping[str, Mapping[str, Statistics]] = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBatch:
    """Units, by number, to process or scan in order.

    extremes, means: by group of units, and of their scales where these are asked for.
    """

    numbers: tuple[int, ...]
    scans: bool
    extremes: Mapping[str, tuple[float, float]]
    means: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Failure of a unit, and of the rest of its batch.

    cause: the operating system's error behind it, which exceptions lose on their way between machines.
    """

    number: int
    error: ZeropointError
    cause: OSError | None


Result = ScanResult | UnitResult | Failed


def work(request: PlanRequest, batch: UnitBatch) -> list[Result]:
    """Process a batch durably; a failure is the last of its results."""
    found: list[Result] = []
    number = batch.numbers[0]
    try:
        _require_shared(request)
        plan, all_units = _prepare(request)
        torch.set_num_threads(1)
        with thread_limit(1), torch.inference_mode():
            for number in batch.numbers:
                found.append(_one(all_units[number], batch, request, plan))
        files = {all_units[number].file for number in batch.numbers if not batch.scans}
        for file in sorted(files):
            with request.partials.open(file) as descriptor:
                os.fdatasync(descriptor)
    except ZeropointError as error:
        cause = error.__cause__
        # What was done before is not durable yet, so it does not count.
        return [Failed(number=number, error=error, cause=cause if isinstance(cause, OSError) else None)]
    return found


def _one(unit: Unit, batch: UnitBatch, request: PlanRequest, plan: CheckpointPlan) -> ScanResult | UnitResult:
    scratch = _scratch(buffer_bytes([unit], plan.limits), plan.limits.device)
    if batch.scans:
        return scan(unit, plan.limits, scratch)
    group = unit.group
    found = (None, None) if group is None else (batch.extremes[group], batch.means[group])
    return process(unit, request.partials, plan.limits, scratch, layer_data(plan, unit.output, *found))


@functools.lru_cache(maxsize=1)
def _scratch(size: int, device: torch.device) -> Scratch:
    return Scratch(bytearray(size), device)


def _require_shared(request: PlanRequest) -> None:
    """Raise ExecutorError unless this output is the driver's."""
    path, end = request.partials.path / TOKEN_FILE, time.monotonic() + request.patience
    while _content(path) != request.token:
        if time.monotonic() >= end:
            raise ExecutorError(
                f"host {socket.gethostname()} does not see the driver's files in "
                f"{shown(request.partials.path)}; the output must lie on a file system that every node mounts"
                " at the same path"
            )
        time.sleep(_GLANCE_SECONDS)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)
def _prepare(request: PlanRequest) -> tuple[CheckpointPlan, Sequence[Unit]]:
    """Return the rebuilt plan and units; raises ExecutorError where they differ."""
    plan = make_plan(
        open_source(request.source),
        request.recipe,
        selection=request.selection,
        limits=request.limits,
        codec=request.codec,
    )
    plan = replace(plan, statistics=request.statistics)
    try:
        require_same(
            identity(plan),
            dict(request.identity),
            what=f"the plan, seen from host {socket.gethostname()},",
            remedy="install one version of zeropoint on every node, and let all see the same source",
        )
    except CheckpointError as error:
        raise ExecutorError(str(error)) from error
    return plan, Units(plan)
