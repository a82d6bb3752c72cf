"""Families with divided tensors: DeepSeek, GLM-5, and Granite with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...architectures import Config
from ...errors import UnsupportedError
from ..divided_tensors import RowRun, TensorPiece
from ..stored_forms import Shape
from . import family as f
from .decoder_families import GRANITE
from .expert_families import ROUTING, SHARED_EXPERTS
from .hybrid_families import MAMBA, SSM_WIDE, head_of_mamba

_LATENT = ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight")
_LITE = (26, 27)
"""Layers of the models of DeepSeek-V2 whose queries llama.cpp does not compress."""


def _latent(shape: Shape, text: Config) -> Sequence[TensorPiece]:
    """Return the pieces of latent keys, transposed, and values."""
    keys, values, heads = text["qk_nope_head_dim"], text["v_head_dim"], text["num_attention_heads"]
    return [
        TensorPiece(
            _LATENT[0],
            (heads, shape[1], keys),
            (RowRun(0, (heads, keys), (keys + values, 1)),),
            transposed=True,
        ),
        TensorPiece(
            _LATENT[1], (heads, values, shape[1]), (RowRun(keys, (heads, values), (keys + values, 1)),)
        ),
    ]


def _of_latent(shapes: Sequence[Shape], text: Config) -> Shape:
    (heads, columns, keys), (_, values, _) = shapes
    return (heads * (keys + values), columns)


def _deepseek(text: Config) -> f.Values:
    if text.get("q_lora_rank") is None and text["num_hidden_layers"] not in _LITE:
        raise UnsupportedError(
            "q_lora_rank is None in config.json, but llama.cpp loads models of deepseek2 without it that "
            f"have 26 or 27 layers, not {text['num_hidden_layers']}; write safetensors"
        )
    latent, rotated = text["kv_lora_rank"], text["qk_rope_head_dim"]
    values: dict[str, Any] = {
        "attention.head_count_kv": 1, "attention.key_length": latent + rotated,
        "attention.value_length": latent, "attention.key_length_mla": text["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": text["v_head_dim"], "rope.dimension_count": rotated,
        "expert_gating_func": f.SIGMOID if text.get("scoring_func", "sigmoid") == "sigmoid" else 1,
    }
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * float(rope["mscale_all_dim"])
    return values


def _greedy(text: Config) -> Config:
    """Return the only expert group; raises UnsupportedError for ranked groups."""
    if text.get("topk_method", "greedy") == "greedy":
        return {"n_group": 1, "topk_group": 1}
    if (text.get("n_group") or 1) > 1:
        raise UnsupportedError(
            f"topk_method is {text['topk_method']!r:.40} in config.json, but llama.cpp ranks groups of "
            "experts by the sum of their best two; write safetensors"
        )
    return {}


def _of_deepseek(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = values.get("rope.dimension_count")
    key, value = values.get("attention.key_length_mla"), values.get("attention.value_length_mla")
    found = dict[str, Any]()
    if isinstance(rotated, int) and isinstance(key, int):
        found |= {"qk_nope_head_dim": key - rotated, "head_dim": rotated}
    scale = values.get("rope.scaling.yarn_log_multiplier")
    if isinstance(scale, float):
        found["rope_scaling"] = dict.fromkeys(("mscale", "mscale_all_dim"), float(format(scale * 10, ".6g")))
    return {
        **found, "qk_rope_head_dim": rotated, "v_head_dim": value,
        "num_key_value_heads": values.get("attention.head_count"),
        "q_lora_rank": values.get("attention.q_lora_rank"),
    }


_DEEPSEEK = f.Family(
    architecture="deepseek2", model_type="deepseek_v3", class_name="DeepseekV3ForCausalLM", wide=f.WIDE,
    layers=MappingProxyType({
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", **f.MLP, **f.ROUTER,
        **SHARED_EXPERTS, "self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
        "self_attn.o_proj": "attn_output",
    }),
    tensors=MappingProxyType({"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}),
    divided=MappingProxyType({"self_attn.kv_b_proj.weight": f.Division(_LATENT, _latent, _of_latent)}),
    experts=(("mlp.experts", f.PROJECTIONS),), numbers=f.ROUTED_EXPERTS,
    values=MappingProxyType({
        **ROUTING, "attention.q_lora_rank": f.Key(("q_lora_rank",)),
        "attention.kv_lora_rank": f.Key(("kv_lora_rank",)),
    }),
    derived=f.Derived(_deepseek, _of_deepseek),
    defaults=MappingProxyType({
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 10000.0, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    }),
    always=MappingProxyType({"attention_bias": False}),
)


def _sparse(text: Config) -> f.Values:
    """Return the values of DeepSeek; raises UnsupportedError for later dense layers."""
    kinds, dense = text.get("mlp_layer_types"), text["first_k_dense_replace"]
    if kinds and any(kind != ("dense" if at < dense else "sparse") for at, kind in enumerate(kinds)):
        raise UnsupportedError(
            "mlp_layer_types has dense layers behind others in config.json, but llama.cpp has the first "
            f"{dense} so; write safetensors"
        )
    return _deepseek(text)


_GLM_DSA = dataclasses.replace(
    _DEEPSEEK, architecture="glm-dsa", model_type="glm_moe_dsa", class_name="GlmMoeDsaForCausalLM",
    layers=MappingProxyType({
        **_DEEPSEEK.layers, "self_attn.indexer.wq_b": "indexer.attn_q_b",
        "self_attn.indexer.wk": "indexer.attn_k", "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
    }),
    values=MappingProxyType({
        **_DEEPSEEK.values, "attention.indexer.head_count": f.Key(("index_n_heads",)),
        "attention.indexer.key_length": f.Key(("index_head_dim",)),
        "attention.indexer.top_k": f.Key(("index_topk",)),
    }),
    kinds=(f.LayerKinds("indexer_types", MappingProxyType({
        "full": {"attention.indexer.types": True}, "shared": {"attention.indexer.types": False},
    })),),
    complete=lambda text: {
        "indexer_types": text.get("indexer_types") or ["full"] * text["num_hidden_layers"],
    },
    derived=f.Derived(_sparse, _of_deepseek),
    defaults=MappingProxyType({
        **_DEEPSEEK.defaults, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    }),
)
_EXPERTS = "block_sparse_moe.experts."
_SHARED = ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight")
_SHARED_MLP = MappingProxyType({
    "shared_mlp.gate_proj": "ffn_gate_shexp", "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
})
_GRANITE_MOE = f.Family(
    architecture="granitemoe", model_type="granitemoe", class_name="GraniteMoeForCausalLM",
    wide=f.WIDE | SSM_WIDE,
    halves=True, values=GRANITE, numbers=f.LOCAL_EXPERTS,
    layers=MappingProxyType({**f.ATTENTION, "block_sparse_moe.router.layer": "ffn_gate_inp"}),
    divided=MappingProxyType({
        "block_sparse_moe.input_linear.weight": f.parts_of(f"{_EXPERTS}gate_proj", f"{_EXPERTS}up_proj"),
        "block_sparse_moe.output_linear.weight": f.parts_of(f"{_EXPERTS}down_proj"),
    }),
    experts=(("block_sparse_moe.experts", f.PROJECTIONS),),
    defaults=MappingProxyType({
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    }),
)
_SHARED_SIZE = {"expert_shared_feed_forward_length": ("shared_intermediate_size",)}
_GRANITE_SHARED = dataclasses.replace(
    _GRANITE_MOE, model_type="granitemoeshared", class_name="GraniteMoeSharedForCausalLM",
    layers=MappingProxyType({**_GRANITE_MOE.layers, **_SHARED_MLP}),
    numbers=MappingProxyType({**f.LOCAL_EXPERTS, **_SHARED_SIZE}),
    divided=MappingProxyType({
        **_GRANITE_MOE.divided, "shared_mlp.input_linear.weight": f.parts_of(*_SHARED),
    }),
)
_MIXED = f.LayerKinds("layer_types", MappingProxyType({
    "linear_attention": {"attention.head_count_kv": 0},
    "full_attention": {"attention.head_count_kv": "num_key_value_heads"},
}), MappingProxyType({"mamba": "linear_attention", "attention": "full_attention"}))


def _has_mamba(text: Config) -> bool:
    return not {"mamba", "linear_attention"}.isdisjoint(text.get("layer_types") or ())


def _with_experts(text: Config) -> bool:
    return bool(text.get("num_local_experts"))


def _rotated(text: Config) -> f.Values:
    """Return the metadata for rotated, or unrotated, queries and keys."""
    inner = text["mamba_n_heads"] * text["mamba_d_head"]
    return {"ssm.inner_size": inner, "rope.scaling.finetuned": text.get("position_embedding_type") == "rope"}


def _of_rotated(values: Mapping[str, Any]) -> dict[str, Any]:
    kind = "rope" if values.get("rope.scaling.finetuned") else "nope"
    return {**head_of_mamba("mamba_d_head", values), "position_embedding_type": kind}


_HYBRID = dataclasses.replace(
    _GRANITE_SHARED, architecture="granitehybrid", model_type="granitemoehybrid", kinds=(_MIXED,),
    class_name="GraniteMoeHybridForCausalLM", when=lambda text: _has_mamba(text) and _with_experts(text),
    layers=MappingProxyType({
        **_GRANITE_SHARED.layers, "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d",
        "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    }),
    tensors=MappingProxyType({"mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"}),
    changes=MappingProxyType({**MAMBA, "ssm_norm.weight": f.Change(shape=f.grouped("mamba_n_groups"))}),
    values=MappingProxyType({
        **GRANITE, "ssm.conv_kernel": f.Key(("mamba_d_conv",)), "ssm.state_size": f.Key(("mamba_d_state",)),
        "ssm.group_count": f.Key(("mamba_n_groups",)), "ssm.time_step_rank": f.Key(("mamba_n_heads",)),
    }),
    derived=f.Derived(_rotated, _of_rotated),
    defaults=MappingProxyType({**_GRANITE_MOE.defaults, "mamba_d_conv": 4, "mamba_n_groups": 1}),
    always=MappingProxyType({"mamba_proj_bias": False}),
)


def _dense(family: f.Family) -> f.Family:
    """Return a Granite family without experts, only a shared MLP."""
    own = {
        "shared_mlp.gate_proj": "ffn_gate",
        "shared_mlp.up_proj": "ffn_up",
        "shared_mlp.output_linear": "ffn_down",
    }
    kept = {old: new for old, new in family.layers.items() if new != "ffn_gate_inp"}
    return dataclasses.replace(
        family, layers=MappingProxyType({**kept, **own}), experts=(), numbers=MappingProxyType({}),
        divided=MappingProxyType({"shared_mlp.input_linear.weight": f.parts_of(*_SHARED)}),
        complete=lambda text: {
            "intermediate_size": text.get("shared_intermediate_size") or text.get("intermediate_size"),
        },
    )


FAMILIES = (
    _DEEPSEEK,
    dataclasses.replace(
        _DEEPSEEK, model_type="deepseek_v2", class_name="DeepseekV2ForCausalLM",
        tensors=MappingProxyType({}), complete=_greedy,
        defaults=MappingProxyType({
            **_DEEPSEEK.defaults, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0, "scoring_func": "softmax",
        }),
    ),
    _GLM_DSA,
    _GRANITE_MOE,
    _GRANITE_SHARED,
    _HYBRID,
    dataclasses.replace(
        _dense(_HYBRID), when=lambda text: _has_mamba(text) and not _with_experts(text),
        derived=f.Derived(_rotated, lambda values: {
            **_of_rotated(values), "shared_intermediate_size": values.get("feed_forward_length"),
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        }),
    ),
    # Without Mamba llama.cpp takes it for the families without, and so is it read back.
    dataclasses.replace(
        _GRANITE_SHARED, model_type="granitemoehybrid",
        when=lambda text: not _has_mamba(text) and _with_experts(text),
    ),
    dataclasses.replace(
        _dense(_GRANITE_SHARED), architecture="granite", model_type="granitemoehybrid",
        when=lambda text: not _has_mamba(text) and not _with_experts(text),
    ),
)
