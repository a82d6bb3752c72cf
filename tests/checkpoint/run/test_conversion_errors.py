"""Conversions of files with wrong scales, and to places where no result can be: one sentence each."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import CONFIG, save, weight

import zeropoint as zp
from zeropoint.errors import CheckpointError, UnsupportedError, ZeropointError

UP = "model.layers.0.mlp.up_proj"
LAYOUTS = {
    "gptq": ("scales", "int4:g64"), "awq": ("scales", "int4:g64:asym"), "quark": ("weight_scale", "int4:g64"),
    "compressed-tensors": ("weight_scale", "w4a16:g64"),
}  # fmt: skip
HOLDERS = ("compressed-tensors", "gptq", "awq", "quark", "torchao", "hqq", "mlx", "gguf")
Tensors = dict[str, torch.Tensor]


def written(folder: Path, layout: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Path:
    """Write a quantized layer and a norm, without a manifest; change: of its scales."""
    tensors = {f"{UP}.weight": weight(64, 128, dtype=torch.float16), "norm.weight": torch.ones(8).half()}
    suffix, scheme = LAYOUTS[layout]
    save(folder / "floats", tensors, {**CONFIG, "torch_dtype": "float16"})
    out = folder / layout
    zp.quantize_checkpoint(folder / "floats", out, scheme, format=layout)
    (out / "zeropoint_manifest.json").unlink()
    found = load_file(out / "model.safetensors")
    if change is not None:
        found[f"{UP}.{suffix}"] = change(found[f"{UP}.{suffix}"]).contiguous()
        save_file(found, out / "model.safetensors", {"format": "pt"})
    return out


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale[0, 0] = value
        return scale

    return change


@pytest.mark.crossed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("change", "found", "said"), [
    (first(float("nan")), r"scale 1 \(=nan\) of block \(0, 0\) must be finite", "64 non-finite values"),
    (first(float("-inf")), r"scale 1 \(=-inf\) of block \(0, 0\) must be finite", "64 non-finite values"),
    (lambda scale: scale.to(torch.int32), "is I32, but must be one of", "is I32, but must be one of"),
    (lambda scale: scale[:-1], "is F16 of shape", "is F16 of shape"),
    (lambda scale: scale.reshape(-1), "is F16 of shape", "is F16 of shape"),
])  # fmt: skip
def test_wrong_scales_are_named_by_verify_and_refused_by_convert(
    tmp_path: Path, layout: str, change: Callable[[torch.Tensor], torch.Tensor], found: str, said: str
) -> None:
    folder = written(tmp_path, layout, change)
    problems = [str(problem) for problem in zp.verify_checkpoint(folder).problems]
    assert any(re.search(found, problem) for problem in problems), problems
    for to in ("mlx", layout):
        with pytest.raises(ZeropointError, match=said):
            zp.convert_checkpoint(folder, tmp_path / f"to-{to}", to)
    with pytest.raises(ZeropointError, match=said.replace("64 ", "")):
        zp.convert_checkpoint(folder, tmp_path / "floats-again", to="float32")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_negative_scales_go_without_loss_wherever_the_layout_holds_the_codes(
    tmp_path: Path, layout: str
) -> None:
    folder = written(tmp_path, layout, torch.neg)
    assert zp.verify_checkpoint(folder).ok
    zp.convert_checkpoint(folder, tmp_path / "wanted", to="float32")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    for to in HOLDERS:
        if (layout, to) == ("awq", "gguf"):
            continue  # which has no zero points
        zp.convert_checkpoint(folder, tmp_path / f"to-{to}", to)
        zp.convert_checkpoint(tmp_path / f"to-{to}", tmp_path / f"from-{to}", to="float32")
        found = load_file(tmp_path / f"from-{to}" / "model.safetensors")
        assert torch.equal(found[f"{UP}.weight"], wanted[f"{UP}.weight"]), to


@pytest.mark.parametrize(("out", "message"), [
    ("gptq", "is the source or lies in it; write elsewhere"),
    ("gptq/../gptq", "is the source or lies in it; write elsewhere"),
    ("gptq/new", "is the source or lies in it; write elsewhere"),
    ("link", "is the source or lies in it; write elsewhere"),
    ("link/new", "is the source or lies in it; write elsewhere"),
    ("file", "exists and is not a directory; choose another path"),
    ("file/new", "cannot be written: Not a directory"),
    ("held", "holds 'x'; choose an empty directory"),
    ("n" * 300, "file systems take 255"),
])  # fmt: skip
def test_a_place_where_no_result_can_be_is_refused_and_nothing_changes(
    tmp_path: Path, out: str, message: str
) -> None:
    folder = written(tmp_path, "gptq")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("x")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "x").write_text("x")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((ZeropointError, OSError), match=message):
        zp.convert_checkpoint(folder, f"{tmp_path}/{out}", "awq")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "floats", "gptq", "held", "link"]


def test_one_file_of_a_quantized_checkpoint_says_that_its_configuration_is_needed(tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")
    with pytest.raises(CheckpointError, match=r"pass the directory whose config\.json says how"):
        zp.convert_checkpoint(folder / "model.safetensors", tmp_path / "out", "awq")


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "GEMV", "marlin", "exllama"])
def test_other_versions_of_awq_are_not_taken_for_gemm(tmp_path: Path, version: str) -> None:
    folder = written(tmp_path, "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = version
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError, match=f"version '{version.lower()}' and zero_point True are not read"
    ):
        zp.convert_checkpoint(folder, tmp_path / "out", "gptq")
    assert any("are not read" in problem for problem in zp.inspect_checkpoint(folder).problems)
