"""What holds of quantizing holds of `convert`, `rotate` and `kv-scales`, of GGUF and of ONNX."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.codecs.onnx_models import model, save
from tests.faults.children import Children
from tests.faults.replay import make, on_disk
from tests.faults.stage import Stage, Tally, digests, run_here
from tests.faults.test_concurrent import one_proceeds, together
from tests.faults.test_errors import lasting, recorded, refused, single
from tests.faults.test_kills import faults, killed
from tests.faults.test_overwrite import killed as killed_over
from tests.faults.test_power import checked, disk_states, survived
from tests.faults.test_power import recorded as with_disk
from tests.faults.test_signals import interrupted_twice, moments, signaled
from tests.faults.tiny import CONFIG, HIDDEN, write_tiny

pytestmark = pytest.mark.rotating

TARGETS = {"gptq": "int4:g32:scale=bfloat16", "gguf": "q4_0"}
"""Layouts, one of which cuts weights along their inputs, with the schemes that hold the source."""
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
"""Of the model of `write_tiny`, for commands that run it or know its parts."""
SOLVED = pytest.param("solved", marks=pytest.mark.slow)
"""Codes from data: the quick suite interrupts such runs in tests/checkpoint/model/test_solved_weights.py."""


@pytest.fixture(scope="module", params=[*TARGETS, "onnx", "rotate", SOLVED, "kv-scales"])
def converting(disk: Path, request: pytest.FixtureRequest) -> Stage:
    """A stage with one of these sources: codes that are converted or given scales, floats that are rotated or
    solved on data, an ONNX model that is quantized."""
    folder = disk / f"converting-{request.param}"
    if request.param == "onnx":
        folder.mkdir()
        source = save(model(), folder / "source", external=True).parent
        return Stage.of(
            source, folder / "work", command=("quantize", "--format", "onnx", "--to"), scheme="int4:g32"
        )
    floats, codes = write_tiny(folder / "floats"), folder / "source"
    (floats / "config.json").write_text(json.dumps({**CONFIG, **SIZES}))
    if request.param == "rotate":
        return Stage.of(floats, folder / "work", command=("rotate", "--seed"), scheme="3")
    ids = folder / "ids.safetensors"
    save_file({"input_ids": torch.arange(16).view(2, 8)}, ids)
    if request.param == "solved":
        command = ("quantize", "--method", "shift+gptq", "--calibration", str(ids), "--to")
        return Stage.of(floats, folder / "work", command=command, scheme="int4:g32")
    ran = run_here(("quantize", str(floats), str(codes), "--to", "int4:g32", "--workers", "1", "--json"))
    assert ran.status == 0, ran.err
    if request.param == "kv-scales":
        return Stage.of(codes, folder / "work", command=("kv-scales", "--calibration"), scheme=str(ids))
    command = ("convert", "--force", "--format", request.param, "--to")
    return Stage.of(codes, folder / "work", command=command, scheme=TARGETS[request.param])


@pytest.fixture
def stage(converting: Stage, children: Children, record_property: Any) -> Iterator[Stage]:
    """A clear stage with counts of its own."""
    if "--calibration" in converting.command:
        children.load("transformers.models.llama.modeling_llama")
    fresh = copy.copy(converting)
    fresh.tally = Tally()
    fresh.clear()
    yield fresh
    record_property("faults", str(fresh.tally))


def test_a_conversion_killed_at_some_of_its_calls_resumes(children: Children, stage: Stage) -> None:
    every = faults(stage)
    some = every[:: len(every) // 2 + 1]
    for fault in some:
        killed(children, stage, fault)
    assert stage.tally.resumes == len(some)


def test_a_conversion_resumes_after_some_refused_calls(stage: Stage) -> None:
    calls = recorded(stage)
    for call, fault in random.Random(2).sample(single(calls) + lasting(calls), 4):
        refused(stage, call, fault)
    assert stage.tally.resumes > 1


def test_a_conversion_resumes_after_some_power_losses(stage: Stage) -> None:
    calls, start = with_disk(stage)
    states = list(disk_states(calls, start, mixes=1))
    assert survived(stage, random.Random(1).sample(states, 4)) == 4


def test_a_conversion_that_gets_one_signal_or_two_resumes(children: Children, stage: Stage) -> None:
    for at, number in moments(stage, 4, seed=6):
        signaled(children, stage, at, number)
    interrupted_twice(children, stage, (0,))
    assert stage.tally.resumes > 2


def test_of_two_conversions_at_once_one_proceeds(children: Children, stage: Stage) -> None:
    one_proceeds(stage, together(children, stage, 2, 3))
    assert stage.tally.points == 1


@pytest.mark.slow
@pytest.mark.parametrize("converting", ["gguf"], indirect=True)
def test_a_gguf_file_that_replaces_another_is_never_mixed_with_it(children: Children, stage: Stage) -> None:
    ran, _ = replace(stage, scheme="q8_0").run()
    assert ran.status == 0, ran.err
    stage.old = digests(stage.out)
    assert stage.old["model.gguf"] != stage.golden["model.gguf"]
    before = on_disk(stage.work)
    checked(stage)
    points = stage.tally.points
    assert points > 50
    make(before, stage.work)
    killed_over(children, stage, before, 40)
    assert stage.tally.resumes == stage.tally.points - points >= 40


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


@pytest.mark.slow
def test_a_conversion_that_gets_any_signal_at_any_moment_resumes(children: Children, stage: Stage) -> None:
    for at, number in moments(stage, 100, seed=7):
        signaled(children, stage, at, number)
    interrupted_twice(children, stage, range(-120, 121, 8))
    assert stage.tally.points == 100 + 31


@pytest.mark.slow
def test_of_several_conversions_at_once_one_proceeds(children: Children, stage: Stage) -> None:
    for seed in range(10):
        one_proceeds(stage, together(children, stage, 2 + seed % 3, seed))
    assert stage.tally.points == 10
