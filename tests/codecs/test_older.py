"""Files of compressed-tensors that nothing here writes: older packing, g_idx, zero points in bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import dequantized, save
from tests.peers import Peer
from tests.tensors import encoded

import zeropoint as zp
from zeropoint.codecs.compressed_tensors import layer_scheme
from zeropoint.schemes import Scheme

naive_quantized = Peer("compressed_tensors.compressors.naive_quantized")
pack_quantized = Peer("compressed_tensors.compressors.pack_quantized")
packing = Peer("compressed_tensors.compressors.pack_quantized.helpers")
quantization = Peer("compressed_tensors.quantization")

ROWS, COLUMNS, GROUP = 48, 192, 32


def weight(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) + 0.3


def quantized(text: str) -> zp.QuantizedTensor:
    return zp.quantize(weight(), Scheme.parse(f"{text}:scale=input:dialect=compressed-tensors"))


def arguments(text: str, **more: object) -> dict[str, Any]:
    """Return what compressed-tensors calls a scheme of integers."""
    element, granularity, *rest = text.split(":")
    group = int(granularity[1:]) if granularity[0] == "g" else None
    return {
        "num_bits": int(element.removeprefix("int")), "type": "int", "symmetric": "asym" not in rest,
        "strategy": granularity if group is None else "group", "group_size": group, **more,
    }  # fmt: skip


def files(folder: Path, tensors: dict[str, torch.Tensor], layout: str, weights: dict[str, Any]) -> Path:
    """Write a checkpoint of one layer, ``a``."""
    stored = {f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    others = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    groups = {"group_0": others, "group_1": group}
    section = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    config = {"model_type": "llama", "dtype": "float32", "quantization_config": section}
    return save(folder, stored, config)


def floats(path: Path, out: Path) -> torch.Tensor:
    return dequantized(path, out)["a.weight"]


def apart(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of signed codes as words of whole fields, by integers of Python."""
    per, half = 32 // bits, 1 << (bits - 1)
    rows = []
    for row in fields.tolist():
        parts = [row[at : at + per] for at in range(0, len(row), per)]
        rows.append([sum((code + half) << (bits * n) for n, code in enumerate(part)) for part in parts])
    words = torch.tensor(rows)
    return torch.where(words < 2**31, words, words - 2**32).int()


# pack_to_int32 of compressed-tensors 0.15, of the codes 7 * n modulo 2 ** bits, less half of these.
WORDS = {
    3: "3829cbb8 2ee0a72e 1cbb829c 0a72ee0a",
    5: "07cab8e0 1a6fe22a 2f048b74 03a9b0be 164ed9e8 2ae38332 0008a87c",
    6: "1c54e1c0 3fe31aa3 226d4346 05fb7c29 2885a4cc 0b13ddaf 2e9e0652 11283f35",
    7: "02a38380 062a919c 09b19fb8 0d38add4 00bfbbf0 0426898c 07ad97a8 0b34a5c4 0ebbb3e0 022281fc",
}


@pytest.mark.parametrize("bits", WORDS)
def test_the_words_of_an_older_release_are_known(bits: int) -> None:
    codes = torch.arange(40)[None] * 7 % (1 << bits) - (1 << (bits - 1))
    assert [f"{word:08x}" for word in apart(codes, bits)[0].tolist()] == WORDS[bits].split()


@pytest.mark.parametrize(
    "text", ["int3:g32", "int3:g32:asym", "int5:channel:asym", "int6:g64", "int7:g32:asym"]
)
def test_older_packing_is_found_by_its_width_and_read(text: str, tmp_path: Path) -> None:
    q = quantized(text)
    tensors = encoded(layer_scheme(text), q)
    tensors["weight_packed"] = apart(q.codes, q.scheme.bits)
    if q.zero_point is not None:
        tensors["weight_zero_point"] = apart(q.zero_point.t(), q.scheme.bits).t()
    path = files(tmp_path / "in", tensors, "pack-quantized", arguments(text))
    assert zp.verify_checkpoint(path).problems == ()
    (seen,) = zp.inspect_checkpoint(path).schemes
    assert seen.layout == "pack-quantized of fields apart"
    assert torch.equal(floats(path, tmp_path / "out"), q.dequantize())


