"""The worst weights in every report and document, and one figure for an output in three commands."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.checkpoints import write_hard_llama, write_llama
from tests.cli.conftest import Call
from tests.cli.test_errors import assert_one_line


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hard_llama(tmp_path_factory.mktemp("hard") / "model")


def test_the_report_names_them_and_the_option_on_a_line_of_its_own(
    call: Call, hard: Path, tmp_path: Path
) -> None:
    lines = call("quantize", hard, tmp_path / "out", "--to", "w4a16").out.splitlines()
    at = lines.index("the worst")
    named = [line.split() for line in lines[at + 1 : at + 6]]
    assert all(name.startswith("model.layers.") for name, *_ in named)
    assert [float(cells[1]) for cells in named] == sorted((float(cells[1]) for cells in named), reverse=True)
    assert lines[at + 6].startswith("keeping the worst (")
    option = lines[at + 7].split()
    again = call("quantize", hard, tmp_path / "kept", "--to", "w4a16", *option)
    error = lines[at + 6].rpartition("relative error ")[2]
    assert (again.status, f"relative error {error}" in again.out) == (0, True)


def test_weights_are_sorted_by_their_error(call: Call, hard: Path, tmp_path: Path) -> None:
    call("quantize", hard, tmp_path / "out", "--to", "w4a16")
    for command in (
        ("quantize", hard, tmp_path / "again", "--to", "w4a16"),
        ("verify", tmp_path / "out", "--against", hard),
        ("compare", hard, tmp_path / "out"),
    ):
        called = call(*command, "--all", "--sort", "error")
        assert called.status == 0
        rows = [line.split() for line in called.out.splitlines() if "_proj" in line]
        errors = [float(cells[1]) for cells in rows if cells[1].startswith("0.")]
        # The last five are the worst once more.
        assert len(errors) >= 14
        assert errors[:14] == sorted(errors[:14], reverse=True)


def test_documents_have_them(call: Call, hard: Path, tmp_path: Path) -> None:
    found = json.loads(call("quantize", hard, tmp_path / "out", "--to", "w4a16", "--json").out)
    relative = [each["error"]["relative"] for each in found["weights"]]
    assert [each["error"]["relative"] for each in found["worst"]] == sorted(relative, reverse=True)[:5]
    assert found["keeping"]["bytes"] > 0
    compared = json.loads(call("compare", hard, tmp_path / "out", "--json").out)
    assert [each["name"] for each in compared["worst"]] == [each["tensor"] for each in found["worst"]]
    verified = json.loads(call("verify", tmp_path / "out", "--against", hard, "--json").out)
    assert [each["module"] for each in verified["worst"]] == [each["module"] for each in found["worst"]]


def test_three_commands_have_one_figure_for_an_output_whatever_else_is_in_the_files(
    call: Call, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    # What engines keep as a buffer: the squares of its numbers are far above those of all weights.
    tensors["model.position_ids"] = torch.arange(4096)
    tensors["model.norm.weight"] = torch.full((128,), 1e4, dtype=torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    run_of = json.loads(call("quantize", model, out, "--to", "w4a16", "--json").out)["error"]
    verified = json.loads(call("verify", out, "--against", model, "--json").out)["error"]
    called = call("compare", model, out, "--json")
    compared = json.loads(called.out)
    assert compared["counted_tensors"] == 14
    for other in (verified, compared):
        assert math.isclose(other["relative"], run_of["relative"], rel_tol=1e-3)
    assert " over 14 tensors of floats that are quantized or changed, in " in call("compare", model, out).out


@pytest.mark.parametrize(
    ("to", "instead"),
    [
        ("int4", "write int4:g128 or w4a16, or int4:tensor where one scale is meant"),
        ("INT8", "write INT8:g128 or w8a16, or INT8:tensor where one scale is meant"),
        ("int5", "write int5:g128 or w4a16, or int5:tensor"),
        ("int4:narrow", "write int4:g128:narrow or w4a16, or int4:tensor:narrow"),
        ("int4:scale=float32", "write int4:g128:scale=float32 or w4a16, or int4:tensor:scale=float32"),
        ("uint4", "write int4:g128 or w4a16\n"),
        ("int3:asym", "write int3:g128:asym or w4a16_asym\n"),
    ],
)  # fmt: skip
def test_an_integer_without_blocks_is_an_error_that_offers_groups(
    call: Call, model: Path, tmp_path: Path, to: str, instead: str
) -> None:
    for command in (("quantize", model, tmp_path / "out"), ("plan", model)):
        called = call(*command, "--to", to)
        assert_one_line(
            called, 2, f"{to} has one scale for a whole weight, which leaves little of it; {instead}"
        )
    assert not (tmp_path / "out").exists()


def test_one_scale_for_a_weight_that_is_spelled_out_is_written(
    call: Call, model: Path, tmp_path: Path
) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "int4:tensor", "--force").status == 0
    assert call("plan", model, "--to", "float8_e4m3fn").status == 0


def test_a_candidate_without_blocks_is_an_error_too(call: Call, model: Path) -> None:
    called = call("search", model, "--budget", "8bpw", "--candidates", "int4,w8a16")
    assert (called.status, "; write int4:g128 or w4a16" in called.err) == (1, True)
