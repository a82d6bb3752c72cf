"""Checkpoints whose scales a rule searched: written, read back, and proven."""

from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import save

import zeropoint as zp


@pytest.mark.parametrize("to", ["nvfp4a16:scale=search", "mxfp4a16:scale=search", "w4a16:scale=search"])
def test_a_checkpoint_with_searched_scales_is_proven_and_has_less_error(to: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    save(source, {"layers.0.up_proj.weight": weight}, {"model_type": "llama", "torch_dtype": "bfloat16"})
    errors = {}
    for name in (to, to.partition(":")[0]):
        out = tmp_path / name.replace(":", "_")
        zp.quantize_checkpoint(source, out, name)
        checked = zp.verify_checkpoint(out, against=source)
        assert checked.problems == ()
        errors[name] = checked.layers[0].error.relative
    assert errors[to] < errors[to.partition(":")[0]]
