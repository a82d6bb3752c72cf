"""Families with attention and one MLP in all layers; BERT."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...architectures import Config
from ...errors import UnsupportedError
from . import family as f

_RMS = MappingProxyType({"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0})
_POST_NORMS = MappingProxyType({**f.POST_NORM, "post_feedforward_layernorm": "post_ffw_norm"})
_OLMO2 = MappingProxyType({
    **{old: new for old, new in f.LAYERS.items() if new != "attn_norm"}, **f.QUERY_NORMS, **_POST_NORMS,
})
_WINDOW = MappingProxyType({"attention.sliding_window": f.Key(("sliding_window",))})
ALTERNATING = f.LayerKinds("layer_types", MappingProxyType({
    "sliding_attention": {"attention.sliding_window_pattern": True},
    "full_attention": {"attention.sliding_window_pattern": False},
}))
GRANITE = MappingProxyType({
    "attention.scale": f.Key(("attention_multiplier",), float),
    "embedding_scale": f.Key(("embedding_multiplier",), float),
    "residual_scale": f.Key(("residual_multiplier",), float),
    "logit_scale": f.Key(("logits_scaling",), float),
})
"""Numbers by which Granite multiplies, and the last by which it divides."""


def _scaled_queries(largest: int) -> f.Derived:
    """Return Gemma's check of query scales; ``largest``: the largest model's layers."""

    def scaled(text: Config) -> int:
        """Return the number by whose root llama.cpp divides queries."""
        wide = text["num_hidden_layers"] == largest
        return int(text["hidden_size"] // text["num_attention_heads"]) if wide else f.head_size(text)

    def write(text: Config) -> f.Values:
        if text["query_pre_attn_scalar"] != scaled(text):
            raise UnsupportedError(
                f"query_pre_attn_scalar is {text['query_pre_attn_scalar']!r:.40} in config.json, but "
                f"llama.cpp divides queries by the root of {scaled(text)}; write safetensors"
            )
        return {}

    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {
            "num_hidden_layers": values.get("block_count"),
            "hidden_size": values.get("embedding_length"),
            "num_attention_heads": values.get("attention.head_count"),
        }
        whole = all(type(size) is int and size > 0 for size in sizes.values())
        sizes["head_dim"] = values.get("attention.key_length")
        return {"query_pre_attn_scalar": scaled(sizes)} if whole else {}

    return f.Derived(write, read)


def _attention_factor(text: Config) -> f.Values:
    """Return Phi-3's attention factor for long contexts."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "long_factor" not in rope:
        return {}
    short = text.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
    scale = rope.get("factor") or text["max_position_embeddings"] / short
    usual = math.sqrt(1 + math.log(scale) / math.log(short)) if scale > 1 else 1.0
    return {
        "rope.scaling.attn_factor": float(rope.get("attention_factor") or usual),
        "rope.scaling.original_context_length": int(short),
    }


_GEMMA3 = f.Family(
    architecture="gemma3", model_type="gemma3_text", class_name="Gemma3ForCausalLM", types=("gemma3",),
    prefixes=f.TEXT, plus=1.0, left_out=f.OF_IMAGES, values=MappingProxyType({
        **_WINDOW, "final_logit_softcapping": f.Key(("final_logit_softcapping",), float),
    }), derived=_scaled_queries(62), defaults=MappingProxyType({
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "vocab_size": 262208,
    }),
    layers=MappingProxyType({
        **f.LAYERS, **f.QUERY_NORMS, **_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm",
    }),
)
_LLAMA = f.Family(
    architecture="llama", model_type="llama", class_name="LlamaForCausalLM", types=("mistral",),
    layers=f.LAYERS, halves=True, scalings=frozenset(("default", "linear", "yarn", "llama3")),
    defaults=MappingProxyType({**_RMS, "max_position_embeddings": 2048}),
)
_EVERY = 4
"""Period of layers with full attention and without rotary embeddings in Cohere 2 and Llama 4."""


