"""The layer of calls sees what the kernel sees: no call that changes a file passes beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.faults.children import Children
from tests.faults.kernel import traced, why_not
from tests.faults.stage import Stage


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_kernel_sees_the_calls_that_the_layer_recorded(
    children: Children, stage: Stage, tmp_path: Path
) -> None:
    record = tmp_path / "calls.json"
    ended, seen = traced(children, stage.job(record=record), tmp_path / "strace.log")
    assert ended.status == 0, ended.err
    stage.check_complete()
    recorded = [(c["name"], c["path"], c["to"]) for c in json.loads(record.read_text())]
    renamed = {"rename", "replace"}
    expected = [
        ("rename", to) if name in renamed else ("unlink" if name == "remove" else name, path)
        for name, path, to in recorded
        if name != "close"  # of which the kernel sees far more
    ]
    assert [(s.name, s.path) for s in seen if s.changes] == expected
