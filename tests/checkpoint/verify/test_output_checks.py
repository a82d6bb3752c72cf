"""Outputs of solved weights, verified on the statistics that they were solved on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint import manifests
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp

pytestmark = pytest.mark.rotating

MODULE = "model.layers.1.mlp.down_proj"


def ids(seed: int = 0, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 64, (6, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.llama(layers=2, initializer_range=0.1).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gram(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "gram.safetensors"
    zp.gather_statistics(llama, path, ids(), gram=True)
    return path


def quantize(source: Path, out: Path, to: str = "int4:g32", **options: Any) -> zp.RunResult:
    given = {"method": "gptq", "ignore": "lm_head", **options}
    return zp.quantize_checkpoint(source, out, to, **given)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("int4:g32", {}),
        ("int4:g32", {"method": "descent", "format": "gptq"}),
        ("int4:g32", {"method": "adaround"}),
        ("nvfp4a16", {}),
        ("q8_0", {"format": "gguf"}),
    ],
)
def test_every_weight_that_was_solved_on_a_file_is_checked_on_it(
    llama: Path, tmp_path: Path, gram: Path, to: str, options: dict[str, Any]
) -> None:
    result = quantize(llama, tmp_path / "out", to, **options, statistics=gram, force=True)
    said = [weight["loss"]["outputs"] for weight in result.to_dict()["weights"]]
    assert len(said) == 14
    assert all(each["loss"] > 0 for each in said)
    found = zp.verify_checkpoint(tmp_path / "out", llama, statistics=gram)
    assert found.ok
    assert found.to_dict()["outputs"] == {
        "stated": 14, "checked": 14, "others": 0, "absent": 0, "moved": 0
    }  # fmt: skip
    assert any(note.startswith("outputs of 14 of 14 weights were computed") for note in found.notes)
    assert zp.verify_checkpoint(tmp_path / "out", llama).outputs is None


def test_experts_are_checked_on_what_they_borrow_from_all_of_their_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, num_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    gram = tmp_path / "gram.safetensors"
    zp.gather_statistics(tmp_path / "mixture", gram, ids(), gram=True)
    quantize(tmp_path / "mixture", tmp_path / "out", statistics=gram)
    found = zp.verify_checkpoint(tmp_path / "out", tmp_path / "mixture", statistics=gram)
    assert found.ok
    assert found.outputs is not None
    assert found.outputs.checked == found.outputs.stated == 4 + 4 * 3


def test_other_statistics_and_targets_that_no_file_holds_are_counted(
    llama: Path, tmp_path: Path, gram: Path
) -> None:
    quantize(llama, tmp_path / "out", statistics=gram)
    other = tmp_path / "other.safetensors"
    zp.gather_statistics(llama, other, ids(1), gram=True)
    found = zp.verify_checkpoint(tmp_path / "out", llama, statistics=other)
    assert found.ok
    assert found.outputs is not None
    assert (found.outputs.checked, found.outputs.others) == (0, 14)
    assert "14 of 14 weights were solved on another Gram matrix than that of the statistics" in found.notes
    quantize(llama, tmp_path / "magr", method="magr+gptq", statistics=gram)
    found = zp.verify_checkpoint(tmp_path / "magr", llama, statistics=gram)
    assert found.outputs is not None
    assert (found.outputs.checked, found.outputs.moved) == (0, 14)
    # The first layers of a run of the model see what the file has; sums are the same in 64s of tokens.
    zp.gather_statistics(llama, other, ids(0, 64), gram=True, overwrite=True)
    quantize(llama, tmp_path / "run", calibration=ids(0, 64))
    found = zp.verify_checkpoint(tmp_path / "run", llama, statistics=other)
    assert found.ok
    assert found.outputs is not None
    assert (found.outputs.checked, found.outputs.others) == (3, 11)
    quantize(llama, tmp_path / "mse", method="mse")
    found = zp.verify_checkpoint(tmp_path / "mse", llama, statistics=gram)
    assert (
        "the manifest says of no weight how far its outputs are off, so that none was checked" in found.notes
    )


def weights_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / manifests.NAME).read_text())["weights"]
    return found


@pytest.mark.parametrize(
    ("number", "says"), [("loss", "outputs are off by"), ("bound", "outputs have a bound of")]
)
def test_a_manifest_that_says_something_else_is_wrong(
    llama: Path, tmp_path: Path, gram: Path, number: str, says: str
) -> None:
    quantize(llama, tmp_path / "out", statistics=gram)
    weights = weights_of(tmp_path / "out")
    weights[MODULE]["outputs"][number] = 0.5
    manifests.write(tmp_path / "out", weights=weights)
    found = zp.verify_checkpoint(tmp_path / "out", llama, statistics=gram)
    (problem,) = found.problems
    assert problem.where == MODULE
    assert problem.what.startswith(says)
    assert problem.what.endswith("of their squares, but 50.0000% in the manifest")


def test_codes_that_were_changed_together_with_their_hashes_are_found(
    llama: Path, tmp_path: Path, gram: Path
) -> None:
    quantize(llama, tmp_path / "out", statistics=gram)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{MODULE}.weight_packed"][3, 0] ^= 1  # one code, by one step
    save_file(tensors, file, metadata={"format": "pt"})
    manifests.write(tmp_path / "out", weights=weights_of(tmp_path / "out"))
    assert zp.verify_checkpoint(tmp_path / "out", llama).ok
    (problem,) = zp.verify_checkpoint(tmp_path / "out", llama, statistics=gram).problems
    assert problem.where == MODULE
    tensors[f"{MODULE}.weight_packed"][5] = 0  # all of a row
    save_file(tensors, file, metadata={"format": "pt"})
    manifests.write(tmp_path / "out", weights=weights_of(tmp_path / "out"))
    problems = zp.verify_checkpoint(tmp_path / "out", llama, statistics=gram).problems
    assert any("in 1 row, and by more than those of error feedback: row 5" in p.what for p in problems)


def test_what_cannot_be_checked_is_refused(llama: Path, tmp_path: Path, gram: Path) -> None:
    quantize(llama, tmp_path / "out", statistics=gram)
    with pytest.raises(zp.OptionError, match="outputs are from those of the original; add against="):
        zp.verify_checkpoint(tmp_path / "out", statistics=gram)
    plain = tmp_path / "plain.safetensors"
    zp.gather_statistics(llama, plain, ids())
    with pytest.raises(zp.CalibrationError, match="has no Gram matrices"):
        zp.verify_checkpoint(tmp_path / "out", llama, statistics=plain)
    other = shutil.copytree(llama, tmp_path / "other")
    whole = load_file(other / "model.safetensors")
    save_file({name: x * 2 for name, x in whole.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(zp.CalibrationError, match="has statistics of another checkpoint"):
        zp.verify_checkpoint(tmp_path / "out", other, statistics=gram)
    weights = weights_of(tmp_path / "out")
    weights[MODULE]["outputs"] = {"loss": 1}
    manifests.write(tmp_path / "out", weights=weights)
    found = zp.verify_checkpoint(tmp_path / "out", llama, statistics=gram)
    assert any(problem.where == manifests.NAME for problem in found.problems)