def require_every_fourth(text: Config, local: str) -> None:
    """Raise UnsupportedError for other layers of full attention than every fourth.

    local: the kind of the others.
    """
    kinds = text.get("layer_types") or ()
    if any(kind != ("full_attention" if at % _EVERY == 0 else local) for at, kind in enumerate(kinds, 1)):
        raise UnsupportedError(
            "layer_types has other layers of full attention in config.json than every fourth one, which "
            "llama.cpp takes them for; write safetensors"
        )


def _query_norms(text: Config) -> f.Values:
    """Raise UnsupportedError for norms of queries that llama.cpp does not load."""
    normed, large = bool(text.get("use_qk_norm")), text["num_hidden_layers"] >= _LARGE
    if normed != large:
        raise UnsupportedError(
            f"use_qk_norm is {normed} in config.json, but llama.cpp loads norms of queries and keys where "
            f"models of command-r have {_LARGE} layers or more, and there alone; write safetensors"
        )
    return {}


def _local_layers(text: Config) -> f.Values:
    require_every_fourth(text, "sliding_attention")
    return {}


_LARGE = 64
_TIED = MappingProxyType({"embed_tokens": "token_embd", "norm": "output_norm"})
_COHERE = f.Family(
    architecture="command-r", model_type="cohere", class_name="CohereForCausalLM", modules=_TIED,
    layers=MappingProxyType({
        **{old: new for old, new in f.LAYERS.items() if new != "ffn_norm"}, **f.QUERY_NORMS,
    }),
    # Files say a context that is longer than the rotary embeddings' own.
    values=MappingProxyType({
        "context_length": f.Key(("model_max_length", "max_position_embeddings")),
        "logit_scale": f.Key(("logit_scale",), float),
    }),
    constants=MappingProxyType({"rope.scaling.type": "none"}), scalings=frozenset(("default",)),
    derived=f.Derived(_query_norms, lambda values: {
        "max_position_embeddings": values.get("context_length"),
        "use_qk_norm": f.has(values, ".attn_q_norm.weight"),
    }),
    defaults=MappingProxyType({
        "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0,
        "logit_scale": 1 / 16, "tie_word_embeddings": True,
    }),
)
FAMILIES = (
    _LLAMA,
    _COHERE,
    dataclasses.replace(
        _COHERE, architecture="cohere2", model_type="cohere2", class_name="Cohere2ForCausalLM", rotary=1.0,
        layers=MappingProxyType({old: new for old, new in f.LAYERS.items() if new != "ffn_norm"}),
        values=MappingProxyType({**_WINDOW, "logit_scale": f.Key(("logit_scale",), float)}),
        derived=f.Derived(_local_layers),
        always=MappingProxyType({"rotary_pct": 1.0, "attention_bias": False}),
        defaults=MappingProxyType({**_COHERE.defaults, "sliding_window": 4096}),
    ),
    f.Family(
        architecture="qwen2", model_type="qwen2", class_name="Qwen2ForCausalLM",
        layers=f.LAYERS, defaults=_RMS,
    ),
    f.Family(
        architecture="qwen3", model_type="qwen3", class_name="Qwen3ForCausalLM",
        layers=MappingProxyType({**f.LAYERS, **f.QUERY_NORMS}),
        defaults=MappingProxyType({**_RMS, "head_dim": 128}),
    ),
    f.Family(
        architecture="seed_oss", model_type="seed_oss", class_name="SeedOssForCausalLM", defaults=_RMS,
        layers=MappingProxyType({**f.LAYERS, **f.POST_NORM}),
    ),
    f.Family(
        architecture="ernie4_5", model_type="ernie4_5", class_name="Ernie4_5ForCausalLM", layers=f.LAYERS,
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
    ),
    dataclasses.replace(
        _LLAMA, architecture="smollm3", model_type="smollm3", class_name="SmolLM3ForCausalLM", types=(),
        defaults=MappingProxyType({**_RMS, "rope_theta": 2e6}),
        # llama.cpp counts layers without rotary embeddings itself.
        always=MappingProxyType({"no_rope_layer_interval": 4, "use_sliding_window": False}),
    ),
    dataclasses.replace(
        _LLAMA, architecture="granite", model_type="granite", class_name="GraniteForCausalLM", types=(),
        values=GRANITE,
    ),
    f.Family(
        architecture="olmo2", model_type="olmo2", class_name="Olmo2ForCausalLM",
        layers=_OLMO2,
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}),
    ),
    f.Family(
        architecture="olmo2", model_type="olmo3", class_name="Olmo3ForCausalLM", values=_WINDOW,
        layers=_OLMO2, kinds=(ALTERNATING,),
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}),
    ),
    f.Family(
        architecture="glm4", model_type="glm4", class_name="Glm4ForCausalLM", rotary=0.5,
        layers=MappingProxyType({
            **f.ATTENTION, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
            "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
        }),
        defaults=MappingProxyType({**_RMS, "max_position_embeddings": 131072, "head_dim": 128}),
    ),
    f.Family(
        architecture="phi3", model_type="phi3", class_name="Phi3ForCausalLM", rotary=1.0,
        layers=MappingProxyType({
            "input_layernorm": "attn_norm", "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        }),
        defaults=MappingProxyType({**_RMS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
        # llama.cpp tells Phi-4 by a window of 0.
        complete=lambda text: {"sliding_window": text.get("sliding_window") or 0}, unlike=f.no_window,
        values=MappingProxyType({
            **_WINDOW, "rope.scaling.original_context_length": f.Key(("original_max_position_embeddings",)),
        }),
        derived=f.Derived(_attention_factor, lambda values: {
            "sliding_window": values.get("attention.sliding_window") or None,
        }), scalings=frozenset(("default", "longrope")),
    ),
    f.Family(
        architecture="starcoder2", model_type="starcoder2", class_name="Starcoder2ForCausalLM",
        unlike=f.no_window,
        layers=MappingProxyType({**f.ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}),
        values=MappingProxyType({"attention.layer_norm_epsilon": f.Key(("norm_epsilon",), float)}),
        defaults=MappingProxyType({
            "norm_epsilon": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        }),
        derived=f.Derived(read=lambda values: {"use_bias": f.has(values, ".attn_q.bias")}),
    ),
    f.Family(
        architecture="stablelm", model_type="stablelm", class_name="StableLmForCausalLM", layers=f.LAYERS,
        rotary=0.25, values=MappingProxyType({"use_parallel_residual": f.Key(("use_parallel_residual",),
        bool)}),
        defaults=MappingProxyType({
            "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0,
            "use_parallel_residual": False,
        }),
        always=MappingProxyType({"qk_layernorm": False}),
        derived=f.Derived(read=lambda values: {"use_qkv_bias": f.has(values, ".attn_q.bias")}),
    ),
    _GEMMA3,
    dataclasses.replace(
        _GEMMA3, architecture="gemma2", model_type="gemma2", class_name="Gemma2ForCausalLM", types=(),
        modules=_TIED,
        derived=_scaled_queries(46), values=MappingProxyType({
            **_GEMMA3.values, "attn_logit_softcapping": f.Key(("attn_logit_softcapping",), float),
        }), layers=MappingProxyType({
            **f.LAYERS, **_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm",
        }),
        defaults=MappingProxyType({
            "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 10000.0, "head_dim": 256,
            "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }),
    ),
    f.Family(
        architecture="bert", model_type="bert", class_name="BertModel", prefixes=("", "bert."),
        block="encoder.layer", encoder=True, wide=frozenset(("position_embd", "token_types")),
        left_out=r"(^|\.)embeddings\.position_ids$|(^|\.)pooler\.dense\.|^cls\.(predictions|seq_relationship)\b",
        modules=MappingProxyType({
            "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
            "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
        }),
        layers=MappingProxyType({
            "attention.self.query": "attn_q", "attention.self.key": "attn_k",
            "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
        }),
        constants=MappingProxyType({"attention.causal": False}),
        defaults=MappingProxyType({
            "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2,
        }),
    ),
)
