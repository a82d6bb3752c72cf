"""Names, shapes and types of the tensors of every family, as llama.cpp's converter gives them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import converted, tiny_families

import zeropoint as zp
from zeropoint.checkpoint.model.importance import with_importance
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.learned_data import layer_data
from zeropoint.checkpoint.plan.recipe import KEEP, RecipeText
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.containers.gguf import GGUF as FILE
from zeropoint.codecs.registry import DEFAULT, get_codec
from zeropoint.errors import UnsupportedError

gguf = pytest.importorskip("gguf", reason="extra `gguf`")
GGUF = get_codec("gguf")
RECORD = json.loads(converted.RECORDED.read_text())
WITH_PIECES = ["qwen3_next", "gpt_oss", "gpt2"]
"""Families that have pieces of all kinds: rows in runs, transposed weights, alternating numbers."""

QUICK = ("qwen3_5", "deepseek_v3", *WITH_PIECES)


def in_float32(source: Path, codec: object = GGUF) -> CheckpointPlan:
    selection = Selection(dequantize=DequantizePolicy.EVERY, floats="F32")
    return make_plan(open_source(source), KEEP, codec=codec, selection=selection)  # type: ignore[arg-type]


def test_every_family_is_recorded() -> None:
    assert RECORD.keys() == tiny_families.FAMILIES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in tiny_families.FAMILIES
    ],
)
def test_a_file_has_the_tensors_of_the_converter(name: str, tmp_path: Path) -> None:
    tiny_families.write(tmp_path / "in", name)
    (shard,) = in_float32(tmp_path / "in").shards
    head = bytes(shard.head)
    found, _ = FILE.parse(lambda at, count: (head[at : at + count] + bytes(count))[:count], shard.size)
    assert converted.digest((row.name, row.shape, row.dtype) for row, *_ in found) == RECORD[name]["digest"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_PIECES)
def test_pieces_are_made_whole_again(name: str, tmp_path: Path) -> None:
    tiny_families.write(tmp_path / "in", name)
    run(in_float32(tmp_path / "in"), tmp_path / "out")
    run(in_float32(tmp_path / "out" / "model.gguf", DEFAULT), tmp_path / "back")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "back"))
    assert first.keys() == second.keys()
    for key, values in first.items():
        torch.testing.assert_close(second[key], values, rtol=0, atol=1e-6, msg=key)


@pytest.mark.filterwarnings("ignore")
def test_codes_of_a_transposed_weight_are_of_its_inputs_and_come_back(tmp_path: Path) -> None:
    model = tiny_families.write(tmp_path / "in", "gpt2")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q8_0", format="gguf")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok
    zp.dequantize_checkpoint(tmp_path / "out" / "model.gguf", tmp_path / "back", dtype="float32")
    back, name = load_file(tmp_path / "back" / "model.safetensors"), "transformer.h.1.mlp.c_fc.weight"
    weight = model.get_parameter(name).detach().t().contiguous()
    assert torch.equal(back[name].t(), zp.quantize(weight, "q8_0").dequantize(torch.float32))
    file, to = tmp_path / "out" / "model.gguf", "int8:g32:scale=float16"
    made = zp.convert_checkpoint(file, tmp_path / "ct", "compressed-tensors", to=to, force=True)
    assert {w.module: w.shape for w in made.plan.weights}[name.removesuffix(".weight")] == weight.shape


@pytest.mark.filterwarnings("ignore")
def test_statistics_have_the_order_of_columns_in_the_file(tmp_path: Path) -> None:
    tiny_families.write(tmp_path / "in", "qwen3_5")
    source, numbers = open_source(tmp_path / "in"), np.arange(64, dtype="<f4") + 1
    name = b"blk.0.ssm_out.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, len(numbers)) + numbers.tobytes()
    (tmp_path / "imatrix.dat").write_bytes(struct.pack("<i", 1) + entry)
    plan = make_plan(source, RecipeText.of("q4_0").by("ggml"), codec=GGUF)
    plan, _ = with_importance(plan, tmp_path / "imatrix.dat")
    module = "model.layers.0.linear_attn.out_proj"
    (weight,) = (each for each in plan.weights if each.module == module)
    # Two heads of keys, each with two of values of 16 numbers, which lie next to each other in the model.
    heads = torch.from_numpy(numbers.copy()).view(2, 2, 16).transpose(0, 1).flatten()
    assert plan.statistics[module]["mean_square"].state["squares"].tolist() == heads.tolist()
    (given,) = layer_data(plan, weight, None).statistics.values()
    assert given.state["squares"].tolist() == numbers.tolist()
    with pytest.raises(UnsupportedError, match=r"method gptq learns of the inputs of .*out_proj' together"):
        make_plan(source, RecipeText.of("q4_0").by("gptq"), codec=GGUF)


@pytest.mark.filterwarnings("ignore")
def test_floats_have_the_dtype_that_is_asked_for_but_what_llama_cpp_reads_in_float32(tmp_path: Path) -> None:
    tiny_families.write(tmp_path / "in", "gpt_oss")
    zp.convert_checkpoint(tmp_path / "in", tmp_path / "out", to="float16", format="gguf")
    run(in_float32(tmp_path / "in"), tmp_path / "wide")
    files = [
        {each.name: each for each in gguf.GGUFReader(tmp_path / name / "model.gguf").tensors}
        for name in ("out", "wide")
    ]
    narrow = {name for name, each in files[0].items() if each.tensor_type.name == "F16"}
    assert {"blk.0.attn_q.weight", "blk.1.ffn_gate_exps.weight", "token_embd.weight"} <= narrow
    assert not {"blk.0.ffn_gate_exps.bias", "blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight"} & narrow
    for name, each in files[0].items():
        whole = np.asarray(files[1][name].data)
        assert np.array_equal(np.asarray(each.data), whole.astype("f2") if name in narrow else whole), name
