"""Mixtures against llama.cpp's own quantizer: the type of each tensor, and the bytes of all of them."""

import ctypes
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoint.written import quantize
from tests.oracles import tiny_models

from zeropoint.checkpoint.model.importance import with_importance
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.llama_cpp.mixtures import FILE_TYPES, MIXTURES, OF_IMPORTANCE
from zeropoint.codecs.registry import get_codec

llama_cpp = pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")

from .test_llama_cpp import WITH_EXPERTS, decoded  # noqa: E402 (which needs llama_cpp)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GGUF = get_codec("gguf")
MANY_LAYERS = {
    "num_hidden_layers": 17,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 8,
}


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {t.name: (t.tensor_type.name, np.asarray(t.data).tobytes()) for t in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module", params=["llama", "qwen2", "bert", "mixtral", "qwen2_moe", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint of floats and the same as a GGUF file of float32."""
    folder = tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, **MANY_LAYERS})
    sizes = MANY_LAYERS | ({"intermediate_size": 64} if request.param in WITH_EXPERTS else {})
    patch.setattr(tiny_models, "DECODER", {**tiny_models.DECODER, **sizes})
    tiny_models.write(folder / "first", request.param, dtype=torch.float32)
    patch.undo()
    quantize(folder / "first", folder / "q8_0", "q8_0", codec=GGUF)
    path = folder / "q8_0" / "model.gguf"
    floats = decoded(path, folder / "floats", GGUF) / "model.gguf"
    return decoded(path, folder / "in", get_codec("compressed-tensors")), floats


def importance(floats: Path, path: Path) -> ctypes.Array[ctypes.Structure]:
    """Write random importance of all weights of blocks to a file, and return it as llama.cpp takes it."""
    rng = np.random.default_rng(5)
    entries = [
        # Of experts, numbers for each.
        (tensor.name.encode(), (rng.random(tensor.shape[0] * math.prod(tensor.shape[2:])) ** 4).astype("f4"))
        for tensor in gguf.GGUFReader(floats).tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    ]
    data = b"".join(
        struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, len(values)) + values.tobytes()
        for name, values in entries
    )
    path.write_bytes(struct.pack("<i", len(entries)) + data)
    table = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))()
    for item, (name, values) in zip(table, entries, strict=False):
        item.name, item.size = name, len(values)
        item.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    table.kept = entries  # type: ignore[attr-defined]
    return table


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_tensor_has_the_type_and_bytes_of_llama_cpp(
    mixture: str, weighted: bool, model: tuple[Path, Path], tmp_path: Path
) -> None:
    source, floats = model
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[mixture], 1
    table = importance(floats, tmp_path / "imatrix.dat")
    if weighted:
        parameters.imatrix = table
    out = str(tmp_path / "theirs.gguf").encode()
    refused = llama_cpp.llama_model_quantize(str(floats).encode(), out, ctypes.byref(parameters)) != 0
    if mixture in OF_IMPORTANCE and not weighted:
        assert refused
        return
    assert not refused
    plan = make_plan(open_source(source), mixture, codec=GGUF)
    run(with_importance(plan, tmp_path / "imatrix.dat")[0] if weighted else plan, tmp_path / "ours")
    ours, theirs = tensors_of(tmp_path / "ours" / "model.gguf"), tensors_of(tmp_path / "theirs.gguf")
    assert {name: kind for name, (kind, _) in ours.items()} == {
        name: kind for name, (kind, _) in theirs.items()
    }
    assert [name for name in ours if ours[name] != theirs[name]] == []
    for path in (tmp_path / "ours" / "model.gguf", tmp_path / "theirs.gguf"):
        assert gguf.GGUFReader(path).fields["general.file_type"].contents() == FILE_TYPES[mixture]
