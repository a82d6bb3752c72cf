"""Rows of families with experts whose layers all have attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...architectures import Config
from ...errors import UnsupportedError
from ..stored_forms import Reshaped
from . import family as f
from .decoder_families import ALTERNATING

ROW = MappingProxyType({
    # Files of before have a vector.
    f"{f.FLAT}.weight": f.Change(shape=lambda _: Reshaped(
        lambda shape: shape, lambda shape: (1, *shape) if len(shape) == 1 else shape,
    )),
})
SHARED_EXPERT = MappingProxyType({
    "mlp.shared_expert_gate": f.FLAT, "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
})
SHARED_EXPERTS = MappingProxyType(
    {
        old.replace("shared_expert.", "shared_experts."): new
        for old, new in SHARED_EXPERT.items()
        if new != f.FLAT
    }
)
WITH_SHARED = MappingProxyType({
    **f.EXPERTS, "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
})
ROUTING = MappingProxyType({
    "expert_group_count": f.Key(("n_group",)), "expert_group_used_count": f.Key(("topk_group",)),
    "leading_dense_block_count": f.Key(("first_k_dense_replace",)),
    "expert_shared_count": f.Key(("n_shared_experts",)),
    "expert_weights_scale": f.Key(("routed_scaling_factor",), float),
    "expert_weights_norm": f.Key(("norm_topk_prob",), bool),
})
_RMS = MappingProxyType({
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0, "norm_topk_prob": False,
})


QWEN_EXPERTS = MappingProxyType({**f.EVERYWHERE, "norm_topk_prob": True})


def _whole_keys(text: Config) -> f.Values:
    """Raise UnsupportedError for shared key heads: llama.cpp misreads their norm."""
    if text["num_key_value_heads"] != text["num_attention_heads"]:
        raise UnsupportedError(
            f"num_key_value_heads is {text['num_key_value_heads']!r:.40} in config.json, but llama.cpp loads "
            f"models of olmoe that have as many as heads, {text['num_attention_heads']}; write safetensors"
        )
    return {}


def _types(text: Config) -> Config:
    """Return Cohere's kinds of layers, counted where config.json has none."""
    dense, count = text.get("first_k_dense_replace", 0), text["num_hidden_layers"]
    periods = [text["prefix_dense_sliding_window_pattern"]] * dense
    periods += [text["sliding_window_pattern"]] * (count - dense)
    places = [*range(1, dense + 1), *range(1, count - dense + 1)]
    kinds = [
        "full_attention" if at % period == 0 else "sliding_attention"
        for at, period in zip(places, periods, strict=True)
    ]
    layers = ["dense"] * dense + ["sparse"] * (count - dense)
    return {
        "layer_types": text.get("layer_types") or kinds,
        "mlp_layer_types": text.get("mlp_layer_types") or layers,
    }


def _cohere(text: Config) -> f.Values:
    """Return the metadata of Cohere's experts.

    Raises UnsupportedError for dense layers that are not the first, or not rotated as llama.cpp rotates them.
    """
    kinds, shared = [kind == "dense" for kind in text["mlp_layer_types"]], text["num_shared_experts"]
    dense, softmax = sum(kinds), text["expert_selection_fn"] == "softmax"
    full = "full_attention" in text["layer_types"][:dense]
    if not all(kinds[:dense]) or (full and text["prefix_dense_sliding_window_pattern"] != 1):
        raise UnsupportedError(
            "config.json has dense layers behind others, or without rotary embeddings, which llama.cpp does "
            "not compute in models of cohere2moe; write safetensors"
        )
    values: dict[str, int | bool] = {
        "leading_dense_block_count": dense,
        "expert_gating_func": f.SOFTMAX if softmax else f.SIGMOID,
        # transformers takes the softmax of chosen experts alone.
        "expert_weights_norm": softmax or bool(text["norm_topk_prob"]),
    }
    if shared:
        values["expert_shared_count"] = shared
        values["expert_shared_feed_forward_length"] = shared * text["intermediate_size"]
    return values


def _of_cohere(values: Mapping[str, Any]) -> dict[str, Any]:
    count, dense = values.get("block_count"), values.get("leading_dense_block_count", 0)
    if type(count) is not int or type(dense) is not int or not 0 <= dense <= count <= 1 << 12:
        return {}
    return {
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (count - dense),
        "expert_selection_fn": "softmax" if values.get("expert_gating_func") == f.SOFTMAX else "sigmoid",
        "norm_topk_prob": values.get("expert_weights_norm", False),
        "num_shared_experts": values.get("expert_shared_count", 0),
    }


