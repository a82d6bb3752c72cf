"""Blocks of ggml: any bytes decode to what the gguf package decodes, and are written back as they were."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from typer.testing import CliRunner

import zeropoint as zp
from zeropoint.checkpoint.read.source import open_source
from zeropoint.cli.app import app
from zeropoint.codecs.containers.gguf import TYPES
from zeropoint.codecs.gguf import BLOCKS, CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.tensor_fields import WeightPart
from zeropoint.layout.bit_places import Digits, field_size
from zeropoint.methods import method_named
from zeropoint.ops.threads import thread_limit

Bytes = npt.NDArray[np.uint8]
ROWS, COUNT = 16, 3
FLOATS = ("F32", "F16", "BF16")
KNOWN = sorted(BLOCKS.keys() & GGMLQuantizationType.__members__.keys())
"""The types that the installed gguf has, too."""


def run(*words: object) -> int:
    return CliRunner().invoke(app, [str(word) for word in words]).exit_code


def random_blocks(name: str, rows: int = ROWS, *, sane: bool = False) -> Bytes:
    """Return rows of random bytes as blocks; only such as a writer gives, with positive scales, if sane."""
    found = BLOCKS[name]
    raw = np.random.default_rng(7).integers(0, 256, (rows, COUNT, found.struct.nbytes), dtype=np.uint8)
    if name == "MXFP4":
        raw[..., 0] = 100 + raw[..., 0] % 50 if sane else raw[..., 0] % 255  # 255 is NaN
    if name == "NVFP4":
        raw[..., :4] %= 0x7F  # the sign is no part of a scale, and 0x7F is NaN, which gguf reads as 0
    if name == "TQ1_0":  # of 256 bytes, 243 are written, and 81 of those with a last digit of 0
        digits = raw[..., :52].astype(int) % 243
        digits[..., 48:] -= digits[..., 48:] % 3
        raw[..., :52] = (digits * 256 + 242) // 243
    for field in found.struct.levels if sane else ():
        if field_size(field) == 2:
            high = field[-1].at + field[-1].size - 1
            raw[..., high] = 0x20 | raw[..., high] & 0x0F  # a float16 from 2^-7 on
    return raw.reshape(rows, -1)


def decoded(name: str, raw: Bytes) -> zp.QuantizedTensor:
    found = BLOCKS[name]
    return found.decode(torch.from_numpy(raw), found.scheme, (len(raw), COUNT * found.block), torch.float32)


def theirs(name: str, raw: Bytes) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, GGMLQuantizationType[name])


def test_sizes_and_numbers_are_those_of_gguf() -> None:
    known = {kind.name: (kind.value, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {name: tuple(found) for name, found in TYPES.items() if name != "Q2_0"} == known


def test_blocks_of_two_bits_are_those_of_ggml() -> None:
    """Q2_0 of llama.cpp (type 42), which gguf 0.19 lacks: d = max |x|, codes round(x / d) + 1."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((8, 256)) * random.choice([0.0, 1e-3, 1.0, 50.0], (8, 1))).astype(np.float32)
    x = x.reshape(8, -1, 64)
    largest = np.abs(x).max(-1, keepdims=True)
    inverse = np.divide(np.float32(1), largest, out=np.zeros_like(largest), where=largest > 0)
    steps = x * inverse
    codes = np.clip(np.trunc(steps + np.copysign(np.float32(0.5), steps)), -1, 2).astype(np.uint8) + np.uint8(
        1
    )
    lines = [codes[..., place::4] << np.uint8(2 * place) for place in range(4)]
    packed = np.bitwise_or.reduce(lines)
    expected = np.concatenate([largest.astype(np.float16).view(np.uint8), packed], -1).reshape(8, -1)
    values = torch.from_numpy(x.reshape(8, 256))
    assert np.array_equal(BLOCKS["Q2_0"].encode(zp.quantize(values, "q2_0")).numpy(), expected)
    searched = method_named("ggml").quantize(values, zp.Scheme.parse("q2_0")).q
    assert np.array_equal(BLOCKS["Q2_0"].encode(searched).numpy(), expected)
    raw = random_blocks("Q2_0")
    d, fields = raw.reshape(-1, 18)[:, :2].copy().view(np.float16), raw.reshape(-1, 18)[:, 2:]
    read = np.stack([fields >> (2 * place) & 3 for place in range(4)], -1).reshape(len(d), 64)
    wanted = (read.astype(np.float32) - 1) * d.astype(np.float32)
    assert np.array_equal(decoded("Q2_0", raw).dequantize().numpy().reshape(-1, 64), wanted, equal_nan=True)


