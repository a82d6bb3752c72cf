"""Where weights of ONNX models may be: nodes Constant, graphs inside of nodes, several readers and files."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs import onnx_operators
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError

from .onnx_models import decoded, model, ran, save, values, with_values

pytestmark = pytest.mark.rotating

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


IN_A_BODY = "read in the body of a node, such as If, whose inputs are not seen while a model runs"


def in_both() -> Any:
    """A weight of the main graph that a branch reads, too."""
    product = node("MatMul", ["r", "w"], ["b"])
    branch = helper.make_graph([product], "branch", [], [info("b", TensorProto.FLOAT, [2, 32])])
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("Relu", ["x"], ["r"]),
        node("If", ["on"], ["c"], then_branch=branch, else_branch=branch), node("Add", ["a", "c"], ["d"]),
        node("MatMul", ["d", "v"], ["y"]),
    ]  # fmt: skip
    on = numpy_helper.from_array(np.array(True), "on")
    return made(nodes, [held("w", (64, 32)), held("v", (32, 32)), on])


@pytest.mark.parametrize(("make", "kept"), [(in_a_loop, {"square", "outer"}), (in_both, {"w"})])
def test_static_inputs_are_for_layers_that_no_body_reads(make: Any, kept: set[str], tmp_path: Path) -> None:
    source, out = save(make(), tmp_path / "in"), tmp_path / "out"
    given = {"format": "onnx", "calibration": torch.from_numpy(X["x"])}
    result = zp.quantize_checkpoint(source, out, "w8a8_static", **given)
    reasons = {d.entry.name.removesuffix(".weight"): d.reason for d in result.plan.unfit}
    assert reasons.keys() == kept
    assert all(IN_A_BODY in reason for reason in reasons.values())
    assert all(name not in decoded(out) for name in kept)
    wanted, found = (ran(path, X)[0] for path in (source, out / "model.onnx"))
    assert np.linalg.norm(wanted - found) < 0.02 * np.linalg.norm(wanted)  # one product in int8
    assert sum(IN_A_BODY in note for note in result.notes) == 1


def test_a_model_whose_layers_are_all_in_bodies_says_so(tmp_path: Path) -> None:
    source = save(in_a_branch(), tmp_path / "in")
    with pytest.raises(CheckpointError, match=f"nothing would be quantized.*{IN_A_BODY}"):
        zp.quantize_checkpoint(
            source, tmp_path / "out", "w8a8_static", format="onnx", calibration=torch.ones(2, 64)
        )


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


def saved(folder: Path, proto: Any) -> Path:
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


def of_set(operators: int, nodes: list[Any], ends: list[Any], tensors: list[Any], **more: Any) -> Any:
    """Return a model of a set of operators; ends: its input and its output."""
    graph = helper.make_graph(nodes, "main", ends[:1], ends[1:], tensors)
    sets = [helper.make_opsetid("", operators), *more.pop("sets", [])]
    return helper.make_model(graph, opset_imports=sets, ir_version=8 if operators > 10 else 4, **more)


def ran_alike(source: Path, out: Path, most: float) -> bool:
    """Return whether outputs are as close as rounding weights leaves them, on normal inputs."""
    found = []
    for file in (source, out / "model.onnx"):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        given = {
            each.name: values([n if isinstance(n, int) else 3 for n in each.shape], 7).astype(
                np.float16 if "float16" in each.type else np.float32
            )
            for each in session.get_inputs()
        }
        found.append(session.run(None, given)[0].astype(np.float64))
    return bool(np.linalg.norm(found[0] - found[1]) < most * np.linalg.norm(found[0]))


@pytest.mark.parametrize("operators", [13, 17, 18, 19, 21])
def test_scales_of_16_bits_raise_the_set_to_that_which_has_them(operators: int, tmp_path: Path) -> None:
    ends = [info("x", TensorProto.FLOAT16, ["n", 64]), info("y", TensorProto.FLOAT16, ["n", 32])]
    weight = numpy_helper.from_array(values((64, 32)).astype(np.float16), "w")
    source = saved(tmp_path, of_set(operators, [node("MatMul", ["x", "w"], ["y"])], ends, [weight]))
    zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel", format="onnx")
    onnx.checker.check_model(str(tmp_path / "out/model.onnx"), full_check=True)
    assert onnx.load(tmp_path / "out/model.onnx").opset_import[0].version == max(operators, 19)
    assert ran_alike(source, tmp_path / "out", 0.02)


def resized(operator: str, mode: str) -> list[Any]:
    return [node("Conv", ["x", "w"], ["h"], pads=[1] * 4), node(operator, ["h", "factors"], ["y"], mode=mode)]


@pytest.mark.parametrize(("operators", "operator"), [(10, "Resize"), (9, "Upsample")])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("scheme", ["int8:channel", "int16:channel"])
def test_nodes_whose_default_changed_keep_their_meaning_in_a_newer_set(
    scheme: str, mode: str, operators: int, operator: str, tmp_path: Path
) -> None:
    ends = [info("x", TensorProto.FLOAT, [1, 16, 8, 8]), info("y", TensorProto.FLOAT, [1, 32, 16, 16])]
    factors = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "factors")
    tensors = [held("w", (32, 16, 3, 3)), factors]
    source = saved(tmp_path, of_set(operators, resized(operator, mode), ends, tensors))
    zp.quantize_checkpoint(source, tmp_path / "out", scheme, format="onnx")
    assert ran_alike(source, tmp_path / "out", 0.02)


def test_a_translation_that_changes_outputs_is_refused_with_the_operators_that_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As every adapter of onnx that is wrong, and not known to be, would be."""
    monkeypatch.setattr(onnx_operators, "_set_right", lambda model, _: model)
    ends = [info("x", TensorProto.FLOAT, [1, 16, 8, 8]), info("y", TensorProto.FLOAT, [1, 32, 16, 16])]
    factors = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "factors")
    tensors = [held("w", (32, 16, 3, 3)), factors]
    source = saved(tmp_path, of_set(10, resized("Resize", "linear"), ends, tensors))
    with pytest.raises(zp.UnsupportedError, match=r"outputs change \('y' by \d\d%\); one of .*Resize"):
        zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel", format="onnx")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_compared_is_said_in_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_operators, "_MOST_BYTES", 1000)
    ends = [info("x", TensorProto.FLOAT, ["n", 64]), info("y", TensorProto.FLOAT, ["n", 32])]
    source = saved(tmp_path, of_set(12, [node("MatMul", ["x", "w"], ["y"])], ends, [held("w", (64, 32))]))
    plan = make_plan(open_source(source), "int8:channel", codec=get_codec("onnx"))
    assert [
        note for note in plan.notes if "its outputs were not compared: its weights (2,048 values)" in note
    ]


