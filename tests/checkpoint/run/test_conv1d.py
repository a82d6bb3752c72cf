"""Weights of Conv1D, which files of floats have as (in, out) and quantized ones as those of linear layers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import digests_of_outputs, save, tensors_of, weight

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.engines import TRANSFORMERS, VLLM, Loads
from zeropoint.codecs.registry import DEFAULT

NAME, KEPT = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 1, "n_head": 2}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "in", {NAME: weight(64, 192), KEPT: weight(64, 64)}, CONFIG)


@pytest.mark.parametrize(
    ("layout", "scheme", "by_transformers", "by_vllm"),
    [
        ("compressed-tensors", "int4:g32", Loads.NO, Loads.YES),
        ("compressed-tensors", "int8:channel", Loads.NO, Loads.YES),
        ("compressed-tensors", "w8a8", Loads.NO, Loads.NO),
        ("gptq", "int4:g32", Loads.PARTLY, Loads.YES),
        ("awq", "int4:g32:asym", Loads.NO, Loads.YES),
        ("bitsandbytes", "nf4", Loads.YES, Loads.NO),
        ("llm-int8", "llm_int8", Loads.YES, Loads.NO),
        ("modelopt", "nvfp4a16", None, Loads.NO),
    ],
)
def test_a_weight_is_quantized_along_its_inputs_and_comes_back_as_it_was(
    layout: str, scheme: str, by_transformers: Loads | None, by_vllm: Loads, source: Path, tmp_path: Path
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    plan = zp.quantize_checkpoint(source, out, scheme, format=layout, ignore=KEPT, force=True).plan
    (quantized,) = plan.weights
    assert quantized.shape == (192, 64)
    said = {v.engine: v.loads for v in verdicts(plan)}
    assert by_transformers in (None, said[TRANSFORMERS])
    assert said[VLLM] is by_vllm
    assert zp.verify_checkpoint(out, source).ok
    zp.dequantize_checkpoint(out, back, dtype="float32")
    found, original = tensors_of(back), load_file(source / "model.safetensors")
    assert torch.equal(found[KEPT], original[KEPT].float())
    expected = zp.quantize(original[NAME].t().contiguous(), str(quantized.layer.weight))
    assert torch.equal(found[NAME].t(), expected.dequantize(torch.float32))
    small = Limits(workers=3, tile_values=256)
    tiled = make_plan(
        open_source(source), scheme, codec=plan.codec, selection=Selection(ignore=(KEPT,)), limits=small
    )
    run(tiled, tmp_path / "tiled")
    run(conversion_plan(open_source(out), "float32", DEFAULT, limits=small), tmp_path / "tiled_back")
    for whole, parts in ((out, tmp_path / "tiled"), (back, tmp_path / "tiled_back")):
        assert digests_of_outputs(whole) == digests_of_outputs(parts)


def test_a_layout_of_another_file_keeps_the_codes(source: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(source, tmp_path / "awq", "int4:g32:asym", format="awq", ignore=KEPT)
    zp.convert_checkpoint(tmp_path / "awq", tmp_path / "ct", format="compressed-tensors")
    assert zp.compare_checkpoints(tmp_path / "awq", tmp_path / "ct").equality.of_bits
    assert tensors_of(tmp_path / "ct")[f"{NAME}_shape"].tolist() == [192, 64]