@pytest.mark.parametrize("text", ["int4:g32", "int4:g32:asym", "int3:g64:asym"])
def test_columns_have_the_scales_of_the_groups_that_g_idx_names(text: str, tmp_path: Path) -> None:
    # compressed-tensors 0.10 dequantizes columns sorted by group, and puts them back.
    order = torch.randperm(COLUMNS)
    back, size = order.argsort(), int(text.split(":")[1][1:])
    q = zp.quantize(weight()[:, order], layer_scheme(text).weight)
    tensors = encoded(layer_scheme(text), q)
    tensors["weight_packed"] = packing.pack_to_int32(q.codes[:, back], q.scheme.bits)
    tensors["weight_g_idx"] = (torch.arange(COLUMNS) // size).int()[back]
    path = files(tmp_path / "in", tensors, "pack-quantized", arguments(text, actorder="group"))
    assert zp.verify_checkpoint(path).problems == ()
    assert zp.inspect_checkpoint(path).schemes[0].layout == "pack-quantized with g_idx"
    assert torch.equal(floats(path, tmp_path / "out"), q.dequantize()[:, back])


def test_groups_that_no_group_order_explains_are_named(tmp_path: Path) -> None:
    tensors = encoded(layer_scheme("int4:g32"), quantized("int4:g32"))
    tensors["weight_g_idx"] = torch.arange(COLUMNS, dtype=torch.int32).flip(0) // GROUP
    path = files(tmp_path / "in", tensors, "pack-quantized", arguments("int4:g32"))
    (problem,) = zp.verify_checkpoint(path).problems
    assert "its weight_g_idx puts columns into groups out of order, but actorder" in problem.what


def test_a_g_idx_that_was_never_set_is_the_order_of_columns(tmp_path: Path) -> None:
    q = quantized("int4:g32")
    tensors = encoded(layer_scheme("int4:g32"), q)
    tensors["weight_g_idx"] = torch.full((COLUMNS,), -1, dtype=torch.int32)
    path = files(tmp_path / "in", tensors, "pack-quantized", arguments("int4:g32", actorder="group"))
    assert torch.equal(floats(path, tmp_path / "out"), q.dequantize())


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("text", ["int8:channel:asym", "int4:g32:asym", "int8:tensor:asym", "int8:g64"])
def test_integers_in_bytes_decode_as_its_own_compressor_decodes_them(
    text: str, layout: str, tmp_path: Path
) -> None:
    q = quantized(text)
    tensors = {"weight": q.codes, "weight_scale": stored(q.scales[0])}
    if q.zero_point is not None:
        tensors["weight_zero_point"] = stored(q.zero_point).to(torch.int8)
    theirs = naive_quantized.IntQuantizationCompressor.decompress(tensors, scheme(text))["weight"]
    path = files(tmp_path / "in", tensors, layout, arguments(text))
    assert zp.verify_checkpoint(path).problems == ()
    assert torch.equal(floats(path, tmp_path / "out"), theirs)


def test_one_packed_zero_point_of_a_tensor_is_a_byte(tmp_path: Path) -> None:
    text, q = "int4:tensor:asym", quantized("int4:tensor:asym")
    assert q.zero_point is not None
    tensors = {
        "weight_packed": packing.pack_to_int32(q.codes, 4), "weight_scale": stored(q.scales[0]),
        "weight_zero_point": stored(q.zero_point).to(torch.int8), "weight_shape": torch.tensor(q.shape),
    }  # fmt: skip
    theirs = pack_quantized.PackedQuantizationCompressor.decompress(tensors, scheme(text))["weight"]
    path = files(tmp_path / "in", tensors, "pack-quantized", arguments(text))
    assert torch.equal(floats(path, tmp_path / "out"), theirs)


def stored(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(1) if values.numel() == 1 else values


def scheme(text: str) -> quantization.QuantizationScheme:
    return quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments(text))
    )
