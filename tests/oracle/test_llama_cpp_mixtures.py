"""Mixtures against llama.cpp's own quantizer: the type of each tensor, and the bytes of all of them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

llama_cpp = pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")
transformers = pytest.importorskip("transformers", reason="extra `hf`")

from tests.oracles import tiny_models  # noqa: E402 (it needs transformers)

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan  # noqa: E402
from zeropoint.checkpoint.read.source import open_source  # noqa: E402
from zeropoint.checkpoint.run.loop import run  # noqa: E402
from zeropoint.codecs.llama_cpp.mixtures import MIXTURES  # noqa: E402
from zeropoint.codecs.registry import get_codec  # noqa: E402

from .test_llama_cpp import decoded  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GGUF = get_codec("gguf")
MANY_LAYERS = {
    "num_hidden_layers": 17,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 8,
}
FILE_TYPES = {
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "mostly_q4_0": 2, "mostly_q4_1": 3, "mostly_q5_0": 8, "mostly_q5_1": 9, "mostly_q8_0": 7,
    "mostly_q2_k": 10, "mostly_q6_k": 18, "mostly_iq4_nl": 25, "mostly_iq4_xs": 30,
    "mostly_tq1_0": 36, "mostly_tq2_0": 37,
}  # fmt: skip


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {t.name: (t.tensor_type.name, np.asarray(t.data).tobytes()) for t in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module", params=["llama", "qwen2", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint of floats and the same as a GGUF file of float32."""
    folder = tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, **MANY_LAYERS})
    patch.setattr(tiny_models, "DECODER", {**tiny_models.DECODER, **MANY_LAYERS})
    tiny_models.write(folder / "first", request.param, dtype=torch.float32)
    patch.undo()
    run(make_plan(open_source(folder / "first"), "q8_0", codec=GGUF), folder / "q8_0")
    path = folder / "q8_0" / "model.gguf"
    floats = decoded(path, folder / "floats", GGUF) / "model.gguf"
    return decoded(path, folder / "in", get_codec("compressed-tensors")), floats


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_tensor_has_the_type_and_bytes_of_llama_cpp(
    mixture: str, model: tuple[Path, Path], tmp_path: Path
) -> None:
    source, floats = model
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[mixture], 1
    out = str(tmp_path / "theirs.gguf").encode()
    assert llama_cpp.llama_model_quantize(str(floats).encode(), out, ctypes.byref(parameters)) == 0
    run(make_plan(open_source(source), mixture, codec=GGUF), tmp_path / "ours")
    ours, theirs = tensors_of(tmp_path / "ours" / "model.gguf"), tensors_of(tmp_path / "theirs.gguf")
    assert {name: kind for name, (kind, _) in ours.items()} == {
        name: kind for name, (kind, _) in theirs.items()
    }
    assert [name for name in ours if ours[name] != theirs[name]] == []
