"""GGUF files: read by gguf-py with the same values, and refused where they are not well-formed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import dequantized, save
from tests.oracles import tiny_tokenizers
from tokenizers import Tokenizer

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.containers.gguf import GGUF, TYPES
from zeropoint.codecs.containers.protocol import Row
from zeropoint.codecs.gguf import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.llama_cpp.model_values import PlainValues
from zeropoint.errors import CheckpointError, UnsupportedError

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).bfloat16()


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two files."""
    folder.mkdir()
    tensors = {UP: weight(48, 96), NORM: weight(7), "model.layers.1.mlp.up_proj.weight": weight(16, 96)}
    names = list(tensors)
    files = {f"model-0000{n}-of-00002.safetensors": part for n, part in ((1, names[:2]), (2, names[2:]))}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return tensors


def written(tmp_path: Path, to: str) -> tuple[dict[str, torch.Tensor], Path]:
    tensors = checkpoint(tmp_path / "in")
    run(make_plan(open_source(tmp_path / "in"), to, codec=CODEC), tmp_path / "out")
    return tensors, tmp_path / "out" / "model.gguf"


@pytest.mark.parametrize(
    ("to", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("int8:g32", "Q8_0"), ("int4:g32", "Q4_0")]
)
def test_gguf_py_reads_the_same_values(to: str, kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="extra `gguf`")
    tensors, path = written(tmp_path, to)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        theirs = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        if x.ndim == 1:
            assert np.array_equal(theirs, x.float().numpy())
            continue
        assert found[name].tensor_type.name == kind
        assert list(found[name].shape) == [x.shape[1], x.shape[0]]
        ours = zp.quantize(x, layer_scheme(to, CODEC).weight).dequantize(torch.float32)
        assert np.array_equal(theirs.reshape(x.shape), ours.numpy())
        if to in ("q8_0", "q4_0"):  # the bytes are those of ggml, too
            quantized = gguf.quants.quantize(x.float().numpy(), found[name].tensor_type)
            assert np.array_equal(quantized.reshape(found[name].data.shape), found[name].data)


def test_known_blocks() -> None:
    layer = layer_scheme("int4:g32", CODEC)
    q = zp.quantize(torch.arange(-8.0, 8.0).repeat_interleave(2)[None] * 0.9375, layer.weight)
    (block,) = CODEC.encode(layer, q).values()
    assert block.shape == (1, 18)
    # A scale of 1 in float16; element 0 is the lowest code, 16 the middle one, in one byte.
    assert block[0, :3].tolist() == [0x00, 0x3C, 0x80]


@pytest.mark.parametrize("to", ["q8_0", "q4_0", "int4:g32", "int8:g32"])
def test_a_result_is_verified(to: str, tmp_path: Path) -> None:
    tensors, _ = written(tmp_path, to)
    found = zp.verify_checkpoint(tmp_path / "out", tmp_path / "in")
    assert (found.problems, found.hashed, found.values) == ((), True, (48 + 16) * 96)
    seen = zp.inspect_checkpoint(tmp_path / "out")
    assert [(s.layout, s.layers) for s in seen.schemes] == [("Q4_0" if "4" in to else "Q8_0", 2)]
    assert seen.quantization == "gguf"
    with pytest.raises(CheckpointError, match="is quantized already"):
        zp.plan_checkpoint(tmp_path / "out", "w4a16")
    assert set(tensors) == set(open_source(tmp_path / "out").entries)


def test_a_byte_that_changed_is_found(tmp_path: Path) -> None:
    _, path = written(tmp_path, "int8:g32")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    problems = zp.verify_checkpoint(tmp_path / "out").problems
    assert any("SHA-256" in str(problem) for problem in problems)


@pytest.mark.parametrize(
    "text", ["int4:g64", "int4:g32:asym", "uint4:g32", "int4:g32:scale=float32", "mxfp4"]
)
def test_a_scheme_without_a_type_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="has no type in GGUF"):
        layer_scheme(text, CODEC)


