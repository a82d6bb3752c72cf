"""What tests of checkpoints share: models in shards, small units, interrupted runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoint.interrupted import plan_of, stop_after
from tests.checkpoint.written import digests
from tests.oracles import llmcompressor_golden, synthetic_llama

from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.run import units as cut
from zeropoint.checkpoint.run.loop import run


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a checkpoint of a few megabytes into dozens of units."""
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 40_000)
    monkeypatch.setattr(cut, "UNIT_BYTES", 50_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, sets of weights that share a scale across them, and two companions."""
    folder = synthetic_llama.write(tmp_path_factory.mktemp("source") / "in")
    (folder / "tokenizer.json").write_text("{}" * 40_000)
    (folder / "empty.txt").write_bytes(b"")
    return folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The models of which the golden hashes of llm-compressor are, by dtype and whether they have experts."""
    root = tmp_path_factory.mktemp("llama")
    kinds = sorted({(dtype, moe) for _, dtype, moe in llmcompressor_golden.CASES})
    return {
        (dtype, moe): synthetic_llama.write(root / f"{dtype}{moe}", dtype=getattr(torch, dtype), moe=moe)
        for dtype, moe in kinds
    }


@pytest.fixture
def golden(source: Path, tmp_path: Path, small_units: None) -> dict[str, str]:
    """What an undisturbed run writes."""
    run(plan_of(source), tmp_path / "golden")
    return digests(tmp_path / "golden")


@pytest.fixture
def stopped(source: Path, tmp_path: Path, small_units: None) -> Path:
    """An interrupted run of 30 units."""
    stop_after(plan_of(source), tmp_path / "out", 30)
    return tmp_path / "out"
