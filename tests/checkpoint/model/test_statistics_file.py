"""Statistics of inputs as files: what they hold, how they add, and weights that are quantized by them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint.checkpoint.model.calibration import calibrated
from zeropoint.checkpoint.model.importance import name_in_llama_cpp
from zeropoint.checkpoint.model.statistics_file import SavedStatistics
from zeropoint.checkpoint.read.imatrix_file import read_imatrix
from zeropoint.checkpoint.read.source import open_source

pytestmark = pytest.mark.rotating

Q = "model.layers.0.self_attn.q_proj"


def ids(first: int = 0, windows: int = 6) -> torch.Tensor:
    every = torch.randint(0, 512, (12, 24), generator=torch.Generator().manual_seed(0))
    return every[first : first + windows]


@pytest.fixture(scope="module")
def gram(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "gram.safetensors"
    zp.gather_statistics(source, path, ids(), gram=True)
    return path


def quantize(source: Path, out: Path, **options: object) -> zp.RunResult:
    given = {"method": "gptq", "ignore": "lm_head", **options}
    return zp.quantize_checkpoint(source, out, "int4:g64", **given)  # type: ignore[arg-type]


def test_a_file_has_the_mean_squares_that_calibration_takes(source: Path, gram: Path) -> None:
    plan = calibrated(zp.plan_checkpoint(source, "w4a16", method="mse_weighted"), ids())
    with SavedStatistics([gram], open_source(source)) as saved:
        for module, needs in plan.statistics.items():
            assert saved.mean_square(module) == needs["mean_square"]
        assert saved.owners["model.layers.0.self_attn.k_proj"] == Q
        sites = saved.sites[Q], saved.sites["model.layers.0.self_attn.o_proj"]
        assert sites[0].readers == tuple(f"{Q[:-6]}{part}" for part in ("q_proj", "k_proj", "v_proj"))
        assert [site.vectors for site in sites] == [6 * 24, 6 * 24]
        diagonal = saved.gram(Q)["gram"].diagonal()
    # A Gram matrix is of numbers of 12 bits.
    assert torch.allclose(diagonal, load_file(gram)[f"{Q}.squares"], rtol=2**-10)


def test_files_add_number_by_number_in_their_order(source: Path, tmp_path: Path, gram: Path) -> None:
    parts = [tmp_path / f"{first}.safetensors" for first in (0, 2, 4)]
    for path, first in zip(parts, (0, 2, 4), strict=True):
        zp.gather_statistics(source, path, ids(first, 2), gram=True)
    for name, files in (
        ("all", parts),
        ("two", parts[:2]),
        ("turns", [tmp_path / "two.safetensors", parts[2]]),
    ):
        zp.gather_statistics(source, tmp_path / f"{name}.safetensors", statistics=files)
    whole, turns = (load_file(tmp_path / f"{name}.safetensors") for name in ("all", "turns"))
    found = [load_file(path) for path in parts]
    for name, numbers in whole.items():
        assert torch.equal(numbers, found[0][name] + found[1][name] + found[2][name])
        assert torch.equal(numbers, turns[name])
    at_once = load_file(gram)
    assert all(
        torch.allclose(whole[name], numbers, rtol=1e-6, atol=1e-6) for name, numbers in at_once.items()
    )
    assert (tmp_path / "all.safetensors").read_bytes() == (tmp_path / "turns.safetensors").read_bytes()
    # The files are those of which quantize_checkpoint makes the sum itself.
    quantize(source, tmp_path / "out", statistics=parts)
    quantize(source, tmp_path / "same", statistics=tmp_path / "all.safetensors")
    assert digests(tmp_path / "out") == digests(tmp_path / "same")


def test_weights_are_solved_from_a_file_without_a_run_of_the_model(
    source: Path, tmp_path: Path, gram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source, tmp_path / "run", calibration=ids())
    monkeypatch.setattr(
        "zeropoint.checkpoint.model.running_model.empty_model", lambda *_: pytest.fail("the model was built")
    )
    result = quantize(source, tmp_path / "file", statistics=gram)
    run, file = tensors_of(tmp_path / "run"), tensors_of(tmp_path / "file")
    # The inputs of the first layers do not depend on what is quantized.
    for name in (name for name in run if name.startswith((Q, f"{Q[:-6]}k_proj", f"{Q[:-6]}v_proj"))):
        assert torch.equal(run[name], file[name])
    assert any(not torch.equal(run[name], file[name]) for name in run)
    losses = [weight["loss"] for weight in result.to_dict()["weights"]]
    assert all(
        0 < loss["seen"] < 0.2 and loss["held_out"] is None and loss["vectors"] == 144 for loss in losses
    )
    assert zp.verify_checkpoint(tmp_path / "file", source).ok


@pytest.mark.parametrize(("to", "layout"), [("nvfp4a16", None), ("q4_k", "gguf"), ("int4:g32", "gptq")])
def test_every_layout_takes_weights_solved_from_a_file(
    source: Path, tmp_path: Path, gram: Path, to: str, layout: str | None
) -> None:
    options = {"method": "gptq", "ignore": "lm_head", "format": layout, "statistics": gram}
    result = zp.quantize_checkpoint(source, tmp_path / "out", to, **options)  # type: ignore[arg-type]
    assert result.plan.solved
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats")
    floats = tensors_of(tmp_path / "floats")
    for name, weight in tensors_of(source).items():
        # Rows are in their places: q and k of GGUF lie in another order.
        assert float((floats[name].float() - weight.float()).norm() / weight.float().norm()) < 0.25, name
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_methods_of_mean_squares_take_a_file(source: Path, tmp_path: Path, gram: Path) -> None:
    quantize(source, tmp_path / "run", method="mse_weighted", calibration=ids())
    quantize(source, tmp_path / "file", method="mse_weighted", statistics=gram)
    assert digests(tmp_path / "run") == digests(tmp_path / "file")


def test_an_importance_matrix_has_the_means_under_the_names_of_llama_cpp(
    source: Path, tmp_path: Path, gram: Path
) -> None:
    for ending in ("gguf", "dat"):
        zp.gather_statistics(source, tmp_path / f"i.{ending}", statistics=gram)
    peer = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    newer, older = (read_imatrix(tmp_path / f"i.{ending}") for ending in ("gguf", "dat"))
    with SavedStatistics([gram], open_source(source)) as saved:
        assert newer.keys() == older.keys()
        assert len(newer) == len(saved.owners)
        for module in saved.owners:
            name = name_in_llama_cpp(module)
            assert name is not None
            sums = saved.squares(saved.owners[module])["squares"].float().numpy()
            assert np.array_equal(peer[f"{name}.in_sum2"].data.reshape(-1), sums)
            assert peer[f"{name}.counts"].data.reshape(-1).tolist() == [144.0]
            assert np.array_equal(newer[name], sums / np.float32(144))
            assert np.array_equal(older[name], newer[name])
    quantize(source, tmp_path / "a", method="mse_weighted", imatrix=tmp_path / "i.gguf")
    quantize(source, tmp_path / "b", method="mse_weighted", imatrix=tmp_path / "i.dat")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def changed(gram: Path, path: Path, **texts: str) -> Path:
    """Write a file with other metadata."""
    with safe_open(gram, "pt") as file:
        save_file(load_file(gram), path, {**file.metadata(), **texts})
    return path


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"zeropoint_statistics": "9"}, "is no file of statistics that is read here"),
        ({"sites": "{"}, "is a damaged file of statistics"),
        (
            {"sites": json.dumps({Q: {"readers": [Q], "vectors": 1, "left_out": 0}})},
            "tensors and sites differ",
        ),
        ({"model": "0"}, "has statistics of another checkpoint"),
    ],
)
def test_wrong_files_are_refused(
    source: Path, tmp_path: Path, gram: Path, texts: dict[str, str], message: str
) -> None:
    path = changed(gram, tmp_path / "wrong.safetensors", **texts)
    with pytest.raises(zp.ZeropointError, match=message):
        quantize(source, tmp_path / "out", statistics=path)
    assert not (tmp_path / "out").exists()


def test_cut_files_and_numbers_that_are_none_are_refused(source: Path, tmp_path: Path, gram: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(gram.read_bytes()[:-8])
    with pytest.raises(zp.CheckpointError, match="truncated"):
        quantize(source, tmp_path / "out", statistics=tmp_path / "cut.safetensors")
    with safe_open(gram, "pt") as file:
        metadata = file.metadata()
    for value, message in ((float("nan"), "numbers that are not finite"), (-1.0, "squares below 0")):
        tensors = load_file(gram)
        tensors[f"{Q}.squares"][0] = value
        save_file(tensors, tmp_path / "bad.safetensors", metadata)
        with pytest.raises(zp.CheckpointError, match=message):
            quantize(source, tmp_path / "out", statistics=tmp_path / "bad.safetensors")


def test_what_statistics_do_not_hold_is_said(source: Path, tmp_path: Path, gram: Path) -> None:
    plain = tmp_path / "plain.safetensors"
    zp.gather_statistics(source, plain, ids())
    for options, message in (
        (
            {"method": "shift+gptq", "statistics": gram},
            "needs the cross_gram of inputs of the quantized model",
        ),
        ({"statistics": plain}, r"has no Gram matrices.*gram=True"),
        ({"statistics": [gram, gram]}, "are of the same data, which would count twice"),
        ({"statistics": [gram, plain]}, "has no Gram matrices, and another file has"),
        ({"statistics": gram, "calibration": "random"}, "both say what inputs are; give one of them"),
        ({"statistics": gram, "method": "nearest"}, "no method of this plan takes statistics"),
    ):
        with pytest.raises(zp.ZeropointError, match=message):
            quantize(source, tmp_path / "out", **options)
    other = synthetic_llama.write(tmp_path / "other", dtype=torch.float32)
    with pytest.raises(zp.CalibrationError, match="statistics of another checkpoint"):
        quantize(other, tmp_path / "out", statistics=gram)
    for name, message in (("a.gguf", r"must end in \.safetensors"), ("a.txt", "must end in")):
        with pytest.raises(zp.OptionError, match=message):
            zp.gather_statistics(source, tmp_path / name, "random")
    with pytest.raises(zp.CheckpointError, match="exists"):
        zp.gather_statistics(source, plain, ids())
