"""What holds of quantizing holds of `convert`, whose source is codes, of GGUF and of ONNX."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.codecs.onnx_models import model, save
from tests.faults.children import Children
from tests.faults.stage import Stage, Tally, run_here
from tests.faults.test_errors import lasting, recorded, refused, single
from tests.faults.test_kills import faults, killed
from tests.faults.test_power import disk_states, survived
from tests.faults.test_power import recorded as with_disk
from tests.faults.tiny import write_tiny

TARGETS = {"gptq": "int4:g32:scale=bfloat16", "gguf": "q4_0"}
"""Layouts, one of which cuts weights along their inputs, with the schemes that hold the source."""


@pytest.fixture(scope="module", params=[*TARGETS, "onnx"])
def converting(disk: Path, request: pytest.FixtureRequest) -> Stage:
    """A stage whose source is quantized, and converted, or an ONNX model that is quantized."""
    folder = disk / f"converting-{request.param}"
    if request.param == "onnx":
        folder.mkdir()
        source = save(model(), folder / "source", external=True).parent
        return Stage.of(
            source, folder / "work", command=("quantize", "--format", "onnx", "--to"), scheme="int4:g32"
        )
    floats, codes = write_tiny(folder / "floats"), folder / "source"
    ran = run_here(("quantize", str(floats), str(codes), "--to", "int4:g32", "--workers", "1", "--json"))
    assert ran.status == 0, ran.err
    command = ("convert", "--force", "--format", request.param, "--to")
    return Stage.of(codes, folder / "work", command=command, scheme=TARGETS[request.param])


@pytest.fixture
def stage(converting: Stage, record_property: Any) -> Iterator[Stage]:
    """A clear stage with counts of its own."""
    fresh = copy.copy(converting)
    fresh.tally = Tally()
    fresh.clear()
    yield fresh
    record_property("faults", str(fresh.tally))


def test_a_conversion_killed_at_some_of_its_calls_resumes(children: Children, stage: Stage) -> None:
    some = faults(stage)[::151]
    for fault in some:
        killed(children, stage, fault)
    assert stage.tally.resumes == len(some)


def test_a_conversion_resumes_after_some_refused_calls(stage: Stage) -> None:
    calls = recorded(stage)
    for call, fault in random.Random(2).sample(single(calls) + lasting(calls), 6):
        refused(stage, call, fault)
    assert stage.tally.resumes > 2


def test_a_conversion_resumes_after_some_power_losses(stage: Stage) -> None:
    calls, start = with_disk(stage)
    states = list(disk_states(calls, start, mixes=1))
    assert survived(stage, random.Random(1).sample(states, 6)) == 6


@pytest.mark.slow
def test_a_conversion_killed_at_any_of_its_calls_resumes(children: Children, stage: Stage) -> None:
    every = faults(stage)
    for fault in every:
        killed(children, stage, fault)
    assert stage.tally.resumes == len(every)


@pytest.mark.slow
def test_a_conversion_resumes_after_every_refused_call(stage: Stage) -> None:
    calls = recorded(stage)
    every = single(calls) + lasting(calls)
    for call, fault in every:
        refused(stage, call, fault)
    assert stage.tally.resumes > 0.9 * len(every)


@pytest.mark.slow
def test_a_conversion_resumes_after_every_power_loss(stage: Stage) -> None:
    calls, start = with_disk(stage)
    states = list(disk_states(calls, start, mixes=5))
    assert survived(stage, states) == len(states) > 500
