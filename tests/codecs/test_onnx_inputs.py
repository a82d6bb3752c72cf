"""Static inputs of ONNX models: onnxruntime runs them on data, and its int8 kernels run the result."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.quantized_layers import find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.containers.protocol import GraphFiles
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CalibrationError, CheckpointError, UnsupportedError
from zeropoint.recipes import Activation, parse_recipe

from .onnx_models import decoded, save, values

node, info = helper.make_node, helper.make_tensor_value_info
LAYERS = ("first", "second", "head")
DATA = {"first": "x", "second": "b", "head": "d"}
"""Tensors with the range of what each layer reads."""


def images() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def graph(weights: dict[str, torch.Tensor], dtype: type = np.float32, axis: str | int = "n") -> Any:
    """Conv, Relu, Conv, Relu, MaxPool and Gemm, from x (n, 1, 8, 8) to y (n, 10)."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    held = [numpy_helper.from_array(w.numpy().astype(dtype), name) for name, w in weights.items()]
    held.append(numpy_helper.from_array(np.array([-1, 512]), "rows"))
    nodes = [
        node("Conv", ["x", "first.weight", "first.bias"], ["a"], pads=[1] * 4),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "second.weight", "second.bias"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["d"]),
        node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Reshape", ["e", "rows"], ["f"]),
        node("Gemm", ["f", "head.weight", "head.bias"], ["y"], transB=1),
    ]
    made = helper.make_graph(
        nodes, "main", [info("x", kind, [axis, 1, 8, 8])], [info("y", kind, [axis, 10])], held
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    """The weights of a network that was trained on digits for some epochs."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    head = nn.Linear(512, 10)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), head)
    step = torch.optim.Adam(net.parameters(), 3e-3)
    x, y = images()
    for begin in [*range(0, 1280, 64)] * 3:
        loss = nn.functional.cross_entropy(net(x[begin : begin + 64]), y[begin : begin + 64])
        step.zero_grad()
        loss.backward()
        step.step()
    layers = dict(zip(LAYERS, (first, second, head), strict=True))
    return {
        f"{n}.{part}": getattr(m, part).detach() for n, m in layers.items() for part in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def model(trained: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(graph(trained), tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "images.safetensors"
    save_file({"anything": images()[0][:100].contiguous()}, path)
    return path


@pytest.fixture(scope="module")
def out(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "q"
    zp.quantize_checkpoint(model, folder, "w8a8_static", format="onnx", calibration=data)
    return folder / "model.onnx"


def test_samples_in_a_mapping_give_the_bytes_of_samples_in_a_file(
    model: Path, out: Path, tmp_path: Path
) -> None:
    given = {"anything": images()[0][:100]}
    zp.quantize_checkpoint(model, tmp_path / "q", "w8a8_static", format="onnx", calibration=given)
    assert (tmp_path / "q/model.onnx").read_bytes() == out.read_bytes()


def session(path: Path, *, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if optimized is None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(path, options)


def parameters(path: Path) -> dict[str, Any]:
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def test_scales_are_those_of_onnxruntimes_own_quantizer(model: Path, out: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter([{"x": images()[0][:100].numpy()}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    quantize_static(
        model, tmp_path / "theirs.onnx", Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
        weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
    )  # fmt: skip
    ours, theirs = parameters(out), parameters(tmp_path / "theirs.onnx")
    for layer, name in DATA.items():
        scale, zero = ours[f"{layer}.input_scale"], ours[f"{layer}.input_zero_point"]
        assert scale == pytest.approx(theirs[f"{name}_scale"], rel=1e-6)  # their division is float32's
        assert zero == theirs[f"{name}_zero_point"]
        assert zero.dtype == np.uint8


def test_a_range_of_inputs_leaves_out_tails(model: Path, tmp_path: Path) -> None:
    x = images()[0][:100]
    zp.quantize_checkpoint(
        model, tmp_path / "out", "w8a8_static", format="onnx", calibration=x, input_range="percentile:80"
    )
    exact = float(np.percentile(x.numpy(), 80 - 1e-9, method="inverted_cdf"))
    assert 0 < exact < x.max()
    found = parameters(tmp_path / "out" / "model.onnx")["first.input_scale"]
    assert exact / 255 * (1 - 1e-6) <= found <= exact / 255 * (1 + 1 / 32)  # the end of its bin


def test_onnxruntime_computes_what_the_codes_say(out: Path, trained: dict[str, torch.Tensor]) -> None:
    found, weights = parameters(out), decoded(out.parent)

    def seen(layer: str, x: torch.Tensor) -> torch.Tensor:
        scale, zero = (torch.tensor(found[f"{layer}.input_{part}"]) for part in ("scale", "zero_point"))
        return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale

    def of(layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[layer].reshape(trained[f"{layer}.weight"].shape), trained[f"{layer}.bias"]

    x = images()[0][1300:]
    b = nn.functional.conv2d(seen("first", x), *of("first"), padding=1).relu()
    d = nn.functional.conv2d(seen("second", b), *of("second"), padding=1).relu()
    f = nn.functional.max_pool2d(d, 2).flatten(1)
    expected = nn.functional.linear(seen("head", f), *of("head"))
    (got,) = session(out).run(None, {"x": x.numpy()})
    apart = (torch.tensor(got) - expected).abs().max(1).values
    # Sums in another order differ in their last bits, and round some inputs to the next code.
    assert float((apart < 1e-4).float().mean()) > 0.9
    assert float(apart.max()) < 0.05  # half a code of the inputs of the head, times its weights


def test_int8_kernels_run_it_and_find_the_digits(model: Path, out: Path, tmp_path: Path) -> None:
    x, y = images()
    quick = session(out, optimized=tmp_path / "run.onnx")
    kinds = [n.op_type for n in onnx.load(tmp_path / "run.onnx", load_external_data=False).graph.node]
    assert kinds.count("QLinearConv") == 2
    right = [
        float((torch.tensor(s.run(None, {"x": x[1300:].numpy()})[0]).argmax(1) == y[1300:]).float().mean())
        for s in (session(model), quick)
    ]
    assert right[0] > 0.85  # one in ten is what a network finds that has learned nothing
    assert right[1] > right[0] - 0.01  # four of the 497 digits


def test_a_result_is_proven_read_and_written_again(model: Path, out: Path, tmp_path: Path) -> None:
    assert zp.verify_checkpoint(out.parent, against=model).ok
    layers = find_layers(open_source(out.parent)).layers
    assert {str(layer.layer.input) for layer in layers} == {"uint8:tensor:asym static"}
    zp.convert_checkpoint(out.parent, tmp_path / "weights", "onnx", to="int8:channel")
    bare = onnx.load(tmp_path / "weights/model.onnx")
    assert {each.op_type for each in bare.graph.node} >= {"DequantizeLinear", "Conv"}
    assert not any(each.op_type == "QuantizeLinear" for each in bare.graph.node)
    assert not any("input" in each.name for each in bare.graph.initializer)
    before, after = parameters(out), parameters(tmp_path / "weights/model.onnx")
    assert all((before[f"{n}.weight_quantized"] == after[f"{n}.weight_quantized"]).all() for n in LAYERS)
    zp.dequantize_checkpoint(out.parent, tmp_path / "floats")
    entries = open_source(tmp_path / "floats").entries
    assert {f"{n}.weight" for n in LAYERS} <= set(entries)
    assert not any("input" in name for name in entries)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("given", ["int8:tensor", "uint8:tensor:asym", "float8_e4m3fn:tensor"])
def test_other_inputs_and_dtypes_are_run(
    given: str, dtype: type, trained: dict[str, torch.Tensor], data: Path, tmp_path: Path
) -> None:
    source = save(graph(trained, dtype), tmp_path / "in")
    recipe = parse_recipe(f"{{default: {{weight: 'int8:channel', input: '{given} static'}}}}")
    zp.quantize_checkpoint(source, tmp_path / "out", recipe, format="onnx", calibration=data, samples=50)
    x = images()[0][1300:1400].numpy().astype(dtype)
    (a,), (b,) = (session(path).run(None, {"x": x}) for path in (source, tmp_path / "out/model.onnx"))
    # Each input is off by a code in 256, or float8 by one in 16: noise of 0.3 to 3 percent, and no more.
    assert np.linalg.norm((a - b).astype(np.float64)) < 0.05 * np.linalg.norm(a.astype(np.float64))
    read = find_layers(open_source(tmp_path / "out")).layers
    assert {layer.layer.input for layer in read} == {Activation.of(given, dynamic=False)}


def test_a_graph_of_one_batch_size_runs_on_whole_batches(
    trained: dict[str, torch.Tensor], data: Path, tmp_path: Path
) -> None:
    every = {}
    for name, axis in (("free", "n"), ("fixed", 20)):
        source = save(graph(trained, axis=axis), tmp_path / name)
        out = tmp_path / f"{name}_out"
        zp.quantize_checkpoint(source, out, "w8a8_static", format="onnx", calibration=data)
        every[name] = {n: v for n, v in parameters(out / "model.onnx").items() if "input" in n}
    assert every["free"].keys() == every["fixed"].keys()
    for name, value in every["free"].items():
        assert value == pytest.approx(every["fixed"][name], rel=1e-5)  # sums of another batch
    few = images()[0][:10]
    with pytest.raises(CalibrationError, match="takes 20 samples at once, and there are 10; give more"):
        zp.quantize_checkpoint(
            tmp_path / "fixed", tmp_path / "none", "w8a8_static", format="onnx", calibration=few
        )


def test_one_input_of_several_products_is_quantized_for_each(tmp_path: Path) -> None:
    """Products behind Transpose and Identity, and one weight that reads two tensors."""
    held = {"q": (64, 32), "k": (32, 64), "twice": (32, 32)}
    nodes = [
        node("MatMul", ["x", "q"], ["a"]),
        node("Transpose", ["k"], ["kt"], perm=[1, 0]),
        node("MatMul", ["x", "kt"], ["b"]),
        node("MatMul", ["a", "twice"], ["c"]),
        node("MatMul", ["b", "twice"], ["d"]),
        node("Add", ["c", "d"], ["y"]),
    ]
    made = helper.make_graph(
        nodes, "main", [info("x", 1, ["n", 64])], [info("y", 1, ["n", 32])],
        [numpy_helper.from_array(values(shape, n), name) for n, (name, shape) in enumerate(held.items())],
    )  # fmt: skip
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    source, x = save(proto, tmp_path / "in"), torch.tensor(values((40, 64), 9)) * 10
    zp.quantize_checkpoint(source, tmp_path / "out", "w8a8_static", format="onnx", calibration=x)
    result = onnx.load(tmp_path / "out/model.onnx")
    onnx.checker.check_model(result, full_check=True)
    reads = sorted(each.input[0] for each in result.graph.node if each.op_type == "QuantizeLinear")
    assert reads == ["a", "b", "x", "x"]
    found = parameters(tmp_path / "out/model.onnx")
    assert found["q.input_scale"] == found["k.input_scale"]
    (a,), (b,) = (session(p).run(None, {"x": x.numpy()}) for p in (source, tmp_path / "out/model.onnx"))
    assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)  # a code in 256 of two products and a sum


def test_what_is_no_input_of_the_graph_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    def refused(given: Any, error: type[Exception], words: str, **more: Any) -> None:
        with pytest.raises(error, match=words):
            zp.quantize_checkpoint(
                model, tmp_path / "out", "w8a8_static", format="onnx", calibration=given, **more
            )
        assert not (tmp_path / "out").exists()

    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 100)
    refused(text, CalibrationError, "this model reads arrays, not text; pass calibration=")
    refused("random", CalibrationError, "random tokens are not what the model will see")
    refused(data, CalibrationError, "samples=101 asks for more than the 100", samples=101)
    refused(data, CalibrationError, "length=8 counts tokens, and this model reads arrays", length=8)
    refused(images()[0][:, 0], UnsupportedError, "onnxruntime does not run the model")
    two = tmp_path / "two.safetensors"
    save_file({"x": torch.zeros(4, 1, 8, 8), "z": torch.zeros(4)}, two)
    refused(two, CalibrationError, "the model reads 'x', and the data are 'x', 'z'")
    refused(images()[0] * math.nan, CalibrationError, "the input of 'first' received no finite number")
    refused(data, UnsupportedError, "method mse_weighted needs statistics", method="mse_weighted")
    with pytest.raises(CalibrationError, match="calibration"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w8a8_static", format="onnx")


def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    made = helper.make_graph(
        [node("MatMul", ["x", "w"], ["y"])], "main", [info("x", 1, ["n", 8192])], [info("y", 1, ["n", 8192])],
        [numpy_helper.from_array(np.zeros((8192, 8192), np.float32), "w")],
    )  # fmt: skip
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    source = save(proto, tmp_path / "in", external=True)
    with pytest.raises(CheckpointError, match=r"^running the model takes about 28\d\.\d MiB, "):
        zp.quantize_checkpoint(
            source, tmp_path / "out", "w8a8_static", format="onnx", calibration=torch.zeros(1, 8192),
            max_memory="640M",
        )  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Relu and MatMul, whose input takes 8 MiB for each sample."""
    made = helper.make_graph(
        [node("Relu", ["x"], ["y"]), node("MatMul", ["y", "w"], ["z"])], "main",
        [info("x", 1, ["n", 2048, 1024])], [info("z", 1, ["n", 2048, 32])],
        [numpy_helper.from_array(values((1024, 32)), "w")],
    )  # fmt: skip
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return save(proto, tmp_path_factory.mktemp("wide"))


def test_inputs_of_layers_that_do_not_fit_into_memory_are_refused(wide: Path, tmp_path: Path) -> None:
    x = torch.zeros(1, 1, 1).expand(3, 2048, 1024)
    with pytest.raises(
        CheckpointError, match=r"^running the model takes about 80\.\d MiB, .* use max_memory="
    ):
        zp.quantize_checkpoint(
            wide, tmp_path / "out", "w8a8_static", format="onnx", calibration=x, max_memory="470M"
        )
    assert not (tmp_path / "out").exists()


def test_batches_are_bounded_by_samples_and_by_the_bytes_of_inputs(model: Path, wide: Path) -> None:
    def sizes(path: Path, module: str, x: torch.Tensor) -> list[int]:
        source = open_source(path)
        assert isinstance(source.root, Path)
        names = {name: entry.file.name for name, entry in source.entries.items()}
        files = GraphFiles(graph=source.graph, folder=source.root, files=names)
        seen = source.container.layer_inputs(files, [module], lambda _: {"": x}, lambda _: None)
        return [len(each) for _, each in seen]

    assert sizes(model, "second", images()[0][:40]) == [1, 16, 16, 7]
    assert sizes(wide, "w", torch.zeros(1, 1, 1).expand(5, 2048, 1024)) == [1, 2, 2]


def test_inputs_that_are_no_data_stay_as_they_are(tmp_path: Path) -> None:
    """Rows of a table are chosen by numbers, and recurrent layers have states of their own."""
    made = helper.make_graph(
        [node("Gather", ["table.weight", "ids"], ["e"]), node("MatMul", ["e", "w"], ["y"])], "main",
        [info("ids", TensorProto.INT64, ["n"])], [info("y", 1, ["n", 32])],
        [numpy_helper.from_array(values((100, 64)), "table.weight"),
         numpy_helper.from_array(values((64, 32), 1), "w")],
    )  # fmt: skip
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    source = save(proto, tmp_path / "in")
    with pytest.raises(CheckpointError, match="it is read by Gather, whose inputs are not quantized here"):
        make_plan(
            open_source(source),
            "w8a8_static",
            codec=get_codec("onnx"),
            selection=Selection(include=("table*",)),
        )
    ids = torch.arange(50)
    zp.quantize_checkpoint(source, tmp_path / "out", "w8a8_static", format="onnx", calibration=ids)
    assert {n.split(".")[0] for n in parameters(tmp_path / "out/model.onnx") if "input" in n} == {"w"}


def language_model(folder: Path, *others: str) -> Path:
    """A graph that reads tokens: rows of a table, times a mask and positions, and a MatMul."""
    names = ["input_ids", "attention_mask", "position_ids", *others]
    made = helper.make_graph(
        [
            node("Gather", ["table", "input_ids"], ["e"]),
            node("Cast", ["attention_mask"], ["m"], to=1), node("Cast", ["position_ids"], ["p"], to=1),
            node("Mul", ["m", "p"], ["f"]), node("Unsqueeze", ["f", "last"], ["g"]),
            node("Mul", ["e", "g"], ["x"]), node("MatMul", ["x", "w"], ["y"]),
        ],
        "main", [info(name, TensorProto.INT64, ["n", "t"]) for name in names],
        [info("y", 1, ["n", "t", 32])],
        [numpy_helper.from_array(values((100, 64)), "table"), numpy_helper.from_array(np.array([-1]), "last"),
         numpy_helper.from_array(values((64, 32), 1), "w")],
    )  # fmt: skip
    save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder)
    (folder / "config.json").write_text('{"model_type": "bert", "vocab_size": 100}')
    return folder


