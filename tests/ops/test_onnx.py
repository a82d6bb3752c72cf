"""Dialect onnx-reference against the node tests of ONNX and its evaluator, operator set by operator set."""

import functools
import importlib
import warnings

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator

import zeropoint as zp
from zeropoint import QuantizationParams, QuantizedTensor, Scheme
from zeropoint.layout.packing import pack

Array = np.ndarray
OPERATORS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
# Element formats by the dtype of the codes in an ONNX file.
ELEMENTS = {
    np.dtype(ml_dtypes.int2): "int2",
    np.dtype(ml_dtypes.uint2): "uint2",
    np.dtype(ml_dtypes.int4): "int4",
    np.dtype(ml_dtypes.uint4): "uint4",
    np.dtype(np.int8): "int8",
    np.dtype(np.uint8): "uint8",
    np.dtype(np.int16): "int16",
    np.dtype(np.uint16): "uint16",
    np.dtype(np.int32): "int32",
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "float8_e4m3fnuz",
    np.dtype(ml_dtypes.float8_e5m2): "float8_e5m2",
    np.dtype(ml_dtypes.float8_e5m2fnuz): "float8_e5m2fnuz",
    np.dtype(ml_dtypes.float4_e2m1fn): "float4_e2m1fn",
}
# Node tests of these operators that the algebra does not cover, with the reason. There are none.
NOT_COVERED: dict[str, str] = {}
# What ONNX 1.22 has at operator set 25; a test that vanishes or is added must be looked at.
NODE_TESTS = 33


@functools.cache
def node_tests() -> dict[str, onnx.backend.test.case.test_case.TestCase]:
    with warnings.catch_warnings():
        # Importing a module computes the expected values of its operator, some of which overflow on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        for operator in OPERATORS:
            importlib.import_module(f"{node.__name__}.{operator.lower()}")
    cases = node._NodeTestCases  # collect_testcases() imports all operators, for six seconds
    prefixes = tuple(f"test_{operator.lower()}" for operator in OPERATORS)
    return {case.name: case for case in cases if case.name.startswith(prefixes)}


def as_array(value: Array | onnx.TensorProto) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def as_integers(codes: Array) -> list[int]:
    """Return ONNX codes as ours: numbers for integer formats, patterns for floating-point ones."""
    if np.issubdtype(codes.dtype, np.integer) or codes.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return codes.astype(np.int64).flatten().tolist()
    return codes.view(np.uint8).flatten().tolist()


def granularity(scale: Array, rank: int, attributes: dict[str, int]) -> str:
    axis, size = attributes.get("axis", 1), attributes.get("block_size", 0)
    if size:
        return "last[" + ",".join(["1"] * axis + [str(size)] + ["1"] * (rank - axis - 1)) + "]rest1"
    return "tensor" if scale.size == 1 else f"channel{axis}"


def parameters(
    element: str, shape: tuple[int, ...], scale: Array, zero_point: Array | None, attributes: dict[str, int]
) -> QuantizationParams:
    affine = zero_point is not None and element.lstrip("u").startswith("int")
    special = ":overflow=special" if attributes.get("saturate", 1) == 0 else ""
    text = f"{element}:{granularity(scale, len(shape), attributes)}{':asym' if affine else ''}"
    scheme = Scheme.parse(f"{text}:scale=input:dialect=onnx-reference{special}")
    grid, dtype = scheme.granularity.grid(shape), torch.from_numpy(np.asarray(scale)).dtype
    zeros = None
    if affine:
        assert zero_point is not None
        zeros = torch.from_numpy(zero_point.astype(np.int32)).reshape(grid)
    params = QuantizationParams(
        scheme=scheme,
        shape=shape,
        scales=(torch.from_numpy(np.asarray(scale)).reshape(grid),),
        zero_point=zeros,
        dtype=dtype,
    )
    params.validate()
    return params


