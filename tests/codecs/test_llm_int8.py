"""Files of LLM.int8: bitsandbytes' bytes and values, a model that transformers loads, and wrong files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import LLAMA, dequantized, quantize, save
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.llm_int8 import CODEC, magnitude_of, scale_of

M = "a.up_proj"
Tensors = dict[str, torch.Tensor]
# What functional.int8_vectorwise_quant(x().half()) of bitsandbytes 0.50.2 gives on a CPU: the first digits of
# the SHA-256 of its codes, and its magnitudes.
CODES, MAGNITUDES = "d0492c1cb7ed546d21422ab982cecac2", [0.78515625, 0.78515625, 0.0]


def x() -> torch.Tensor:
    found = ((torch.arange(256) * 37 % 101).float() - 50.25).view(2, 128) / 64
    return torch.cat([found, torch.zeros(1, 128)]).bfloat16()


def stored() -> Tensors:
    """Return the tensors of a layer as bitsandbytes writes them."""
    codes = (torch.arange(3 * 128) * 37 % 255 - 127).view(3, 128)
    return {
        f"{M}.weight": codes.to(torch.int8), f"{M}.SCB": torch.tensor([0.5, 0.75, 3.0]),
        f"{M}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip


def theirs(folder: Path, tensors: Tensors, **section: Any) -> Path:
    found = {"quant_method": "bitsandbytes", "load_in_8bit": True, **section}
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": found}
    return save(folder, tensors, config)


def original(folder: Path, **others: torch.Tensor) -> Path:
    return save(folder, {f"{M}.weight": x(), **others}, LLAMA)


def test_the_bytes_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    source = original(tmp_path / "in", **{"a.down_proj.weight": torch.ones(64)})
    quantize(source, tmp_path / "out", "llm_int8", codec=CODEC)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert hashlib.sha256(found[f"{M}.weight"].numpy().tobytes()).hexdigest()[:32] == CODES
    assert found[f"{M}.SCB"].tolist() == MAGNITUDES
    assert (found[f"{M}.weight_format"].dtype, int(found[f"{M}.weight_format"])) == (torch.uint8, 0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_skip_modules": [],
    }  # fmt: skip
    assert not zp.verify_checkpoint(tmp_path / "out", source).problems


def test_files_of_bitsandbytes_are_read_with_its_values(tmp_path: Path) -> None:
    tensors = stored()
    tensors[f"{M}.weight"][2], tensors[f"{M}.SCB"][2] = 0, 0.0
    folder = theirs(tmp_path / "in", tensors)
    assert not zp.verify_checkpoint(folder).problems
    wanted = tensors[f"{M}.weight"] * tensors[f"{M}.SCB"].view(-1, 1) * 7.874015718698502e-3
    assert torch.equal(dequantized(folder, tmp_path / "out")[f"{M}.weight"], wanted.bfloat16())


def test_magnitudes_of_16_bits_come_back_and_others_keep_their_scale() -> None:
    short = torch.arange(1, 1 << 15, dtype=torch.int16).view(torch.float16).float()
    short = short[torch.isfinite(short)]
    assert torch.equal(magnitude_of(scale_of(short)), short)
    scales = scale_of(torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(scale_of(magnitude_of(scales)), scales)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_package_itself_gives_the_same_codes_but_for_ties(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    given = (torch.randn(96, 512, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype)
    layer = layer_scheme("llm_int8", CODEC)
    q = zp.quantize(given, layer.weight)
    ours = CODEC.encode(layer, q)
    codes, magnitudes, _ = functional.int8_vectorwise_quant(given.half())
    assert torch.equal(ours["SCB"], magnitudes)
    ratio = given.double() * 127 / magnitudes.double()[:, None]
    tie = ((ratio - ratio.floor()) - 0.5).abs() < 2.0**-16
    assert torch.equal(ours["weight"][~tie], codes[~tie])
    assert int((ours["weight"].int() - codes.int()).abs().max()) <= 1


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_what_is_written_and_its_files_are_read(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    tiny_models.llama(seed=6).bfloat16().save_pretrained(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "ours", "llm_int8", codec=CODEC)
    load = transformers.AutoModelForCausalLM.from_pretrained
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    quantized = load(tmp_path / "in", quantization_config=eight, dtype=torch.bfloat16)
    quantized.save_pretrained(tmp_path / "theirs")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in written.items()} == {
        k: (v.dtype, v.shape) for k, v in saved.items()
    }
    model = load(tmp_path / "ours", dtype=torch.bfloat16)
    modules = {name: module for name, module in model.named_modules() if f"{name}.SCB" in written}
    assert len(modules) == 7
    for name, module in modules.items():
        assert torch.equal(module.weight.data, written[f"{name}.weight"])
        assert torch.equal(module.weight.SCB, written[f"{name}.SCB"])
    with torch.no_grad():
        assert bool(torch.isfinite(model(torch.arange(12)[None]).logits).all())
    assert not zp.verify_checkpoint(tmp_path / "theirs", tmp_path / "in").problems
    values = dequantized(tmp_path / "theirs", tmp_path / "decoded")
    for name in modules:
        wanted = functional.int8_vectorwise_dequant(saved[f"{name}.weight"], saved[f"{name}.SCB"])
        assert torch.equal(values[f"{name}.weight"], wanted.bfloat16())
