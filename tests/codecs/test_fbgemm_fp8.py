"""Files of FBGEMM: values as transformers computes them, what is written, and wrong files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import LLAMA, dequantized, save
from tests.tensors import normal

import zeropoint as zp
from zeropoint.codecs.fbgemm_fp8 import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.recipes import Activation

M = "a.up_proj"
Tensors = dict[str, torch.Tensor]


def stored(dtype: torch.dtype = torch.float32) -> Tensors:
    """Return the tensors of a layer as Meta's files have them."""
    codes = normal(3, 128, seed=4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5], [0.75], [3.0]], dtype=dtype)
    return {f"{M}.weight": codes, f"{M}.weight_scale": scales, f"{M}.input_scale_ub": torch.tensor([1200.0])}


def theirs(folder: Path, tensors: Tensors, **section: Any) -> Path:
    found = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, **section}
    return save(folder, tensors, {**LLAMA, "quantization_config": found})


def test_what_is_written_has_a_scale_for_each_row(tmp_path: Path) -> None:
    x = normal(64, 128, seed=5, dtype=torch.bfloat16)
    source = save(tmp_path / "in", {f"{M}.weight": x, "a.norm.weight": torch.ones(64)}, LLAMA)
    zp.quantize_checkpoint(source, tmp_path / "out", "fp8_dynamic", format="fbgemm-fp8")
    found = load_file(tmp_path / "out" / "model.safetensors")
    scale = x.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(found[f"{M}.weight_scale"], scale)
    assert torch.equal(found[f"{M}.weight"].float(), (x.float() / scale).to(torch.float8_e4m3fn).float())
    assert f"{M}.input_scale_ub" not in found
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section == {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": [],
    }
    assert not zp.verify_checkpoint(tmp_path / "out", source).problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bound", [True, False])
def test_files_of_others_are_read_with_their_values(dtype: torch.dtype, bound: bool, tmp_path: Path) -> None:
    tensors = stored(dtype)
    if not bound:  # a buffer of transformers that it does not save
        del tensors[f"{M}.input_scale_ub"]
    folder = theirs(tmp_path / "in", tensors)
    assert not zp.verify_checkpoint(folder).problems
    wanted = tensors[f"{M}.weight"].float() * tensors[f"{M}.weight_scale"].float()
    assert torch.equal(dequantized(folder, tmp_path / "out")[f"{M}.weight"], wanted.bfloat16())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({f"{M}.weight_scale": None}, "weight_scale is missing, which fbgemm_fp8 needs"),
        (
            {f"{M}.weight_scale": torch.ones(3, 1, dtype=torch.float64)},
            "weight_scale is F64, but must be one of",
        ),
        ({f"{M}.weight_scale": torch.ones(3)}, r"weight_scale is F32 of shape \[3\], but must be F32"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(
    change: dict[str, torch.Tensor | None], why: str, tmp_path: Path
) -> None:
    tensors = {name: x for name, x in {**stored(), **change}.items() if x is not None}
    (problem,) = zp.verify_checkpoint(theirs(tmp_path / "in", tensors)).problems
    assert re.search(why, problem.what)


@pytest.mark.parametrize("bound", ["1200", -1.0, True])
def test_a_malformed_bound_is_refused(bound: object, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "in", stored(), activation_scale_ub=bound)
    with pytest.raises(CheckpointError, match=r"activation_scale_ub of quantization_config is .* positive"):
        zp.verify_checkpoint(folder)


def test_other_schemes_and_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="is not what FBGEMM stores; use fp8_dynamic"):
        layer_scheme("int8:channel", CODEC)
    weight = layer_scheme("fp8_dynamic", CODEC).weight
    with pytest.raises(UnsupportedError, match="has no place in FBGEMM; use float8_e4m3fn:token"):
        LayerScheme(codec=CODEC, name="", weight=weight, input=Activation.of("int8:token"))