def ours(operator: str, inputs: list[Array], attributes: dict[str, int], code_dtype: np.dtype) -> list[Array]:
    """Run an operator on our side and return its outputs, codes as integers."""
    if operator == "DynamicQuantizeLinear":
        q = zp.quantize(torch.from_numpy(inputs[0]), "uint8:tensor:asym:dialect=onnx")
        assert q.zero_point is not None
        return [q.codes.numpy(), q.scales[0].numpy().reshape(()), q.zero_point.numpy().reshape(())]
    data, scale, *rest = inputs
    zero_point = rest[0] if rest else None
    params = parameters(ELEMENTS[code_dtype], data.shape, scale, zero_point, attributes)
    if operator == "QuantizeLinear":
        return [zp.quantize(torch.from_numpy(data), params).codes.numpy()]
    codes = torch.tensor(as_integers(data), dtype=torch.int64).reshape(data.shape)
    q = QuantizedTensor(
        data=pack(codes, params.scheme.bits), params=params, shape=data.shape, dtype=params.dtype
    )
    return [q.dequantize().numpy()]


def attributes_of(model: onnx.ModelProto) -> dict[str, int]:
    return {a.name: helper.get_attribute_value(a) for node in model.graph.node for a in node.attribute}


def test_the_node_tests_are_all_there() -> None:
    assert len(node_tests()) == NODE_TESTS
    assert set(NOT_COVERED) <= set(node_tests())


@pytest.mark.parametrize("number", range(NODE_TESTS))
def test_onnx_node_tests_have_their_expected_bytes(number: int) -> None:
    name, case = sorted(node_tests().items())[number]
    operator = next(o for o in OPERATORS if name.startswith(f"test_{o.lower()}"))
    inputs, outputs = ([as_array(v) for v in values] for values in case.data_sets[0])
    # The expanded tests spell DynamicQuantizeLinear in other operators, whose attributes are not its own.
    attributes = {} if operator == "DynamicQuantizeLinear" else attributes_of(case.model)
    codes = outputs[0] if operator == "QuantizeLinear" else inputs[0]
    results = ours(operator, inputs, attributes, codes.dtype)
    assert len(results) == len(outputs)
    for result, wanted in zip(results, outputs, strict=True):
        assert result.shape == wanted.shape
        if wanted.dtype.kind == "f" and operator != "QuantizeLinear":
            assert result.dtype == wanted.dtype
            assert result.tobytes() == wanted.tobytes()
        else:
            assert result.flatten().astype(np.int64).tolist() == as_integers(wanted)


# The first operator set in which each output dtype may be used.
SINCE = {
    TensorProto.UINT8: 10,
    TensorProto.INT8: 10,
    TensorProto.FLOAT8E4M3FN: 19,
    TensorProto.FLOAT8E5M2: 19,
    TensorProto.FLOAT8E4M3FNUZ: 19,
    TensorProto.FLOAT8E5M2FNUZ: 19,
    TensorProto.UINT16: 21,
    TensorProto.INT16: 21,
    TensorProto.UINT4: 21,
    TensorProto.INT4: 21,
    TensorProto.FLOAT4E2M1: 23,
    TensorProto.UINT2: 25,
    TensorProto.INT2: 25,
}
VERSIONS = (10, 13, 19, 21, 23, 24, 25)
COMBINATIONS = [(version, kind) for version in VERSIONS for kind, since in SINCE.items() if since <= version]


