"""Every plan and every file as it was: plans.json holds digests, and the changelog says what changes one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoint.plan import frozen_plans
from tests.checkpoint.plan.frozen_plans import SOURCES, Case, frozen, llama, plan_of


@pytest.mark.parametrize("name", SOURCES)
def test_every_plan_decides_and_writes_what_is_recorded(name: str, tmp_path: Path) -> None:
    recorded = json.loads(frozen_plans.PLANS.read_text())
    found = dict(frozen_plans.of_source(name, tmp_path))
    assert found.keys() == {case for case in recorded if case.startswith(f"{name}: ")}
    changed = {
        case: {
            key: (recorded[case].get(key), now) for key, now in new.items() if recorded[case].get(key) != now
        }
        for case, new in found.items()
    }
    assert {case: keys for case, keys in changed.items() if keys} == {}


def test_a_changed_decision_or_order_of_outputs_shows(tmp_path: Path) -> None:
    case = Case("quantize", "w4a16")
    plan = plan_of(llama(tmp_path / "llama"), case)
    before = frozen(plan)
    last = plan.decisions[-1]
    said = [*plan.decisions[:-1], replace(last, reason="another reason")]
    plan.outputs.actions = replace(plan.outputs.actions, decisions=said)
    assert frozen(plan)["tensors"] != before["tensors"]
    again = plan_of(tmp_path / "llama", Case("quantize", "w4a16", options={"ignore": (last.entry.name,)}))
    assert {key for key, value in frozen(again).items() if value != before[key]} >= {"tensors", "identity"}