def test_a_graph_of_tokens_is_calibrated_on_token_ids(tmp_path: Path) -> None:
    source, ids = language_model(tmp_path / "in"), torch.arange(60).reshape(5, 12) * 7 % 100
    zp.quantize_checkpoint(source, tmp_path / "out", "w8a8_static", format="onnx", calibration=ids)
    read = torch.from_numpy(values((100, 64)))[ids] * torch.arange(12)[:, None]  # all ones, and 0 to 11
    scale = (max(0.0, float(read.max())) - min(0.0, float(read.min()))) / 255
    assert parameters(tmp_path / "out/model.onnx")["w.input_scale"] == pytest.approx(scale, rel=1e-6)


def test_tokens_are_refused_where_inputs_do_not_follow_from_them(tmp_path: Path) -> None:
    def refused(source: Path, given: Any, match: str, error: type[Exception] = CalibrationError) -> None:
        with pytest.raises(error, match=match):
            zp.quantize_checkpoint(source, tmp_path / "out", "w8a8_static", format="onnx", calibration=given)
        assert not (tmp_path / "out").exists()

    plain, pixels = language_model(tmp_path / "in"), language_model(tmp_path / "more", "pixel_values")
    refused(pixels, torch.ones(2, 8, dtype=torch.int64), "reads 'pixel_values', which does not follow from")
    refused(plain, torch.full((2, 8), 100), r"has token 100, and the model knows 0\.\.99")
    refused(plain, "random", "static inputs take their scales from calibration, and random tokens are not")
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 100)
    refused(plain, text, "has no files of a tokenizer; copy its files there", UnsupportedError)