@pytest.mark.parametrize("name", KNOWN)
def test_random_bytes_have_the_values_that_gguf_gives_them(name: str) -> None:
    raw = random_blocks(name)
    ours, expected = decoded(name, raw).dequantize().numpy(), theirs(name, raw)
    # Only the sign of zero may differ: gguf keeps the values of FP4 as integers, which have one zero.
    assert np.array_equal(ours, expected, equal_nan=True)
    if not name.endswith("FP4"):
        bits = ours.view(np.uint32) == expected.view(np.uint32)
        assert bool((bits | np.isnan(expected)).all())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_written_back_as_they_were_read(name: str) -> None:
    raw = random_blocks(name)
    assert np.array_equal(BLOCKS[name].encode(decoded(name, raw)).numpy(), raw)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_rows_are_no_bytes(name: str) -> None:
    found, raw = BLOCKS[name], random_blocks(name)
    q = decoded(name, raw[:0])
    assert found.encode(q).shape == raw[:0].shape


def parts_of(q: zp.QuantizedTensor) -> list[torch.Tensor]:
    return [q.data, *(level.view(torch.uint8) for level in q.params.levels)]


@pytest.mark.crossed
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 700])
@pytest.mark.parametrize("name", BLOCKS)
def test_kernels_give_the_bytes_of_the_reference(name: str, rows: int, threads: int) -> None:
    raw = random_blocks(name, rows)
    with thread_limit(threads):
        q = decoded(name, raw)
        with zp.only_backend("reference"):
            expected = decoded(name, raw)
            assert np.array_equal(BLOCKS[name].encode(q).numpy(), raw)
        assert all(map(torch.equal, parts_of(q), parts_of(expected)))
        assert np.array_equal(BLOCKS[name].encode(expected).numpy(), raw)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_bit_of_a_block_has_one_place(name: str) -> None:
    struct = BLOCKS[name].struct
    taken = np.zeros((struct.nbytes, 8), dtype=int)
    for field in struct.fields:
        numbers = np.zeros(field_size(field), dtype=int)
        for part in field:
            if isinstance(part, Digits):
                taken[part.at : part.at + part.run] += 1
                numbers[part.first : part.end] += 1
                continue
            for move in part.moves():
                taken[move.at : move.at + move.size, move.shift : move.shift + part.width] += 1
                numbers[move.number : move.number + move.size] += move.mask << move.low
        assert bool((numbers == numbers[0]).all())
    assert bool((taken == 1).all())
    assert (BLOCKS[name].block, struct.nbytes) == TYPES[name][1:]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_type_is_written_for_the_scheme_with_which_it_is_read(name: str) -> None:
    assert CODEC.layout(layer_scheme(str(BLOCKS[name].scheme), CODEC)) == name


