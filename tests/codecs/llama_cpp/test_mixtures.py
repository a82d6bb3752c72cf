"""Mixtures: types by place, fallbacks, and the recipe of a checkpoint; bytes are compared in tests/oracle."""

from dataclasses import replace

import pytest
from gguf import LlamaFileType

from zeropoint.codecs.gguf import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.llama_cpp.families import FAMILIES
from zeropoint.codecs.llama_cpp.mixtures import FILE_TYPES, MIXTURES, types_of
from zeropoint.codecs.model_format import ModelFiles
from zeropoint.errors import UnsupportedError

LLAMA = FAMILIES[0]
LAYER = "model.layers.{}."
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


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


def test_some_mixtures_give_more_bits_to_the_first_layers_alone() -> None:
    for mixture, part, most, layers in (
        ("q3_k_m", "self_attn.v_proj", "q5_k", 2), ("q4_k_s", "self_attn.v_proj", "q5_k", 4),
        ("q3_k_m", "mlp.down_proj", "q5_k", 1), ("q4_k_s", "mlp.down_proj", "q5_k", 2),
    ):  # fmt: skip
        found = types(mixture, model(layers=16))
        more = [n for n in range(16) if found[f"{LAYER.format(n)}{part}.weight"] == most]
        assert more == list(range(layers)), (mixture, part)


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


def test_an_importance_matrix_changes_the_first_layers_of_some_mixtures() -> None:
    down, shapes = f"{LAYER.format(0)}mlp.down_proj.weight", model(layers=8)
    for mixture, plain, weighted in (
        ("mostly_q4_0", "q4_0", "q4_1"), ("mostly_q5_0", "q5_0", "q5_1"), ("mostly_iq4_nl", "q5_k", "iq4_nl"),
        ("mostly_iq4_xs", "q5_k", "iq4_xs"), ("q2_k_s", "q4_k", "q4_k"), ("q4_k_s", "q5_k", "q5_k"),
    ):  # fmt: skip
        found = types(mixture, shapes), types(f"{mixture}+imatrix", shapes)
        assert (found[0][down], found[1][down]) == (plain, weighted), mixture


def test_the_head_of_a_file_names_its_mixture() -> None:
    files = ModelFiles(config={}, metadata={}, read=lambda _: None, rows=lambda: 8)
    config = {"model_type": "llama", **dict.fromkeys(SIZES, 8)}
    for mixture, number in (("q4_k_m", 15), ("mostly_q6_k", 18), ("q2_k_s+imatrix", 21)):
        said = CODEC.model_format.metadata(replace(files, config=config, mixture=mixture))
        assert said["general.file_type"] == number
    assert FILE_TYPES.keys() == MIXTURES.keys()
    assert {LlamaFileType(number).name for number in FILE_TYPES.values()} == {
        f"MOSTLY_{name.removeprefix('mostly_').upper()}" for name in MIXTURES
    }


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_type_of_a_mixture_is_a_preset(mixture: str) -> None:
    for name in set(types(mixture, model(layers=9, columns=512)).values()):
        assert layer_scheme(name, CODEC).layout == name.upper()


def test_a_family_without_names_has_no_mixture() -> None:
    with pytest.raises(UnsupportedError, match="mixture q4_k_m needs a family"):
        CODEC.model_format.mixture("q4_k_m", {}, {"model_type": "bloom"})
