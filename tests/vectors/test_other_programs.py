"""The expectations of the conformance vectors, compared with programs that are not ours."""

import json
from pathlib import Path
from typing import Any

import gfloat
import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from tests.checkpoint.quantized_inputs import dequantized_by_others
from tests.codecs.test_awq import fields
from tests.codecs.test_gptq import by_hand
from tests.oracle.test_dialect_peers import OBSERVED, flat, quarks, runtimes, torchs
from tests.oracle.test_formats_oracles import GFLOAT, ML_DTYPES
from tests.vectors.reading import cases, parts

import zeropoint as zp

FORMATS = {case["name"]: case for case in cases("formats")}
DIALECTS = {case["name"]: case for case in cases("dialects")}
LAYOUTS = {case["name"]: case for case in cases("layouts")}
NARROW = [name for name in FORMATS if name in ML_DTYPES and "int" not in name and name != "float8_e8m0fnu"]
ROUNDED = [name for name in FORMATS if name in GFLOAT and "int" not in name and name != "float8_e8m0fnu"]
INTEGERS = [name for name in FORMATS if name.startswith(("int", "uint")) and name != "int8_mx"]
BLOCKS = [
    name
    for name, case in LAYOUTS.items()
    if name.startswith("gguf/") and case["layout"] in GGMLQuantizationType.__members__.keys() - {"NVFP4"}
]
GPTQ = [name for name, case in LAYOUTS.items() if case["layout"] in ("gptq", "gptq_v2")]
WRITTEN = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def bits(x: Any) -> list[int]:
    """Return the bits of float32 numbers, with one NaN for all."""
    array = np.array(x, np.float32)
    array[np.isnan(array)] = np.nan
    return [int(b) for b in array.view(np.uint32)]


@pytest.mark.parametrize("name", [name for name in FORMATS if name in ML_DTYPES])
def test_codes_have_the_values_of_ml_dtypes(name: str) -> None:
    table = parts("formats", FORMATS[name])
    with np.errstate(invalid="ignore"):
        theirs = table["codes"].numpy().view(ML_DTYPES[name]).astype(np.float32)
    assert bits(table["values"].numpy()) == bits(theirs)


@pytest.mark.parametrize("name", [name for name in FORMATS if name in GFLOAT])
def test_codes_have_the_values_of_gfloat(name: str) -> None:
    table = parts("formats", FORMATS[name])
    theirs = [gfloat.decode_float(GFLOAT[name], int(code)).fval for code in table["codes"]]
    assert bits(table["values"].numpy()) == bits(theirs)


@pytest.mark.parametrize("name", NARROW)
def test_inputs_have_the_codes_of_ml_dtypes_where_these_do_not_overflow(name: str) -> None:
    table = parts("formats", FORMATS[name])
    largest = float(table["values"][torch.isfinite(table["values"])].max())
    inside = table["inputs"].abs() <= largest
    theirs = table["inputs"][inside].numpy().astype(ML_DTYPES[name])
    patterns = theirs.view(np.uint8 if theirs.itemsize == 1 else np.uint16)
    assert patterns.tolist() == table["encoded"][inside].tolist()


@pytest.mark.parametrize("name", ROUNDED)
def test_inputs_have_the_codes_of_gfloat(name: str) -> None:
    table, kind = parts("formats", FORMATS[name]), GFLOAT[name]
    for value, code in zip(table["inputs"].tolist(), table["encoded"].tolist(), strict=True):
        rounded = gfloat.round_float(kind, value, gfloat.RoundMode.TiesToEven, sat=True)
        assert int(gfloat.encode_float(kind, rounded)) == code, value


@pytest.mark.parametrize("name", INTEGERS)
def test_inputs_have_the_integers_of_numpy(name: str) -> None:
    table, width = parts("formats", FORMATS[name]), FORMATS[name]["bits"]
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if name[0] == "i" else (0, 2**width - 1)
    theirs = np.clip(np.rint(table["inputs"].numpy().astype(np.float64)), low, high).astype(np.int64)
    assert (theirs % 2**width).tolist() == table["encoded"].tolist()


def test_the_codebook_of_iq4_is_that_of_gguf() -> None:
    assert parts("formats", FORMATS["iq4"])["values"].tolist() == list(gguf.quants.IQ4_NL.kvalues)


