"""Mixtures: types by place, fallbacks, and the recipe of a checkpoint; bytes are compared in tests/oracle."""

from __future__ import annotations

import pytest

from zeropoint.codecs.gguf import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.llama_cpp.families import FAMILIES
from zeropoint.codecs.llama_cpp.mixtures import MIXTURES, types_of
from zeropoint.errors import UnsupportedError

LLAMA = FAMILIES[0]
LAYER = "model.layers.{}."


def model(*, layers: int, columns: int = 256, tied: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (10, columns),
        "model.norm.weight": (columns,),
    }
    if not tied:
        shapes["lm_head.weight"] = (10, columns)
    for layer in range(layers):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
            shapes[f"{LAYER.format(layer)}{name}.weight"] = (256, columns)
    return shapes


def types(mixture: str, shapes: dict[str, tuple[int, ...]], **more: int) -> dict[str, str]:
    layers = sum(name.endswith("down_proj.weight") for name in shapes)
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": 256, "intermediate_size": 256,
        "num_attention_heads": 8, **more,
    }  # fmt: skip
    return types_of(mixture, LLAMA, shapes, config)


def test_q4_k_m_gives_more_bits_to_some_layers_and_to_the_head() -> None:
    found = types("q4_k_m", model(layers=16))
    more = [n for n in range(16) if found[f"{LAYER.format(n)}mlp.down_proj.weight"] == "q6_k"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert found["lm_head.weight"] == "q6_k"
    assert found["model.embed_tokens.weight"] == found[f"{LAYER.format(0)}self_attn.q_proj.weight"] == "q4_k"
    assert "model.norm.weight" not in found


def test_a_tied_embedding_has_the_type_of_the_head() -> None:
    assert types("q4_k_m", model(layers=1, tied=True))["model.embed_tokens.weight"] == "q6_k"
    assert types("mostly_q8_0", model(layers=1, tied=True))["model.embed_tokens.weight"] == "q8_0"


def test_rows_that_no_block_divides_fall_back() -> None:
    found = types("q4_k_m", model(layers=8, columns=96))
    assert set(found.values()) == {"q5_0", "q8_0"}
    assert types("q4_k_m", model(layers=1, columns=100)) == {}


def test_shared_heads_of_keys_and_70b_get_more_bits() -> None:
    value = f"{LAYER.format(0)}self_attn.v_proj.weight"
    assert types("mostly_q2_k", model(layers=1))[value] == "q3_k"
    assert types("mostly_q2_k", model(layers=1), num_key_value_heads=2)[value] == "q4_k"
    assert types("q4_k_s", model(layers=80), num_key_value_heads=2)[
        f"{LAYER.format(40)}self_attn.v_proj.weight"
    ] == ("q5_k")


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_type_of_a_mixture_is_a_preset(mixture: str) -> None:
    for name in set(types(mixture, model(layers=9, columns=512)).values()):
        assert layer_scheme(name, CODEC).layout == name.upper()


def test_a_family_without_names_has_no_mixture() -> None:
    with pytest.raises(UnsupportedError, match="mixture q4_k_m needs a family"):
        CODEC.model_format.mixture("q4_k_m", {}, {"model_type": "gpt2"})