def small() -> bytes:
    rows = [Row("a", "F32", (3,), 12), Row("b", "Q8_0", (2, 32), 68)]
    head = GGUF.head(rows, {"general.architecture": "x", "n": 7})
    data = bytearray(head.data + bytes(head.size - len(head.data)))
    for row, begin in zip(rows, head.begins, strict=True):
        data[begin : begin + row.nbytes] = bytes(range(1, 1 + row.nbytes))
    return bytes(data)


def parsed(data: bytes) -> tuple[list[tuple[str, int]], Mapping[str, Any]]:
    found, metadata = GGUF.parse(lambda begin, count: data[begin : begin + count], len(data))
    return [(each.row.name, each.begin) for each in found], PlainValues(metadata)


def test_what_was_written_is_read() -> None:
    names, metadata = parsed(small())
    assert [name for name, _ in names] == ["a", "b"]
    assert all(begin % 32 == 0 for _, begin in names)
    assert metadata == {"general.architecture": "x", "n": 7}


def test_a_file_that_ends_anywhere_is_refused() -> None:
    data = small()
    last = max(begin for _, begin in parsed(data)[0]) + TYPES["Q8_0"].nbytes * 2
    for size in range(last):
        with pytest.raises(CheckpointError, match="the file is damaged"):
            parsed(data[:size])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: b"GGUX" + data[4:], "does not begin"),
        (lambda data: data[:4] + struct.pack("<I", 2) + data[8:], "does not begin"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "no room"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "no room"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 60) + data[32:], "above the limit"),
        (lambda data: data[:-1] + b"\1", "padding"),
        (lambda data: data + bytes(64), "comes before it ends"),
    ],
)
def test_damage_is_refused(change: object, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        parsed(change(small()))  # type: ignore[operator]


def test_values_of_all_kinds_are_read_as_they_were_written() -> None:
    values = {
        "t": "ä",
        "b": True,
        "n": 7,
        "m": -7,
        "w": 1 << 40,
        "f": 0.5,
        "ts": ["a", ""],
        "ns": [1, 2],
        "fs": [0.5],
    }
    head = GGUF.head([], values)
    assert {key: parsed(head.data)[1][key] for key in values} == values
    again = GGUF.head(
        [], GGUF.parse(lambda begin, count: head.data[begin : begin + count], len(head.data))[1]
    )
    assert again.data == head.data


def test_arrays_of_the_head_are_read() -> None:
    data = small()
    words = b"".join(struct.pack("<Q", 1) + b"w" for _ in range(3))
    array = struct.pack("<Q", 6) + b"tokens" + struct.pack("<IIQ", 9, 8, 3) + words
    begin = min(begin for _, begin in parsed(data)[0])
    moved = data[:16] + struct.pack("<Q", 3) + array + data[24:begin]
    # Padding of the head begins anew: the directory ends where the last offset of eight bytes does.
    end = moved.rindex(struct.pack("<IQ", TYPES["Q8_0"].number, 32)) + 12
    whole = moved[:end] + bytes(-end % 32) + data[begin:]
    assert [name for name, _ in parsed(whole)[0]] == ["a", "b"]
    assert parsed(whole)[1]["tokens"] == ["w", "w", "w"]


def gemma(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of a layer of Gemma 3 with a tokenizer."""
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": weight(400, 64), "model.norm.weight": weight(64),
        f"{layer}self_attn.q_proj.weight": weight(64, 64), f"{layer}self_attn.q_norm.weight": weight(16),
        f"{layer}mlp.down_proj.weight": weight(64, 96),
    }  # fmt: skip
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 400,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    save(folder, tensors, config)
    for name, data in tiny_tokenizers.files("sentencepiece").items():
        (folder / name).write_bytes(data)
    return tensors


def test_a_file_has_the_names_of_llama_cpp_and_comes_back(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="extra `gguf`")
    tensors = gemma(tmp_path / "in")
    plan = make_plan(open_source(tmp_path / "in"), "q8_0", codec=CODEC)
    run(plan, tmp_path / "out")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert {name: tensor.tensor_type.name for name, tensor in found.items()} == {
        "token_embd.weight": "BF16", "output_norm.weight": "F32", "blk.0.attn_q.weight": "Q8_0",
        "blk.0.attn_q_norm.weight": "F32", "blk.0.ffn_down.weight": "Q8_0",
    }  # fmt: skip
    norm = tensors["model.norm.weight"].float() + 1
    assert np.array_equal(found["output_norm.weight"].data, norm.numpy())
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems == ()
    (tmp_path / "alone").mkdir()
    (tmp_path / "out" / "model.gguf").rename(tmp_path / "alone" / "any.gguf")
    back = dequantized(tmp_path / "alone" / "any.gguf", tmp_path / "back")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        error = (back[name].float() - x.float()).abs().max()
        assert float(error) <= (0.02 if "proj" in name else 2**-8 * float(x.abs().max())), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["head_dim"], config["num_hidden_layers"], config["vocab_size"]) == (16, 1, 400)
    files = [Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("in", "back")]
    assert files[0].encode(tiny_tokenizers.TEXT).ids == files[1].encode(tiny_tokenizers.TEXT).ids


def test_a_gguf_file_is_quantized_again_with_its_tokenizer(tmp_path: Path) -> None:
    gemma(tmp_path / "in")
    run(make_plan(open_source(tmp_path / "in"), "q8_0", codec=CODEC), tmp_path / "a")
    selection = Selection(dequantize=DequantizePolicy.EVERY, include=("model.embed_tokens",))
    source = open_source(tmp_path / "a" / "model.gguf")
    run(make_plan(source, "q4_0", codec=CODEC, selection=selection), tmp_path / "b")
    found = open_source(tmp_path / "b" / "model.gguf")
    assert found.config == source.config
    assert {e.dtype for e in found.entries.values() if len(e.shape) == 2} == {"Q4_0"}
    tokenizers = [PlainValues(each.metadata["model.gguf"]) for each in (source, found)]
    assert tokenizers[0]["tokenizer.ggml.tokens"] == tokenizers[1]["tokenizer.ggml.tokens"]


def file_of_others(path: Path, alignment: int) -> Path:
    """Write a file as gguf-py does, with types, an order and an alignment that are not ours."""
    gguf = pytest.importorskip("gguf", reason="extra `gguf`")
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("general.small", 7)
    writer.add_float64("a.wide", 0.1)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_file_type(7)
    writer.add_key_value("quantize.imatrix.file", "x.dat", gguf.GGUFValueType.STRING)
    raw = np.random.default_rng(3).integers(0, 256, (4, 2, 34), dtype=np.uint8)
    raw[..., 1] = 0x20  # a scale that is finite
    for name in ("z.weight", "a.weight"):
        writer.add_tensor(name, raw.reshape(4, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("m.bias", np.ones(3, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 64])
def test_a_file_of_others_that_nothing_changes_is_written_byte_for_byte(
    alignment: int, tmp_path: Path
) -> None:
    path = file_of_others(tmp_path / "in" / "any.gguf", alignment)
    zp.convert_checkpoint(path, tmp_path / "out", "gguf")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == path.read_bytes()


def test_a_file_of_others_in_other_types_keeps_the_rest_of_what_it_says(tmp_path: Path) -> None:
    path = file_of_others(tmp_path / "in" / "any.gguf", 64)
    zp.convert_checkpoint(path, tmp_path / "out", "gguf", to="q4_0", allow_requantize=True)
    before, after = open_source(path), open_source(tmp_path / "out" / "model.gguf")
    assert list(after.entries) == list(before.entries) == ["z.weight", "a.weight", "m.bias"]
    assert {entry.dtype for entry in after.entries.values()} == {"Q4_0", "F16"}
    said, says = before.metadata["any.gguf"], after.metadata["model.gguf"]
    changed = {key for key in said.keys() | says.keys() if said.get(key) != says.get(key)}
    assert changed == {"quantize.imatrix.file", "general.quantization_version"}
