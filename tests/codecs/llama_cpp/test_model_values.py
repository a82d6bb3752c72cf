"""Values of a model: to the metadata of a GGUF file, and back to config.json."""

import struct
from typing import Any

import pytest
from tests.oracles import tiny_families

from zeropoint.codecs.llama_cpp.families import family_of
from zeropoint.codecs.llama_cpp.model_values import model_config, model_values, rope_factors
from zeropoint.errors import CheckpointError, UnsupportedError

BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "max_position_embeddings": 256, "vocab_size": 100, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def values_of(config: dict[str, Any]) -> dict[str, Any]:
    family = family_of(config)
    assert family is not None
    return dict(model_values(family, config))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}), ("llama", {"head_dim": 32}), ("qwen2", {"rope_scaling": YARN}),
        ("qwen3", {"head_dim": 32}), ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
        ("qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": []}),
    ],
)  # fmt: skip
def test_a_configuration_comes_back(kind: str, more: dict[str, Any]) -> None:
    config = {"model_type": kind, **BASE, **more}
    found = model_config(values_of(config), ["token_embd.weight"], None)
    assert found is not None
    assert {key: found.get(key) for key in config} == config
    assert found["tie_word_embeddings"] is True


def test_transformers_5_says_rope_in_one_object() -> None:
    old = {"model_type": "gemma3_text", **BASE, "rope_local_base_freq": 2e4, "query_pre_attn_scalar": 16}
    old["head_dim"] = 16
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = {key: value for key, value in old.items() if not key.startswith("rope")} | {"rope_parameters": rope}
    assert values_of(new) == values_of(old)
    assert values_of(new)["gemma3.rope.freq_base_swa"] == 2e4


def test_the_scaling_of_llama_3_is_a_tensor_from_which_it_is_found_again() -> None:
    config = {"model_type": "llama", **BASE, "rope_scaling": LLAMA3}
    family = family_of(config)
    assert family is not None
    row = rope_factors(family, config)
    assert row is not None
    assert (row.name, row.shape, len(row.data)) == ("rope_freqs.weight", (8,), 32)
    factors = struct.unpack("<8f", row.data)
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    found = model_config(values_of(config), ["token_embd.weight"], factors)
    assert found is not None
    assert found["rope_scaling"] == LLAMA3
    with pytest.raises(UnsupportedError, match="factors of no scaling"):
        model_config(values_of(config), ["token_embd.weight"], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 7}, "query_pre_attn_scalar is 7"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        values_of({"model_type": "llama", **BASE, **more})


def test_a_file_without_sizes_is_refused_and_one_of_another_architecture_is_not_understood() -> None:
    with pytest.raises(CheckpointError, match="does not say the sizes"):
        model_config({"general.architecture": "llama"}, ["token_embd.weight"], None)
    assert model_config({"general.architecture": "falcon"}, ["token_embd.weight"], None) is None
    assert model_config({"general.architecture": "llama"}, ["model.norm.weight"], None) is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "cohere",
            {"use_qk_norm": True},
            "where models of command-r have 64 layers or more",
        ),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "other layers of full attention"),
        (
            "llama4",
            {"moe_layers": [0]},
            r"moe_layers is \[0\] in config.json, but",
        ),
        ("llama4", {"use_qk_norm": False}, "use_qk_norm is False in config.json"),
        ("llama4", {"attention_chunk_size": 4096}, "attention_chunk_size is 4096 in config.json"),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse"] * 3}, "has the first 1 so; write safetensors"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "indexer_types has 2 items in config.json"),
        ("cohere2_moe_shared", {"mlp_layer_types": ["sparse", "dense"] * 2}, "dense layers behind others"),
        ("cohere2_moe_shared", {"prefix_dense_sliding_window_pattern": 2}, "without rotary embeddings"),
        (
            "cohere2_moe",
            {"shared_expert_combination_strategy": "sum"},
            "shared_expert_combination_strategy is 'sum' in config.json",
        ),
    ],
)
def test_what_llama_cpp_has_as_constants_is_refused_where_a_model_has_others(
    name: str, change: dict[str, object], message: str
) -> None:
    config = tiny_families.FAMILIES[name]().to_dict()
    family = family_of(config)
    assert family is not None
    assert model_values(family, config)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        model_values(family, config | change)


def test_kinds_of_layers_of_cohere_are_counted_where_config_json_does_not_say_them() -> None:
    config = tiny_families.FAMILIES["cohere2_moe_shared"]().to_dict()
    older = {key: value for key, value in config.items() if not key.endswith("layer_types")}
    assert values_of({**older, "first_k_dense_replace": 1}) == values_of(config)
    window = [False, True, True, True, False]
    assert values_of(config)["cohere2moe.attention.sliding_window_pattern"] == window
    assert values_of(config)["cohere2moe.leading_dense_block_count"] == 1


def test_softmax_of_chosen_experts_is_a_softmax_of_all_that_is_scaled() -> None:
    config = tiny_families.FAMILIES["cohere2_moe"]().to_dict() | {"norm_topk_prob": False}
    values = values_of(config)
    assert (values["cohere2moe.expert_gating_func"], values["cohere2moe.expert_weights_norm"]) == (1, True)
    sigmoid = values_of(config | {"expert_selection_fn": "sigmoid"})
    assert (sigmoid["cohere2moe.expert_gating_func"], sigmoid["cohere2moe.expert_weights_norm"]) == (2, False)
