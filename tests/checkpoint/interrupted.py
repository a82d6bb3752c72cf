"""Runs that are ended on purpose, and what they leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.checkpoint.written import ONE, digests

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import RunResult, run

TO = "nvfp4a16"


def plan_of(source: Path, to: str = TO, limits: Limits = ONE, **selection: tuple[str, ...]) -> CheckpointPlan:
    return make_plan(open_source(source), to, limits=limits, selection=Selection(**selection))


def stop_after(plan: CheckpointPlan, out: Path, count: int, **options: bool) -> None:
    """Run until so many units are done, and end as Ctrl-C does."""
    left = iter(range(count))

    def progress(done: int, total: int, name: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, out, on_progress=progress, **options)


def records(out: Path) -> list[dict[str, object]]:
    """Return what a journal says, by its documented layout."""
    lines = (out / JOURNAL).read_bytes().splitlines()
    return [json.loads(line[18:]) for line in lines]


def resumed(plan: CheckpointPlan, out: Path, golden: dict[str, str]) -> RunResult:
    result = run(plan, out)
    assert digests(out) == golden
    return result


def flip_a_byte(path: Path) -> None:
    """Change one byte of a file in the middle."""
    # Far behind the header, where the first unit's codes are.
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))
