"""Names and forms of tensors: gguf-py's table of names, llama.cpp's permutation, and back to the model."""

from collections.abc import Iterator

import pytest
import torch

from zeropoint.codecs.llama_cpp.families import FAMILIES, Family, family_of, form_of, model_names
from zeropoint.codecs.stored_forms import OMITTED, RowOrder
from zeropoint.errors import CheckpointError

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PLAIN = [
    family
    for family in FAMILIES
    if not (family.divided or family.kinds) and family.changes.keys() <= {"ffn_gate_inp_shexp.weight"}
]
"""Those whose tensors lie in files one by one, in the order of the model; test_conversions.py has all."""


def config_of(family: Family) -> dict[str, object]:
    numbers = {keys[0]: 4 for keys in family.numbers.values()}
    return {"model_type": family.model_type, **SIZES, **numbers}


def names(family: Family) -> Iterator[str]:
    """Yield the names of all tensors that a model of a family may have."""
    for module in family.modules:
        yield ("" if module == "lm_head" else family.prefixes[0]) + f"{module}.weight"
    for layer in range(2):
        for module in family.layers:
            yield f"{family.prefixes[0]}{family.block}.{layer}.{module}.weight"
            yield f"{family.prefixes[0]}{family.block}.{layer}.{module}.bias"


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.model_type)
def test_names_are_those_of_gguf_py_and_come_back(family: Family) -> None:
    gguf = pytest.importorskip("gguf", reason="extra `gguf`")
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    theirs = gguf.get_tensor_name_map(arch, 2)
    config = config_of(family)
    assert family_of(config) is family
    for name in names(family):
        form = form_of(family, name, (64, 64), config)
        assert form.name == theirs.get_name(name, try_suffixes=(".weight", ".bias")), name
        found = model_names(family, form.name, (64, 64), config)
        assert found is not None
        assert [each for _, each in found] == [form]
        # Mixtral's router has a second name.
        assert (
            found[0][0] == name or family.layers[name.split(".", 3)[3].rpartition(".")[0]] == "ffn_gate_inp"
        )


@pytest.mark.parametrize("family", [f for f in PLAIN if f.experts], ids=lambda family: family.model_type)
def test_experts_of_a_layer_are_one_tensor_that_gguf_py_names(family: Family) -> None:
    gguf = pytest.importorskip("gguf", reason="extra `gguf`")
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    theirs, config = gguf.get_tensor_name_map(arch, 2), config_of(family)
    # llama.cpp's converter calls those of Mixtral so, conversion/llama.py.
    whole = (
        "layers.1.feed_forward.experts" if family.model_type == "mixtral" else "model.layers.1.mlp.experts"
    )
    for stem, projections in family.experts:
        for kind in projections:
            form = form_of(family, f"model.layers.1.{stem}.2.{kind}.weight", (32, 64), config)
            if stem == family.experts[0][0]:
                assert form.name == theirs.get_name(f"{whole}.{kind}.weight", try_suffixes=(".weight",))
            assert (form.part, form.file_shape((32, 64))) == ((2, 4), (4, 32, 64))
            found = model_names(family, form.name, (4, 32, 64), config)
            assert found is not None
            assert found[2][1] == form
            assert form_of(family, found[2][0], (32, 64), config) == form
            assert [each.part for _, each in found] == [(number, 4) for number in range(4)]
    with pytest.raises(CheckpointError, match="but must hold the matrices of 4 experts"):
        model_names(family, "blk.1.ffn_up_exps.weight", (3, 32, 64), config)
    with pytest.raises(CheckpointError, match="has no name in GGUF files"):
        form_of(family, f"model.layers.1.{family.experts[0][0]}.4.up_proj.weight", (32, 64), config)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_prefixes_of_other_classes_are_understood(prefix: str) -> None:
    family = next(family for family in FAMILIES if family.architecture == "gemma3")
    name = f"{prefix}layers.1.self_attn.q_proj.weight"
    assert form_of(family, name, (64, 64), config_of(family)).name == "blk.1.attn_q.weight"


def test_what_llama_cpp_has_no_place_for_is_left_out_or_refused() -> None:
    bert = next(family for family in FAMILIES if family.architecture == "bert")
    for name in ("pooler.dense.weight", "embeddings.position_ids", "cls.predictions.bias"):
        assert form_of(bert, name, (4,), config_of(bert)) is OMITTED
    llama = FAMILIES[0]
    with pytest.raises(CheckpointError, match=r"'model.extra.weight' has no name in GGUF files of llama"):
        form_of(llama, "model.extra.weight", (4, 4), config_of(llama))
    with pytest.raises(CheckpointError, match="24 rows, which are not whole heads of 16"):
        form_of(llama, "model.layers.0.self_attn.q_proj.weight", (24, 64), config_of(llama))


def test_rows_of_heads_are_those_of_llama_cpp() -> None:
    x = torch.randn(3 * 8, 5)
    theirs = x.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(x.shape)
    order, at = RowOrder(group=8, runs=2), torch.arange(len(x))
    assert torch.equal(x[order.model_rows(at)], theirs)
    assert torch.equal(theirs[order.file_rows(at)], x)


def test_heads_of_values_alternate_by_heads_of_keys_behind_what_lies_before() -> None:
    order, at = RowOrder(group=2 * 3 * 4, runs=2, unit=4, first=5), torch.arange(5 + 2 * 3 * 4)
    theirs = torch.cat([at[:5], at[5:].view(2, 3, 4).transpose(0, 1).flatten()])
    assert torch.equal(order.model_rows(at), theirs)
    assert torch.equal(order.file_rows(theirs), at)
    assert order.fits(29)
    assert not order.fits(28)


def test_a_family_needs_its_sizes() -> None:
    assert family_of({"model_type": "llama"}) is None
    assert family_of({"model_type": "bloom", **SIZES}) is None
    assert family_of({"model_type": "gpt2", "n_layer": 1 << 40}) is None
    assert family_of({"model_type": "llama", **SIZES, "hidden_size": "64"}) is None


def test_norms_of_gemma_are_stored_with_1_added_and_vectors_in_float32() -> None:
    gemma = next(family for family in FAMILIES if family.architecture == "gemma3")
    norm = form_of(gemma, "model.layers.0.self_attn.q_norm.weight", (16,), config_of(gemma))
    assert (norm.plus, norm.float32) == (1.0, True)
    bias = form_of(FAMILIES[0], "model.layers.0.self_attn.q_proj.bias", (64,), config_of(FAMILIES[0]))
    assert (bias.plus, bias.float32, bias.rows) == (0.0, True, RowOrder(16, 2))


def test_layers_behind_those_of_the_model_are_left_out() -> None:
    family = next(family for family in FAMILIES if family.architecture == "glm4moe")
    config = config_of(family)
    assert form_of(family, "model.layers.1.self_attn.q_proj.weight", (64, 64), config) is not OMITTED
    assert form_of(family, "model.layers.2.self_attn.q_proj.weight", (64, 64), config) is OMITTED
    assert form_of(family, "model.layers.2.eh_proj.weight", (64, 64), config) is OMITTED