def test_bfloat16_and_float16_are_those_of_the_machine() -> None:
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        table = parts("formats", FORMATS[name])
        inside = table["inputs"].abs() <= float(ml_dtypes.finfo(dtype).max)
        theirs = table["inputs"][inside].numpy().astype(dtype).view(np.uint16)
        assert theirs.tolist() == table["encoded"][inside].tolist()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_values_of_gguf(name: str) -> None:
    table, kind = parts("layouts", LAYOUTS[name]), GGMLQuantizationType[LAYOUTS[name]["layout"]]
    blocks, values = table["weight"].numpy(), table["values"]
    theirs = torch.from_numpy(gguf.dequantize(blocks, kind).reshape(values.shape))
    assert torch.equal(theirs, values)
    if name.split("/")[1] in WRITTEN:
        written = gguf.quantize(table["inputs"].float().numpy(), kind)
        other = np.unique(written.reshape(blocks.shape) ^ blocks)
        # Of zeros of both signs, the smallest is the first here and in llama.cpp's C, and the last in numpy.
        assert set(other.tolist()) <= ({0, 0x80} if name.split("/")[1].endswith("_1") else {0})


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_has_the_values_of_its_equation(name: str) -> None:
    table, section = parts("layouts", LAYOUTS[name]), LAYOUTS[name]["quantization_config"]
    first = LAYOUTS[name]["layout"] == "gptq"
    tensors = {part: table[part] for part in ("qweight", "qzeros", "scales", "g_idx")}
    assert torch.equal(by_hand(tensors, section["bits"], first_version=first).t(), table["values"])


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("awq/")])
def test_awq_has_the_values_of_its_equation(name: str) -> None:
    table = parts("layouts", LAYOUTS[name])
    group = table["values"].shape[1] // len(table["scales"])
    zeros, scales = fields(table["qzeros"]), table["scales"].float()
    steps = fields(table["qweight"]) - zeros.repeat_interleave(group, 0)
    assert torch.equal((steps.float() * scales.repeat_interleave(group, 0)).t(), table["values"])


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n.startswith(("compressed-tensors/", "fp8-block/"))])
def test_compressed_tensors_has_these_values(name: str, tmp_path: Path) -> None:
    """It computes in the dtype of the scale, bfloat16 but for MX, to which ours are rounded here."""
    case, table = LAYOUTS[name], parts("layouts", LAYOUTS[name])
    stored = {each["name"]: table[part] for part, each in case["stored"].items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": case["quantization_config"]}))
    theirs = dequantized_by_others(tmp_path, dtype=torch.float32)["m.up_proj.weight"]
    dtype = torch.float32 if "mx" in name else torch.bfloat16
    assert torch.equal(theirs.to(dtype), table["values"].to(dtype))


@pytest.mark.parametrize("inputs", ["ordinary", "extreme"])
@pytest.mark.parametrize("text", [text for text in OBSERVED if f"{text}:dialect=torch/ordinary" in DIALECTS])
def test_the_dialect_torch_is_that_of_torch(text: str, inputs: str) -> None:
    table = parts("dialects", DIALECTS[f"{text}:dialect=torch/{inputs}"])
    scale, zero, values = torchs(table["inputs"], text)
    assert flat(table["scale1"]) == flat(scale)
    assert flat(table.get("zero_point")) == (flat(zero) if "asym" in text else [])
    assert torch.equal(table["values"], values)


@pytest.mark.parametrize("text", ["int8:channel", "uint8:tensor:asym", "float8_e4m3fn:channel"])
def test_the_dialect_onnx_is_that_of_onnxruntime(text: str) -> None:
    table = parts("dialects", DIALECTS[f"{text}:dialect=onnx/ordinary"])
    q = zp.quantize(table["inputs"], f"{text}:dialect=onnx")
    assert flat(q.scales[0]) == flat(table["scale1"])
    codes, values = runtimes(table["inputs"], q, text.split(":")[0])
    assert table["values"].numpy().tobytes() == values.tobytes()
    assert "float" in text or table["codes"].tolist() == codes.numpy().tolist()


def test_the_dialect_quark_is_by_the_formulas_of_quark() -> None:
    text = "uint8:tensor:asym"
    table = parts("dialects", DIALECTS[f"{text}:dialect=quark/ordinary"])
    scale, zero, codes = quarks(table["inputs"], text)
    ours = (table["scale1"], table["zero_point"], table["codes"])
    assert list(map(flat, ours)) == list(map(flat, (scale, zero, codes)))
