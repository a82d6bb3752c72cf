"""A checkpoint that is quantized as ONNX: exported under its own names, and run by onnxruntime."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from tests.codecs.onnx_models import decoded
from tests.oracles import tiny_models
from tests.peers import Peer, transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import Limits

onnxruntime = Peer("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    tiny_models.llama(layers=2).to(torch.bfloat16).save_pretrained(made)
    return made


def run(out: Path, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(out / "model.onnx", options)
    given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    return [torch.from_numpy(each) for each in session.run(None, given)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["onnx", "onnx-matmulnbits"])
def test_onnxruntime_runs_a_model_with_the_decoded_weights_under_their_names(
    layout: str, folder: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "out"
    result = zp.quantize_checkpoint(folder, out, "int4:g32", format=layout, ignore="lm_head")
    assert any("by torch" in note and "in float32" in note for note in result.notes)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "config.json").read_bytes() == before["config.json"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = decoded(out)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(weights) == linear - {"lm_head"}
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(f"{name}.weight").copy_(value)
        ids, mask = torch.arange(1, 22).reshape(3, 7), torch.ones(3, 7, dtype=torch.int64)
        mask[1, 5:] = 0
        wanted = model(input_ids=ids, attention_mask=mask).logits
    (found,) = run(out, ids, mask)
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-5)
    again = zp.quantize_checkpoint(folder, out, "int4:g32", format=layout, ignore="lm_head")
    assert again.to_dict()["output_bytes"] == result.to_dict()["output_bytes"]


@pytest.mark.slow
def test_static_inputs_of_an_exported_model_have_the_ranges_of_the_model(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "in", "bert")
    ids = torch.arange(64).reshape(4, 16)
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "w8a8_static", format="onnx", calibration=ids)
    model = transformers.AutoModel.from_pretrained(tmp_path / "in", dtype=torch.float32).eval()
    found = zp.calibrate(model, "w8a8_static", [{"input_ids": ids}])
    parameters = {
        each.name: numpy_helper.to_array(each)
        for each in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    }
    compared = 0
    for place, own in found.params.items():
        scale = parameters.get(f"{place}_scale")
        if scale is not None:  # a pooler is no part of the graph
            assert scale == pytest.approx(float(own.scales[0]), rel=1e-4)
            compared += 1
    assert compared >= 12
    assert zp.verify_checkpoint(tmp_path / "out").problems == ()


@pytest.mark.slow
def test_an_encoder_keeps_the_names_of_its_outputs(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "in", "bert")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int8:channel", format="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert [each.name for each in session.get_outputs()][:1] == ["last_hidden_state"]
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path
) -> None:
    base = Limits.default(1, None).base_memory
    with pytest.raises(
        zp.CheckpointError, match=r"^exporting .* takes about .*max_memory.*export it by hand"
    ):
        zp.quantize_checkpoint(folder, tmp_path / "out", "int4:g32", format="onnx", max_memory=base + 1000)
    assert list(tmp_path.iterdir()) == []


def test_data_are_refused_before_the_model_is_exported(folder: Path, tmp_path: Path) -> None:
    options = {"format": "onnx", "quality": "good", "calibration": "random"}
    with pytest.raises(
        zp.CalibrationError, match=r"^format='onnx' takes ranges .*quality='fast' or method='mse'"
    ):
        zp.quantize_checkpoint(folder, tmp_path / "out", "int4:g32", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_asks_for_the_graph(folder: Path) -> None:
    with pytest.raises(
        zp.UnsupportedError, match="zeropoint quantize exports a checkpoint of transformers by"
    ):
        zp.plan_checkpoint(folder, "int4:g32", format="onnx")
