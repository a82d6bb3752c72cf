"""Models that transformers builds from a stranger's config.json: what it is given, and what bounds it."""

import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles import synthetic_llama
from tests.peers import transformers

from zeropoint.checkpoint.model.empty_model import empty_model
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.declared_models import model_config
from zeropoint.errors import UnsupportedError, ZeropointError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return synthetic_llama.write(folder)


@pytest.fixture
def plain(checkpoint: Path) -> Iterator[Path]:
    """A checkpoint whose config.json a test may change."""
    path = checkpoint / "config.json"
    before = path.read_text()
    yield checkpoint
    path.write_text(before)


def built(folder: Path, **changes: Any) -> Any:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return empty_model(open_source(folder), Limits(workers=1), "take another", None)


WRONG: list[dict[str, Any]] = [
    {"vocab_size": "x"}, {"max_position_embeddings": None}, {"num_attention_heads": 0},
    {"pad_token_id": 10**9}, {"intermediate_size": 0}, {"hidden_size": [64]}, {"rope_theta": "x"},
    {"rope_scaling": "x"},
    {"rope_parameters": [1]}, {"hidden_act": "x"}, {"hidden_act": {"a": 1}}, {"num_labels": 10**9},
    {"id2label": {"a": "b"}}, {"torch_dtype": "x"}, {"dtype": "float99"}, {"model_type": None},
    {"model_type": "evil"}, {"model_type": "bert"}, {"architectures": {"a": 1}}, {"architectures": 5},
    {"architectures": ["PreTrainedModel"]}, {"architectures": ["AutoModel"]}, {"architectures": ["pipeline"]},
    {"architectures": ["__doc__"]}, {"architectures": ["LlamaConfig"]}, {"architectures": [None]},
    {"architectures": ["DetrModel"], "model_type": "detr"}, {"layer_types": "x"}, {"head_dim": -1},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_configuration_that_makes_no_model_is_a_sentence(plain: Path, change: dict[str, Any]) -> None:
    try:
        model = built(plain, **change)
    except ZeropointError as error:
        model, said = None, str(error)
    if model is None:
        assert "\n" not in said
    else:  # what transformers takes is checked against the files later
        assert isinstance(model, transformers.PreTrainedModel)


SIZES: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**6}, {"num_hidden_layers": 10**12}, {"vocab_size": 10**9},
    {"vocab_size": 10**18}, {"hidden_size": 1 << 23}, {"intermediate_size": 1 << 24},
    {"max_position_embeddings": 1 << 62}, {"num_key_value_heads": 10**10},
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 10**9},
    {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "max_position_embeddings": 1 << 22},
    {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 1 << 34},
]  # fmt: skip


@pytest.mark.parametrize("change", SIZES, ids=str)
def test_sizes_are_bounded_by_the_files_before_anything_is_made(plain: Path, change: dict[str, Any]) -> None:
    start = time.process_time()
    if change == {"max_position_embeddings": 1 << 62}:
        with pytest.raises(UnsupportedError, match="does not build"):
            built(plain, **change)
    else:
        with pytest.raises(ZeropointError, match=r"config\.json describes a model|does not build"):
            built(plain, **change)
    assert time.process_time() - start < 5


def test_a_configuration_whose_models_are_a_class_of_others_makes_one(plain: Path) -> None:
    model = built(plain, model_type="internlm3", head_dim=32)
    assert type(model) is transformers.LlamaForCausalLM
    assert type(model.config) is transformers.CONFIG_MAPPING["internlm3"]


def test_keys_that_choose_code_do_not_reach_transformers(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(plain)  # what transformers imports first asks a module for its __spec__
    calls: list[object] = []
    kernels = types.ModuleType("kernels")
    kernels.get_kernel = lambda *given, **named: calls.append((given, named))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    code = "kernels-community/flash-attn2@0123456789012345678901234567890123456789"
    for changes in (
        {"attn_implementation": code}, {"_attn_implementation": code}, {"experts_implementation": code},
        {"_attn_implementation_internal": code}, {"auto_map": {"AutoModelForCausalLM": "evil--model.Evil"}},
        {"per_layer_config": {"0": {"attn_implementation": code}}}, {"unheard_of": {"kernel": code}},
        {"quantization_config": {"quant_method": "evil"}}, {"use_kernels": [code]},
    ):  # fmt: skip
        model = built(plain, **changes)
        assert code not in json.dumps(model.config.to_dict(), default=str)
        assert model.config._attn_implementation in ("sdpa", "eager")
    assert calls == []


def test_a_class_gets_what_it_declares_and_numbers(plain: Path) -> None:
    def of(**changes: Any) -> Any:
        given = {"model_type": "llama", "num_hidden_layers": 2, **changes}
        return model_config(given, "it does not build", "take another")

    assert of(rope_theta=500000.0).rope_parameters["rope_theta"] == 500000.0
    assert of(rope_theta=10**8).rope_parameters["rope_theta"] == 1e8
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert of(rope_scaling=scaled).rope_parameters["factor"] == 2.0
    assert of(torch_dtype="bfloat16").dtype is torch.bfloat16
    assert of(hidden_act="gelu", pad_token_id=7).hidden_act == "gelu"
    whole = model_config(
        {"model_type": "gpt2", "n_layer": 3, "activation_function": "relu"},
        "it does not build",
        "take another",
    )
    assert (whole.num_hidden_layers, whole.activation_function) == (3, "relu")
    with pytest.raises(UnsupportedError, match="its model_type 'evil' is unknown; take another"):
        model_config({"model_type": "evil"}, "it does not build", "take another")
