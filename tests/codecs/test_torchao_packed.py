"""Files of torchao with packed codes or scales: its bytes, recorded, int4 by its formula; wrong ones."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.written import LLAMA, dequantized, quantize, save
from tests.codecs.problems import assert_wrong
from tests.codecs.torchao_files import wrapped, write

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.torchao import CODEC
from zeropoint.codecs.torchao_packed import straight, swizzled
from zeropoint.errors import UnsupportedError
from zeropoint.recipes import Activation

M = "a.up_proj"
QDATA, SCALE, ZERO, TENSOR = (
    f"{M}._weight_{name}" for name in ("qdata", "scale", "zero_point", "per_tensor_scale")
)
Tensors = dict[str, torch.Tensor]
# The first digits of the SHA-256 of qdata and scale, and the shape of scale, that torchao 0.18 gives x() on a
# CPU: MXTensor.to_mx by RCEIL and NVFP4Tensor.to_nvfp4 with a scale of the tensor, both with swizzled scales.
RECORDED = {
    "mxfp8": ("a375dca51b4cde35e918ff45d8d9c2eb", "f17856ea7162ca0762c0ed2ab4c0ca02", (64, 32)),
    "mxfp4": ("47348b25785ad801502716e77873c111", "d74e3d85a961e6e87578f6650b18ce6f", (64, 32)),
    "nvfp4a16": ("87442b9453798f2a44f3daeb42588fac", "4b0836b9ac3f563c694170371a914ed1", (64, 48)),
}


def x() -> torch.Tensor:
    numbers = (torch.arange(130 * 160) * 37 % 1013).float() - 506.25
    return (numbers.view(130, 160) / 640).bfloat16()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def written(folder: Path, text: str, weight: torch.Tensor) -> Tensors:
    save(folder / "in", {f"{M}.weight": weight}, LLAMA)
    limits = Limits(workers=1, tile_values=1)
    quantize(folder / "in", folder / "out", text, codec=CODEC, limits=limits)
    return load_file(folder / "out" / "model.safetensors")


def decoded(folder: Path, out: Path) -> torch.Tensor:
    return dequantized(folder, out)[f"{M}.weight"]


@pytest.mark.parametrize("text", RECORDED)
def test_the_bytes_are_those_of_torchao(text: str, tmp_path: Path) -> None:
    found = written(tmp_path, text, x())
    scale = found[SCALE]
    assert (digest(found[QDATA]), digest(scale), tuple(scale.shape)) == RECORDED[text]
    if text == "nvfp4a16":
        assert float(found[TENSOR]) == 0.00029355002334341407
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems
    values = zp.quantize(x(), layer_scheme(text, CODEC).weight).dequantize()
    assert torch.equal(decoded(tmp_path / "out", tmp_path / "floats"), values)


def test_scales_lie_in_tiles_of_which_a_line_has_every_32nd_row() -> None:
    scale = (torch.arange(300 * 9) % 251).to(torch.uint8).view(300, 9)
    found = swizzled(scale)
    assert found.shape == (3 * 32, 3 * 16)
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 8), (128, 4), (299, 8)):
        tile = row // 128 * 3 + column // 4
        at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert found.flatten()[at] == scale[row, column]
    assert torch.equal(straight(found, 9)[:300], scale)


def test_int4_is_that_of_its_formula(tmp_path: Path) -> None:
    weight = x()
    found = written(tmp_path, "int4:g32:scale=linear_late/input:offset=minimum_late/input", weight)
    groups = weight.float().view(130, 5, 32)
    low, high = groups.aminmax(dim=2)[0], groups.aminmax(dim=2)[1]
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15) - 8
    assert torch.equal(found[SCALE], scale.bfloat16().t())
    assert torch.equal(found[ZERO], (low + scale * 8).bfloat16().t())
    fields = torch.stack([found[QDATA] << 4 >> 4, found[QDATA] >> 4], 2).view(130, 5, 32)
    # Where a quotient is within rounding of the middle of two codes, the other one is as close.
    assert int((fields - codes).abs().max()) <= 1
    assert int((fields != codes).sum()) < 20
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems
    values = fields * found[SCALE].float().t()[..., None] + found[ZERO].float().t()[..., None]
    assert torch.equal(decoded(tmp_path / "out", tmp_path / "floats"), values.view(130, 160).bfloat16())


def test_the_metadata_and_the_configuration_of_int4_are_those_of_torchao(tmp_path: Path) -> None:
    written(tmp_path, "int4wo", torch.ones(16, 256).bfloat16())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        said = json.loads(file.metadata()[f"{M}.weight"])
    assert said == {
        "_type": "Int4Tensor",
        "_data": {
            "activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "block_size": [1, 128],
            "shape": [16, 256],
        },
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }  # fmt: skip
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["quant_type"]["default"]["_data"]["int4_packing_format"]["_data"] == "PLAIN"


MX: dict[str, Any] = {
    "elem_dtype": wrapped("torch.dtype", "float4_e2m1fn_x2"), "block_size": 32,
    "orig_dtype": wrapped("torch.dtype", "bfloat16"), "act_quant_kwargs": None, "is_swizzled_scales": False,
}  # fmt: skip
NVFP4: dict[str, Any] = {
    "block_size": 16, "orig_dtype": wrapped("torch.dtype", "bfloat16"), "act_quant_kwargs": None,
    "is_swizzled_scales": False,
}  # fmt: skip
INT4: dict[str, Any] = {"block_size": [1, 32], "shape": [2, 64]}


def mx() -> Tensors:
    scale = torch.tensor([[127, 126], [120, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {QDATA: torch.arange(64, dtype=torch.uint8).view(2, 32), SCALE: scale}


def nvfp4() -> Tensors:
    return {
        QDATA: torch.arange(64, dtype=torch.uint8).view(2, 32),
        SCALE: torch.arange(1, 9).view(2, 4).float().to(torch.float8_e4m3fn), TENSOR: torch.tensor(0.5),
    }  # fmt: skip


def int4() -> Tensors:
    parts = (torch.tensor([[0.5, 1.0], [2.0, 0.25]]).bfloat16(), torch.ones(2, 2).bfloat16())
    return {QDATA: torch.arange(64).view(2, 32).char(), SCALE: parts[0], ZERO: parts[1]}


def theirs(folder: Path, tensors: Tensors, kind: str, data: Mapping[str, Any]) -> Path:
    return write(folder, tensors, kind, data, config=wrapped("AnyConfig", {}))


def test_scales_in_rows_are_read_as_well(tmp_path: Path) -> None:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = mx()[QDATA]
    values = table[torch.stack([codes & 15, codes >> 4], 2).int()].view(2, -1)
    for name, tensors, data, group in (("MXTensor", mx(), MX, 32), ("NVFP4Tensor", nvfp4(), NVFP4, 16)):
        folder = theirs(tmp_path / name, tensors, name, data)
        assert not zp.verify_checkpoint(folder).problems
        factor = tensors[SCALE].float().repeat_interleave(group, 1) * (1 if name == "MXTensor" else 0.5)
        found = decoded(folder, tmp_path / f"{name}-floats")
        assert torch.equal(found, (values * factor).bfloat16())


KWARGS = wrapped("QuantizeTensorToMXKwargs", {"elem_dtype": wrapped("torch.dtype", "float8_e4m3fn")})
WRONG: tuple[tuple[Callable[[], Tensors], str, Mapping[str, Any], str], ...] = (
    (mx, "MXTensor", MX | {"block_size": 16}, "MXTensor with block_size 16 in its metadata is not read"),
    (mx, "MXTensor", MX | {"block_size": True}, "block_size True in its metadata is not read"),
    (mx, "MXTensor", MX | {"elem_dtype": "fp6_e2m3"}, "elem_dtype 'fp6_e2m3' in its metadata is not read"),
    (mx, "MXTensor", MX | {"orig_dtype": None}, "its dtype is None, but must be one of bfloat16"),
    (mx, "MXTensor", MX | {"act_quant_kwargs": KWARGS}, "quantized inputs .* in its metadata are not read"),
    (mx, "MXTensor", MX | {"is_swizzled_scales": True}, r"is F8_E8M0 of shape \[2, 2\], but must be"),
    (lambda: mx() | {SCALE: torch.ones(2, 2)}, "MXTensor", MX, r"_weight_scale is F32 of shape \[2, 2\]"),
    (lambda: {QDATA: mx()[QDATA]}, "MXTensor", MX, "_weight_scale is missing, which MXTensor needs"),
    (lambda: mx() | {TENSOR: torch.tensor(1.0)}, "MXTensor", MX, "per_tensor_scale has no place in MXTensor"),
    (nvfp4, "NVFP4Tensor", NVFP4 | {"block_size": 32}, "NVFP4Tensor with block_size 32 in its"),
    (lambda: nvfp4() | {TENSOR: torch.ones(2)}, "NVFP4Tensor", NVFP4, r"scale is F32 of shape \[2\], but"),
    (lambda: nvfp4() | {TENSOR: torch.tensor(-1.0)}, "NVFP4Tensor", NVFP4, "must be finite and positive"),
    (
        lambda: nvfp4() | {SCALE: (-nvfp4()[SCALE].float()).to(torch.float8_e4m3fn)},
        "NVFP4Tensor",
        NVFP4,
        "a scale is negative",
    ),
    (int4, "Int4Tensor", INT4 | {"block_size": [2, 32]}, r"block_size \[2, 32\] in its metadata"),
    (int4, "Int4Tensor", INT4 | {"block_size": [1, 31]}, r"block_size \[1, 31\] in its metadata"),
    (int4, "Int4Tensor", INT4 | {"shape": [2, 32]}, r"shape in its metadata is \[2, 32\], but its codes"),
    (lambda: int4() | {SCALE: torch.ones(2, 2)}, "Int4Tensor", INT4, "zero_point is BF16 .* must be F32"),
    (lambda: int4() | {SCALE: torch.ones(2, 2).char()}, "Int4Tensor", INT4, "its dtype is int8, but must"),
    (lambda: int4() | {QDATA: torch.ones(8).char()}, "Int4Tensor", INT4, "but must be a matrix"),
    (int4, "Int4PreshuffledTensor", INT4, "class 'Int4PreshuffledTensor' are not read; known are Int8"),
)  # fmt: skip


@pytest.mark.parametrize(("tensors", "kind", "data", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    tensors: Callable[[], Tensors], kind: str, data: Mapping[str, Any], rule: str, tmp_path: Path
) -> None:
    assert_wrong(theirs(tmp_path / "in", tensors(), kind, data), M, rule)


def test_weights_that_do_not_fill_their_blocks_are_refused() -> None:
    layer = layer_scheme("mxfp4", CODEC)
    assert CODEC.refusal(layer, (8, 100)) == "last axis 100 is not a multiple of the group, 32"


def test_inputs_that_int4_has_no_place_for_are_refused() -> None:
    weight = layer_scheme("int4wo", CODEC).weight
    with pytest.raises(UnsupportedError, match="has no place in Int4Tensor"):
        LayerScheme(codec=CODEC, name="x", weight=weight, input=Activation.of("int8:token"))


def test_mx_weights_without_quantized_inputs_are_refused_in_the_plan(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"leaves inputs as they are, .* use mxfp8 or mxfp4"):
        written(tmp_path, "float4_e2m1fn:g32:scale=rceil", x())


def test_mxfp4_of_others_becomes_that_of_torchao_and_back(tmp_path: Path) -> None:
    written(tmp_path / "a", "mxfp4", x())
    source = tmp_path / "a" / "out"
    zp.convert_checkpoint(str(source), str(tmp_path / "ct"), "compressed-tensors")
    result = zp.convert_checkpoint(str(tmp_path / "ct"), str(tmp_path / "back"), "torchao", to="mxfp4")
    assert result.error.relative == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[n], t) for n, t in load_file(source / "model.safetensors").items())
