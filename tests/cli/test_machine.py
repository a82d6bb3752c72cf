"""What the command says of this machine: versions, kernels, and their speeds."""

import json
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Call

from zeropoint import __version__
from zeropoint.bench import speeds
from zeropoint.bench.cases import operator_cases


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "SIDE", 128)


def test_doctor_names_versions_the_processor_and_a_kernel_for_each_scheme(call: Call) -> None:
    found = json.loads(call("doctor", "--json").out)
    assert (found["zeropoint"], found["packages"]["torch"]) == (__version__, torch.__version__)
    assert found["engines"]["transformers"]
    assert "vllm" not in found["engines"]
    assert found["kernels"]["cpu"]["int4:g128"].startswith("cpu runs")
    text = call("doctor").out
    assert all(
        f"{key} " in text for key in ("zeropoint", "processor", "memory", "GPUs", "packages", "engines")
    )


def test_bench_gives_each_kernel_its_share_of_a_copy_and_a_picture(call: Call, tmp_path: Path) -> None:
    words = ("bench", "--rounds", "1", "--workers", "1", "--only", "int4", "--plot", tmp_path / "p.svg")
    found = json.loads(call(*words, "--json").out)
    named = [case.label for case in operator_cases() if "int4" in case.label]
    assert [row["kernel"] for row in found["kernels"]] == named
    row = found["kernels"][0]
    assert row["bytes"] == 128 * 128 * 4 + 128 * 128 // 2 + 128 * 4
    assert row["of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
    picture = (tmp_path / "p.svg").read_text()
    assert all(name in picture for name in named)
    again = call(*words)
    assert (again.status, "exists; name a new file" in again.err) == (1, True)
    assert call(*words, "--overwrite").status == 0


def test_bench_of_nothing_is_an_error(call: Call) -> None:
    called = call("bench", "--only", "nothing", "--json")
    assert called.status == 2
    assert (
        json.loads(called.out)["error"]
        == "--only nothing is in the name of no kernel; try int4 or dequantize"
    )


def test_the_threads_of_torch_are_what_they_were(call: Call) -> None:
    before = torch.get_num_threads()
    assert call("bench", "--rounds", "1", "--workers", "2", "--only", "nf4").status == 0
    assert torch.get_num_threads() == before
