"""Models of transformers whose keys and values are those of vLLM's float8 cache on a CPU.

Its kernel (0.32) divides by the scale and cuts the mantissa to three bits, where others round to nearest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LOST = (1 << 20) - 1
"""Bits of a float32's mantissa behind the first three."""


def cut(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return values of a cache with a scale, in normal numbers of float8_e4m3fn cut towards zero."""
    scaled = (values.float() / scale).clamp(-LARGEST, LARGEST).contiguous()
    return ((scaled.view(torch.int32) & ~_LOST).view(torch.float32) * scale).to(values.dtype)


def logits_with_cut_cache(
    floats: Path, codes: Path, windows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the logits of ``floats`` with keys and values cut by the scales of ``codes``."""
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tensors: dict[str, torch.Tensor] = {}
    for path in codes.glob("*.safetensors"):
        tensors |= load_file(path)
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        of_key, of_value = (
            float(tensors[f"model.layers.{module.layer_idx}.self_attn.{name}_scale"]) for name in "kv"
        )
        return usual(module, query, cut(key, of_key), cut(value, of_value), *more, **named)

    ALL_ATTENTION_FUNCTIONS.register("cut_cache", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("cut_cache", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=dtype, attn_implementation="cut_cache").eval()
    with torch.no_grad():
        return torch.stack([model(window[None]).logits[0].float() for window in windows])
