"""One word, one meaning: a preset gives the same bytes for a tensor, in a model and in a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import save, weight
from torch import nn

import zeropoint as zp
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import DEFAULT
from zeropoint.errors import CalibrationError
from zeropoint.schemes import PRESETS, Preset

MODULE = "model.layers.0.mlp.up_proj"


def bits(q: zp.QuantizedTensor) -> list[bytes]:
    """Return the bytes of codes, scales and zero points."""
    parts = [part for part in (q.data, *q.scales, q.zero_point) if part is not None]
    return [part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRESETS)
def test_a_model_has_the_bytes_of_a_tensor(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(256, 128, bias=False)).to(dtype)
    x = torch.ones(2, 256, dtype=dtype)
    calibration = zp.calibrate(model, name, [x]) if PRESETS[name].static else None
    (layer,) = zp.quantize_model(model, name, calibration=calibration).model
    assert bits(layer.weight.quantized()) == bits(zp.quantize(model[0].weight.detach(), name))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DEFAULT.presets)
def test_a_checkpoint_has_the_bytes_of_a_tensor(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    w = weight(128, 256, dtype=dtype)
    source = save(tmp_path / "in", {f"{MODULE}.weight": w})
    if PRESETS[name].static:
        with pytest.raises(CalibrationError, match="need scales observed on data; pass calibration=FILE"):
            zp.quantize_checkpoint(source, tmp_path / "out", name)
        return
    zp.quantize_checkpoint(source, tmp_path / "out", name)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = DEFAULT.encode(layer_scheme(name, DEFAULT), zp.quantize(w, name))
    assert len(expected) > 1
    for suffix, tensor in expected.items():
        same = found[f"{MODULE}.{suffix}"]
        assert same.dtype == tensor.dtype
        assert torch.equal(same.view(torch.uint8).flatten(), tensor.view(torch.uint8).flatten()), suffix


def test_a_codec_has_no_preset_of_a_name_with_another_meaning() -> None:
    assert {name: preset for name, preset in DEFAULT.presets.items() if PRESETS[name] != preset} == {}
    assert all(isinstance(preset, Preset) for preset in PRESETS.values())
