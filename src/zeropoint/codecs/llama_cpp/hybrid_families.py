"""Families with mixed layers: linear attention, convolutions, Mamba 2, Gemma 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from ...architectures import Config
from ..divided_tensors import RowRun, TensorPiece
from ..stored_forms import RowOrder, Shape
from . import family as f
from .expert_families import QWEN_EXPERTS, ROW, SHARED_EXPERT, WITH_SHARED

SSM_WIDE = frozenset(("ssm_conv1d", "shortconv.conv"))


def _tiled(unit: str | None, *, behind: bool = False) -> f.Change:
    """Return the order of value heads that share key heads.

    The model has value heads of one key head next to each other; llama.cpp repeats the key heads. unit:
    the key of the rows of a head, or None for one. behind: whether all queries and keys come before.
    """

    def order(text: Config) -> RowOrder | None:
        keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
        rows = 1 if unit is None else text[unit]
        first = 2 * keys * text["linear_key_head_dim"] if behind else 0
        return None if keys == values else RowOrder(values * rows, keys, rows, first)

    return f.Change(rows=order)


_VALUES = "linear_value_head_dim"
_LINEAR = MappingProxyType({
    "attn_qkv.weight": _tiled(_VALUES, behind=True), "attn_gate.weight": _tiled(_VALUES),
    "ssm_conv1d.weight": _tiled(_VALUES, behind=True)._replace(shape=f.kernel),
    "ssm_alpha.weight": _tiled(None), "ssm_beta.weight": _tiled(None), "ssm_dt.bias": _tiled(None),
    "ssm_a": _tiled(None)._replace(negated_exp=True), "ssm_norm.weight": f.Change(plain=True),
    "ssm_out.weight": f.Change(columns=_tiled(_VALUES).rows),
})
_OF_LINEAR = MappingProxyType({
    "ssm.conv_kernel": f.Key(("linear_conv_kernel_dim",)), "ssm.state_size": f.Key(("linear_key_head_dim",)),
    "ssm.group_count": f.Key(("linear_num_key_heads",)),
    "ssm.time_step_rank": f.Key(("linear_num_value_heads",)),
    "full_attention_interval": f.Key(("full_attention_interval",)),
})
_RECURRENT = f.LayerKinds("layer_types", MappingProxyType({
    "linear_attention": {"attention.recurrent_layers": True},
    "full_attention": {"attention.recurrent_layers": False},
}))
_SECTIONS = (11, 11, 10, 0)


def _every_fourth(text: Config) -> Config:
    """Return the layer kinds from the interval of full attention."""
    every = text.get("full_attention_interval") or 4
    kinds = [
        "full_attention" if at % every == every - 1 else "linear_attention"
        for at in range(text["num_hidden_layers"])
    ]
    return {"full_attention_interval": every, "layer_types": text.get("layer_types") or kinds}


def _linear_sizes(text: Config) -> f.Values:
    return {"ssm.inner_size": text[_VALUES] * text["linear_num_value_heads"]}


def _with_sections(text: Config) -> f.Values:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = [*rope.get("mrope_section", _SECTIONS), 0][:4]
    return {**_linear_sizes(text), "rope.dimension_sections": sections}


def _of_linear_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    inner, heads = values.get("ssm.inner_size"), values.get("ssm.time_step_rank")
    return {_VALUES: inner // heads} if isinstance(inner, int) and isinstance(heads, int) and heads else {}


_OF_MODELS = MappingProxyType({
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, _VALUES: 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "norm_topk_prob": True,
})
_QWEN35 = f.Family(
    architecture="qwen35", model_type="qwen3_5_text", class_name="Qwen3_5ForCausalLM", types=("qwen3_5",),
    prefixes=f.TEXT, left_out=f.OF_IMAGES + f.DRAFTS, plus=1.0, rotary=0.25, wide=f.WIDE | SSM_WIDE,
    defaults=_OF_MODELS,
    layers=MappingProxyType({
        **f.ATTENTION, **f.QUERY_NORMS, **f.POST_NORM, **f.MLP, "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    }),
    tensors=MappingProxyType({"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}),
    changes=_LINEAR, values=_OF_LINEAR, kinds=(_RECURRENT,), complete=_every_fourth,
    derived=f.Derived(_with_sections, _of_linear_sizes),
)


def _sizes(text: Config) -> tuple[int, int, int]:
    """Return key heads, key size, and values per key head."""
    keys, size = text["linear_num_key_heads"], text["linear_key_head_dim"]
    return keys, size, text["linear_num_value_heads"] // keys * text[_VALUES]


_JOINT = ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight")


def _joint(shape: Shape, text: Config) -> Sequence[TensorPiece]:
    """Return the pieces of joint queries, keys, values and gates."""
    (keys, size, values), columns = _sizes(text), shape[-1]
    group = 2 * (size + values)
    runs = [
        RowRun(first, (keys, count), (group, 1))
        for first, count in ((0, size), (size, size), (2 * size, values), (2 * size + values, values))
    ]
    qkv = (keys * (2 * size + values), columns)
    return [
        TensorPiece(_JOINT[0], qkv, tuple(runs[:3])),
        TensorPiece(_JOINT[1], (keys * values, columns), (runs[3],)),
    ]


_QWEN3_NEXT = dataclasses.replace(
    _QWEN35, architecture="qwen3next", model_type="qwen3_next", class_name="Qwen3NextForCausalLM", types=(),
    layers=MappingProxyType({
        **{old: new for old, new in _QWEN35.layers.items() if old not in f.MLP and new[:5] not in ("ssm_a",
        "ssm_b")},
        "linear_attn.in_proj_ba": "ssm_ba", **f.ROUTER, **SHARED_EXPERT,
    }),
    divided=MappingProxyType({"linear_attn.in_proj_qkvz.weight": f.Division(
        _JOINT, _joint, lambda shapes, _: (sum(shape[0] for shape in shapes), shapes[0][-1])
    )}),
    changes=MappingProxyType({
        **ROW, "ssm_conv1d.weight": f.Change(shape=f.kernel), "ssm_a": f.Change(negated_exp=True),
        "ssm_norm.weight": f.Change(plain=True),
    }),
    experts=(("mlp.experts", f.PROJECTIONS),), numbers=WITH_SHARED, always=QWEN_EXPERTS,
    derived=f.Derived(_linear_sizes, _of_linear_sizes),
)
_CONV = f.LayerKinds("layer_types", MappingProxyType({
    "conv": {"attention.head_count_kv": 0},
    "full_attention": {"attention.head_count_kv": "num_key_value_heads"},
}))


def _lfm2(text: Config) -> Config:
    """Return LFM2's implied MLP width and layer kinds."""
    width = text.get("block_ff_dim") or text["intermediate_size"]
    if text.get("block_auto_adjust_ff_dim", False):
        width, of = int(2 * width / 3), text.get("block_multiple_of", 256)
        width = int((text.get("block_ffn_dim_multiplier") or 1) * width)
        width = of * -(-width // of)
    whole = text.get("full_attn_idxs") or ()
    kinds = ["full_attention" if at in whole else "conv" for at in range(text["num_hidden_layers"])]
    return {"intermediate_size": width, "layer_types": text.get("layer_types") or kinds}


_LFM2 = f.Family(
    architecture="lfm2", model_type="lfm2", class_name="Lfm2ForCausalLM", wide=f.WIDE | SSM_WIDE,
    modules=MappingProxyType({"embed_tokens": "token_embd", "embedding_norm": "token_embd_norm"}),
    layers=MappingProxyType({
        "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
        "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
    }),
    changes=MappingProxyType({"shortconv.conv.weight": f.Change(shape=f.kernel)}),
    values=MappingProxyType({
        "attention.layer_norm_rms_epsilon": f.Key(("norm_eps", "block_norm_eps"), float),
        "shortconv.l_cache": f.Key(("conv_L_cache",)),
    }), kinds=(_CONV,), complete=_lfm2,
    derived=f.Derived(read=lambda _: {"block_auto_adjust_ff_dim": False}),
    always=MappingProxyType({"conv_bias": False}),
    defaults=MappingProxyType({
        "norm_eps": 1e-5, "max_position_embeddings": 128000, "rope_theta": 1e6, "conv_L_cache": 3,
        "tie_word_embeddings": True,
    }),
)


def head_of_mamba(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Mamba 2's head size, under key ``name``."""
    inner, heads = values.get("ssm.inner_size"), values.get("ssm.time_step_rank")
    return {name: inner // heads} if isinstance(inner, int) and isinstance(heads, int) and heads else {}


_mamba = partial(head_of_mamba, "mamba_head_dim")
_PATTERN = MappingProxyType({"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"})
_SPELLED = MappingProxyType({"mamba": "linear_attention", "attention": "full_attention"})


def _nemotron_h(text: Config) -> Config:
    """Return Nemotron-H's implied layer kinds and their number."""
    kinds = text.get("layers_block_type") or [
        _PATTERN.get(kind, kind) for kind in text.get("hybrid_override_pattern", "")
    ]
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _has_experts(text: Config) -> bool:
    return "moe" in _nemotron_h(text)["layers_block_type"]


MAMBA = MappingProxyType({
    "ssm_a": f.Change(negated_exp=True, shape=f.column), "ssm_d": f.Change(shape=f.column),
    "ssm_conv1d.weight": f.Change(shape=f.kernel),
})
_NO_KEYS, _NO_WIDTH = {"attention.head_count_kv": 0}, {"feed_forward_length": 0}
_NEMOTRON_H = f.Family(
    architecture="nemotron_h", model_type="nemotron_h", class_name="NemotronHForCausalLM",
    when=lambda text: not _has_experts(text), complete=_nemotron_h, prefixes=("backbone.", "model.", ""),
    modules=MappingProxyType({"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}),
    wide=f.WIDE | SSM_WIDE, left_out=f.OF_IMAGES + f.DRAFTS, halves=True,
    layers=MappingProxyType({
        "norm": "attn_norm", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
        "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
        "mixer.out_proj": "ssm_out",
    }),
    tensors=MappingProxyType({
        "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias",
    }),
    changes=MappingProxyType({**MAMBA, "ssm_norm.weight": f.Change(shape=f.grouped("n_groups"))}),
    values=MappingProxyType({
        "attention.layer_norm_epsilon": f.Key(("layer_norm_epsilon", "norm_eps"), float),
        "ssm.conv_kernel": f.Key(("conv_kernel",)), "ssm.state_size": f.Key(("ssm_state_size",)),
        "ssm.group_count": f.Key(("n_groups",)), "ssm.time_step_rank": f.Key(("mamba_num_heads",)),
    }),
    kinds=(f.LayerKinds("layers_block_type", MappingProxyType({
        "linear_attention": {**_NO_KEYS, **_NO_WIDTH},
        "full_attention": {"attention.head_count_kv": "num_key_value_heads", **_NO_WIDTH},
        "mlp": {**_NO_KEYS, "feed_forward_length": "intermediate_size"},
    }), _SPELLED),),
    constants=MappingProxyType({"rope.scaling.finetuned": False}),
    derived=f.Derived(lambda text: {
        "ssm.inner_size": text["mamba_num_heads"] * text["mamba_head_dim"],
        "rope.dimension_count": text["head_dim"],
    }, _mamba),
    always=MappingProxyType({"mlp_hidden_act": "relu2"}),
    defaults=MappingProxyType({
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096, "head_dim": 128, "conv_kernel": 4,
        "ssm_state_size": 128, "n_groups": 8, "mamba_num_heads": 128, "mamba_head_dim": 64,
    }),
)


def _gemma4(text: Config) -> Config:
    """Return Gemma 4's configuration of full-attention layers."""
    kinds, each = text.get("layer_types") or (), text.get("per_layer_config") or {}
    whole = (str(at) for at, kind in enumerate(kinds) if kind == "full_attention")
    own: Config = next((each[at] for at in whole if at in each), {})
    keys = own.get("num_key_value_heads") or text.get("num_global_key_value_heads")
    return {
        "global_head_dim": own.get("head_dim") or text.get("global_head_dim") or text["head_dim"],
        "num_global_key_value_heads": keys or text["num_key_value_heads"],
        "final_logit_softcapping": text.get("final_logit_softcapping") or 0.0,
    }


def _gemma4_values(text: Config) -> f.Values:
    layers, shared = text["num_hidden_layers"], text["num_kv_shared_layers"]
    width, wide, head = text["intermediate_size"], text["global_head_dim"], text["head_dim"]
    values: dict[str, Any] = {
        "attention.key_length": wide, "attention.value_length": wide, "attention.key_length_swa": head,
        "attention.value_length_swa": head, "rope.dimension_count": wide, "rope.dimension_count_swa": head,
        "embedding_length_per_layer_input": text.get("hidden_size_per_layer_input") or 0,
    }
    if text.get("use_double_wide_mlp"):
        values["feed_forward_length"] = [width * (1 + (at >= layers - shared)) for at in range(layers)]
    return values


def _of_gemma4(values: Mapping[str, Any]) -> dict[str, Any]:
    wide, head = values.get("attention.key_length"), values.get("attention.key_length_swa")
    widths = values.get("feed_forward_length")
    found = {"global_head_dim": wide, "head_dim": head, "use_double_wide_mlp": isinstance(widths, list)}
    own: dict[str, Any] = {"intermediate_size": widths[0]} if isinstance(widths, list) and widths else {}
    kinds = values.get("attention.sliding_window_pattern")
    full = [at for at, local in enumerate(kinds if isinstance(kinds, list) else ()) if not local]
    keys = {f"blk.{at}.attn_k.weight" for at in full} & values["tensors"]
    same = keys and not {f"blk.{at}.attn_v.weight" for at in full} & values["tensors"]
    softcap = values.get("final_logit_softcapping") or None
    return {
        **found, **own, "final_logit_softcapping": softcap, "attention_k_eq_v": bool(same),
        "vocab_size_per_layer_input": values.get("vocab_size"),
    }


_GEMMA4 = f.Family(
    architecture="gemma4", model_type="gemma4_text", class_name="Gemma4ForCausalLM", types=("gemma4",),
    when=lambda text: not text.get("enable_moe_block"), complete=_gemma4, prefixes=f.TEXT,
    left_out=f.OF_IMAGES + r"|^(model\.)?(audio_tower|embed_audio)\.",
    modules=MappingProxyType({
        "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
        "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_projection_norm": "per_layer_proj_norm",
        "per_layer_model_projection": "per_layer_model_proj",
    }),
    layers=MappingProxyType({
        **f.LAYERS, **f.QUERY_NORMS, **f.POST_NORM, "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm": "ffn_norm", "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    }),
    tensors=MappingProxyType({"layer_scalar": "layer_output_scale.weight"}),
    values=MappingProxyType({
        "attention.sliding_window": f.Key(("sliding_window",)),
        "attention.shared_kv_layers": f.Key(("num_kv_shared_layers",)),
        "embedding_length_per_layer_input": f.Key(("hidden_size_per_layer_input",)),
        "final_logit_softcapping": f.Key(("final_logit_softcapping",), float),
    }),
    kinds=(f.LayerKinds("layer_types", MappingProxyType({
        "sliding_attention": {
            "attention.sliding_window_pattern": True, "attention.head_count_kv": "num_key_value_heads",
        },
        "full_attention": {
            "attention.sliding_window_pattern": False,
            "attention.head_count_kv": "num_global_key_value_heads",
        },
    })),),
    scalings=frozenset(("default", "proportional")), derived=f.Derived(_gemma4_values, _of_gemma4),
    defaults=MappingProxyType({
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "rope_theta": 1e6, "head_dim": 256,
        "rope_local_base_freq": 1e4, "num_kv_shared_layers": 0, "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    }),
)
FAMILIES = (
    _QWEN3_NEXT,
    _QWEN35,
    dataclasses.replace(
        _QWEN35, architecture="qwen35moe", model_type="qwen3_5_moe_text", types=("qwen3_5_moe",),
        class_name="Qwen3_5MoeForCausalLM", experts=(("mlp.experts", f.PROJECTIONS),), numbers=WITH_SHARED,
        always=QWEN_EXPERTS, changes=MappingProxyType({**_LINEAR, **ROW}), layers=MappingProxyType({
            **{old: new for old, new in _QWEN35.layers.items() if old not in f.MLP},
            **f.ROUTER, **SHARED_EXPERT,
        }),
    ),
    _LFM2,
    dataclasses.replace(
        _LFM2, architecture="lfm2moe", model_type="lfm2_moe", class_name="Lfm2MoeForCausalLM",
        layers=MappingProxyType({**_LFM2.layers, "feed_forward.gate": "ffn_gate_inp"}),
        tensors=MappingProxyType({"feed_forward.expert_bias": "exp_probs_b.bias"}),
        experts=(("feed_forward.experts", ("w1", "w3", "w2")),), numbers=f.EXPERTS,
        constants=MappingProxyType({"expert_gating_func": f.SIGMOID}), complete=lambda _: {},
        derived=f.Derived(),
        values=MappingProxyType({
            **_LFM2.values, "leading_dense_block_count": f.Key(("num_dense_layers",)),
        }),
        always=MappingProxyType({"conv_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0}),
        defaults=MappingProxyType({**_LFM2.defaults, "num_dense_layers": 2, "norm_topk_prob": True}),
    ),
    _NEMOTRON_H,
    dataclasses.replace(
        _NEMOTRON_H, architecture="nemotron_h_moe", when=_has_experts,
        layers=MappingProxyType({
            **_NEMOTRON_H.layers, "mixer.gate": "ffn_gate_inp", "mixer.fc1_latent_proj": "ffn_latent_down",
            "mixer.fc2_latent_proj": "ffn_latent_up",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
        }),
        tensors=MappingProxyType({
            **_NEMOTRON_H.tensors, "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        }),
        experts=(("mixer.experts", ("", "up_proj", "down_proj")),),
        numbers=MappingProxyType({
            **f.ROUTED_EXPERTS,
            "expert_shared_feed_forward_length": ("moe_shared_expert_intermediate_size",),
        }),
        values=MappingProxyType({
            **_NEMOTRON_H.values, "expert_group_count": f.Key(("n_group",)),
            "expert_group_used_count": f.Key(("topk_group",)),
            "expert_shared_count": f.Key(("n_shared_experts",)),
            "expert_weights_norm": f.Key(("norm_topk_prob",), bool),
            "expert_weights_scale": f.Key(("routed_scaling_factor",), float),
            "moe_latent_size": f.Key(("moe_latent_size",)),
        }),
        kinds=(_NEMOTRON_H.kinds[0]._replace(values=MappingProxyType({
            **{kind: items for kind, items in _NEMOTRON_H.kinds[0].values.items() if kind != "mlp"},
            "moe": {**_NO_KEYS, "feed_forward_length": "moe_intermediate_size"},
        })),),
            derived=_NEMOTRON_H.derived._replace(read=lambda values: {
            **_mamba(values), "intermediate_size": values.get("expert_feed_forward_length"),
        }),
    ),
    _GEMMA4,
    dataclasses.replace(
        _GEMMA4, when=lambda text: bool(text.get("enable_moe_block")), wide=f.WIDE,
        layers=MappingProxyType({
            **_GEMMA4.layers, "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "router.proj": "ffn_gate_inp",
        }),
        tensors=MappingProxyType({
            **_GEMMA4.tensors, "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        }),
        experts=(("experts", f.PROJECTIONS),),
        divided=MappingProxyType({
            "experts.gate_up_proj": f.parts_of("experts.gate_proj", "experts.up_proj"),
            "experts.down_proj": f.parts_of("experts.down_proj"),
        }),
        numbers=MappingProxyType({
            **f.EXPERTS, "expert_used_count": ("top_k_experts", "num_experts_per_tok"),
        }),
        constants=MappingProxyType({}), always=MappingProxyType({}),
        derived=f.Derived(_gemma4_values, lambda values: {**_of_gemma4(values), "enable_moe_block": True}),
    ),
)
