"""Scales of a cache from the run that quantizes: what the command for them alone gives, in one pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.model import solved_weights as door
from zeropoint.errors import CalibrationError, CheckpointError, UnsupportedError

pytestmark = pytest.mark.rotating

IDS = torch.randint(0, 512, (9, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_llama.write(tmp_path_factory.mktemp("floats") / "in")


def quantize(source: Path, out: Path, **given: Any) -> Any:
    asked = {"to": "w4a16", "calibration": IDS, "kv_scales": True} | given
    return zp.quantize_checkpoint(source, out, **asked)


@pytest.mark.parametrize("method", ["gptq", "shift+gptq", "rotate+gptq", "awq+gptq"])
def test_solved_weights_have_the_scales_of_the_command_for_them(
    method: str, source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "one", method=method)
    quantize(source, tmp_path / "plain", method=method, kv_scales=False)
    zp.add_kv_scales(tmp_path / "plain", tmp_path / "two", IDS)
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert sum(name.endswith(("k_scale", "v_scale")) for name in one) == 2 * synthetic_llama.LAYERS
    assert all(torch.equal(one[name], two[name]) for name in one)
    configs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert next(configs) == next(configs)


@pytest.mark.parametrize("given", [{}, {"method": "mse_weighted"}, {"to": "w8a8_static"}], ids=str)
def test_other_weights_have_the_scales_of_the_caches_of_the_float_model(
    given: dict[str, str], source: Path, tmp_path: Path
) -> None:
    result = quantize(source, tmp_path / "out", **given)
    assert any(note.startswith("scales of a cache for 2 attention layers") for note in result.notes)
    found = tensors_of(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=True)
    for number, layer in enumerate(cache.layers):
        for suffix, x in (("k_scale", layer.keys), ("v_scale", layer.values)):
            ours = found[f"model.layers.{number}.self_attn.{suffix}"]
            torch.testing.assert_close(ours, (x.abs().max() / 448).reshape(1), rtol=2**-7, atol=0)
    assert zp.verify_checkpoint(tmp_path / "out").ok


def test_a_resumed_run_has_the_same_scales(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source, tmp_path / "whole", method="shift+gptq")
    add, left = door.SolvedFolder.add, [9]

    def stopping(*given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        add(*given)

    monkeypatch.setattr(door.SolvedFolder, "add", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", method="shift+gptq")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"differs in .output."):
        quantize(source, tmp_path / "out", method="shift+gptq", kv_scales=False)
    quantize(source, tmp_path / "out", method="shift+gptq", workers=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_plan_keeps_the_request(source: Path, tmp_path: Path) -> None:
    zp.plan_checkpoint(source, "w4a16", kv_scales=True, out=tmp_path / "plan.json")
    with pytest.raises(CalibrationError, match=r"^kv_scales=True learns from keys and values of the model"):
        zp.quantize_checkpoint(source, tmp_path / "out", plan=tmp_path / "plan.json")
    zp.quantize_checkpoint(source, tmp_path / "out", plan=tmp_path / "plan.json", calibration=IDS)
    quantize(source, tmp_path / "same")
    assert digests(tmp_path / "out") == digests(tmp_path / "same")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"calibration": None}, CalibrationError, "pass calibration=FILE with text"),
        ({"calibration": None, "to": None, "budget": "5bpw"}, CalibrationError, "pass calibration=FILE"),
        ({"calibration": "random"}, CalibrationError, "random tokens do not have"),
        ({"format": "gptq"}, UnsupportedError, "no place in the layout of GPTQ; use one of compressed-"),
    ],
    ids=str,
)
def test_requests_without_sense_are_refused_before_anything_runs(
    given: dict[str, Any], kind: type[Exception], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        quantize(source, tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_models_whose_caches_have_no_such_scales_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "in")
    for method in ("nearest", "gptq"):
        with pytest.raises(UnsupportedError, match=r"has no attention layers .*; leave kv_scales=True out$"):
            quantize(tmp_path / "in", tmp_path / "out", to="int8:g64", method=method)


def test_a_checkpoint_of_floats_has_no_scales_of_a_cache(source: Path, tmp_path: Path) -> None:
    def scales(folder: Path) -> int:
        return sum(name.endswith(("k_scale", "v_scale")) for name in tensors_of(folder))

    quantize(source, tmp_path / "in")
    result = zp.dequantize_checkpoint(tmp_path / "in", tmp_path / "floats")
    assert any(note.startswith("4 scales of a cache left out, such as 'model.") for note in result.notes)
    assert scales(tmp_path / "floats") == 0
    quantize(tmp_path / "floats", tmp_path / "again")
    # Where other codes take their place, configuration and scales stay.
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "anew", "w8a16", dequantize_first=True)
    assert scales(tmp_path / "again") == scales(tmp_path / "anew") == 4
    assert "kv_cache_scheme" in (tmp_path / "anew" / "config.json").read_text()
