"""Files of the fp8 layout, decoded by transformers on a CPU: bit for bit what they decode to here."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

import zeropoint as zp


def test_transformers_decodes_the_blocks_to_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "fp8_block", format="fp8-block")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    found = dict(loaded.named_parameters())
    for name, weight in model.named_parameters():
        wanted = weight.detach()
        if name.endswith("_proj.weight"):
            wanted = zp.quantize(wanted, "float8_e4m3fn:block128x128:scale=float32").dequantize()
            assert not torch.equal(wanted, weight)
        assert found[name].dtype is torch.bfloat16
        assert torch.equal(found[name], wanted), name
