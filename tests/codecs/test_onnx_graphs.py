"""Where weights of ONNX models may be: nodes Constant, graphs inside of nodes, several readers and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.registry import get_codec

from .onnx_models import decoded, model, ran, save, values, with_values

X = {"x": values((2, 64), 9)}
node, info = helper.make_node, helper.make_tensor_value_info


def made(nodes: list[Any], held: list[Any], *, inputs: tuple[Any, ...] = ()) -> Any:
    """Return a model from x (2, 64) to y (2, 32)."""
    graph = helper.make_graph(
        nodes, "main", [info("x", TensorProto.FLOAT, [2, 64]), *inputs],
        [info("y", TensorProto.FLOAT, [2, 32])], held,
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(proto)
    return proto


def held(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    return numpy_helper.from_array(values(shape, seed), name)


def in_a_constant() -> Any:
    weight = node("Constant", [], ["w"], value=held("any", (64, 32)))
    return made([weight, node("MatMul", ["x", "w"], ["y"])], [])


def in_a_branch() -> Any:
    def branch(name: str, seed: int) -> Any:
        product = node("MatMul", ["x", f"{name}.w"], [f"{name}.y"])
        out = [info(f"{name}.y", TensorProto.FLOAT, [2, 32])]
        return helper.make_graph([product], name, [], out, [held(f"{name}.w", (64, 32), seed)])

    chosen = node("If", ["on"], ["y"], then_branch=branch("then", 1), else_branch=branch("else", 2))
    return made([chosen], [numpy_helper.from_array(np.array(True), "on")])


def in_a_loop() -> Any:
    """The body multiplies with a weight of its own and one of the outer graph."""
    body = helper.make_graph(
        [
            node("MatMul", ["was", "square"], ["a"]), node("MatMul", ["a", "outer"], ["now"]),
            node("Identity", ["on"], ["still"]),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []), info("was", 1, [2, 64])],
        [info("still", TensorProto.BOOL, []), info("now", 1, [2, 64])], [held("square", (64, 64), 3)],
    )  # fmt: skip
    times = numpy_helper.from_array(np.array(3), "times")
    nodes = [node("Loop", ["times", "", "x"], ["last"], body=body), node("MatMul", ["last", "w"], ["y"])]
    return made(nodes, [times, held("outer", (64, 64), 4), held("w", (64, 32), 5)])


def shared() -> Any:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("Relu", ["x"], ["r"]), node("MatMul", ["r", "w"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [held("w", (64, 32))])


PLACES = {
    "in_a_constant": (in_a_constant, {"w"}), "in_a_branch": (in_a_branch, {"then.w", "else.w"}),
    "in_a_loop": (in_a_loop, {"square", "outer", "w"}), "shared": (shared, {"w"}),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["onnx", "onnx-matmulnbits"])
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_is_quantized_wherever_it_is(place: str, layout: str, tmp_path: Path) -> None:
    make, names = PLACES[place]
    source, out = save(make(), tmp_path / "in"), tmp_path / "out"
    zp.quantize_checkpoint(source, out, "int4:g32", format=layout)
    assert zp.verify_checkpoint(out, source).problems == ()
    weights = decoded(out)
    assert set(weights) == names
    np.testing.assert_allclose(
        ran(out / "model.onnx", X)[0], ran(with_values(source, weights), X)[0], rtol=0, atol=1e-5
    )
    assert np.abs(ran(out / "model.onnx", X)[0] - ran(source, X)[0]).max() > 1e-4


def test_an_older_model_is_translated_with_the_numbers_of_a_branch_elsewhere(tmp_path: Path) -> None:
    proto, out = in_a_branch(), tmp_path / "out"
    proto.opset_import[0].version, proto.ir_version = 17, 8
    source = save(proto, tmp_path / "in", external=True)
    branches = onnx.load(source, load_external_data=False).graph.node[0].attribute
    assert [branch.g.initializer[0].data_location for branch in branches] == [1, 1]
    zp.quantize_checkpoint(source, out, "int4:g32", format="onnx")
    assert zp.verify_checkpoint(out, source).problems == ()
    assert set(decoded(out)) == {"then.w", "else.w"}
    assert onnx.load(out / "model.onnx").opset_import[0].version == 21


def test_a_weight_that_is_read_both_ways_is_kept_with_its_reason(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("Gemm", ["a", "w"], ["b"], transB=1),
        node("MatMul", ["b", "v"], ["y"]),
    ]  # fmt: skip
    source = save(made(nodes, [held("w", (64, 64)), held("v", (64, 32))]), tmp_path / "in")
    plan = make_plan(open_source(source), "int4:g32", codec=get_codec("onnx"))
    kept = {each.entry.name: each.reason for each in plan.decisions if not each.quantized}
    assert list(kept) == ["w"]
    assert "both as (inputs, outputs) and as (outputs, inputs)" in str(kept["w"])


def test_numbers_in_a_file_for_each_tensor_give_the_same_bytes(tmp_path: Path) -> None:
    whole, apart = save(model(), tmp_path / "whole"), tmp_path / "apart" / "model.onnx"
    apart.parent.mkdir()
    onnx.save(model(), apart, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=128)
    assert len(list(apart.parent.iterdir())) > 5
    found = []
    for source in (whole, apart):
        out = tmp_path / f"out of {source.parent.name}"
        zp.quantize_checkpoint(source, out, "int4:g32", format="onnx")
        found.append([(out / name).read_bytes() for name in ("model.onnx", "model.onnx.data")])
        assert zp.verify_checkpoint(out, source).problems == ()
    assert found[0] == found[1]


def test_tensors_that_stay_in_the_graph_are_named(tmp_path: Path) -> None:
    proto = model()
    proto.graph.initializer.append(helper.make_tensor("shift", TensorProto.INT64, [40], range(40)))
    few = numpy_helper.from_array(values((3,)), "f")
    proto.graph.node.insert(0, node("Constant", [], ["few"], value=few))
    path = save(proto, tmp_path / "in")
    said = "4 tensors of few numbers, or with numbers one by one, stay in the graph of model.onnx: "
    for given in (path, path.parent):
        (note,) = [note for note in open_source(given).notes if note.startswith("4 tensors")]
        assert note == f"{said}'rows', 'pixels', 'shift', 'few'"
    plan = make_plan(open_source(path), "int4:g32", codec=get_codec("onnx"))
    assert any(note.startswith("4 tensors of few numbers") for note in plan.notes)
