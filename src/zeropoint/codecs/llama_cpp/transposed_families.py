"""Families with transposed weights: gpt-oss, Llama 4 and GPT-2."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from ...architectures import Config
from ...errors import UnsupportedError
from . import family as f
from .decoder_families import require_every_fourth
from .expert_families import SHARED_EXPERTS


def _alternating(text: Config) -> f.Values:
    """Raise UnsupportedError for other kinds of layers than llama.cpp takes them for."""
    kinds = text.get("layer_types") or ()
    usual = [("sliding_attention", "full_attention")[at % 2] for at in range(len(kinds))]
    if list(kinds) != usual:
        raise UnsupportedError(
            "layer_types do not alternate in config.json, but llama.cpp computes models of gpt-oss as if "
            "every second layer were full attention; write safetensors"
        )
    return {"expert_feed_forward_length": text["intermediate_size"]}


def _rounded(text: Config) -> Sequence[str]:
    """Return a sentence about fractional bounds of YaRN, which llama.cpp rounds."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type") != "yarn" or rope.get("truncate") is not False:
        return ()
    return ("llama.cpp rounds the bounds of YaRN, which config.json does not (truncate)",)


_GPT_OSS = f.Family(
    architecture="gpt-oss", model_type="gpt_oss", class_name="GptOssForCausalLM", wide=f.WIDE,
    layers=MappingProxyType({**f.ATTENTION, **f.POST_NORM, "mlp.router": "ffn_gate_inp"}),
    tensors=MappingProxyType({
        "self_attn.sinks": "attn_sinks.weight", "mlp.experts.gate_proj_bias": "ffn_gate_exps.bias",
        "mlp.experts.up_proj_bias": "ffn_up_exps.bias", "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    }),
    divided=MappingProxyType({
        "mlp.experts.gate_up_proj": f.parts_of(
            "mlp.experts.gate_proj", "mlp.experts.up_proj", transposed=True, alternating=True,
        ),
        "mlp.experts.down_proj": f.parts_of("mlp.experts.down_proj", transposed=True),
        "mlp.experts.gate_up_proj_bias": f.parts_of(
            "mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias", alternating=True, vectors=True,
        ),
    }),
    experts=(("mlp.experts", f.PROJECTIONS),), numbers=f.LOCAL_EXPERTS,
    values=MappingProxyType({"attention.sliding_window": f.Key(("sliding_window",))}),
    derived=f.Derived(_alternating, lambda _: {"rope_scaling": {"truncate": False}}), unlike=_rounded,
    defaults=MappingProxyType({
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0, "head_dim": 64,
        "sliding_window": 128,
    }),
)
_OF_LLAMA4 = "feed_forward.experts"


_MAVERICK = 128
"""Experts of the model of Llama 4 whose queries and keys have no norm."""


def _llama4(text: Config) -> f.Values:
    """Raise UnsupportedError for what llama.cpp has as constants of Llama 4."""
    layers, step = text["num_hidden_layers"], text["interleave_moe_layer_step"]
    require_every_fourth(text, "chunked_attention")
    said = {
        "moe_layers": list(range(step - 1, layers, step)),
        "no_rope_layers": [int(at % 4 != 0) for at in range(1, layers + 1)],
        "use_qk_norm": text["num_local_experts"] != _MAVERICK,
    }
    for key, value in said.items():
        if text.get(key) is not None and text[key] != [] and text[key] != value:
            raise UnsupportedError(
                f"{key} is {text[key]!r:.40} in config.json, but llama.cpp computes models of llama4 as if "
                f"it were {value!r:.40}; write safetensors"
            )
    return {}


_LLAMA4 = f.Family(
    architecture="llama4", model_type="llama4_text", class_name="Llama4ForCausalLM", types=("llama4",),
    prefixes=f.TEXT, left_out=f.OF_IMAGES, rotary=1.0, wide=f.WIDE,
    scalings=frozenset(("default", "llama3")),
    layers=MappingProxyType({
        **f.ATTENTION, "feed_forward.router": "ffn_gate_inp",
        **{old.replace("mlp.", "feed_forward."): new for old, new in f.MLP.items()},
        **{
            old.replace("mlp.shared_experts.", "feed_forward.shared_expert."): new
            for old, new in SHARED_EXPERTS.items()
        },
    }),
    divided=MappingProxyType({
        f"{_OF_LLAMA4}.gate_up_proj": f.parts_of(
            f"{_OF_LLAMA4}.gate_proj", f"{_OF_LLAMA4}.up_proj", transposed=True,
        ),
        f"{_OF_LLAMA4}.down_proj": f.parts_of(f"{_OF_LLAMA4}.down_proj", transposed=True),
    }),
    experts=((_OF_LLAMA4, f.PROJECTIONS),),
    numbers=MappingProxyType({**f.LOCAL_EXPERTS, "expert_feed_forward_length": ("intermediate_size",)}),
    values=MappingProxyType({
        "feed_forward_length": f.Key(("intermediate_size_mlp",)),
        "interleave_moe_layer_step": f.Key(("interleave_moe_layer_step",)),
    }),
    derived=f.Derived(_llama4, lambda values: {"use_qk_norm": values.get("expert_count") != _MAVERICK}),
    always=MappingProxyType({
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
    }),
    defaults=MappingProxyType({
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "head_dim": 128,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1,
        "num_local_experts": 16,
    }),
)


def _gpt2_sizes(text: Config) -> Config:
    """Return the sizes of GPT-2 under their usual names."""
    width = text.get("n_embd", 0)
    return {
        "num_hidden_layers": text.get("n_layer"),
        "hidden_size": width,
        "num_attention_heads": text.get("n_head"),
        "intermediate_size": text.get("n_inner") or 4 * width,
        "max_position_embeddings": text.get("n_positions"),
    }


_CONV1D = MappingProxyType({
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
})
_GPT2 = f.Family(
    architecture="gpt2", model_type="gpt2", class_name="GPT2LMHeadModel", prefixes=("transformer.", ""),
    block="h", wide=frozenset(("position_embd",)), left_out=r"\.attn\.(masked_)?bias$", complete=_gpt2_sizes,
    modules=MappingProxyType({
        "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output",
    }),
    layers=MappingProxyType({"ln_1": "attn_norm", "ln_2": "ffn_norm", **_CONV1D}),
    divided=MappingProxyType({
        name: f.parts_of(name, transposed=True) for name in (f"{module}.weight" for module in _CONV1D)
    }),
    values=MappingProxyType({
        "block_count": f.Key(("n_layer",)), "context_length": f.Key(("n_positions",)),
        "embedding_length": f.Key(("n_embd",)), "attention.head_count": f.Key(("n_head",)),
        "feed_forward_length": f.Key(("n_inner", "intermediate_size")),
        "attention.layer_norm_epsilon": f.Key(("layer_norm_epsilon",), float),
    }),
    always=MappingProxyType({
        "activation_function": "gelu_new", "scale_attn_weights": True, "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
    }),
    defaults=MappingProxyType({
        "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
    }),
)
FAMILIES = (_LLAMA4, _GPT_OSS, _GPT2)
