"""Files of AMD Quark: its bytes, recorded, its configuration, and files that are wrong."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import quantize, save
from tests.codecs.problems import assert_wrong
from tests.oracles.quark_models import dtype_of, model

import zeropoint as zp
from zeropoint.checkpoint.read.quantized_layers import find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.amd_quark import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme

M = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
_FP8 = "float8_e4m3fn:{}:dialect=compressed-tensors"
# The first 32 digits of the SHA-256 of the names, dtypes, shapes and bytes of all that amd-quark 0.13 writes
# of the linear layers of this model; tests/oracle/test_quark.py compares with the package itself.
RECORDED = {
    "int4_group": "b89b362f7f8d638b549c4fc88ee2759e",
    "int4_channel": "e3428bb3cddc110ccb89ca866e2797ea",
    "int8_channel": "8213072005a6e4bc92496dabb0d2de64",
    "int8_tensor": "27afc95fb51cea63ab37abbb0bbada74",
    "int8_group": "869f06d1f22474823da223a06ae74b0f",
    "uint4_group": "a3797391f99433dd56cab3e77cbeb459",
    "uint8_channel": "2bd1c14150faa1707dbf1cf7ad6d6510",
    "fp8_tensor": "487432bdd5a092ebc3bf4105a32ebc6a",
    "fp8_channel": "8416cb36600ef7b23429d89fb1ad1b54",
}
SCHEMES = {
    "int4_group": "int4:g32", "int4_channel": "int4:channel", "int8_channel": "int8:channel",
    "int8_tensor": "int8:tensor", "int8_group": "int8:g32", "uint4_group": "uint4:g32:asym",
    "uint8_channel": "uint8:channel:asym", "fp8_tensor": _FP8.format("tensor"),
    "fp8_channel": _FP8.format("channel"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_the_bytes_are_those_of_quark(case: str, tmp_path: Path) -> None:
    model(dtype_of(case)).save_pretrained(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "out", SCHEMES[case], codec=CODEC)
    tensors, digest = load_file(tmp_path / "out" / "model.safetensors"), hashlib.sha256()
    for name in sorted(name for name in tensors if "_proj" in name):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:32] == RECORDED[case]
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems


ZERO_POINT = f"{M}.weight_zero_point"


def stored() -> Tensors:
    """Return a layer of int4 with a scale for each channel."""
    return {
        f"{M}.weight": torch.arange(8 * 2, dtype=torch.int32).view(8, 2) * 7919,
        f"{M}.weight_scale": torch.arange(1, 9).bfloat16() / 64,
        ZERO_POINT: torch.zeros(1, dtype=torch.int32),
    }


SPEC: dict[str, Any] = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}


def theirs(folder: Path, tensors: Tensors, spec: dict[str, Any] = SPEC, **section: Any) -> Path:
    """Return a checkpoint of Quark."""
    found = {"quant_method": "quark", "global_quant_config": {"weight": spec}, "exclude": [], **section}
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": found}
    return save(folder, tensors, config)


def test_the_first_glob_of_a_layer_says_how_it_is_quantized(tmp_path: Path) -> None:
    int8 = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True}
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    found = {"*.up_proj": {"weight": SPEC, "input_tensors": inputs}, "*": {"weight": int8}}
    source = theirs(tmp_path / "in", stored(), int8, layer_quant_config=found)
    (layer,) = (layer.layer for layer in find_layers(open_source(source)).layers)
    assert (layer.layout, str(layer.input)) == ("int4 per_channel", "float8_e4m3fn:tensor static")


def spec(**changes: Any) -> dict[str, Any]:
    return SPEC | changes


WRONG: tuple[tuple[Callable[[], Tensors], dict[str, Any], str], ...] = (
    (lambda: stored() | {ZERO_POINT: torch.ones(1).int()}, SPEC, "is not 0, but int4"),
    (stored, spec(qscheme="per_group"), "weights of Quark with .* are not read"),
    (stored, spec(ch_axis=1), "weights of Quark with .*'ch_axis': 1.* are not read"),
    (stored, spec(qscheme="per_group", group_size=2, ch_axis=1), r"weight_scale is BF16 of shape \[8\], but"),
)
"""What tests/hostile/layouts.py does not have, which changes weights of fp8."""


@pytest.mark.parametrize(("tensors", "given", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    tensors: Callable[[], Tensors], given: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    assert_wrong(theirs(tmp_path / "in", tensors(), given), M, rule)


def test_codes_that_fill_no_words_are_refused() -> None:
    layer = layer_scheme("w4a16", CODEC)
    assert CODEC.refusal(layer, (12, 128)) == "has 12 codes in a line, but a word holds 8"
