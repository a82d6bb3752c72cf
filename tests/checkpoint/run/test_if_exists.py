"""An output that a run of the same plan finished is left as it is, by its manifest; any other is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import digests
from tests.cli.checkpoints import write_llama
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.checkpoint.model import saved_solving, solved_weights
from zeropoint.checkpoint.run import resume

pytestmark = pytest.mark.rotating


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def test_nothing_is_read_of_an_output_that_is_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zp.quantize_checkpoint(model, tmp_path / "out", "w4a16")
    before = digests(tmp_path / "out")
    monkeypatch.setattr(resume, "local", None)
    result = zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="skip")
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
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="skip", progress=stop)
    result = zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="skip")
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
        zp.quantize_checkpoint(model, tmp_path / "out", "w8a16", if_exists="skip")
    change(tmp_path / "out")
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="skip")


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that runs, whose queries, keys and values have biases."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.llama(layers=1, initializer_range=0.1, attention_bias=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["shift+gptq", "awq+nearest", "gptq+bias"])
@pytest.mark.parametrize("data", ["ids", "random", "self"])
def test_weights_of_an_output_that_is_finished_are_not_solved_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, data: str
) -> None:
    options: dict[str, Any] = {"method": method, "if_exists": "skip"}
    options |= {"calibration": ids()} if data == "ids" else {"calibration": data, "samples": 2, "length": 16}
    zp.quantize_checkpoint(llama, tmp_path / "out", "int4:g32", **options)
    before = digests(tmp_path / "out")
    monkeypatch.setattr(solved_weights, "solve", None)
    result = zp.quantize_checkpoint(llama, tmp_path / "out", "int4:g32", **options)
    assert result.notes[-1].endswith("was finished by an earlier run, by its manifest; nothing was read")
    assert (len(result.outcomes), digests(tmp_path / "out")) == (0, before)
    assert json.loads(result.to_json())["error"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_of_an_output_of_statistics_are_not_solved_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for seed, file in enumerate(files):
        zp.gather_statistics(llama, file, ids(seed), gram=True)
    options: dict[str, Any] = {"method": "gptq", "if_exists": "skip"}
    zp.quantize_checkpoint(llama, tmp_path / "out", "int4:g32", statistics=files[0], **options)
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(llama, tmp_path / "out", "int4:g32", statistics=files[1], **options)
    monkeypatch.setattr(saved_solving, "_solve", None)
    result = zp.quantize_checkpoint(llama, tmp_path / "out", "int4:g32", statistics=files[0], **options)
    assert result.notes[-1].endswith("nothing was read")


@pytest.mark.parametrize(
    "change", [{"calibration": ids(1)}, {"method": "descent"}, {"to": "int3:g32"}, {"ignore": "*.up_proj"}]
)
def test_weights_of_another_run_are_solved_and_refused_or_written(
    llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"to": "int4:g32", "method": "gptq", "calibration": ids()}
    zp.quantize_checkpoint(llama, tmp_path / "out", **options)
    options |= {**change, "if_exists": "skip"}
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(llama, tmp_path / "out", **options)
    result = zp.quantize_checkpoint(llama, tmp_path / "out", **options, overwrite=True)
    assert len(result.outcomes) > 0
    again = zp.quantize_checkpoint(llama, tmp_path / "out", **options)
    assert len(again.outcomes) == 0
    cut(tmp_path / "out")
    with pytest.raises(zp.CheckpointError, match="choose an empty directory, or add overwrite=True"):
        zp.quantize_checkpoint(llama, tmp_path / "out", **options)


def test_an_output_with_files_is_an_error_on_request_be_it_of_the_same_run(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="error")
    with pytest.raises(zp.CheckpointError, match=r"out' holds files already; choose another output"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", if_exists="error")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"if_exists": "replace"},
            "if_exists='replace' must be resume, skip or error; overwrite=True writes",
        ),
        ({"if_exists": "error", "overwrite": True}, "if_exists='error' excludes overwrite=True"),
        ({"if_exists": "error", "restart": True}, "if_exists='error' excludes restart=True"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    model: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(zp.OptionError, match=said):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", **options)
