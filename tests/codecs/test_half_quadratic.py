"""Files of HQQ: its packing by its formula, layers that it loads and saves itself, and wrong files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import dequantized, quantize, save
from tests.codecs.problems import assert_wrong

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.codecs.distant_groups import codes_of, words_of
from zeropoint.codecs.half_quadratic import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.errors import RecipeError

M = "a.up_proj"
Tensors = dict[str, torch.Tensor]


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(16, 128, generator=torch.Generator().manual_seed(4)) * 0.1 + 0.02).to(dtype)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_far_apart_share_a_byte(bits: int) -> None:
    codes = (torch.arange(24) % 2**bits).byte().view(24, 1)
    step = 24 * bits // 8
    wanted = [
        sum(int(codes[i + at * step]) << (8 - bits * (at + 1)) for at in range(8 // bits))
        for i in range(step)
    ]
    assert words_of(codes, bits, high_first=True).flatten().tolist() == wanted
    assert torch.equal(codes_of(words_of(codes, bits, high_first=True), bits, 24, high_first=True), codes)


def test_ten_codes_of_three_bits_share_a_word() -> None:
    codes = (torch.arange(24, dtype=torch.uint8) % 8).view(24, 1)
    padded = [*codes.flatten().tolist(), *[0] * 6]
    wanted = [sum(padded[i + 3 * at] << (27 - 3 * at) for at in range(10)) for i in range(3)]
    assert words_of(codes, 3, high_first=True).flatten().tolist() == wanted
    assert words_of(codes, 3, high_first=True).dtype == torch.int32
    assert torch.equal(codes_of(words_of(codes, 3, high_first=True), 3, 24, high_first=True), codes)


def written(folder: Path, text: str, weight: torch.Tensor, method: str = "nearest") -> Tensors:
    name = str(weight.dtype).removeprefix("torch.")
    save(folder / "in", {f"{M}.weight": weight}, {"model_type": "llama", "dtype": name})
    recipe = RecipeText(text=f"default: '{text}'\nmethod: {method}", name="a recipe")
    quantize(folder / "in", folder / "out", recipe, codec=CODEC)
    return load_file(folder / "out" / "model.safetensors")


def decoded(folder: Path, out: Path) -> torch.Tensor:
    return dequantized(folder, out)[f"{M}.weight"]


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("method", ["nearest", "hqq"])
def test_what_is_written_is_read_with_the_same_values(bits: int, method: str, tmp_path: Path) -> None:
    text = f"uint{bits}:g32:asym=real"
    found = written(tmp_path, text, x(), method)
    scale, zero = found[f"{M}.scale"], found[f"{M}.zero"]
    codes = codes_of(found[f"{M}.W_q"], bits, 64, high_first=True)
    values = ((codes.float() - zero) * scale).view(16, 128)
    assert torch.equal(decoded(tmp_path / "out", tmp_path / "floats"), values)
    if method == "nearest":
        assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems
        assert torch.equal(zp.quantize(x(), text).dequantize(), values)
    assert bytes(found[f"{M}.compute_dtype"].tolist()) == b"torch.float32"
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["quant_config"]["weight_quant_params"]["nbits"] == bits


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_groups_along_outputs_are_read_by_their_formula(bits: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (8, 256), generator=generator, dtype=torch.uint8)
    scale, zero = torch.rand(2, 1, 256, generator=generator) + 0.1
    said = {
        "W_q": words_of(codes, bits, high_first=True),
        "scale": scale, "zero": zero * 2**bits, "nbits": number(bits),
        "group_size": number(8), "axis": number(0), "shape": torch.tensor([16, 128]),
        "packing": text(CODEC.layout(layer_scheme(f"uint{bits}:g32:asym=real", CODEC))),
        "compute_dtype": text("torch.float32"),
    }  # fmt: skip
    folder = hqq_files(tmp_path / "in", {f"{M}.{name}": tensor for name, tensor in said.items()})
    wanted = ((codes.float() - said["zero"]) * scale).reshape(16, 128)
    assert torch.equal(decoded(folder, tmp_path / "out"), wanted)
    assert not zp.verify_checkpoint(folder).problems
    (seen,) = zp.inspect_checkpoint(folder).schemes
    assert seen.scheme == f"uint{bits}:block8x1:asym=real"
    with pytest.raises(RecipeError, match="is not what HQQ stores"):
        written(tmp_path / "again", f"uint{bits}:block8x1:asym=real", x())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_of_hqq_along_outputs_are_read(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    hqq = pytest.importorskip("hqq.core.quantize", reason="tests/oracles/more_peers.sh")
    linear = torch.nn.Linear(96, 64, bias=False)
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=32, axis=0)
    theirs = hqq.HQQLinear(linear, config, compute_dtype=dtype, device="cpu", del_orig=False)
    state = {f"{M}.{name}": tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    folder = hqq_files(tmp_path / "theirs", state)
    assert not zp.verify_checkpoint(folder).problems
    meta = {**theirs.meta, **{name: theirs.meta[name].float() for name in ("scale", "zero")}}
    values = hqq.Quantizer.dequantize(theirs.W_q, {**meta, "compute_dtype": torch.float32})
    assert torch.equal(decoded(folder, tmp_path / "floats"), values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_layers_of_hqq_load_what_is_written_and_save_what_is_read(bits: int, tmp_path: Path) -> None:
    hqq = pytest.importorskip("hqq.core.quantize", reason="tests/oracles/more_peers.sh")
    found = written(tmp_path, f"uint{bits}:g32:asym=real", x())
    layer = hqq.HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
    layer.load_state_dict({name.removeprefix(f"{M}."): tensor for name, tensor in found.items()})
    assert torch.equal(layer.dequantize(), decoded(tmp_path / "out", tmp_path / "floats"))
    linear = torch.nn.Linear(128, 16, bias=False)
    linear.weight.data = x()
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=32, axis=1)
    theirs = hqq.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    stored = {f"{M}.{name}": tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert stored.keys() == found.keys()
    folder = hqq_files(tmp_path / "theirs", stored)
    assert not zp.verify_checkpoint(folder).problems
    assert torch.equal(decoded(folder, tmp_path / "their-floats"), theirs.dequantize())


def hqq_files(folder: Path, tensors: Tensors) -> Path:
    section = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
    config = {"model_type": "llama", "dtype": "float32", "quantization_config": section}
    return save(folder, tensors, config)


def stored(**changes: Any) -> Tensors:
    """Return a layer of 4 rows in 4 bits, with other tensors."""
    layer = layer_scheme("uint4:g32:asym=real", CODEC)
    q = zp.quantize(x()[:4], layer.weight)
    found = CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)
    found |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    return {f"{M}.{name}": tensor for name, tensor in found.items() if changes.get(name, 0) is not None}


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def text(value: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


WRONG: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"nbits": number(5)}, "nbits 5, group_size 32 and axis 1 are not read; known are 1, 2, 3, 4 and 8"),
    ({"axis": number(2)}, "axis 2 are not read; known are 1, 2, 3, 4 and 8, any group, and 0 and 1"),
    ({"axis": number(0)}, r"shape \[4, 128\] is not read: columns must be whole groups of 32"),
    ({"group_size": number(0)}, "group_size 0 and axis 1 are not read"),
    ({"group_size": number(48)}, r"shape \[4, 128\] is not read: rows must be whole groups of 48"),
    ({"group_size": number(64)}, r"W_q is U8 of shape \[8, 32\], but must be U8 of shape \[4, 64\]"),
    ({"nbits": torch.tensor(4)}, r"nbits is I64 of shape \[\], but must be I32 of \[\]"),
    ({"nbits": None}, "nbits is missing, which W_q needs"),
    ({"shape": torch.tensor([4, -128])}, r"shape \[4, -128\] is not read"),
    ({"shape": torch.tensor([4])}, r"shape is I64 of shape \[1\], but must be I64 of \[2\]"),
    ({"scale": None}, "scale is missing, which W_q needs"),
    ({"zero": None}, "zero is missing, which 4bit_u8 needs"),
    ({"scale": torch.ones(16, 1, dtype=torch.int8)}, "scale is I8, but must be one of"),
    ({"scale": torch.ones(16, 1).half()}, r"zero is F32 of .*, but must be F16"),
    ({"scale": torch.full((16, 1), float("nan"))}, "must be finite and at least"),
    ({"packing": text("4bit_32")}, "packing '4bit_32' of 4 bits is not read; known is 4bit_u8"),
    ({"packing": text("x" * 65)}, "packing is U8 .*, but must be U8, a short name"),
    ({"compute_dtype": text("torch.int8")}, "compute_dtype is 'int8', but must be one of torch.float16"),
    ({"quant_zero": torch.tensor(1, dtype=torch.uint8)}, "quant_zero is set, which is not read"),
    ({"view_as_float": torch.tensor(1, dtype=torch.uint8)}, "view_as_float is set, which is not read"),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    assert_wrong(hqq_files(tmp_path / "in", stored(**changes)), M, rule)


def test_groups_that_do_not_fill_bytes_are_refused() -> None:
    layer = layer_scheme("uint4:g32:asym=real", CODEC)
    assert CODEC.refusal(layer, (3, 32)) == "3 groups do not fill whole bytes, of 2 codes"
