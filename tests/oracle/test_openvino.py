"""OpenVINO runs quantized ONNX models: what it computes is what the decoded weights give in floats."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.codecs.onnx_models import decoded, ran, save, with_values
from tests.codecs.test_onnx_graphs import OTHERS, PLACES, X

import zeropoint as zp

openvino = pytest.importorskip("openvino", reason="tests/oracles/more_peers.sh")
IN_FLOATS = {
    "INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}  # fmt: skip
"""Without them, products are in bfloat16 where the processor has them, and inputs are rounded to 8 bits."""
MAKERS = {**PLACES, **OTHERS}
CAST = 4e-5
"""Where float16 weights are cast, values are decoded in float16, in which the order of products shows."""


def run(path: Path, feeds: dict[str, Any]) -> Any:
    core = openvino.Core()
    return next(iter(core.compile_model(core.read_model(path), "CPU", IN_FLOATS)(feeds).values()))


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("onnx", "int8:channel"), ("onnx", "int4:g16"), ("onnx", "int4:g32:asym"),
        ("onnx", "float8_e4m3fn:channel"), ("onnx-matmulnbits", "int4:g16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", MAKERS)
def test_openvino_multiplies_with_the_decoded_weights(
    place: str, layout: str, scheme: str, tmp_path: Path
) -> None:
    source, out = save(MAKERS[place][0](), tmp_path / "in"), tmp_path / "out"
    try:
        zp.quantize_checkpoint(source, out, scheme, format=layout)
    except zp.CheckpointError:
        assert layout == "onnx-matmulnbits"
        pytest.skip("MatMulNBits replaces products of matrices alone")
    wanted = ran(with_values(source, decoded(out)), X)[0]
    bound = CAST if place == "behind_nodes" else 1e-6
    np.testing.assert_allclose(run(out / "model.onnx", X), wanted, rtol=0, atol=bound)
    assert np.abs(wanted - ran(onnx.load(source), X)[0]).max() > 1e-5
