"""ONNX models quantized as streams, run by onnxruntime and by the reference of the standard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.peers import Peer

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, UnsupportedError

from .onnx_models import LAYERS, decoded, model, ran, save, values, with_values

matmul_nbits = Peer("onnxruntime.quantization.matmul_nbits_quantizer")


@pytest.fixture(scope="module", params=[False, True], ids=["in the file", "next to it"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model(), tmp_path_factory.mktemp("source"), external=request.param)


def quantized(
    source: Path, out: Path, to: str, layout: str = "onnx", *, include: tuple[str, ...] = ()
) -> Path:
    selection = Selection(include=include)
    run(make_plan(open_source(source), to, selection=selection, codec=get_codec(layout)), out)
    found = zp.verify_checkpoint(out, source)
    assert (found.problems, found.hashed) == ((), True)
    assert zp.inspect_checkpoint(out).problems == ()
    return out


RUN = [
    ("onnx", "int4:g32"), ("onnx", "uint4:g32:asym"), ("onnx", "int8:channel"),
    ("onnx", "uint8:channel:asym"), ("onnx", "int8:tensor"), ("onnx", "float8_e4m3fn:g32"),
    ("onnx", "float8_e5m2:channel"), ("onnx", "int2:g32"), ("onnx-matmulnbits", "int4:g32"),
    ("onnx-matmulnbits", "uint4:g16:asym"), ("onnx-matmulnbits", "int4:g32:asym"),
    ("onnx-matmulnbits", "int8:g32"), ("onnx-matmulnbits", "int2:g32"),
]  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize(("layout", "to"), RUN)
def test_onnxruntime_gives_what_the_float_model_gives_with_our_decoded_weights(
    source: Path, tmp_path: Path, layout: str, to: str
) -> None:
    out = quantized(source, tmp_path / "out", to, layout)
    weights = decoded(out)
    assert set(LAYERS[: 3 if layout == "onnx-matmulnbits" else 4]) <= set(weights)
    ours, theirs = ran(out / "model.onnx"), ran(with_values(source, weights))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-6)
    assert np.abs(ours[0] - ran(source)[0]).max() > 1e-4


def weight_model(x: np.ndarray, *, opset: int = 25) -> Any:
    """A product with one weight, (inputs, outputs)."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [info("x", kind, [1, x.shape[0]])],
        [info("y", kind, [1, x.shape[1]])], [numpy_helper.from_array(x, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


OF_STANDARD = [
    "int4:g32", "uint4:channel:asym", "int2:g32", "float4_e2m1fn:g32", "float8_e4m3fn:g32", "int16:channel",
    "nvfp4a16", "float8_e5m2:tensor", "uint8:tensor:asym",
]  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("to", OF_STANDARD)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_reference_of_the_standard_decodes_the_same_values(to: str, dtype: type, tmp_path: Path) -> None:
    source = save(weight_model(values((64, 48)).astype(dtype)), tmp_path / "in")
    out = quantized(source, tmp_path / "out", to)
    proto = onnx.load(out / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    for node in proto.graph.node:  # which onnx 1.22 does not run: it gives the dtype of scales
        for attribute in [each for each in node.attribute if each.name == "output_dtype"]:
            node.attribute.remove(attribute)
    product = next(node for node in proto.graph.node if node.op_type == "MatMul")
    name = product.input[1]
    proto.graph.node.remove(product)
    del proto.graph.output[:]
    proto.graph.output.add(name=name)
    (found,) = ReferenceEvaluator(proto).run(None, {"x": np.zeros((1, 64), dtype)})
    ours = decoded(out)["w"].t()
    assert ours.dtype == torch.from_numpy(values((1,)).astype(dtype)).dtype
    np.testing.assert_array_equal(np.asarray(found).astype(dtype), ours.numpy())  # to the bit


DEFAULT = "DefaultWeightOnlyQuantConfig"
OF_RUNTIME = {
    "onnx": (
        ("uint4:g32:asym", DEFAULT, False),
        ("int4:g32:scale=signed_late/input:dialect=ggml", DEFAULT, True),
    ),
    "onnx-matmulnbits": (
        ("uint4:g32:asym", DEFAULT, False),
        ("uint4:g32:asym", "RTNWeightOnlyQuantConfig", False),
    ),
}  # fmt: skip
"""What onnxruntime quantizes as the standard has it; its other ways multiply by a reciprocal, or by -8."""


def of_runtime(source: Path, config: str, layout: str, *, symmetric: bool) -> Any:
    """Return a model that onnxruntime quantized."""
    more = {"quant_format": matmul_nbits.QuantFormat.QDQ} if layout == "onnx" else {}
    if config == DEFAULT:
        more |= {"block_size": 32, "is_symmetric": symmetric}
    made = matmul_nbits.MatMulNBitsQuantizer(
        onnx.load(source),
        block_size=32,
        is_symmetric=symmetric,
        algo_config=getattr(matmul_nbits, config)(**more),
    )
    made.process()
    return made.model.model


@pytest.mark.parametrize(
    ("layout", "to", "config", "symmetric"),
    [(layout, *each) for layout, several in OF_RUNTIME.items() for each in several],
)
def test_bytes_are_those_of_the_quantizers_of_onnxruntime(
    layout: str, to: str, config: str, symmetric: bool, tmp_path: Path
) -> None:
    source = save(weight_model(values((256, 64)), opset=21), tmp_path / "in")
    out = quantized(source, tmp_path / "out", to, layout)
    theirs = of_runtime(source, config, layout, symmetric=symmetric).graph.initializer
    ours = onnx.load(out / "model.onnx").graph.initializer
    assert sorted((t.data_type, list(t.dims), t.raw_data) for t in theirs) == sorted(
        (t.data_type, list(t.dims), t.raw_data) for t in ours
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", OF_RUNTIME)
def test_models_that_onnxruntime_quantized_are_read(layout: str, symmetric: bool, tmp_path: Path) -> None:
    source = save(weight_model(values((256, 64)), opset=21), tmp_path / "in")
    proto = of_runtime(source, DEFAULT, layout, symmetric=symmetric)
    for side in (proto.graph.input[0], proto.graph.output[0]):
        side.type.tensor_type.shape.dim[0].dim_value = 256
    path = save(proto, tmp_path / "theirs")
    found = zp.verify_checkpoint(path)
    assert (found.problems, found.values, len(found.layers)) == ((), 256 * 64, 1)
    weights = decoded(path)
    assert list(weights) == ["w"]
    (product,) = ran(path, {"x": np.eye(256, dtype=np.float32)})
    np.testing.assert_array_equal(product, weights["w"].t().numpy())


@pytest.mark.parametrize("to", ["float4_e2m1fn:g32", "nvfp4a16"])
def test_what_onnxruntime_is_said_not_to_load_it_does_not_load(to: str, tmp_path: Path) -> None:
    source = save(weight_model(values((64, 48)), opset=21), tmp_path / "in")
    with pytest.raises(CheckpointError, match="onnxruntime does not load the result"):
        zp.quantize_checkpoint(source, tmp_path / "out", to, format="onnx")
    out = quantized(source, tmp_path / "out", to)
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED|FAIL|INVALID|not supported"):
        ran(out / "model.onnx", {"x": np.zeros((1, 64), np.float32)})


def test_an_older_set_of_operators_is_translated(tmp_path: Path) -> None:
    source = save(model(opset=13), tmp_path / "in")
    out = quantized(source, tmp_path / "out", "int4:g32")
    proto = onnx.load(out / "model.onnx")
    assert (proto.opset_import[0].version, proto.ir_version >= 10) == (21, True)
    np.testing.assert_allclose(
        ran(out / "model.onnx")[0], ran(with_values(source, decoded(out)))[0], rtol=0, atol=1e-6
    )
    kept = quantized(source, tmp_path / "kept", "int8:channel")
    assert onnx.load(kept / "model.onnx").opset_import[0].version == 13


def test_half_precision_keeps_its_dtype(tmp_path: Path) -> None:
    source = save(model(dtype=np.float16), tmp_path / "in", external=True)
    out = quantized(source, tmp_path / "out", "int4:g32")
    assert {e.dtype for e in open_source(out).entries.values() if e.name.endswith("_scale")} == {"F16"}
    assert {tensor.dtype for tensor in decoded(out).values()} == {torch.float16}
    assert ran(out / "model.onnx")[0].dtype == np.float16


def test_what_is_kept_has_its_reason_and_its_bytes(source: Path) -> None:
    plan = make_plan(open_source(source), "int4:g32", codec=get_codec("onnx"))
    reasons = {d.entry.name: d.reason for d in plan.decisions if not d.quantized}
    assert reasons == {
        "kernel.weight": "its kernel has 9 numbers an input, and blocks hold inputs; use channel",
        "table.weight": "an embedding", "fc2.bias": "1-D, not a matrix",
    }  # fmt: skip
    assert next(d for d in plan.decisions if d.entry.name == "kernel.weight").kept_by_default


def test_an_embedding_is_quantized_when_asked_for(source: Path, tmp_path: Path) -> None:
    out = quantized(source, tmp_path / "out", "int4:g32", include=("table",))
    weights = decoded(out)
    assert set(weights) == {*LAYERS, "table"}
    np.testing.assert_allclose(
        ran(out / "model.onnx")[0], ran(with_values(source, weights))[0], rtol=0, atol=1e-6
    )
    with pytest.raises(CheckpointError, match="read by Gather, and MatMulNBits replaces products"):
        zp.quantize_checkpoint(
            source, tmp_path / "no", "int4:g32", format="onnx-matmulnbits", include=["table"]
        )


def test_bytes_do_not_depend_on_where_numbers_lie_threads_or_memory(tmp_path: Path) -> None:
    found = set()
    limits = (None, Limits(max_memory=2 << 30, workers=1, base_memory=1 << 30))
    for number, (external, limit) in enumerate(((False, None), (True, None), (True, limits[1]))):
        source = save(model(), tmp_path / f"in{number}", external=external)
        out = tmp_path / f"out{number}"
        run(make_plan(open_source(source), "int4:g32", limits=limit, codec=get_codec("onnx")), out)
        found.add(((out / "model.onnx").read_bytes(), (out / "model.onnx.data").read_bytes()))
    assert len(found) == 1


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="writes ONNX models from ONNX models"):
        zp.quantize_checkpoint(tmp_path, tmp_path / "out", "int4:g32", format="onnx")


def test_a_quantized_model_is_not_quantized_again(source: Path, tmp_path: Path) -> None:
    out = quantized(source, tmp_path / "out", "int4:g32")
    with pytest.raises(CheckpointError, match="quantized already"):
        zp.quantize_checkpoint(out, tmp_path / "again", "int4:g32", format="onnx")
