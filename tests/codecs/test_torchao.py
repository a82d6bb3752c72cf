"""Files of torchao: its bytes, recorded, its metadata, and files that are wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.written import LLAMA, dequantized, quantize, save
from tests.codecs.torchao_files import wrapped, write

import zeropoint as zp
from zeropoint.codecs.torchao import CODEC

M = "a.up_proj"
Tensors = dict[str, torch.Tensor]
# The first digits of the SHA-256 of qdata, and the scales, that torchao 0.18 gives x() on a CPU.
RECORDED = {
    "int8wo": ("d9416e67162b0df5b421af0e6597bfa3", [0.00616455078125, 0.00616455078125]),
    "int8dq": ("d9416e67162b0df5b421af0e6597bfa3", [0.00616455078125, 0.00616455078125]),
    "float8wo": ("a86722df277d0a1836bfd7635e4a876c", [0.0017547607421875, 0.0017547607421875]),
}


def x() -> torch.Tensor:
    return (((torch.arange(256) * 37 % 101).float() - 50.25).view(2, 128) / 64).bfloat16()


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize("preset", RECORDED)
def test_the_bytes_are_those_of_torchao(preset: str, tmp_path: Path) -> None:
    save(tmp_path / "in", {f"{M}.weight": x(), "a.norm.weight": torch.ones(4)}, LLAMA)
    quantize(tmp_path / "in", tmp_path / "out", preset, codec=CODEC)
    found = load_file(tmp_path / "out" / "model.safetensors")
    codes = found[f"{M}._weight_qdata"].view(torch.uint8).numpy().tobytes()
    scales = found[f"{M}._weight_scale"]
    digest = hashlib.sha256(codes).hexdigest()[:32]
    assert (digest, scales.flatten().tolist(), scales.shape) == (*RECORDED[preset], (2, 1))
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems
    described = metadata(tmp_path / "out" / "model.safetensors")
    assert sorted(json.loads(described["tensor_names"])) == ["a.norm.weight", f"{M}.weight"]
    assert json.loads(described["a.norm.weight"]) == {"_type": "Tensor"}
    dequantized(tmp_path / "out", tmp_path / "back")
    assert metadata(tmp_path / "back" / "model.safetensors") == {"format": "pt"}


DATA: dict[str, Any] = {
    "target_dtype": wrapped("torch.dtype", "int4"), "block_size": [1, 32],
    "dtype": wrapped("torch.dtype", "bfloat16"), "activation_quantization": None,
}  # fmt: skip


def stored() -> Tensors:
    """Return a layer of int4 in groups."""
    return {
        f"{M}._weight_qdata": (torch.arange(128).view(2, 64) % 16 - 8).to(torch.int8),
        f"{M}._weight_scale": torch.tensor([[0.5, 1.0], [2.0, 0.25]]).bfloat16(),
        f"{M}._weight_zero_point": torch.zeros(2, 2, dtype=torch.int8),
    }


def theirs(
    folder: Path, tensors: Tensors, kind: str = "IntxUnpackedToInt8Tensor", mapping: str = "SYMMETRIC",
    **changes: Any,
) -> Path:  # fmt: skip
    """Return a checkpoint of torchao whose metadata has other values."""
    config = wrapped("IntxWeightOnlyConfig", {"mapping_type": wrapped("MappingType", mapping)})
    return write(folder, tensors, kind, DATA | changes, config=config)


def test_zero_points_are_read_where_the_configuration_has_them(tmp_path: Path) -> None:
    tensors = stored()
    tensors[f"{M}._weight_zero_point"][1] = 3
    folder = theirs(tmp_path / "in", tensors, mapping="ASYMMETRIC")
    assert not zp.verify_checkpoint(folder).problems
    dequantized(folder, tmp_path / "out")
    codes, scales, zeros = (t.float() for t in tensors.values())
    wanted = (codes.view(2, 2, 32) - zeros[..., None]) * scales[..., None]
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{M}.weight"]
    assert torch.equal(found.float(), wanted.view(2, 64))
