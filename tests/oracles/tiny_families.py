"""Tiny models of all families that become GGUF files, by the type of the model, with random weights.

Each has layers of every kind that its family has, and numbers that follow from names alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import DECODER, EXPERTS, config_of
from tests.oracles.tiny_tokenizers import files
from tests.peers import transformers

_MODEL: dict[str, Any] = {**DECODER, "vocab_size": 360}
_FOUR = {**_MODEL, "num_hidden_layers": 4}
_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_GEMMA4 = {
    **_MODEL, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
    "vocab_size_per_layer_input": 360, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
_LATENT = {
    **_MODEL, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "topk_group": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_GRANITE = {
    **_MODEL, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}  # fmt: skip
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_HYBRID = {
    **_GRANITE, "num_hidden_layers": 4, "shared_intermediate_size": 64, "layer_types": _MIXED,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "position_embedding_type": None,
}  # fmt: skip
_NEMOTRON = {
    **{key: value for key, value in _MODEL.items() if key != "num_hidden_layers"}, "head_dim": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
}  # fmt: skip
_COHERE = {
    **_MODEL, "num_hidden_layers": 5, "head_dim": 16, "logit_scale": 0.25, "sliding_window": 16,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_CONV = ["conv", "conv", "full_attention", "conv"]
_ROUTED = {
    **_MODEL, "num_hidden_layers": 3, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "use_qk_norm": True, "num_nextn_predict_layers": 0,
}  # fmt: skip


def _config(name: str, **values: Any) -> Callable[[], transformers.PretrainedConfig]:
    return lambda: getattr(transformers, f"{name}Config")(**values)


FAMILIES: Mapping[str, Callable[[], transformers.PretrainedConfig]] = {
    **{
        name: lambda name=name: config_of(name, 360)  # type: ignore[misc]
        for name in (
            "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe",
        )
    },
    "seed_oss": _config("SeedOss", **_MODEL, head_dim=16),
    "ernie4_5": _config("Ernie4_5", **_MODEL, head_dim=16),
    "smollm3": _config("SmolLM3", **_FOUR, pad_token_id=2),
    "granite": _config("Granite", **_GRANITE), "olmo2": _config("Olmo2", **_MODEL),
    "olmo3": _config("Olmo3", **_FOUR, sliding_window=16),
    "glm4": _config("Glm4", **_MODEL, head_dim=16, pad_token_id=2),
    "phi3": _config("Phi3", **_MODEL, pad_token_id=2),
    "phi3_long": _config(
        "Phi3", **{**_MODEL, "max_position_embeddings": 1024}, pad_token_id=2, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "short_factor": [1.0, 1.0, 1.25, 1.25, 1.5, 1.5], "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
        }, original_max_position_embeddings=256,
    ),
    "gpt2": _config(
        "GPT2", vocab_size=360, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_ctx=128, bos_token_id=1,
        eos_token_id=2,
    ),
    "starcoder2": _config("Starcoder2", **_MODEL, use_bias=True, sliding_window=None),
    "stablelm": _config("StableLm", **_MODEL, use_qkv_bias=True),
    "gemma2": _config("Gemma2", **_MODEL, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "olmoe": _config("Olmoe", **{**_MODEL, "num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2),
    "glm4_moe": _config("Glm4Moe", **_ROUTED),
    "qwen3_next": _config(
        "Qwen3Next", **_FOUR, **EXPERTS, **_LINEAR, head_dim=32, shared_expert_intermediate_size=64,
        decoder_sparse_step=1, norm_topk_prob=True,
    ),
    "qwen3_5": _config("Qwen3_5Text", **_FOUR, **_LINEAR, head_dim=32),
    "qwen3_5_moe": _config(
        "Qwen3_5MoeText", **_FOUR, **EXPERTS, **_LINEAR, head_dim=32, shared_expert_intermediate_size=64
    ),
    "lfm2": _config("Lfm2", **_FOUR, layer_types=_CONV),
    "lfm2_moe": _config("Lfm2Moe", **_FOUR, **EXPERTS, num_dense_layers=1, layer_types=_CONV),
    "nemotron_h": _config("NemotronH", **_NEMOTRON, layers_block_type=["mamba", "attention", "mlp", "mamba"]),
    "nemotron_h_moe": _config(
        "NemotronH", **_NEMOTRON, layers_block_type=["mamba", "attention", "moe", "mamba", "moe"],
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64, n_group=1, topk_group=1,
    ),
    "gemma4": _config("Gemma4Text", **_GEMMA4),
    "gemma4_shared": _config("Gemma4Text", **{
        **_GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4_moe": _config(
        "Gemma4Text", **_GEMMA4, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32, num_global_key_value_heads=1, attention_k_eq_v=True,
    ),
    "deepseek_v2": _config("DeepseekV2", **_LATENT, n_group=1, topk_method="greedy"),
    "deepseek_v3": _config("DeepseekV3", **_LATENT, n_group=2, rope_parameters=_YARN),
    "glm_moe_dsa": _config(
        "GlmMoeDsa", **{**_LATENT, "n_group": 1}, index_n_heads=4, index_head_dim=128, index_topk=16,
    ),
    "llama4": _config(
        "Llama4Text", **_FOUR, **_LOCAL, intermediate_size_mlp=192, head_dim=16, interleave_moe_layer_step=2,
    ),
    "cohere": _config("Cohere", **_MODEL, logit_scale=0.25), "cohere2": _config(
        "Cohere2", **_FOUR, logit_scale=0.25, sliding_window=16, rotary_pct=1.0,
    ),
    "cohere2_moe": _config("Cohere2Moe", **_COHERE), "cohere2_moe_shared": _config(
        "Cohere2Moe", **_COHERE, first_k_dense_replace=1, prefix_dense_intermediate_size=64,
        rms_norm_eps=1e-5, num_shared_experts=2, expert_selection_fn="sigmoid", norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "nemotron_h_latent": _config(
        "NemotronH", **_NEMOTRON, layers_block_type=["mamba", "attention", "moe", "mamba", "moe"],
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, moe_latent_size=32,
        moe_shared_expert_intermediate_size=64, n_group=1, topk_group=1,
    ),
    "gpt_oss": _config(
        "GptOss", **_MODEL, **_LOCAL, head_dim=16, sliding_window=16, rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 64, "truncate": True,
        },
    ),
    "granitemoe": _config("GraniteMoe", **_GRANITE, **_LOCAL),
    "granitemoeshared": _config("GraniteMoeShared", **_GRANITE, **_LOCAL, shared_intermediate_size=64),
    "granitemoehybrid": _config("GraniteMoeHybrid", **_HYBRID, **_LOCAL),
    "granitemoehybrid_dense": _config(
        "GraniteMoeHybrid", **_HYBRID, num_local_experts=0, num_experts_per_tok=0
    ),
}  # fmt: skip
"""By name, what makes a configuration."""


def write(folder: Path, name: str) -> torch.nn.Module:
    """Write a checkpoint of a tiny model of a family in float32, and return the model."""
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval()
    with torch.no_grad():
        biases = (pair for pair in model.named_buffers() if pair[0].endswith("bias"))
        for place, tensor in (*model.named_parameters(), *biases):
            random = np.random.default_rng(zlib.crc32(place.encode())).standard_normal(tuple(tensor.shape))
            # Norms stay near what they are made as; of other vectors processors might make other last bits.
            usual = 1.0 if "norm" in place and float(tensor.flatten()[0]) == 1.0 else 0.0
            tensor.copy_(torch.from_numpy(usual + random * (0.1 if tensor.ndim == 1 else 0.2)))
    model.save_pretrained(folder)
    for file, data in files("byte_level").items():
        (folder / file).write_bytes(data)
    return model
