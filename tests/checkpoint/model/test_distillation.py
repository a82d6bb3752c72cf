"""Quantized checkpoints whose scales are trained for the outputs of the blocks of the float model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.model import distillation

pytestmark = pytest.mark.rotating


def ids(windows: int = 8, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 512, (windows, length), generator=torch.Generator().manual_seed(0))


def distill(source: Path, quantized: Path, out: Path, **options: Any) -> zp.RunResult:
    return zp.distill_checkpoint(source, quantized, out, **{"calibration": ids(), "steps": 20, **options})


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    zp.quantize_checkpoint(source, out, "int3:g64", ignore="lm_head")
    return out


def block_outputs(folder: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the last block gives, before the norm."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    found: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda *given: found.append(given[-1]))
    with torch.no_grad():
        model(tokens)
    return found[0]


def test_outputs_of_blocks_come_closer_and_only_scales_change(
    source: Path, quantized: Path, tmp_path: Path
) -> None:
    result = distill(source, quantized, tmp_path / "out")
    errors = re.match(
        r"outputs of 2 blocks are off by ([\d.]+)% .* by ([\d.]+)% before .* which changed 2", result.notes[0]
    )
    assert errors is not None
    assert float(errors[1]) < 0.97 * float(errors[2])
    before, after = tensors_of(quantized), tensors_of(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed
    assert {name.rpartition(".")[2] for name in changed} == {"weight_scale"}
    configs = [(folder / "config.json").read_bytes() for folder in (quantized, tmp_path / "out")]
    assert configs[0] == configs[1]
    unseen = torch.randint(0, 512, (8, 24), generator=torch.Generator().manual_seed(1))
    wanted, shares = block_outputs(source, unseen), []
    for which in ("out", quantized):
        zp.dequantize_checkpoint(tmp_path / which, tmp_path / "floats", dtype="float32", overwrite=True)
        found = block_outputs(tmp_path / "floats", unseen)
        shares.append(float((found - wanted).square().sum() / wanted.square().sum()))
    assert shares[0] < 0.97 * shares[1]


def test_a_rotated_checkpoint_is_trained_against_the_rotated_model(source: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(source, tmp_path / "rotated", "int3:g64", method="rotate+nearest")
    result = distill(source, tmp_path / "rotated", tmp_path / "out")
    errors = re.match(r"outputs of 2 blocks are off by ([\d.]+)% .* by ([\d.]+)% before", result.notes[0])
    assert errors is not None
    assert float(errors[1]) < 0.97 * float(errors[2]) < 50  # of the model that is not rotated, over 100
    assert zp.verify_checkpoint(tmp_path / "out", source).ok


def test_the_manifest_says_what_is_trained_and_verify_measures_it(
    source: Path, quantized: Path, tmp_path: Path
) -> None:
    distill(source, quantized, tmp_path / "out", steps=2)
    text = (tmp_path / "out" / "zeropoint_manifest.json").read_text()
    said = re.findall(r'^"(model\.layers\.[\w.]+_proj)": (\{.*?\}),?$', text, re.MULTILINE)
    assert len(said) == len(dict(said)) == 14
    assert {about for _, about in said} == {'{"method": "distill"}'}
    assert {each.method for each in zp.inspect_checkpoint(tmp_path / "out").schemes} == {"distill"}
    found = zp.verify_checkpoint(tmp_path / "out", source)
    assert found.ok
    assert "errors are measured" in str(found)
    assert zp.verify_checkpoint(tmp_path / "out", require_manifest=True).ok


def test_an_interrupted_command_resumes_to_the_same_bytes(
    source: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill(source, quantized, tmp_path / "whole", steps=4)
    add, blocks = distillation._Scales.add, iter(("model.layers.0",))

    def stop(self: Any, block: str, found: Any) -> None:
        if next(blocks, None) is None:
            raise KeyboardInterrupt
        add(self, block, found)

    with monkeypatch.context() as patch:
        patch.setattr(distillation._Scales, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            distill(source, quantized, tmp_path / "out", steps=4)
    folder = tmp_path / ".out.solved"
    assert [path.name for path in folder.glob("*.safetensors")] == ["0.safetensors"]
    with pytest.raises(zp.CheckpointError, match="differs in 'steps'"):
        distill(source, quantized, tmp_path / "out", steps=5)
    trained: list[int] = []
    monkeypatch.setattr(distillation._Scales, "add", lambda *given: (trained.append(1), add(*given)))
    resumed = distill(source, quantized, tmp_path / "out", steps=4, workers=1)
    assert trained == [1]
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert "2 blocks" in resumed.notes[0]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("to", "layout", "changed"),
    [("nvfp4a16", None, "weight_scale"), ("int4:g32", "gptq", "scales"), ("fp8", None, "weight_scale")],
)
def test_layouts_with_tensors_of_scales_keep_their_files(
    source: Path, tmp_path: Path, to: str, layout: str | None, changed: str
) -> None:
    data = {"calibration": ids()} if to == "fp8" else {}
    zp.quantize_checkpoint(source, tmp_path / "q", to, format=layout, ignore="lm_head", **data)
    distill(source, tmp_path / "q", tmp_path / "out", learning_rate=0.05)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    before, after = tensors_of(tmp_path / "q"), tensors_of(tmp_path / "out")
    pairs = {name: (before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before}
    different = {name for name, pair in pairs.items() if not torch.equal(*pair)}
    assert {name.rpartition(".")[2] for name in different} <= {changed}


def test_what_cannot_be_trained_is_refused_in_one_sentence(
    source: Path, quantized: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = synthetic_llama.write(tmp_path / "other", dtype=torch.float32)
    with pytest.raises(zp.CheckpointError, match="is not quantized; pass the float checkpoint, then the one"):
        distill(source, source, out)
    with pytest.raises(zp.CheckpointError, match="is quantized itself; pass the float checkpoint, then"):
        distill(quantized, quantized, out)
    with pytest.raises(zp.RangeError, match="steps=0 must be at least 1"):
        distill(other, quantized, out, steps=0)
    zp.quantize_checkpoint(source, tmp_path / "mx", "mxfp4a16", ignore="lm_head")
    with pytest.raises(zp.UnsupportedError, match=r"no scale can be trained: .* are powers of two; keep the"):
        distill(source, tmp_path / "mx", out)
    zp.quantize_checkpoint(source, tmp_path / "q8.gguf", "q8_0", format="gguf")
    with pytest.raises(zp.UnsupportedError, match="hold codes and scales in one tensor"):
        distill(source, tmp_path / "q8.gguf", out)
    with pytest.raises(zp.CheckpointError, match=r"training a block takes about .* use max_memory='\d+M'"):
        distill(source, quantized, out, max_memory="700M")
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(zp.CheckpointError, match=r"mine\.txt"):
        distill(source, quantized, out)
    assert not (tmp_path / ".out.solved").exists()


def test_both_models_are_trained_in_the_memory_that_a_refusal_names(
    source: Path, quantized: Path, tmp_path: Path
) -> None:
    given = {"steps": 1, "calibration": ids(1)}
    with pytest.raises(zp.CheckpointError, match="for one window at a time") as refused:
        distill(source, quantized, tmp_path / "out", max_memory="700M", **given)
    (enough,) = re.findall(r"use max_memory='(\d+)M'", str(refused.value))
    with pytest.raises(zp.CheckpointError, match="for one window at a time"):
        distill(source, quantized, tmp_path / "out", max_memory=f"{int(enough) - 1}M", **given)
    result = distill(source, quantized, tmp_path / "out", max_memory=f"{enough}M", **given)
    assert "2 blocks" in result.notes[0]