@pytest.mark.parametrize("scheme", ["int8:channel", "int4:g32"])
def test_weights_of_local_functions_are_weights_and_the_result_is_loaded(scheme: str, tmp_path: Path) -> None:
    sets = [helper.make_opsetid("", 18)]
    function = helper.make_function(
        "local", "Linear", ["a", "b"], ["c"], [node("MatMul", ["a", "b"], ["c"])], sets
    )
    nodes = [node("Linear", ["x", "w"], ["h"], domain="local"), node("MatMul", ["h", "v"], ["y"])]
    ends = [info("x", TensorProto.FLOAT, ["n", 64]), info("y", TensorProto.FLOAT, ["n", 32])]
    tensors = [held("w", (64, 64)), held("v", (64, 32), 1)]
    proto = of_set(18, nodes, ends, tensors, functions=[function], sets=[helper.make_opsetid("local", 1)])
    source = saved(tmp_path, proto)
    found = zp.quantize_checkpoint(source, tmp_path / "out", scheme, format="onnx")
    assert {outcome.weight.module for outcome in found.outcomes} == {"w", "v"}
    assert ran_alike(source, tmp_path / "out", 0.2)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_a_local_function_of_another_set_is_refused_where_the_set_is_raised(tmp_path: Path) -> None:
    sets = [helper.make_opsetid("", 13)]
    function = helper.make_function(
        "local", "Linear", ["a", "b"], ["c"], [node("MatMul", ["a", "b"], ["c"])], sets
    )
    nodes = [node("Linear", ["x", "w"], ["h"], domain="local"), node("MatMul", ["h", "v"], ["y"])]
    ends = [info("x", TensorProto.FLOAT, ["n", 64]), info("y", TensorProto.FLOAT, ["n", 32])]
    tensors = [held("w", (64, 64)), held("v", (64, 32), 1)]
    proto = of_set(18, nodes, ends, tensors, functions=[function], sets=[helper.make_opsetid("local", 1)])
    with pytest.raises(
        zp.UnsupportedError, match=r"local functions \('local.Linear'\) of another operator set"
    ):
        zp.quantize_checkpoint(saved(tmp_path, proto), tmp_path / "out", "int4:g32", format="onnx")


