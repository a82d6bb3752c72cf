"""Checkpoints with rescaled channels: written, resumed, verified against the original, loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.model.test_solved_weights import Stopping, ids, stopping
from tests.checkpoint.written import digests
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.rescaled import RESCALED, folds_text, parsed_folds

pytestmark = pytest.mark.rotating

__all__ = ["stopping"]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bfloat16 in which the inputs of layers have sizes that differ."""
    model = tiny_models.llama(layers=2, initializer_range=0.1, vocab_size=512).to(torch.bfloat16)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(torch.exp(torch.randn(parameter.shape)))
    folder = tmp_path_factory.mktemp("uneven")
    model.save_pretrained(folder)
    return folder


def quantize(source: Path, out: Path, to: str = "int4:g32", **options: Any) -> zp.RunResult:
    given = {"method": "awq+shift+gptq", "calibration": ids(), "ignore": "lm_head", **options}
    return zp.quantize_checkpoint(source, out, to, **given)


def test_a_run_that_is_interrupted_resumes_to_the_same_bytes(
    uneven: Path, tmp_path: Path, stopping: Stopping
) -> None:
    quantize(uneven, tmp_path / "whole")
    with stopping(9):
        quantize(uneven, tmp_path / "out")
    assert len(list((tmp_path / ".out.solved").glob("rescaled-*.json"))) == 2
    quantize(uneven, tmp_path / "out", workers=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("int4:g32", {"method": "awq+mse_weighted"}),
        ("int4:g32", {"method": "equalize+awq+gptq", "format": "gptq"}),
        ("nvfp4", {"method": "awq+gptq"}),
        ("w8a8", {"method": "smooth+nearest"}),
        ("w8a8_static", {"method": "smooth+nearest"}),
        ("q8_0", {"method": "awq+gptq", "format": "gguf"}),
    ],
)
def test_every_layout_is_verified_against_the_original(
    uneven: Path, tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    result = quantize(uneven, tmp_path / "out", to, **options, force=True)
    assert any(RESCALED in note for note in result.notes)
    assert not any("ANOTHER MODEL" in note for note in result.notes)
    proven = zp.verify_checkpoint(tmp_path / "out", uneven)
    assert proven.ok
    # Error feedback has no bound of weights, and none is claimed.
    assert ("proven bound" not in proven.summary[-1]) == options["method"].endswith("gptq")
    (tmp_path / "out" / RESCALED).unlink()
    found = zp.verify_checkpoint(tmp_path / "out", uneven)
    assert any("layernorm" in problem.where or "norm" in problem.where for problem in found.problems)


def test_transformers_runs_the_result_with_the_norms_that_were_written(uneven: Path, tmp_path: Path) -> None:
    quantize(uneven, tmp_path / "out", "int8:g32", method="awq+mse_weighted")
    folds, *_ = parsed_folds((tmp_path / "out" / RESCALED).read_text())
    norm = "model.layers.0.input_layernorm.weight"
    written, original = (load_file(next(f.glob("*.safetensors")))[norm] for f in (tmp_path / "out", uneven))
    assert torch.equal(written, folds[norm].of(original))
    assert not torch.equal(written, original)
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats", dtype="float32")
    base, other = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (uneven, tmp_path / "floats")
    )
    with torch.no_grad():
        wanted, found = (model(ids(2)).logits for model in (base, other))
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"zeropoint_rescaled": 2}, "does not say how channels are rescaled"),
        ({"tensors": 3}, "names no tensors"),
        ({"tensors": {"model.norm.weight": {"rows": "!", "columns": None, "one": 0.0}}}, "damaged"),
        ({"tensors": {"model.norm.weight": {"rows": "AAA=", "columns": None, "one": 0.0}}}, "another size"),
        ({"tensors": {"stranger": {"rows": None, "columns": None, "one": 0.0}}}, "not in the checkpoint"),
        ({"tensors": {"model.norm.weight": {"rows": None, "columns": None, "one": 7}}}, "module adds"),
    ],
)
def test_a_file_that_is_damaged_is_refused(
    uneven: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    zp.quantize_checkpoint(uneven, tmp_path / "out", "int8:g32", ignore="lm_head")
    document = {**json.loads(folds_text({"model.norm.weight": zp_fold()})), **change}
    (tmp_path / "out" / RESCALED).write_text(json.dumps(document))
    with pytest.raises(zp.CheckpointError, match=says):
        zp.verify_checkpoint(tmp_path / "out", uneven)


def zp_fold() -> Any:
    _, fold = next(iter(parsed_folds(_EXAMPLE)[0].items()))
    return fold


_EXAMPLE = '{"zeropoint_rescaled": 1, "tensors": {"a": {"rows": "CAj4", "columns": null, "one": 1.0}}}'


def test_the_file_says_what_it_was_written_from() -> None:
    fold = zp_fold()
    assert (fold.rows.tolist(), fold.columns, fold.one) == ([8, 8, -8], None, 1.0)
    assert parsed_folds(folds_text({"a": fold}, ["note", ""], refused="why"))[1:] == (("note", ""), "why")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "smooth+nearest", "calibration": None}, "rescales channels"),
        ({"method": "awq"}, r"write awq\+mse_weighted"),
        ({"method": "awq+smooth+gptq"}, "do the same"),
        ({"method": "shift+awq+gptq"}, r"write awq\+shift\+gptq"),
    ],
)
def test_what_cannot_be_done_is_refused(
    uneven: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(zp.ZeropointError, match=says):
        quantize(uneven, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
