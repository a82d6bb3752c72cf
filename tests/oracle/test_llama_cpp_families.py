"""Every family against llama.cpp: its converter's tensors, its logits, its quantizer's types, and back."""

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoint.written import quantize
from tests.oracles import converted, tiny_families
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.llama_cpp.mixtures import FILE_TYPES
from zeropoint.codecs.registry import DEFAULT, get_codec

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GGUF = get_codec("gguf")
NAMES = list(tiny_families.FAMILIES)
NEAR = dict.fromkeys(
    ("gpt2", "gemma2", "gemma3", "gemma4", "gemma4_shared", "gemma4_moe", "starcoder2"), 2e-2
)
"""ggml's GELU is a table in float16."""
_LATENT = ("attn_k_b.weight", "attn_v_b.weight")
OTHER_TYPES = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm_moe_dsa"), _LATENT)
"""Matrices of heads in one tensor, which llama.cpp quantizes and zeropoint keeps."""
GATE_UP = {"gemma4_moe": "_gate_up_exps"}
"""What is in names of tensors in which llama.cpp's converter leaves gate and up together."""


def written(source: Path, out: Path, codec: object = GGUF) -> Path:
    """Write a checkpoint or GGUF file in float32 of a codec, and return the file of weights."""
    selection = Selection(dequantize=DequantizePolicy.EVERY, floats="F32")
    run(make_plan(open_source(source), KEEP, codec=codec, selection=selection), out)  # type: ignore[arg-type]
    return out / ("model.gguf" if codec is GGUF else "model.safetensors")


def tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str, np.ndarray]]:
    return {
        t.name: (tuple(map(int, t.shape[::-1])), t.tensor_type.name, np.asarray(t.data))
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the name of a family and a folder with a checkpoint and its GGUF file of float32."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_families.write(folder / "in", request.param)
    written(folder / "in", folder / "out")
    return request.param, folder


def test_tensors_are_those_of_the_converter(model: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = model
    if not converted.CONVERTER.exists() or name in converted.UNREAD:
        pytest.skip("the converter is made by benchmarks/llama_cpp.sh")
    converted.convert(folder / "in", tmp_path / "theirs.gguf")
    ours, theirs = tensors(folder / "out" / "model.gguf"), tensors(tmp_path / "theirs.gguf")
    assert {k: v[:2] for k, v in ours.items()} == {k: v[:2] for k, v in theirs.items()}
    for key, (_, _, values) in ours.items():
        if key.endswith(".ssm_a"):  # exp in float64 here, and in float32 there
            np.testing.assert_allclose(values, theirs[key][2], rtol=2e-7)
        else:
            assert values.tobytes() == theirs[key][2].tobytes(), key


def test_logits_are_those_of_transformers_and_come_back(model: tuple[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")
    name, folder = model
    first, back = folder / "in", written(folder / "out" / "model.gguf", tmp_path / "back", DEFAULT).parent
    theirs = converted.logits_of(folder / "out" / "model.gguf")
    for checkpoint in (first, back):
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        if name == "gpt_oss":  # llama.cpp rounds bounds of YaRN, which real models do not, and no file says
            config.rope_parameters["truncate"] = True
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, dtype=torch.float32
        ).eval()
        apart = (converted.logits_by_step(loaded) - theirs[:, :360]).abs().max()
        assert float(apart) <= NEAR.get(name, 2e-4), checkpoint


def test_types_of_a_mixture_are_those_of_llama_cpp(model: tuple[str, Path], tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")
    name, folder = model
    for mixture in ("q4_k_m", "q3_k_m"):
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = FILE_TYPES[mixture], 1
        made, source = str(tmp_path / "theirs.gguf").encode(), str(folder / "out" / "model.gguf").encode()
        assert llama_cpp.llama_model_quantize(source, made, ctypes.byref(parameters)) == 0
        quantize(folder / "in", tmp_path / mixture, mixture, codec=GGUF)
        assert zp.verify_checkpoint(tmp_path / mixture, folder / "in").problems == ()
        ours, theirs = tensors(tmp_path / mixture / "model.gguf"), tensors(tmp_path / "theirs.gguf")
        converted.logits_of(tmp_path / mixture / "model.gguf")  # it loads and runs
        for key, (_, kind, values) in theirs.items():
            together = name in GATE_UP and GATE_UP[name] in key
            if not together and not key.endswith(OTHER_TYPES.get(name, "/")):
                assert ours[key][1] == kind, key
                assert ours[key][2].tobytes() == values.tobytes(), key