def test_verify_loads_what_it_verifies(tmp_path: Path) -> None:
    ends = [info("x", TensorProto.FLOAT, ["n", 64]), info("y", TensorProto.FLOAT, ["n", 32])]
    source = saved(tmp_path, of_set(21, [node("MatMul", ["x", "w"], ["y"])], ends, [held("w", (64, 32))]))
    zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel", format="onnx")
    broken = onnx.load(tmp_path / "out/model.onnx", load_external_data=False)
    broken.opset_import[0].version = 9
    (tmp_path / "out/model.onnx").write_bytes(broken.SerializeToString())
    (tmp_path / "out/zeropoint_manifest.json").unlink()
    problems = [str(each) for each in zp.verify_checkpoint(tmp_path / "out", source).problems]
    assert any("onnxruntime does not load it (" in each for each in problems), problems


def test_models_that_other_tools_quantized_are_called_so(tmp_path: Path) -> None:
    ends = [info("x", TensorProto.UINT8, ["n", 64]), info("y", TensorProto.INT32, ["n", 32])]
    codes = numpy_helper.from_array((values((64, 32)) * 100).astype(np.int8), "w_quantized")
    source = saved(tmp_path, of_set(13, [node("MatMulInteger", ["x", "w_quantized"], ["y"])], ends, [codes]))
    assert "a tool of ONNX (MatMulInteger multiplies codes)" in zp.inspect_checkpoint(source).summary[1]
    with pytest.raises(
        zp.CheckpointError, match="it holds 'w_quantized', I8, which MatMulInteger multiplies"
    ):
        zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel", format="onnx")
    ends = [info("x", TensorProto.FLOAT, ["n", 64]), info("y", TensorProto.FLOAT, ["n", 32])]
    source = saved(tmp_path, of_set(21, [node("MatMul", ["x", "w"], ["y"])], ends, [held("w", (64, 32))]))
    zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel", format="onnx")
    with pytest.raises(zp.CheckpointError, match=r"is quantized already \(.*\); .* dequantize_first=True"):
        zp.quantize_checkpoint(tmp_path / "out", tmp_path / "again", "int8:channel", format="onnx")


