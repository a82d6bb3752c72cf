"""Rows of families with experts whose layers all have attention."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from ...architectures import Config
from ...errors import UnsupportedError
from ..stored_forms import Reshaped
from .family import (
    ATTENTION,
    EVERYWHERE,
    EXPERTS,
    FLAT,
    LOCAL_EXPERTS,
    MLP,
    POST_NORM,
    PROJECTIONS,
    QUERY_NORMS,
    ROUTED_EXPERTS,
    ROUTER,
    SIGMOID,
    WIDE,
    Change,
    Derived,
    Family,
    Key,
    Values,
    has,
    of_row,
)

ROW = MappingProxyType({
    # Files of before have a vector.
    f"{FLAT}.weight": Change(shape=lambda _: Reshaped(lambda shape: shape, of_row)),
})
SHARED_EXPERT = MappingProxyType({
    "mlp.shared_expert_gate": FLAT, "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
})
SHARED_EXPERTS = MappingProxyType(
    {
        old.replace("shared_expert.", "shared_experts."): new
        for old, new in SHARED_EXPERT.items()
        if new != FLAT
    }
)
WITH_SHARED = MappingProxyType({
    **EXPERTS, "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
})
ROUTING = MappingProxyType({
    "expert_group_count": Key(("n_group",)), "expert_group_used_count": Key(("topk_group",)),
    "leading_dense_block_count": Key(("first_k_dense_replace",)),
    "expert_shared_count": Key(("n_shared_experts",)),
    "expert_weights_scale": Key(("routed_scaling_factor",), float),
    "expert_weights_norm": Key(("norm_topk_prob",), bool),
})
_RMS = MappingProxyType({
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0, "norm_topk_prob": False,
})


QWEN_EXPERTS = MappingProxyType({**EVERYWHERE, "norm_topk_prob": True})


def _whole_keys(text: Config) -> Values:
    """Raise UnsupportedError for shared key heads: llama.cpp misreads their norm."""
    if text["num_key_value_heads"] != text["num_attention_heads"]:
        raise UnsupportedError(
            f"num_key_value_heads is {text['num_key_value_heads']!r:.40} in config.json, but llama.cpp loads "
            f"models of olmoe that have as many as heads, {text['num_attention_heads']}; write safetensors"
        )
    return {}


_QWEN2_MOE = Family(
    architecture="qwen2moe", model_type="qwen2_moe", class_name="Qwen2MoeForCausalLM", wide=WIDE,
    layers=MappingProxyType({**ATTENTION, **ROUTER, **SHARED_EXPERT}), changes=ROW,
    experts=(("mlp.experts", PROJECTIONS),), numbers=WITH_SHARED, defaults=_RMS,
    always=MappingProxyType({**EVERYWHERE, "norm_topk_prob": False}),
)
FAMILIES = (
    Family(
        architecture="llama", model_type="mixtral", class_name="MixtralForCausalLM", halves=True, wide=WIDE,
        # Checkpoints have the first names, models of transformers 5 the others.
        layers=MappingProxyType({**ATTENTION, **ROUTER, "block_sparse_moe.gate": "ffn_gate_inp"}),
        experts=(("block_sparse_moe.experts", ("w1", "w3", "w2")), ("mlp.experts", PROJECTIONS)),
        numbers=LOCAL_EXPERTS,
        defaults=MappingProxyType({
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6,
        }),
    ),
    _QWEN2_MOE,
    dataclasses.replace(
        _QWEN2_MOE, architecture="qwen3moe", model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM",
        layers=MappingProxyType({**ATTENTION, **QUERY_NORMS, **ROUTER}), numbers=EXPERTS,
        always=QWEN_EXPERTS,
    ),
    dataclasses.replace(
        _QWEN2_MOE, architecture="olmoe", model_type="olmoe", class_name="OlmoeForCausalLM",
        layers=MappingProxyType({**ATTENTION, **QUERY_NORMS, **ROUTER}),
        numbers=MappingProxyType({
            key: names for key, names in EXPERTS.items() if key != "expert_feed_forward_length"
        }),
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
        always=MappingProxyType({"norm_topk_prob": False, "clip_qkv": None}), derived=Derived(_whole_keys),
    ),
    Family(
        architecture="glm4moe", model_type="glm4_moe", class_name="Glm4MoeForCausalLM", wide=WIDE, rotary=0.5,
        layers=MappingProxyType({
            **ATTENTION, **QUERY_NORMS, **MLP, **ROUTER, **POST_NORM, **SHARED_EXPERTS,
        }),
        tensors=MappingProxyType({"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}),
        experts=(("mlp.experts", PROJECTIONS),), numbers=ROUTED_EXPERTS, values=ROUTING,
        constants=MappingProxyType({"expert_gating_func": SIGMOID}),
        derived=Derived(read=lambda values: {"use_qk_norm": has(values, ".attn_q_norm.weight")}),
        defaults=MappingProxyType({
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 10000.0, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        }),
    ),
)
