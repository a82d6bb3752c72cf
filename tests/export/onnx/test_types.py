"""Weights as ONNX holds them, judged by ONNX's reference evaluator and by onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.export.onnx.types import CodeType, StoredWeight, code_type, packed_bytes, stored

SCHEMES = {
    "int8:tensor": ("INT8", "per tensor"),
    "int8:channel:narrow": ("INT8", "axis 0"),
    "int8:channel1": ("INT8", "axis 1"),
    "uint8:channel:asym": ("UINT8", "axis 0"),
    "int4:g16": ("INT4", "blocks of 16 along 1"),
    "int4:g16:asym": ("INT4", "blocks of 16 along 1"),
    "uint4:channel:asym": ("UINT4", "axis 0"),
    "int3:g16": ("INT4", "blocks of 16 along 1"),
    "int2:channel": ("INT4", "axis 0"),
    "uint5:tensor:asym": ("UINT8", "per tensor"),
    "int16:channel": ("INT16", "axis 0"),
    "uint12:channel": ("UINT16", "axis 0"),
    "int4:g20": ("INT4", "blocks of 20 along 1"),
    "int8:block4x16": ("INT8", "blocks of 16 along 1"),
    "int8:g16:scale=bfloat16": ("INT8", "blocks of 16 along 1"),
    "float8_e4m3fn:channel": ("FLOAT8E4M3FN", "axis 0"),
    "float8_e4m3fn:block4x16": ("FLOAT8E4M3FN", "blocks of 16 along 1"),
    "float8_e5m2:tensor": ("FLOAT8E5M2", "per tensor"),
    "float8_e4m3fnuz:tensor": ("FLOAT8E4M3FNUZ", "per tensor"),
    "float8_e5m2fnuz:tensor": ("FLOAT8E5M2FNUZ", "per tensor"),
    "float8_e4m3fn:cast": ("FLOAT8E4M3FN", "per tensor"),
    "mxfp8_e4m3": ("FLOAT8E4M3FN", "blocks of 32 along 1"),
    "mxfp6_e3m2": ("FLOAT8E4M3FN", "blocks of 32 along 1"),
    "mxfp6_e2m3": ("FLOAT8E4M3FN", "blocks of 32 along 1"),
    "mxfp4": ("FLOAT8E4M3FN", "blocks of 32 along 1"),
    "nvfp4": ("FLOAT8E4M3FN", "blocks of 16 along 1"),
    "mxint8": ("INT8", "blocks of 32 along 1"),
    "bfp16": ("INT8", "blocks of 8 along 1"),
    "mx6": ("FLOAT8E4M3FN", "blocks of 2 along 1"),
    "mx4": ("FLOAT8E4M3FN", "blocks of 2 along 1"),
}


def model_of(weight: StoredWeight, opset: int) -> onnx.ModelProto:
    """Return the model of one DequantizeLinear on initializers."""
    element = TensorProto.DataType.Value(weight.type.name)
    names = ["codes", "scale"]
    scale = helper.make_tensor(
        "scale", TensorProto.FLOAT, weight.scale.shape, weight.scale.flatten().tolist()
    )
    held = [initializer("codes", weight.codes, weight.type), scale]
    if weight.zero_point is not None:
        held.append(initializer("zero", weight.zero_point, weight.type))
        names.append("zero")
    node = helper.make_node("DequantizeLinear", names, ["y"], **weight.attributes)
    assert element
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(weight.codes.shape))
    graph = helper.make_graph([node], "g", [], [output], held)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset < 23 else 13)


def initializer(name: str, codes: torch.Tensor, kind: CodeType) -> onnx.TensorProto:
    data = (
        packed_bytes(codes, kind)
        if kind.is_packed
        else codes.contiguous().view(torch.uint8).numpy().tobytes()
    )
    element = TensorProto.DataType.Value(kind.name)
    return helper.make_tensor(name, element, list(codes.shape), data, raw=True)


def run(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {})[0]
    return result


def same(found: np.ndarray, values: torch.Tensor) -> bool:
    """Whether the bits agree, but for the sign of zero, which integer codes do not have."""
    return found.dtype == np.float32 and np.array_equal(found, values.numpy())


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(12, 64), (5, 35), (3, 70)])
def test_dequantize_linear_gives_the_bits_of_dequantize(scheme: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    q = zp.quantize(x.abs() if scheme == "uint12:channel" else x, scheme)
    weight = stored(q, 21)
    kind, place = SCHEMES[scheme]
    assert weight.type.name == kind
    axis, size = weight.axis, weight.block_size
    reported = (
        "per tensor" if axis is None else f"axis {axis}" if size is None else f"blocks of {size} along {axis}"
    )
    assert reported == place
    model = model_of(weight, 21)
    onnx.checker.check_model(model, full_check=True)
    assert same(run(model), q.dequantize())
    if shape[1] % (size or 1) == 0:  # ONNX's own evaluator wants whole blocks, which the standard does not
        assert same(ReferenceEvaluator(model).run(None, {})[0], q.dequantize())


@pytest.mark.parametrize(
    ("scheme", "opset", "kind"),
    [("mxfp4", 23, "FLOAT4E2M1"), ("nvfp4", 25, "FLOAT4E2M1"), ("int2:channel", 25, "INT2")],
)
def test_later_operator_sets_hold_narrower_codes(scheme: str, opset: int, kind: str) -> None:
    q = zp.quantize(torch.randn(6, 64), scheme)
    weight = stored(q, opset)
    assert weight.type.name == kind
    model = model_of(weight, opset)
    onnx.checker.check_model(model, full_check=True)
    assert same(ReferenceEvaluator(model).run(None, {})[0], q.dequantize())
    assert model.graph.initializer[0].raw_data == q.data.numpy().tobytes()


@pytest.mark.parametrize("scheme", ["int4:g16", "int8:channel", "float8_e4m3fn:channel", "int16:tensor"])
def test_codes_are_stored_byte_for_byte(scheme: str) -> None:
    q = zp.quantize(torch.randn(6, 64), scheme)
    assert model_of(stored(q, 21), 21).graph.initializer[0].raw_data == q.data.numpy().tobytes()


def test_rows_of_an_odd_length_are_packed_without_gaps() -> None:
    q = zp.quantize(torch.tensor([[7.0, -7.0, 1.0], [2.0, 3.0, -7.0]]), "int4:tensor:narrow")
    assert packed_bytes(stored(q, 21).codes, code_type(q.scheme.element, 21)).hex() == "972193"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("mx9", "mx9_element has no type in ONNX operator set 21"),
        ("nf4", "nf4 has no type in ONNX operator set 21"),
        ("int4:g16:asym=real", "its zero points are no integers"),
        ("bfloat16:tensor", "has no type in ONNX operator set 21"),
        ("int32:tensor", "has no type in ONNX operator set 21"),
    ],
)
def test_what_no_type_holds_is_an_error(scheme: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        stored(zp.quantize(torch.randn(4, 32), scheme), 21)


def test_numbers_in_float64_are_an_error() -> None:
    with pytest.raises(UnsupportedError, match="its numbers are float64"):
        stored(zp.quantize(torch.randn(4, 32, dtype=torch.float64), "int8:tensor"), 21)
