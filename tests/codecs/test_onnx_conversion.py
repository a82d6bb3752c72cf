"""Quantized ONNX models in the other layout of ONNX, with onnxruntime as judge of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.peers import Peer

import zeropoint as zp
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, UnsupportedError

from .onnx_models import decoded, model, ran, save, values
from .test_onnx import DEFAULT, of_runtime, weight_model

quantization = Peer("onnxruntime.quantization")

QDQ, NBITS = "onnx", "onnx-matmulnbits"
EYE = {"x": np.eye(256, dtype=np.float32)}


def plan_of(source: Path, layout: str, to: str | None = None, **options: Any) -> CheckpointPlan:
    return conversion_plan(open_source(source), to, get_codec(layout), **options)


def converted(source: Path, out: Path, layout: str, to: str | None = None, **options: Any) -> RunResult:
    result = run(plan_of(source, layout, to, **options), out)
    found = zp.verify_checkpoint(out, source)
    assert (found.problems, found.hashed) == ((), True)
    return result


def product(rows: int = 256) -> Any:
    """A product with one weight, (256, 64), for a batch of ``rows``."""
    proto = weight_model(values((256, 64)), opset=21)
    for side in (proto.graph.input[0], proto.graph.output[0]):
        side.type.tensor_type.shape.dim[0].dim_value = rows
    return proto


def quantized(proto: Any, folder: Path, to: str, layout: str) -> Path:
    source = save(proto, folder / "floats")
    out = folder / "codes"
    run(make_plan(open_source(source), to, codec=get_codec(layout)), out)
    return out


BOTH = [
    ("int4:g32", None), ("uint4:g32:asym", None), ("int4:g16:asym", None), ("int8:g64", None),
    ("uint8:g128:asym", None), ("int2:g32", None),
]  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize(("to", "scheme"), BOTH)
@pytest.mark.parametrize(("layout", "other"), [(QDQ, NBITS), (NBITS, QDQ)])
def test_onnxruntime_multiplies_by_the_same_weights_before_and_after(
    layout: str, other: str, to: str, scheme: str | None, tmp_path: Path
) -> None:
    source = quantized(product(), tmp_path, to, layout)
    result = converted(source, tmp_path / "out", other, scheme)
    assert result.error.largest == 0
    before, after = (ran(folder / "model.onnx", EYE)[0] for folder in (source, tmp_path / "out"))
    np.testing.assert_array_equal(before, after)
    proto = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(tmp_path / "out" / "model.onnx")
    operators = [node.op_type for node in proto.graph.node]
    assert operators == (["MatMulNBits"] if other == NBITS else ["DequantizeLinear", "MatMul"])
    assert len(proto.graph.initializer) == len(onnx.load(source / "model.onnx").graph.initializer)
    converted(tmp_path / "out", tmp_path / "back", layout)
    numbers = [(folder / "model.onnx.data").read_bytes() for folder in (source, tmp_path / "back")]
    # MatMulNBits has codes without a sign where there are zero points.
    assert (numbers[0] == numbers[1]) is ((layout, to) != (QDQ, "int4:g16:asym"))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("layout", "other"), [(QDQ, NBITS), (NBITS, QDQ)])
def test_models_that_onnxruntime_quantized_keep_their_values(
    layout: str, other: str, symmetric: bool, tmp_path: Path
) -> None:
    floats = save(product(), tmp_path / "in")
    source = save(
        of_runtime(floats, DEFAULT, layout, symmetric=symmetric),
        tmp_path / "q",
    )
    converted(source, tmp_path / "out", other)
    np.testing.assert_array_equal(ran(source, EYE)[0], ran(tmp_path / "out" / "model.onnx", EYE)[0])


def test_a_whole_model_keeps_all_but_its_weights(tmp_path: Path) -> None:
    source = quantized(model(), tmp_path, "int4:g32", NBITS)
    converted(source, tmp_path / "out", QDQ)
    np.testing.assert_allclose(
        ran(source / "model.onnx")[0], ran(tmp_path / "out" / "model.onnx")[0], rtol=0, atol=1e-6
    )
    ours, theirs = decoded(tmp_path / "out"), decoded(source)
    assert ours.keys() == theirs.keys() == {"fc1", "fc2", "flat"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_no_product_is_named_and_refused_before_the_run(tmp_path: Path) -> None:
    source = quantized(model(), tmp_path, "int4:g32", QDQ)
    with pytest.raises(
        UnsupportedError, match=r"1 layer cannot be converted .*read by Conv, and MatMulNBits"
    ):
        plan_of(source, NBITS)
    with pytest.raises(CheckpointError, match="would keep their onnx codes"):
        plan_of(source, NBITS, ignore=("conv",))


def test_scales_of_channels_are_written_for_each_group(tmp_path: Path) -> None:
    source = quantized(product(), tmp_path, "int8:channel", QDQ)
    assert converted(source, tmp_path / "out", NBITS, "int8:g64").error.largest == 0
    np.testing.assert_array_equal(
        ran(source / "model.onnx", EYE)[0], ran(tmp_path / "out" / "model.onnx", EYE)[0]
    )


def test_dynamic_quantizers_of_onnxruntime_are_refused_in_words(tmp_path: Path) -> None:
    floats = save(product(), tmp_path / "in")
    (tmp_path / "dynamic").mkdir()
    out = tmp_path / "dynamic" / "model.onnx"
    quantization.quantize_dynamic(floats, out, weight_type=quantization.QuantType.QInt8)
    with pytest.raises(CheckpointError, match=r"is quantized already .*MatMulInteger multiplies"):
        plan_of(out, NBITS)


@pytest.mark.parametrize("layout", [QDQ, NBITS])
def test_other_sources_are_no_graphs(layout: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.randn(64, 64)}, tmp_path / "in" / "model.safetensors")
    run(make_plan(open_source(tmp_path / "in"), "int4:g32"), tmp_path / "q")
    with pytest.raises(UnsupportedError, match="writes ONNX models from ONNX models, and the source is none"):
        plan_of(tmp_path / "q", layout)


def test_a_graph_goes_into_no_other_file_and_floats_into_no_graph(tmp_path: Path) -> None:
    source = quantized(product(), tmp_path, "int4:g32", NBITS)
    with pytest.raises(
        UnsupportedError, match="is a graph, which cannot be written in the layouts of compressed"
    ):
        plan_of(source, "compressed-tensors")
    with pytest.raises(UnsupportedError, match="writes codes into a graph, and no floats"):
        plan_of(source, QDQ, "float32")
    result = run(plan_of(source, "compressed-tensors", "float32"), tmp_path / "out")
    assert len(result.plan.restored) == 1
    assert (source / "model.onnx.data").exists()
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert not any("quantization_config.json" in note for note in result.plan.notes)


@pytest.mark.parametrize(("layout", "other"), [(QDQ, NBITS), (NBITS, QDQ)])
def test_neither_threads_nor_memory_change_a_byte(
    layout: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quantized(product(), tmp_path, "uint4:g32:asym", layout)
    converted(source, tmp_path / "a", other, limits=Limits(workers=1))
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 1024)
    converted(source, tmp_path / "b", other, limits=Limits(workers=3, tile_values=256))
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_bias_inside_of_matmulnbits_is_added(tmp_path: Path) -> None:
    source = quantized(product(), tmp_path, "int4:g32", NBITS)
    proto = onnx.load(source / "model.onnx")
    bias = onnx.numpy_helper.from_array(values((64,), 9), "bias")
    proto.graph.initializer.append(bias)
    (node,) = proto.graph.node
    node.input.extend(["", "", "bias"][len(node.input) - 3 :])
    assert len(node.input) == 6
    path = save(proto, tmp_path / "biased")
    converted(path, tmp_path / "out", QDQ)
    np.testing.assert_allclose(
        ran(path, EYE)[0], ran(tmp_path / "out" / "model.onnx", EYE)[0], rtol=0, atol=1e-7
    )