def from_the_left() -> Any:
    nodes = [
        node("Transpose", ["x"], ["c"]), node("MatMul", ["w", "c"], ["d"]), node("Transpose", ["d"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [held("w", (32, 64))])


def behind_nodes() -> Any:
    """A weight behind Identity, one of half precision behind a Cast, and one behind two nodes."""
    half = numpy_helper.from_array(values((64, 64), 3).astype(np.float16), "half")
    nodes = [
        node("Identity", ["w"], ["same"]), node("MatMul", ["x", "same"], ["a"]),
        node("Cast", ["half"], ["wide"], to=TensorProto.FLOAT), node("MatMul", ["a", "wide"], ["b"]),
        node("Identity", ["v"], ["v2"]), node("Transpose", ["v2"], ["v3"]), node("Gemm", ["b", "v3"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [held("w", (64, 64)), half, held("v", (32, 64), 4)])


def stacked() -> Any:
    """Four matrices of a product each, once from the right and once from the left."""
    axes = numpy_helper.from_array(np.array([0]), "first")
    nodes = [
        node("Unsqueeze", ["x", "first"], ["u"]), node("MatMul", ["u", "w"], ["a"]),
        node("Transpose", ["a"], ["b"], perm=[0, 2, 1]), node("MatMul", ["v", "b"], ["c"]),
        node("ReduceSum", ["c", "first"], ["d"], keepdims=0), node("Transpose", ["d"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [axes, held("w", (4, 64, 96)), held("v", (4, 32, 96), 1)])


def deconvolved() -> Any:
    """ConvTranspose of two by two values an input, and of one input a group."""
    shapes = {"image": [2, 64, 1, 1], "flat": [2, 32]}
    constants = [numpy_helper.from_array(np.array(shape), name) for name, shape in shapes.items()]
    nodes = [
        node("Reshape", ["x", "image"], ["a"]), node("ConvTranspose", ["a", "w"], ["b"]),
        node("Reshape", ["b", "flat"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [*constants, held("w", (64, 8, 2, 2))])


def recurrent(operator: str, gates: int) -> Any:
    """Two directions of 16 values from a sequence of one step."""
    shapes = {"steps": [1, 2, 64], "flat": [2, 32]}
    constants = [numpy_helper.from_array(np.array(shape), name) for name, shape in shapes.items()]
    sides = {"hidden_size": 16, "direction": "bidirectional"}
    nodes = [
        node("Reshape", ["x", "steps"], ["a"]), node(operator, ["a", "w", "r"], ["b"], **sides),
        node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3]), node("Reshape", ["c", "flat"], ["y"]),
    ]  # fmt: skip
    return made(nodes, [*constants, held("w", (2, gates * 16, 64)), held("r", (2, gates * 16, 16), 1)])


OTHERS = {
    "from_the_left": (from_the_left, {"w"}), "behind_nodes": (behind_nodes, {"w", "half", "v"}),
    "stacked": (stacked, {"w", "v"}), "deconvolved": (deconvolved, {"w"}),
    "lstm": (lambda: recurrent("LSTM", 4), {"w", "r"}), "gru": (lambda: recurrent("GRU", 3), {"w", "r"}),
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["int4:g16", "int8:channel", "int4:channel:asym", "uint8:tensor:asym"])
@pytest.mark.parametrize("place", OTHERS)
def test_a_weight_of_any_product_is_quantized_where_it_lies(place: str, scheme: str, tmp_path: Path) -> None:
    make, names = OTHERS[place]
    source, out = save(make(), tmp_path / "in"), tmp_path / "out"
    zp.quantize_checkpoint(source, out, scheme, format="onnx")
    assert zp.verify_checkpoint(out, source).problems == ()
    weights = decoded(out)
    assert set(weights) == names
    found, wanted = (ran(each, X)[0] for each in (out / "model.onnx", with_values(source, weights)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.abs(found - ran(source, X)[0]).max() > 1e-5


@pytest.mark.parametrize(
    ("place", "said"),
    [("from_the_left", "read by MatMul from the left"), ("stacked", "MatMul of several matrices")],
)
def test_a_product_that_matmulnbits_cannot_replace_is_named(place: str, said: str, tmp_path: Path) -> None:
    source = save(OTHERS[place][0](), tmp_path / "in")
    with pytest.raises(zp.CheckpointError, match=said):
        make_plan(open_source(source), "int4:g32", codec=get_codec("onnx-matmulnbits"))


def test_matmulnbits_takes_the_place_of_what_passes_a_weight_on(tmp_path: Path) -> None:
    source, out = save(behind_nodes(), tmp_path / "in"), tmp_path / "out"
    result = zp.quantize_checkpoint(source, out, "int4:g32", format="onnx-matmulnbits")
    reasons = [str(each.reason) for each in result.plan.decisions if not each.quantized]
    assert any("read by Cast" in reason for reason in reasons)
    weights = decoded(out)
    assert set(weights) == {"w", "v"}
    wanted = ran(with_values(source, weights), X)[0]
    np.testing.assert_allclose(ran(out / "model.onnx", X)[0], wanted, rtol=0, atol=1e-5)


def test_a_group_ends_with_its_matrix(tmp_path: Path) -> None:
    source = save(stacked(), tmp_path / "in")
    with pytest.raises(zp.CheckpointError, match="matrices have 64 inputs each, no multiple of the group of"):
        zp.plan_checkpoint(source, "int4:g128", format="onnx", ignore="v")