def evaluate(
    operator: str, version: int, inputs: list[tuple[Array, int]], output: int, attributes: dict[str, int]
) -> Array:
    """Run one node of an operator set in ONNX's reference evaluator; no attribute has its default value."""
    names = ["x", "scale", "zero"]
    values = [
        helper.make_tensor_value_info(n, kind, None) for n, (_, kind) in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", output, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    feeds = {n: value for n, (value, _) in zip(names, inputs, strict=True)}
    result: Array = ReferenceEvaluator(model).run(None, feeds)[0]
    return result


def zero_points(kind: int, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return zero points of the code dtype: any code for integers, 0 for floats as the standard asks."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    element = ELEMENTS[dtype]
    if "float" in element:
        return np.zeros(shape, dtype=dtype)
    fmt = zp.get_format(element)
    return rng.integers(fmt.qmin, fmt.qmax + 1, shape).astype(dtype)


def layouts(version: int) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """Return scale shapes with their attributes for data of shape (4, 6): per tensor, axis and block."""
    found: list[tuple[tuple[int, ...], dict[str, int]]] = [((), {})]
    if version >= 13:
        found += [((4,), {"axis": 0}), ((6,), {"axis": 1})]
    if version >= 21:
        found += [((4, 3), {"axis": 1, "block_size": 2}), ((2, 6), {"axis": 0, "block_size": 2})]
        found += [((4, 2), {"axis": 1, "block_size": 4}), ((2, 6), {"axis": 0, "block_size": 3})]
    return found


@pytest.mark.crossed
@pytest.mark.parametrize(("version", "kind"), COMBINATIONS)
@pytest.mark.parametrize("real", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_every_operator_set_quantizes_and_dequantizes_as_its_evaluator_does(
    version: int, kind: int, real: int
) -> None:
    if real == TensorProto.FLOAT16 and version < 19:
        real = TensorProto.FLOAT  # float16 data came with operator set 19
    rng = np.random.default_rng(version * 100 + kind)
    floats = np.dtype(helper.tensor_dtype_to_np_dtype(real))
    fmt = zp.get_format(ELEMENTS[np.dtype(helper.tensor_dtype_to_np_dtype(kind))])
    for shape, attributes in layouts(version):
        scale = rng.uniform(0.01, 0.2, shape).astype(floats)
        reach = min(float(fmt.max), 1e3) * 0.1  # x / scale stays within float16
        x = rng.uniform(-1.5 * reach, 1.5 * reach, (4, 6)).astype(floats)
        x[0, :3] = (np.array([0.5, 1.5, -2.5]) * float(np.ravel(scale)[0])).astype(floats)
        zero = zero_points(kind, shape, rng)
        wanted = evaluate(
            "QuantizeLinear", version, [(x, real), (scale, real), (zero, kind)], kind, attributes
        )
        (codes,) = ours("QuantizeLinear", [x, scale, zero], attributes, wanted.dtype)
        assert codes.flatten().astype(np.int64).tolist() == as_integers(wanted)
        # The evaluator has DequantizeLinear from 19 on; before, the operator was the same for fewer dtypes.
        stored = [(wanted, kind), (scale, real), (zero, kind)]
        back = evaluate("DequantizeLinear", max(version, 19), stored, real, attributes)
        (values,) = ours("DequantizeLinear", [wanted, scale, zero], attributes, wanted.dtype)
        assert values.tobytes() == back.astype(floats).tobytes()


@pytest.mark.parametrize("kind", [k for k in SINCE if "FLOAT8" in TensorProto.DataType.Name(k)])
def test_float8_without_saturation_overflows_as_the_evaluator_does(kind: int) -> None:
    x = np.array([1.0, 1e6, -1e6, 464.5, 61440.0, 3.0, -0.0], dtype=np.float32)
    zero = zero_points(kind, (), np.random.default_rng(0))
    one = np.array(1.0, dtype=np.float32)
    inputs = [(x, TensorProto.FLOAT), (one, TensorProto.FLOAT), (zero, kind)]
    wanted = evaluate("QuantizeLinear", 25, inputs, kind, {"saturate": 0})
    (codes,) = ours("QuantizeLinear", [x, one, zero], {"saturate": 0}, wanted.dtype)
    # The evaluator keeps the sign of a NaN, so the numbers are compared; ours has the one canonical code.
    values = codes.astype(np.uint8).view(wanted.dtype).astype(np.float32)
    assert np.array_equal(values, wanted.astype(np.float32), equal_nan=True)
    assert not np.isfinite(values[1])
