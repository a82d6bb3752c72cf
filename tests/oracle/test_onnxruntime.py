"""The quantizers of onnxruntime for whole models, quantize_static and quantize_dynamic, against ours.

Their weights are those of the standard where scales come from extremes alone; MatMulNBits is in tests/codecs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.checkpoint.written import quantize
from tests.peers import Peer

from zeropoint.codecs.registry import get_codec

from ..codecs.onnx_models import save, values
from ..codecs.test_onnx import weight_model

quantization = Peer("onnxruntime.quantization")

pytestmark = pytest.mark.filterwarnings("ignore")
INPUTS, OUTPUTS = 96, 40
KINDS = {
    "normal": lambda: values((INPUTS, OUTPUTS)),
    "positive": lambda: np.abs(values((INPUTS, OUTPUTS))) + 1,
    "with zeros": lambda: np.where(np.arange(OUTPUTS) % 5 == 0, 0, values((INPUTS, OUTPUTS))).astype(
        np.float32
    ),
    "small": lambda: values((INPUTS, OUTPUTS)) * np.float32(1e-30),
    "at ties": lambda: (np.round(values((INPUTS, OUTPUTS)) * 8) / 2 * 127).astype(np.float32),
}
SCHEMES = {
    "int8:channel:narrow": (quantization.QuantType.QInt8, True, True),
    "int8:tensor:narrow": (quantization.QuantType.QInt8, True, False),
    "int8:tensor:asym": (quantization.QuantType.QInt8, False, False),
    "uint8:tensor:asym": (quantization.QuantType.QUInt8, False, False),
    "int16:channel:narrow": (quantization.QuantType.QInt16, True, True),
    "int4:channel": (quantization.QuantType.QInt4, True, True),
    "int4:tensor": (quantization.QuantType.QInt4, True, False),
    "uint4:tensor:asym": (quantization.QuantType.QUInt4, False, False),
}
"""Theirs: the type, whether it is symmetric, and whether each output has a scale, which then is symmetric."""


class Numbers(quantization.CalibrationDataReader):
    """Inputs from which quantize_static takes ranges of activations, which weights do not depend on."""

    def __init__(self) -> None:
        self.rest: Iterator[dict[str, Any]] = iter([{"x": np.ones((1, INPUTS), np.float32)}])

    def get_next(self) -> Any:
        return next(self.rest, None)


def held(proto: Any) -> dict[str, Any]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def ours(source: Path, out: Path, to: str) -> tuple[Any, Any, Any]:
    """Return codes, scales and zero points of the weight."""
    quantize(source, out, to, codec=get_codec("onnx"))
    proto = onnx.load(out / "model.onnx")
    (node,) = (node for node in proto.graph.node if node.op_type == "DequantizeLinear")
    found = held(proto)
    codes, scale, *zero = (found[name] for name in node.input if name)
    return codes, scale, zero[0] if zero else np.zeros_like(scale, codes.dtype)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", SCHEMES)
def test_weights_are_those_of_quantize_static(to: str, kind: str, tmp_path: Path) -> None:
    source = save(weight_model(KINDS[kind](), opset=21), tmp_path / "in")
    weight_type, symmetric, each = SCHEMES[to]
    quantization.quantize_static(
        str(source), str(tmp_path / "theirs.onnx"), Numbers(), quant_format=quantization.QuantFormat.QDQ,
        weight_type=weight_type, activation_type=quantization.QuantType.QUInt8, per_channel=each,
        extra_options={"WeightSymmetric": symmetric},
    )  # fmt: skip
    theirs = held(onnx.load(tmp_path / "theirs.onnx"))
    found = [theirs[f"w_{part}"] for part in ("quantized", "scale", "zero_point")]
    for mine, other in zip(ours(source, tmp_path / "out", to), found, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine.reshape(other.shape), other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [False, True])
def test_weights_are_those_of_quantize_dynamic(each: bool, kind: str, tmp_path: Path) -> None:
    source = save(weight_model(KINDS[kind](), opset=21), tmp_path / "in")
    quantization.quantize_dynamic(
        str(source), str(tmp_path / "theirs.onnx"), weight_type=quantization.QuantType.QInt8, per_channel=each
    )
    theirs = held(onnx.load(tmp_path / "theirs.onnx"))
    codes, scale, _ = ours(source, tmp_path / "out", f"int8:{'channel' if each else 'tensor'}:narrow")
    np.testing.assert_array_equal(codes, theirs["w_quantized"])
    np.testing.assert_array_equal(scale.reshape(theirs["w_scale"].shape), theirs["w_scale"])
