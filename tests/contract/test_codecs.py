"""One table for all codecs: announced tensors, decoding what was encoded, parts, covered files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.checkpoint.written import quantize, save
from tests.tables import each
from tests.tensors import encoded, same_bytes

import zeropoint as zp
from zeropoint.checkpoint.measure.tiles import needs_extremes
from zeropoint.codecs.containers import CONTAINERS
from zeropoint.codecs.containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from zeropoint.codecs.layer_schemes import layer_scheme, preset_layers
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.registry import CODECS, claiming
from zeropoint.codecs.tensor_fields import COLUMNS, ROWS, WeightPart
from zeropoint.errors import UnsupportedError
from zeropoint.schemes import PRESETS

DOUBLE = PRESETS["nf4_double"].weight
OTHERS = {
    "awq": ("int4:g64:asym", "int4:channel:asym:scale=bfloat16"),
    "bitsandbytes": ("nf4:g128", DOUBLE.replace("nf4", "fp4_bnb")),
    "compressed-tensors": ("int4:g64:asym", "int3:channel", "float8_e4m3fn:block64x64"),
    "fp8-block": ("float8_e4m3fn:block64x32",),
    "gguf": ("int8:g32", "int4:g32", "mxfp4a16", "float4_e2m1fn:g16:scale=float8_ue4m3fn"),
    "gpt-oss": ("mxfp4_e2m1",),
    "hqq": ("uint3:g32:asym=real", "uint2:g64:asym=real", "uint1:g32:asym=real"),
    "gptq": ("int3:g32", "int2:channel", "int4:g64:asym"),
    "mlx": (
        "mxfp4_e2m1",
        "mxfp8_e4m3",
        "float4_e2m1fn:g16:scale=float8_ue4m3fn",
        "uint4:g32:scale=float32:offset=float32",
    ),
    "modelopt": ("nvfp4a16:round=half_away",),
    "quanto": ("uint4:g128:asym", "uint2:g128:asym:scale=float32", "float8_e5m2:channel"),
    "quark": (
        "int4:g64",
        "uint4:g32:asym",
        "int4:channel",
        "uint4:channel:asym",
        "int8:g64",
        "int8:tensor",
        "uint8:channel:asym",
        "uint8:g64:asym",
        "uint8:tensor:asym",
        "float8_e4m3fn:tensor",
    ),
    "torchao": (
        "int4:g64",
        "int4:g64:asym",
        "int8:channel:asym",
        "int3:channel",
        "int8:g32",
        "int2:g32:asym",
    ),
    "onnx": ("int8:tensor", "uint4:channel:asym", "float8_e5m2:g64", "float4_e2m1fn:channel", "int2:g32"),
    "onnx-matmulnbits": ("uint4:g16:asym", "int8:g64:asym", "int2:g32"),
}
CASES = [
    *((name, layer.name) for name, codec in CODECS.items() for layer in preset_layers(codec)),
    *((name, text) for name, texts in OTHERS.items() for text in texts),
]
REFUSED = {
    ("awq", "not what AWQ stores"): (
        "int4:g128", "uint4:g128:asym", "int8:g128:asym", "int4:block32x32:asym", "nf4:g64", "mxfp4",
    ),
    ("bitsandbytes", "is not what bitsandbytes stores; use nf4 or fp4_bnb"): (
        "nf4_double:g128", "nf4:g32", "nf4:channel", "int4:g64", "fp4_bnb:token",
    ),
    ("gguf", "has no type in GGUF"): (
        "int4:g64", "int4:g32:asym", "uint4:g32", "int4:g32:scale=float32", "mxfp4",
    ),
    ("gpt-oss", "is not what gpt-oss stores"): (
        "nvfp4a16", "mxfp8a16", "float4_e2m1fn:g16:scale=rceil", "int4:g32",
    ),
    ("gptq", "GPTQ does not store"): (
        "uint4:g128", "int5:g128", "int4:block32x32", "int4:g128:scale=even", "int4:g128:narrow", "mxfp4",
    ),
    ("hqq", "is not what HQQ stores; use hqq_int4"): (
        "uint4:g32", "uint4:g32:asym", "int4:g32:asym=real", "uint5:g32:asym=real",
    ),
    ("llm-int8", r"is not what LLM\.int8 stores; use llm_int8"): ("w8a16", "int8:channel", "w8a8", "nf4"),
    ("mlx", "is not what MLX stores; use mlx_int2"): (
        "int4:g64", "q4_1:g16", "mlx_int4:g256", "uint7:g64:offset=float32", "mxfp6_e2m3",
    ),
    ("modelopt", "input None does not go with weights in FP8; use"): ("float8_e4m3fn:tensor",),
    ("modelopt", "use float8_e4m3fn:token"): ("float8_e4m3fn:channel",),
    ("modelopt", "not what ModelOpt stores"): (
        "float4_e2m1fn:g32:scale=floor", "int4:g128", "float8_e4m3fn:cast",
    ),
    ("modelopt", "whose tensor scales are factors"): (
        "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor:dialect=compressed-tensors",
    ),
    ("quanto", "is not what Quanto stores; use quanto_int8"): (
        "int4:g128", "int8:g128", "uint3:g128:asym", "uint4:g128:asym=real",
    ),
    ("quark", "is not what Quark stores"): (
        "int3:g32", "int4:g32:asym", "uint4:g32", "int4:tensor", "nf4", "nvfp4a16", "mxfp8",
    ),
    ("torchao", "is not what torchao's files hold here"): (
        "float8_e4m3fn:tensor", "float8_e5m2:channel", "uint4:g32:asym", "nf4",
    ),
}  # fmt: skip
"""Codec and a rule of its refusal -> schemes that the layout has no place for."""
SHAPE = (256, 512)
Tensors = Mapping[str, torch.Tensor]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32).bfloat16()


def layer_of(name: str, text: str) -> LayerScheme:
    return layer_scheme(text, CODECS[name])


def of_parts(layer: LayerScheme, x: torch.Tensor) -> LayerScheme:
    """Return the scheme of parts of ``x``, whose scales may have to be seen first."""
    if not layer.codec.needs_mean(layer):
        return layer
    scales = zp.quantize(x, layer.codec.with_mean(layer, 0.0).weight).scales[0]
    return layer.codec.with_mean(layer, math.fsum(scales.flatten().tolist()) / scales.numel())


@pytest.mark.parametrize(("name", "text"), CASES)
def test_the_tensors_are_those_that_were_announced(name: str, text: str) -> None:
    layer = layer_of(name, text)
    assert layer.codec.refusal(layer, (1, *SHAPE) if layer.codec.fused_experts else SHAPE) is None
    part = of_parts(layer, weight(*SHAPE))
    found = encoded(part, zp.quantize(weight(*SHAPE), part.weight))
    specs = {spec.suffix: spec for spec in layer.codec.tensors(layer, SHAPE, torch.bfloat16)}
    container = CONTAINERS[layer.codec.container]
    assert specs.keys() == found.keys()
    for part, tensor in found.items():
        spec = specs[part]
        assert container.nbytes(spec.dtype, spec.shape) == tensor.nbytes
        assert spec.shape[:1] == tuple(tensor.shape[:1])
        if spec.dtype in TORCH_DTYPES:
            assert (spec.dtype, spec.shape) == (FILE_DTYPES[tensor.dtype], tuple(tensor.shape))


@pytest.mark.parametrize(("name", "text"), CASES)
def test_decoding_gives_what_was_encoded(name: str, text: str) -> None:
    layer = of_parts(layer_of(name, text), weight(*SHAPE))
    q, codec = zp.quantize(weight(*SHAPE), layer.weight), layer.codec
    tensors = encoded(layer, q)
    back = codec.decode(layer, tensors, WeightPart(0, SHAPE, torch.bfloat16))
    assert codec.damage(layer, tensors) is None
    assert torch.equal(back.codes, q.codes)
    drift = codec.drift(layer, tensors, WeightPart(0, SHAPE, torch.bfloat16))
    if drift is not None:
        assert bool(((back.scales[0] - q.scales[0]).abs() <= drift).all())
        return
    assert all(same_bytes(a, b) for a, b in zip(back.params.stored, q.params.stored, strict=True))
    assert same_bytes(back.dequantize(), q.dequantize())
    assert back.params.validate() is None


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "text"), CASES)
def test_parts_along_its_axis_give_the_lines_of_the_whole(name: str, text: str) -> None:
    layer = layer_of(name, text)
    codec = layer.codec
    if needs_extremes(layer.weight):
        return  # its parts take a scale of the whole weight, which runs prove
    x, axis, step = weight(*SHAPE), codec.axis(layer), codec.alignment(layer, SHAPE)
    part_layer = of_parts(layer, x)
    whole = encoded(part_layer, zp.quantize(x, part_layer.weight))
    specs = {spec.suffix: spec for spec in codec.tensors(layer, SHAPE, torch.bfloat16)}
    assert axis in (ROWS, COLUMNS)
    for start in range(0, SHAPE[axis], step):
        part = x.narrow(axis, start, min(step, SHAPE[axis] - start)).contiguous()
        q = zp.quantize(part, part_layer.weight)
        lines = part_layer.codec.encode(part_layer, q)
        for suffix, line in lines.items():
            spec = specs[suffix]
            assert spec.axis == axis
            first = start // spec.per * spec.lines
            assert same_bytes(line, whole[suffix][first : first + len(line)])
        lines |= part_layer.codec.constants(part_layer, q.params, SHAPE)
        place = WeightPart(start, tuple(part.shape), torch.bfloat16)
        decoded = part_layer.codec.decode(part_layer, lines, place)
        assert torch.equal(decoded.codes, q.codes)


@each("name, rule, text", [(*key, text) for key, texts in REFUSED.items() for text in texts])
def test_a_scheme_that_has_no_place_is_refused(name: str, rule: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        layer_of(name, text)


def onnx_model(folder: Path) -> Path:
    """Return a model of four weights in the only kind of file of which layouts of ONNX are written."""
    folder.mkdir()
    rows, columns = SHAPE
    names = [f"{part}{n}" for n in (0, 1) for part in ("up", "gate")]
    held = [numpy_helper.from_array(weight(*SHAPE).float().numpy().T, name) for name in names]
    nodes = [helper.make_node("MatMul", ["x", name], [f"out_{name}"]) for name in names]
    begin, *ends = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, side])
        for name, side in (("x", columns), *((f"out_{name}", rows) for name in names))
    )
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [begin], ends, held)), folder / "model.onnx")
    return folder


def checkpoint(folder: Path, *, fused: bool) -> Path:
    """Return a model of four weights, those of fused experts where a layout has no others."""
    names = ("experts.gate_up_proj", "experts.down_proj") if fused else ("up_proj.weight", "gate_proj.weight")
    rows, columns = SHAPE
    shapes = ((1, columns, rows), (1, rows // 2, 2 * rows)) if fused else (SHAPE, SHAPE)
    tensors = {
        f"model.layers.{n}.mlp.{name}": weight(*shape)
        for n in (0, 1)
        for name, shape in zip(names, shapes, strict=True)
    }
    family = "gpt_oss" if fused else "llama"
    return save(
        folder, tensors | {"model.norm.weight": weight(columns)}, {"model_type": family, "dtype": "bfloat16"}
    )


@pytest.mark.parametrize("name", [name for name in CODECS if not CODECS[name].model_format.elsewhere])
def test_every_byte_of_a_result_is_verified_and_one_codec_claims_it(name: str, tmp_path: Path) -> None:
    codec = CODECS[name]
    to = next(text for owner, text in CASES if owner == name)
    fused = codec.fused_experts
    in_onnx = codec.container == "onnx"
    source = onnx_model(tmp_path / "in") if in_onnx else checkpoint(tmp_path / "in", fused=fused)
    result = quantize(source, tmp_path / "out", to, codec=codec)
    found = zp.verify_checkpoint(tmp_path / "out", source)
    values = (3 if fused else 4) * math.prod(SHAPE)
    assert (found.problems, found.hashed, found.values) == ((), True, values)
    assert found.error is not None
    assert found.error.relative == pytest.approx(result.error.relative)
    seen = zp.inspect_checkpoint(tmp_path / "out")
    assert (seen.problems, [s.layers for s in seen.schemes]) == ((), [4])
    assert seen.quantization is not None
    config = tmp_path / "out" / "config.json"
    said = {} if in_onnx else json.loads(config.read_text())
    section = said.get("quantization_config", {"quant_method": seen.quantization})
    assert [other.name for other in CODECS.values() if other.claims(section)] == [name]
    assert claiming(section) == codec
