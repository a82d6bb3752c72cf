from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import CONFIG, LINEAR, ONE, quantize, save, weight
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.output_tensors import tile_shape
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import require_loadable
from zeropoint.checkpoint.read.config_text import WEIGHTS_ONLY_CONFIG, insert_config
from zeropoint.checkpoint.read.source import open_source
from zeropoint.errors import CheckpointError, UnsupportedError

MIB = 1 << 20


def ignored(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> list[str]:
    made = make_plan(open_source(save(folder, {LINEAR: weight(8, 32)} | tensors, config)), "w8a8")
    found: list[str] = json.loads(str(made.texts["config.json"]))["quantization_config"]["ignore"]
    return found


def test_every_kept_matrix_is_in_the_ignore_list(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": weight(8, 32),
        "lm_head.weight": weight(8, 32),
        "model.layers.0.mlp.gate.weight": weight(8, 32),
        "model.norm.weight": weight(32),
    }
    # The last is for a model that is loaded without its head, whose modules have shorter names.
    everywhere = r"re:.*\blayers\.\d+\.mlp\.gate$"
    expected = {"model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", everywhere}
    assert set(ignored(tmp_path, tensors, CONFIG)) == expected


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, "lm_head"),
        ({"architectures": ["GemmaForCausalLM"]}, "lm_head"),
        ({"architectures": ["BertForMaskedLM"]}, "cls.predictions.decoder"),
    ],
)
def test_a_tied_head_is_in_the_ignore_list_though_it_is_not_in_the_file(
    config: dict[str, object], head: str, tmp_path: Path
) -> None:
    assert head in ignored(tmp_path, {}, config)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForQuestionAnswering", "WhisperModel"])
def test_a_model_without_a_head_ignores_none(architecture: str, tmp_path: Path) -> None:
    assert ignored(tmp_path, {}, {"architectures": [architecture]}) == []


def test_quantizing_a_tied_head_is_reported(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    source = open_source(save(tmp_path, {LINEAR: weight(8, 32), "lm_head.weight": weight(8, 32)}, config))
    made = make_plan(source, "w8a8", selection=Selection(include=("lm_head",)))
    assert any("config.json ties it to the embedding" in note for note in made.notes)


def test_a_quantized_embedding_is_a_target_by_name_and_refused_unless_forced(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {LINEAR: weight(8, 32), "model.embed_tokens.weight": weight(8, 32)}))
    made = make_plan(source, "w8a8", selection=Selection(include=("*embed_tokens",)))
    (group,) = json.loads(str(made.texts["config.json"]))["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear", "model.embed_tokens"]
    with pytest.raises(
        CheckpointError, match=r"quantized embeddings and routers are read where weights alone .*force=True"
    ):
        require_loadable(made)


@pytest.mark.parametrize("to", ["w4a16_asym", "nvfp4a16", "fp8_block", "w8a8"])
def test_the_plan_knows_every_byte_that_is_written(to: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    made = make_plan(open_source(source), to, limits=ONE)
    result = quantize(source, tmp_path / "out", to)
    # The manifest says what the run found, which no plan can know.
    files = [p for p in (tmp_path / "out").iterdir() if p.is_file() and p.name != MANIFEST]
    assert made.output_bytes == sum(path.stat().st_size for path in files)
    assert {s.name: s.size for s in made.shards} == {
        path.name: path.stat().st_size for path in files if path.suffix == ".safetensors"
    }
    assert result.plan.shards == made.shards


@pytest.mark.parametrize("to", ["w4a16_asym", "nvfp4a16", "fp8_block", "mxfp8"])
def test_shards_are_byte_for_byte_what_safetensors_would_write(to: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    quantize(source, tmp_path / "out", to)
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        save_file(load_file(path), tmp_path / "again", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_the_index_names_the_shard_of_each_tensor_and_their_bytes(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    quantize(source, tmp_path / "out", "w4a16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[name] = path.name
            size += tensor.numel() * tensor.element_size()
    assert index == {"metadata": {"total_size": size}, "weight_map": found}


def test_a_single_file_gets_an_index_too_as_llm_compressor_writes_it(tmp_path: Path) -> None:
    quantize(save(tmp_path / "in", {LINEAR: weight(8, 32)}), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.weight_shape"]
)
def test_a_name_that_would_come_out_twice_is_an_error_before_writing(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 128), name: weight(3)})
    rule = "would be written twice" if name.endswith("shape") else "is quantized already"
    with pytest.raises(CheckpointError, match=rule):
        quantize(folder, tmp_path / "out", "w4a16")
    assert not (tmp_path / "out").exists()


def test_a_config_keeps_every_byte_and_gains_one_key(tmp_path: Path) -> None:
    text = '{\n   "a": 1e-05, "limit": [0.0, Infinity],\n "unknown": {"x": null}  }\n'
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)}, None)
    (folder / "config.json").write_text(text)
    quantize(folder, tmp_path / "out")
    written = (tmp_path / "out" / "config.json").read_text()
    assert written.startswith(text[: text.rindex("}")].rstrip() + ",")
    assert written.endswith("}\n")
    parsed = json.loads(written)
    assert parsed.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert parsed == json.loads(text)


