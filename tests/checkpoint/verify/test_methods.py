"""Checkpoints whose scales clip: verified against the original, and damage to a code is still found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.damage import change_tensor
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.integrity import Manifest, read_manifest
from zeropoint.checkpoint.verify.verification import verify

pytestmark = pytest.mark.rotating

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_llama.write(tmp_path_factory.mktemp("llama") / "source", dtype=torch.bfloat16, moe=False)


@pytest.mark.parametrize(
    "scheme", ["w4a16", "w4a16:scale=signed", "w4a16_asym", "nvfp4a16", "mxfp4", "fp8_dynamic", "w8a16"]
)
def test_what_is_clipped_is_no_problem(scheme: str, source: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(source, tmp_path / "out", scheme, method="mse")
    found = verify(tmp_path / "out", source)
    assert found.problems == ()
    worst = max(proof.of_bound or 0.0 for proof in found.layers)
    assert 0.5 < worst <= 1, "the bound is that of rounding, which some number comes close to"


def test_other_scales_of_rounding_to_nearest_are_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", method="mse")
    monkeypatch.setattr(Manifest, "method", lambda *_: "nearest")
    assert any("times the proven bound" in str(p) for p in verify(tmp_path / "out", source).problems)


def test_a_wrong_code_is_found(source: Path, tmp_path: Path) -> None:
    def flip(packed: torch.Tensor) -> None:
        packed.view(-1)[0] ^= 0x7

    zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", method="mse")
    change_tensor(tmp_path / "out", f"{LAYER}.weight_packed", flip)
    problems = map(str, verify(tmp_path / "out", source).problems)
    assert any("times the proven bound" in p and LAYER in p for p in problems)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "awq"])
def test_negative_scales_of_others_are_no_damage_and_keep_their_values(
    layout: str, source: Path, tmp_path: Path
) -> None:
    zp.quantize_checkpoint(
        source, tmp_path / "own", "w4a16_asym" if layout == "awq" else "w4a16", format=layout
    )
    (tmp_path / "own/zeropoint_manifest.json").unlink()  # so that it is the file of another tool
    name = f"{LAYER}.{'weight_scale' if layout == 'compressed-tensors' else 'scales'}"
    change_tensor(tmp_path / "own", name, lambda scales: scales[::2].neg_())
    assert verify(tmp_path / "own", None).problems == ()
    zp.convert_checkpoint(tmp_path / "own", tmp_path / "out", "compressed-tensors")
    assert verify(tmp_path / "out", tmp_path / "own").problems == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_double_quantization_of_blocks_of_very_different_sizes_is_verified(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Small blocks next to large ones have a negative absmax, in files of bitsandbytes as in ours."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[5] *= 1e-6
    weight[7] *= 300
    (tmp_path / "source").mkdir()
    save_file({f"{LAYER}.weight": weight.to(dtype)}, tmp_path / "source/model.safetensors")
    (tmp_path / "source/config.json").write_text('{"model_type": "llama"}')
    zp.quantize_checkpoint(tmp_path / "source", tmp_path / "out", "nf4_double", format="bitsandbytes")
    assert verify(tmp_path / "out", tmp_path / "source").problems == ()


def test_a_block_of_signed_scales_may_be_clipped(source: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(source, tmp_path / "out", "w4a16:scale=signed")
    found = verify(tmp_path / "out", source)
    assert found.problems == ()
    assert 0.5 < max(proof.of_bound or 0.0 for proof in found.layers) <= 1


def test_bounds_of_negative_scales_are_those_of_their_magnitudes() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    params = zp.choose_params(x, "int4:g32")
    opposite = replace(params, scales=(-params.scales[0],))
    with pytest.raises(zp.RangeError, match="finite and at least"):
        opposite.validate()
    opposite.validate(negative_scales=True)
    tiny = replace(params, scales=(torch.full_like(params.scales[0], -(2.0**-140)),))
    with pytest.raises(zp.RangeError, match=r"\(=-7\.17.*e-43\) .* at least 2\*\*-128 in magnitude"):
        tiny.validate(negative_scales=True)
    (low, high), (from_, to) = params.representable(), opposite.representable()
    assert torch.equal(from_, -high)
    assert torch.equal(to, -low)
    assert torch.equal(opposite.rounding_bound(), params.rounding_bound())


@pytest.mark.parametrize("types", ["q4_0", "q6_k", "q3_k"])
def test_a_layout_that_tells_signed_scales_keeps_the_bound_of_its_scheme(
    types: str, source: Path, tmp_path: Path
) -> None:
    zp.quantize_checkpoint(source, tmp_path / "out", types, format="gguf")
    manifest = read_manifest(open_source(tmp_path / "out"))
    assert manifest is not None
    assert manifest.method(LAYER) == "nearest"
    assert verify(tmp_path / "out", source).problems == ()
