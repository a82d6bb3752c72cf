"""What a worker gives back of a batch; no cluster is needed to see it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import ONE, save, weight

from zeropoint.checkpoint.cluster.worker import TOKEN_FILE, Failed, PlanRequest, UnitBatch, work
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.identity import identity
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.directory import Partials
from zeropoint.checkpoint.run.unit_results import UnitResult
from zeropoint.checkpoint.run.units import Units


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A worker has one thread, and its process is not ours."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requested(plan: CheckpointPlan, out: Path) -> PlanRequest:
    """Return what a driver asks for whose partial files are in ``out``."""
    (out / TOKEN_FILE).write_text("token")
    return PlanRequest(
        token="token", source=plan.source.given, recipe=plan.recipe, selection=plan.selection,
        codec=plan.codec, limits=replace(plan.limits, workers=1), partials=Partials(path=out, needed=0),
        identity=tuple(identity(plan).items()), patience=0.0, statistics=plan.statistics,
    )  # fmt: skip


def test_nothing_of_a_batch_counts_when_a_unit_of_it_fails(tmp_path: Path) -> None:
    """What was done before is not on disk for good."""
    bad = weight(64, 128)
    bad[5, 5] = float("nan")
    plan = make_plan(
        open_source(save(tmp_path / "in", {"a.weight": weight(64, 128), "b.weight": bad})), "w8a8", limits=ONE
    )
    stop_after(plan, tmp_path / "out", 0)
    numbers = tuple(unit.number for unit in Units(plan) if unit.output.to is not None)
    request = requested(plan, tmp_path / "out")
    first = UnitBatch(numbers=numbers[:1], scans=False, extremes={}, means={})
    assert [type(found) for found in work(request, first)] == [UnitResult]
    (failed,) = work(request, replace(first, numbers=numbers))
    assert isinstance(failed, Failed)
    assert failed.number == numbers[1]
