"""Recipes by model family, as ``--recipe`` names: each a row of data.

Attention is a fifth of a model's weights or less, and of all layers it suffers most from few bits; it gets 8
bits where the rest gets 4. Experts are most of a model with experts, and all of a token pass only a few of
them, so that shared experts count as attention does. An encoder of some hundred megabytes gets 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ATTENTION = """\
method: mse
default: w4a16
rules:
  - name: "*.self_attn.*_proj"
    preset: w8a16
"""
_SHARED = """\
method: mse
default: w4a16
rules:
  - name: "*.self_attn.*"
    preset: w8a16
  - name: "*.{shared}.*_proj"
    preset: w8a16
"""
_EXPERTS = """\
default: keep
rules:
  - name: "*.mlp.experts.*_proj"
    preset: mxfp4
"""
_ENCODER = """\
method: mse
default: w8a16
"""
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen", "gemma", "mixtral", "qwen3-moe"), _ATTENTION),
        "qwen2-moe": _SHARED.format(shared="shared_expert"),
        "deepseek": _SHARED.format(shared="shared_experts"),
        "gpt-oss": _EXPERTS,
        "bert": _ENCODER,
    }
)
"""Name to recipe in YAML; gpt-oss's is for the layout of its own checkpoints."""
