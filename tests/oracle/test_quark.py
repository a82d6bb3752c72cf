"""Files of AMD Quark, made by amd-quark itself: its bytes, its values, and a model that loads ours."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import dequantized, quantize
from tests.oracles.quark_models import CASES, dtype_of, export, model, section
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.amd_quark import CODEC
from zeropoint.codecs.registry import get_codec

pytest.importorskip("quark.torch", reason="tests/oracles/more_peers.sh")

pytestmark = pytest.mark.filterwarnings("ignore")
SCHEMES = {
    "int4_group": "int4:g32", "int4_channel": "int4:channel", "int8_channel": "int8:channel",
    "int8_tensor": "int8:tensor", "int8_group": "int8:g32", "uint4_group": "uint4:g32:asym",
    "uint8_channel": "uint8:channel:asym", "fp8_tensor": "fp8_weights", "fp8_channel": "fp8_weights",
    "mxfp4": "mxfp4a16", "amdfp4": "float4_e2m1fn:g16:scale=float8_ue5m3fn",
    "amdfp4_g32": "float4_e2m1fn:g32:scale=float8_ue5m3fn",
}  # fmt: skip
FP8 = "float8_e4m3fn:{}:scale=input:dialect=compressed-tensors"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.param
    export(found, tmp_path / "theirs")
    model(dtype_of(found)).save_pretrained(tmp_path / "in")
    text = SCHEMES[found].replace("fp8_weights", FP8.format(found.rpartition("_")[2]))
    quantize(tmp_path / "in", tmp_path / "ours", text, codec=CODEC)
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def without_negative_zeros(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes of two FP4 codes with 0 in the place of -0, which Quark does not write."""
    low, high = codes & 15, codes >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


def test_bytes_values_and_logits_are_those_of_quark(case: str, tmp_path: Path) -> None:
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        codes = "fp4" in case and ours[name].dtype == torch.uint8 and not name.endswith("scale")
        own = without_negative_zeros(ours[name]) if codes else ours[name]
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(own), bits(tensor)), name
    written, found = section(tmp_path / "ours"), section(tmp_path / "theirs")
    weights = [table["global_quant_config"]["weight"] for table in (written, found)]
    assert all(weights[1][key] == value for key, value in weights[0].items() if key != "scale_type")
    assert set(written["exclude"]) >= set(found["exclude"])

    assert not zp.verify_checkpoint(tmp_path / "theirs", tmp_path / "in").problems
    values = dequantized(tmp_path / "theirs", tmp_path / "decoded")
    load = transformers.AutoModelForCausalLM.from_pretrained
    first, second = (load(tmp_path / name, dtype=dtype_of(case)).eval() for name in ("theirs", "ours"))
    for name, module in first.named_modules():
        if hasattr(module, "_get_qweight"):
            wanted = module._get_qweight(module.weight).to(dtype_of(case))
            assert torch.equal(values[f"{name}.weight"], wanted), name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(first(tokens).logits, second(tokens).logits)


@pytest.mark.parametrize("text", ["int4:g32", "int4:channel", "int8:g32", "int8:channel", "q4_0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_negative_scales_are_decoded_by_quark(text: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model(dtype).save_pretrained(tmp_path / "in")
    if text == "q4_0":
        quantize(tmp_path / "in", tmp_path / "gguf", text, codec=get_codec("gguf"))
        run(conversion_plan(open_source(tmp_path / "gguf"), None, CODEC), tmp_path / "ours")
    else:
        quantize(tmp_path / "in", tmp_path / "ours", f"{text}:scale=signed", codec=CODEC)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    scales = [tensor for name, tensor in stored.items() if name.endswith("weight_scale")]
    assert len(scales) == 7
    assert all(bool((scale < 0).any() and (scale > 0).any()) for scale in scales)
    values = dequantized(tmp_path / "ours", tmp_path / "decoded")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype).eval()
    for name, module in found.named_modules():
        if hasattr(module, "_get_qweight"):
            scales.pop()
            assert torch.equal(values[f"{name}.weight"], module._get_qweight(module.weight).to(dtype)), name
    assert not scales
