"""The worst weights, and what keeping them costs: what the same run without them writes and reports."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import save
from tests.cli.checkpoints import write_hard_llama

from zeropoint.checkpoint.measure.tensor_error import worst
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.advice import keeping_cost
from zeropoint.checkpoint.run.loop import RunResult, run

ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hard_llama(tmp_path_factory.mktemp("hard") / "model")


def quantized(model: Path, out: Path, **selection: tuple[str, ...]) -> RunResult:
    return run(make_plan(open_source(model), "w4a16", selection=Selection(**selection)), out)


def test_the_worst_are_those_of_the_largest_relative_error(hard: Path, tmp_path: Path) -> None:
    result = quantized(hard, tmp_path / "out")
    found = worst(result.outcomes, lambda outcome: outcome.error)
    errors = sorted((o.error.relative for o in result.outcomes), reverse=True)
    assert [o.error.relative for o in found] == errors[:5]


def test_keeping_them_costs_what_the_same_run_without_them_writes_and_reports(
    hard: Path, tmp_path: Path
) -> None:
    result = quantized(hard, tmp_path / "out")
    found = keeping_cost(result)
    assert found is not None
    other = quantized(hard, tmp_path / "kept", ignore=found.patterns)
    assert found.nbytes == other.plan.output_bytes - result.plan.output_bytes > 0
    assert found.error == other.error
    assert len(other.outcomes) == len(result.outcomes) - found.weights


def test_layers_that_run_as_one_are_kept_together(hard: Path, tmp_path: Path) -> None:
    found = keeping_cost(quantized(hard, tmp_path / "out"))
    assert found is not None
    for names in (
        [f"{ATTENTION}.{which}_proj" for which in "qkv"],
        [f"model.layers.0.mlp.{which}_proj" for which in ("gate", "up")],
    ):
        assert len(set(names) & set(found.patterns)) in (0, len(names))
    assert found.whole
    assert ", those that run as one with them too): " in str(found)


def test_experts_of_a_layer_are_named_by_one_pattern(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{which}_proj.weight": torch.randn(64, 64, generator=generator)
        for layer, e, which in itertools.product(range(2), range(3), ("gate", "up", "down"))
    }
    for name, tensor in tensors.items():
        tensor[:, ::16] *= 8.0 if name.startswith("model.layers.0") else 1.0
    model = save(tmp_path / "model", tensors, {"architectures": ["X"]})
    found = keeping_cost(run(make_plan(open_source(model), "int4:g64"), tmp_path / "out"))
    assert found is not None
    assert (found.patterns, found.weights) == (("model.layers.0.mlp.experts.*",), 9)


def test_nothing_is_said_where_no_other_weight_is_left(tmp_path: Path) -> None:
    model = save(tmp_path / "model", {"a.up.weight": torch.randn(64, 128)}, {"architectures": ["X"]})
    assert keeping_cost(run(make_plan(open_source(model), "w4a16"), tmp_path / "out")) is None
