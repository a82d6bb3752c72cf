"""Statistics of inputs on a Ray cluster are the sums of parts, whatever its nodes are."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint.checkpoint.cluster.statistics_parts import PART, StatisticsRun, gather_part, run_parts
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.run.executor import ExecutorError
from zeropoint.errors import CalibrationError, CheckpointError, OptionError

WINDOWS = 2 * PART + 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_llama.write(tmp_path_factory.mktemp("model") / "llama")


def ids(windows: int = WINDOWS) -> torch.Tensor:
    return torch.randint(0, 512, (windows, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_cluster_writes_the_sum_of_parts(model: Path, cluster: Any, tmp_path: Path) -> None:
    found = zp.gather_statistics(
        model, tmp_path / "all.safetensors", ids(), gram=True, executor="ray", address=cluster.address
    )
    parts = []
    for number, own in enumerate(ids().split(PART)):
        parts.append(tmp_path / f"{number}.safetensors")
        zp.gather_statistics(model, parts[-1], own, gram=True)
    zp.gather_statistics(model, tmp_path / "sum.safetensors", statistics=parts)
    assert len(parts) == 3
    assert {site.vectors for site in found.sites.values()} == {WINDOWS * 8}
    assert (tmp_path / "all.safetensors").read_bytes() == (tmp_path / "sum.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(path.name for path in parts), "all.safetensors", "sum.safetensors",
    ]  # fmt: skip
    zp.gather_statistics(model, tmp_path / "whole.safetensors", ids(), gram=True)
    whole, added = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "all"))
    assert whole.keys() == added.keys()
    assert all(torch.allclose(whole[name], added[name], rtol=1e-6) for name in whole)


@pytest.mark.slow
def test_a_failure_on_a_node_is_raised_here(model: Path, cluster: Any, tmp_path: Path) -> None:
    more = shutil.copytree(model, tmp_path / "in") / "config.json"
    layers = json.loads(more.read_text())
    more.write_text(json.dumps({**layers, "num_hidden_layers": layers["num_hidden_layers"] + 1}))
    with pytest.raises(CheckpointError, match="not in the files under the name"):
        zp.gather_statistics(
            more.parent, tmp_path / "s.safetensors", ids(), executor="ray", address=cluster.address
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_part_is_written_anew_after_a_process_was_lost(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    file.write_bytes(b"half of a part")
    part = StatisticsRun(source=model, given=ids(3), file=file, limits=Limits.default(1), gram=False)
    assert isinstance(gather_part(part), str)
    zp.gather_statistics(model, tmp_path / "1.safetensors", ids(3))
    assert file.read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    lost = StatisticsRun(
        source=tmp_path / "none", given=ids(3), file=file, limits=Limits.default(1), gram=False
    )
    assert isinstance(gather_part(lost), CheckpointError)


def test_a_node_with_another_file_system_is_named(model: Path, tmp_path: Path) -> None:
    part = StatisticsRun(
        source=model, given=ids(3), file=tmp_path / "0.safetensors", limits=Limits.default(1), gram=False
    )
    elsewhere = types.SimpleNamespace(
        remote=lambda **_: lambda _: types.SimpleNamespace(remote=lambda part: part),
        get=lambda _: "node7",
        cancel=lambda *_, **__: None,
        exceptions=types.SimpleNamespace(RayError=RuntimeError),
    )
    with pytest.raises(ExecutorError, match=r"host 'node7' writes to another .*every node mounts"):
        run_parts(elsewhere, [part], 1, progress=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"calibration": "self"}, OptionError, "one model generates"),
        (
            {"calibration": ids(3), "address": "HEAD:6379", "executor": "local"},
            OptionError,
            "executor=.ray. too",
        ),
        ({"calibration": ids(3), "executor": "slurm"}, OptionError, "must be local or ray"),
        ({"statistics": "a.safetensors"}, OptionError, "is for a run of the model"),
        ({"calibration": -1 - ids(3)}, CalibrationError, "has token -"),
        ({"calibration": ids(3), "address": "127.0.0.1:1"}, ExecutorError, "no Ray cluster answers"),
    ],
)
def test_what_a_cluster_does_not_do_is_said_before_it_is_asked(
    options: dict[str, Any], error: type[Exception], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        zp.gather_statistics(model, tmp_path / "s.safetensors", **{"executor": "ray", **options})
    assert list(tmp_path.iterdir()) == []