def file_of_all_types(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Write a file as gguf-py does, with a matrix of each type, experts and floats; return the values."""
    writer, values = GGUFWriter(path, "llama"), {}
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name in KNOWN:
        raw = random_blocks(name, sane=True)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[name])
        values[f"{name}.weight"] = theirs(name, raw)
    raw = random_blocks("Q4_K", 2 * ROWS, sane=True).reshape(2, ROWS, -1)
    writer.add_tensor("ffn_gate_exps.weight", raw, raw_dtype=GGMLQuantizationType.Q4_K)
    values["ffn_gate_exps.weight"] = theirs("Q4_K", raw)
    for name in FLOATS:
        x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
        raw = gguf.quantize(x, GGMLQuantizationType[name])
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[name])
        values[f"{name}.weight"] = theirs(name, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_file_with_all_types_is_inspected_verified_and_dequantized(tmp_path: Path) -> None:
    path = tmp_path / "in" / "model.gguf"
    path.parent.mkdir()
    values = file_of_all_types(path)
    seen = zp.inspect_checkpoint(path)
    assert seen.problems == ()
    assert {scheme.layout for scheme in seen.schemes} == set(KNOWN)
    assert zp.verify_checkpoint(path).problems == ()
    assert run("dequantize", path, tmp_path / "out", "--dtype", "float32") == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == values.keys()
    for name, expected in values.items():
        assert np.array_equal(found[name].float().numpy(), expected)


def file_with(path: Path, name: str, kind: GGMLQuantizationType, raw: Bytes) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def q8_file(tmp_path: Path) -> Path:
    raw = np.ones((2, 34), dtype=np.uint8)
    return file_with(tmp_path / "model.gguf", "a.weight", GGMLQuantizationType.Q8_0, raw)


def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    raw = np.zeros((2, 66), dtype=np.uint8)
    path = file_with(tmp_path / "model.gguf", "a.weight", GGMLQuantizationType.IQ2_XXS, raw)
    (problem,) = zp.inspect_checkpoint(path).problems
    assert str(problem).startswith("'a.weight': its type IQ2_XXS is not read here; read are Q8_0, Q4_0, Q4_1")


def test_a_vector_of_blocks_is_named_as_a_problem(tmp_path: Path) -> None:
    raw = np.ones(34, dtype=np.uint8)
    path = file_with(tmp_path / "model.gguf", "a.bias", GGMLQuantizationType.Q8_0, raw)
    (problem,) = zp.inspect_checkpoint(path).problems
    assert str(problem) == "'a.bias': its codes have shape [32], but must be a matrix, or one for each expert"


def test_blocks_that_the_file_cuts_off_are_refused(q8_file: Path) -> None:
    data = q8_file.read_bytes()
    begin = len(data) - 96
    q8_file.write_bytes(data[: begin + 40])
    message = (
        f"tensor 'a.weight' ends at byte {begin + 68}, but the file at byte {begin + 40}: it is truncated"
    )
    with pytest.raises(zp.CheckpointError, match=message):
        open_source(q8_file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ((8, 0), (99, 0), "tensor 'a.weight' has the type 99, which is unknown here"),
        ((8, 0), (12, 0), "tensor 'a.weight': a row of 32 values does not fill blocks of 256, as Q4_K has"),
    ],
)
def test_a_type_that_does_not_fit_is_refused(
    old: tuple[int, int], new: tuple[int, int], message: str, q8_file: Path
) -> None:
    def directory(kind: int, offset: int) -> bytes:
        return kind.to_bytes(4, "little") + offset.to_bytes(8, "little")

    data = q8_file.read_bytes()
    assert data.count(directory(*old)) == 1
    q8_file.write_bytes(data.replace(directory(*old), directory(*new)))
    with pytest.raises(zp.CheckpointError, match=message):
        open_source(q8_file)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_numbers_are_those_of_gguf(name: str) -> None:
    layer = layer_scheme(name.lower(), CODEC)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(7))
    (found,) = CODEC.encode(layer, zp.quantize(x, layer.weight)).values()
    assert np.array_equal(found.numpy(), gguf.quantize(x.numpy(), GGMLQuantizationType[name]))


def test_any_bytes_of_five_digits_decode_as_in_gguf() -> None:
    lines = torch.randint(0, 256, (64, 2 * 54), dtype=torch.uint8, generator=torch.Generator().manual_seed(8))
    lines.view(-1, 54)[:, 52:] = torch.tensor([1.5], dtype=torch.float16).view(torch.uint8)
    layer = layer_scheme("tq1_0", CODEC)
    q = CODEC.decode(layer, {"weight": lines}, WeightPart(0, (64, 512), torch.float32))
    assert np.array_equal(q.dequantize().numpy(), gguf.dequantize(lines.numpy(), GGMLQuantizationType.TQ1_0))
    assert q.bits_per_value == layer.weight.bits_per_value((64, 512)) == 1.6875


@pytest.mark.parametrize(("text", "block"), [("q4_0", 32), ("q4_k", 256), ("mxfp4a16", 32)])
def test_rows_that_do_not_fill_blocks_are_refused(text: str, block: int) -> None:
    layer = layer_scheme(text, CODEC)
    assert CODEC.refusal(layer, (4, 2 * block)) is None
    said = f"last axis {block + 16} is not a multiple of the block of {layer.layout}, {block}"
    assert CODEC.refusal(layer, (4, block + 16)) == said


def test_digits_of_blocks_are_joined_and_split_by_a_kernel() -> None:
    lines = torch.from_numpy(random_blocks("TQ1_0"))
    with zp.only_backend("reference"):
        wanted = decoded("TQ1_0", lines.numpy())
        assert torch.equal(BLOCKS["TQ1_0"].encode(wanted), lines)
    with zp.only_backend("cpu"):
        found = decoded("TQ1_0", lines.numpy())
        assert torch.equal(BLOCKS["TQ1_0"].encode(found), lines)
    assert torch.equal(found.data, wanted.data)


def test_unused_codes_of_five_digits_join_as_in_the_reference() -> None:
    q = zp.quantize(torch.randn(8, 1024, generator=torch.Generator().manual_seed(9)), BLOCKS["TQ1_0"].scheme)
    for first in (0, 100, 8 * 4 * 52 - 1):
        q.data.view(-1)[first] = 250
        joined = []
        for backend in ("reference", "cpu"):
            with zp.only_backend(backend):
                joined.append(BLOCKS["TQ1_0"].encode(q))
        assert torch.equal(*joined)
