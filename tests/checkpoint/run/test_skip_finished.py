"""An output that a run of the same plan finished is left as it is, by its manifest; any other is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.written import digests
from tests.cli.checkpoints import write_llama

import zeropoint as zp
from zeropoint.checkpoint.run import existing


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def test_nothing_is_read_of_an_output_that_is_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zp.quantize_checkpoint(model, tmp_path / "out", "w4a16")
    before = digests(tmp_path / "out")
    monkeypatch.setattr(existing, "local", None)
    result = zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", skip_finished=True)
    assert result.notes[-1].endswith("was finished by an earlier run, by its manifest; nothing was read")
    assert (len(result.outcomes), result.resumed, digests(tmp_path / "out")) == (0, result.units, before)
    assert "relative error" not in repr(result)
    assert json.loads(result.to_json())["error"] is None


def test_an_output_that_is_not_there_is_written_and_an_interrupted_one_resumed(
    model: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", skip_finished=True, progress=stop)
    result = zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", skip_finished=True)
    assert len(result.outcomes) == 14


def cut(out: Path) -> None:
    file = next(out.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    "change",
    [
        cut,
        lambda out: (out / "tokenizer.json").unlink(),
        lambda out: (out / "zeropoint_manifest.json").write_text("{"),
        lambda out: (out / "zeropoint_manifest.json").write_text("[]"),
        lambda out: (out / "zeropoint_manifest.json").unlink(),
    ],
)
def test_an_output_that_is_damaged_or_of_another_plan_is_an_error_as_ever(
    model: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    zp.quantize_checkpoint(model, tmp_path / "out", "w4a16")
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w8a16", skip_finished=True)
    change(tmp_path / "out")
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", skip_finished=True)
