"""Files of torchao, made by transformers with torchao: its bytes, its values, and models that load ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.written import dequantized, quantize
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec
from zeropoint.codecs.torchao import CODEC

quantization = pytest.importorskip("torchao.quantization", reason="tests/oracles/more_peers.sh")
mx = pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")


pytestmark = pytest.mark.filterwarnings("ignore")
AO = ":dialect=torchao"
SCHEMES = {
    "int8wo": "int8wo", "int8dq": "int8dq", "float8wo": "float8wo", "int4_group": f"int4:g32{AO}",
    "int4_asym": f"int4:g32:asym{AO}", "int8_axis": f"int8:channel:asym{AO}",
    "int3_axis": f"int3:channel{AO}", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4a16",
}  # fmt: skip
FP4 = torch.float4_e2m1fn_x2


def config(case: str) -> Any:
    """Return the configuration of torchao."""
    q = quantization
    group, axis = q.PerGroup(32), q.PerAxis(0)
    asymmetric = {"mapping_type": q.MappingType.ASYMMETRIC}
    made = {
        "int8wo": lambda: q.Int8WeightOnlyConfig(version=2),
        "int8dq": lambda: q.Int8DynamicActivationInt8WeightConfig(version=2),
        "float8wo": q.Float8WeightOnlyConfig,
        "int4_group": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int4_asym": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group, **asymmetric),
        "int8_axis": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=axis, **asymmetric),
        "int3_axis": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=axis),
        "mxfp8": mx.MXDynamicActivationMXWeightConfig,
        "mxfp4": lambda: mx.MXDynamicActivationMXWeightConfig(activation_dtype=FP4, weight_dtype=FP4),
        "nvfp4": mx.NVFP4WeightOnlyConfig,
    }
    return made[case]()


def plain(folder: Path) -> None:
    """Write a small Llama in bfloat16."""
    tiny_models.llama(seed=7).bfloat16().save_pretrained(folder)


@pytest.fixture(params=SCHEMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.param
    plain(tmp_path / "in")
    given = transformers.TorchAoConfig(config(found))
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(tmp_path / "in", quantization_config=given, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "theirs"
    )
    quantize(tmp_path / "in", tmp_path / "ours", SCHEMES[found], codec=CODEC)
    return found


def described(folder: Path) -> dict[str, Any]:
    """Return the metadata of a file, with what is JSON parsed."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = file.metadata()
    parsed = {key: text if key == "format" else json.loads(text) for key, text in found.items()}
    return parsed | {"tensor_names": sorted(parsed["tensor_names"])}


def test_tensors_and_metadata_are_those_of_torchao(case: str, tmp_path: Path) -> None:
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")
    ours_are, theirs_are = ({k: (v.dtype, v.shape) for k, v in found.items()} for found in (ours, theirs))
    assert ours_are == theirs_are
    for name, tensor in theirs.items():
        pair = [each.reshape(-1).view(torch.uint8) for each in (ours[name], tensor)]
        # Elements are multiplied by a reciprocal there, so that ties may fall to the other code.
        few = tensor.numel() // 100 if case == "nvfp4" and name.endswith("qdata") else 0
        assert int((pair[0] != pair[1]).sum()) <= few, (case, name)
    sections = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("ours", "theirs")
    ]
    assert sections[0]["quant_type"] == sections[1]["quant_type"]


def test_both_are_read_with_the_values_of_torchao_and_ours_is_loaded(case: str, tmp_path: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    for name in ("ours", "theirs"):
        assert not zp.verify_checkpoint(tmp_path / name).problems
        values = dequantized(tmp_path / name, tmp_path / f"{name}-decoded")
        model = load(tmp_path / name, dtype=torch.bfloat16)
        weights = {key: value for key, value in model.named_parameters() if "_proj" in key}
        assert len(weights) == 7
        for key, weight in weights.items():
            assert torch.equal(values[key], weight.dequantize()), (case, key)
        if case in ("mxfp8", "mxfp4"):
            continue  # its products of swizzled scales need a GPU
        with torch.no_grad():
            assert bool(torch.isfinite(model(torch.arange(12)[None]).logits).all())
    assert not zp.verify_checkpoint(tmp_path / "ours", tmp_path / "in").problems


@pytest.mark.parametrize("text", ["int4:g32", "int3:channel", "int8:g32", "int8:channel", "q4_0"])
def test_negative_scales_are_decoded_by_torchao(text: str, tmp_path: Path) -> None:
    plain(tmp_path / "in")
    if text == "q4_0":
        quantize(tmp_path / "in", tmp_path / "gguf", text, codec=get_codec("gguf"))
        run(conversion_plan(open_source(tmp_path / "gguf"), None, CODEC), tmp_path / "ours")
    else:
        quantize(tmp_path / "in", tmp_path / "ours", f"{text}:scale=signed", codec=CODEC)
    assert not zp.verify_checkpoint(tmp_path / "ours").problems
    values = dequantized(tmp_path / "ours", tmp_path / "decoded")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    weights = {key: value for key, value in found.named_parameters() if "_proj" in key}
    assert len(weights) == 7
    for key, weight in weights.items():
        assert bool((weight.scale < 0).any()), key
        assert bool((weight.scale > 0).any()), key
        assert torch.equal(values[key], weight.dequantize().to(values[key].dtype)), key