_QWEN2_MOE = f.Family(
    architecture="qwen2moe", model_type="qwen2_moe", class_name="Qwen2MoeForCausalLM", wide=f.WIDE,
    layers=MappingProxyType({**f.ATTENTION, **f.ROUTER, **SHARED_EXPERT}), changes=ROW,
    experts=(("mlp.experts", f.PROJECTIONS),), numbers=WITH_SHARED, defaults=_RMS,
    always=MappingProxyType({**f.EVERYWHERE, "norm_topk_prob": False}),
)
FAMILIES = (
    f.Family(
        architecture="cohere2moe", model_type="cohere2_moe", class_name="Cohere2MoeForCausalLM", wide=f.WIDE,
        layers=MappingProxyType({
            **{old: new for old, new in f.ATTENTION.items() if new != "ffn_norm"}, **f.MLP, **f.ROUTER,
            **SHARED_EXPERTS,
        }),
        experts=(("mlp.experts", f.PROJECTIONS),), complete=_types, kinds=(ALTERNATING,), rotary=1.0,
        numbers=MappingProxyType({**f.EXPERTS, "expert_feed_forward_length": ("intermediate_size",)}),
        values=MappingProxyType({
            "feed_forward_length": f.Key(("prefix_dense_intermediate_size", "intermediate_size")),
            "attention.sliding_window": f.Key(("sliding_window",)),
            "logit_scale": f.Key(("logit_scale",), float),
        }),
        constants=MappingProxyType({"rope.scaling.type": "none"}), scalings=frozenset(("default",)),
        always=MappingProxyType({
            "attention_bias": False, "shared_expert_combination_strategy": "average",
        }),
        derived=f.Derived(_cohere, _of_cohere),
        defaults=MappingProxyType({
            "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0, "head_dim": 128,
            "logit_scale": 1 / 16, "tie_word_embeddings": True, "sliding_window": 4096, "num_experts": 8,
            "num_experts_per_tok": 2, "num_shared_experts": 0, "expert_selection_fn": "softmax",
            "norm_topk_prob": True, "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
        }),
    ),
    f.Family(
        architecture="llama", model_type="mixtral", class_name="MixtralForCausalLM", halves=True, wide=f.WIDE,
        # Checkpoints have the first names, models of transformers 5 the others.
        layers=MappingProxyType({**f.ATTENTION, **f.ROUTER, "block_sparse_moe.gate": "ffn_gate_inp"}),
        experts=(("block_sparse_moe.experts", ("w1", "w3", "w2")), ("mlp.experts", f.PROJECTIONS)),
        numbers=f.LOCAL_EXPERTS,
        defaults=MappingProxyType({
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6,
        }),
    ),
    _QWEN2_MOE,
    dataclasses.replace(
        _QWEN2_MOE, architecture="qwen3moe", model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM",
        layers=MappingProxyType({**f.ATTENTION, **f.QUERY_NORMS, **f.ROUTER}), numbers=f.EXPERTS,
        always=QWEN_EXPERTS,
    ),
    dataclasses.replace(
        _QWEN2_MOE, architecture="olmoe", model_type="olmoe", class_name="OlmoeForCausalLM",
        layers=MappingProxyType({**f.ATTENTION, **f.QUERY_NORMS, **f.ROUTER}),
        numbers=MappingProxyType({
            key: names for key, names in f.EXPERTS.items() if key != "expert_feed_forward_length"
        }),
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
        always=MappingProxyType({"norm_topk_prob": False, "clip_qkv": None}), derived=f.Derived(_whole_keys),
    ),
    f.Family(
        architecture="glm4moe", model_type="glm4_moe", class_name="Glm4MoeForCausalLM",
        wide=f.WIDE, rotary=0.5,
        layers=MappingProxyType({
            **f.ATTENTION, **f.QUERY_NORMS, **f.MLP, **f.ROUTER, **f.POST_NORM, **SHARED_EXPERTS,
        }),
        tensors=MappingProxyType({"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}),
        experts=(("mlp.experts", f.PROJECTIONS),), numbers=f.ROUTED_EXPERTS, values=ROUTING,
        constants=MappingProxyType({"expert_gating_func": f.SIGMOID}),
        derived=f.Derived(read=lambda values: {"use_qk_norm": f.has(values, ".attn_q_norm.weight")}),
        defaults=MappingProxyType({
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 10000.0, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        }),
    ),
)