def test_an_empty_config_and_a_null_one_are_filled() -> None:
    assert json.loads(insert_config("{}", {"a": 1})) == {"quantization_config": {"a": 1}}
    null = {"b": 2, "quantization_config": None}
    assert json.loads(insert_config(json.dumps(null), {"a": 1})) == {
        "b": 2,
        "quantization_config": {"a": 1},
    }


def test_weights_without_a_config_get_a_file_of_their_own(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)}, None)
    result = quantize(folder, tmp_path / "out")
    config = json.loads((tmp_path / "out" / WEIGHTS_ONLY_CONFIG).read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert any(WEIGHTS_ONLY_CONFIG in note for note in result.plan.notes)


def test_one_safetensors_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    quantize(folder / "model.safetensors", tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(tmp_path / "out" / "model.safetensors")


def test_fused_layers_share_one_tensor_scale_in_nvfp4(tmp_path: Path) -> None:
    made = make_plan(open_source(synthetic_llama.write(tmp_path)), "nvfp4a16")
    shares = {w.module.removeprefix("model.layers.1."): w.share for w in made.weights if ".1." in w.module}
    assert shares["self_attn.q_proj"] == shares["self_attn.k_proj"] == shares["self_attn.v_proj"] is not None
    assert shares["mlp.gate_proj"] == shares["mlp.up_proj"] is not None
    assert shares["self_attn.o_proj"] is shares["mlp.down_proj"] is None


def test_stochastic_rounding_is_refused_since_weights_are_cut(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {LINEAR: weight(8, 32)}))
    with pytest.raises(UnsupportedError, match="use half_even"):
        make_plan(source, "int8:channel:round=stochastic(3)")


def test_tiles_hold_whole_blocks_and_whole_words_of_zero_points(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {LINEAR: weight(512, 256)}))
    for to, alignment in (("fp8_block", 128), ("int4:g32:asym", 32), ("int8:channel", 1)):
        for values in (1, 5000, 100_000):
            made = make_plan(source, to, limits=Limits(workers=1, tile_values=values))
            rows, _ = tile_shape(made.weights[0], made.limits)
            assert rows % alignment == 0
            assert rows == alignment or rows * 256 <= values


@pytest.mark.parametrize(
    ("limits", "rule"),
    [
        ({"workers": 0}, r"workers \(=0\) must be at least 1"),
        ({"workers": 10**9}, r"max_memory='2G' is too little for workers=1000000000: a thread takes 256 KiB"),
        ({"workers": 1, "tile_values": 0}, r"tile_values \(=0\)"),
        ({"workers": 1, "max_memory": MIB}, "is too little: Python and torch alone need"),
    ],
)
def test_limits_under_which_nothing_runs_are_refused(limits: dict[str, int], rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        Limits(**limits)


def test_too_little_memory_for_one_block_names_how_much_is_needed(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {LINEAR: weight(256, 4096)}))
    tight = Limits(workers=4, max_memory=10 * MIB, base_memory=MIB)
    with pytest.raises(
        CheckpointError, match=r"too little for 128 rows of 4096 columns; use max_memory='\d+M', or"
    ):
        make_plan(source, "fp8_block", limits=tight)


def test_less_memory_makes_smaller_tiles(tmp_path: Path) -> None:
    source = open_source(save(tmp_path, {LINEAR: weight(2048, 256)}))
    plans = [
        make_plan(source, "w8a8", limits=Limits(workers=2, max_memory=m * MIB, base_memory=MIB))
        for m in (3, 6, 2000)
    ]
    peaks = [made.peak_memory for made in plans]
    assert peaks == sorted(set(peaks))
    assert all(made.peak_memory <= made.limits.max_memory for made in plans)
