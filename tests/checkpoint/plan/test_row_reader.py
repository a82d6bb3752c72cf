"""Rows of floats out of quantized checkpoints, judged by compressed-tensors and transformers.

The tools that are asked are those that convert whole checkpoints: they find layers, scales and blocks by
themselves.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.plan.frozen_plans import SOURCES, plan_of
from tests.checkpoint.quantized_inputs import BLOCKS, FP8, fp8_layer
from tests.checkpoint.written import CONFIG, quantize, save, tensors_of, weight
from tests.peers import Peer
from tests.tensors import same_bytes

from zeropoint.checkpoint.plan.float_view import as_floats
from zeropoint.checkpoint.plan.gathered import Gathered
from zeropoint.checkpoint.plan.rescaled import rescaled_floats
from zeropoint.checkpoint.plan.row_reader import RowReader
from zeropoint.checkpoint.plan.tensor_matrices import matrices
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.storage import OpenFile, Place, open_file
from zeropoint.codecs.compressed_tensors import CODEC
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.methods.channels import ChannelFold

converters = Peer("compressed_tensors.entrypoints.convert")
finegrained_fp8 = Peer("transformers.integrations.finegrained_fp8")

UP, DOWN, Q = (
    f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
)
LAYOUTS = (
    *(name for name, preset in CODEC.presets.items() if not preset.static),
    "int3:g32", "int5:g32", "int8:g32:asym", "int4:channel:asym", "float8_e4m3fn:tensor",
)  # fmt: skip


@contextlib.contextmanager
def opened(readers: Mapping[str, RowReader]) -> Iterator[dict[Place, OpenFile]]:
    """Open every file of some readers."""
    files = {path: open_file(path) for reader in readers.values() for path in reader.files}
    try:
        yield files
    finally:
        for file in files.values():
            file.close()


def decoded(folder: Path, **options: torch.dtype) -> dict[str, torch.Tensor]:
    """Return every quantized weight of a checkpoint as floats, read at once."""
    readers = as_floats(open_source(folder), **options).readers
    result = {}
    with opened(readers) as files:
        for name, reader in readers.items():
            rows = reader.entry.nbytes // (reader.entry.shape[-1] * reader.dtype.itemsize)
            found = reader.read(files, 0, rows, bytearray(reader.entry.nbytes))
            result[name] = found.clone().reshape(reader.entry.shape)
    return result


# For 4-bit floats compressed-tensors has values in bfloat16 only.
@pytest.mark.parametrize(
    ("to", "dtype"),
    [(to, torch.bfloat16) for to in LAYOUTS]
    + [(to, dtype) for to in ("w4a16", "fp8_block") for dtype in (torch.float16, torch.float32)],
)
def test_compressed_tensors_dequantizes_every_layout_to_the_same_bytes(
    to: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {UP: weight(96, 256, dtype=dtype), Q: weight(160, 128, seed=1, dtype=dtype) * 3}
    config = CONFIG | {"dtype": str(dtype).removeprefix("torch.")}
    quantize(save(tmp_path / "in", tensors, config), tmp_path / "out", to)
    judge = converters.CompressedTensorsDequantizer(tmp_path / "out", dtype=dtype)
    expected = judge.process(tensors_of(tmp_path / "out"))
    found = decoded(tmp_path / "out")
    assert found.keys() == expected.keys() == tensors.keys()
    for name, values in expected.items():
        assert same_bytes(found[name], values)


@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (1, 1), (127, 129), (384, 40)])
def test_compressed_tensors_dequantizes_fp8_blocks_to_the_same_bytes(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors = fp8_layer(UP, shape) | {"model.norm.weight": weight(8)}
    folder = save(tmp_path, tensors, CONFIG | {"quantization_config": BLOCKS})
    expected = converters.FP8BlockDequantizer.from_pretrained(str(folder)).process(dict(tensors))
    found = decoded(folder)
    assert found.keys() == {UP}
    assert same_bytes(found[UP], expected[UP])
    # The formula of the layout, written down: the code times the factor of its block.
    codes, factors = tensors[UP].float(), tensors[f"{UP}_scale_inv"]
    row, column = (min(n - 1, at) for n, at in zip(shape, (129, 128), strict=True))
    product = codes[row, column] * factors[row // 128, column // 128]
    assert found[UP][row, column] == product.bfloat16()


@pytest.mark.parametrize("kind", ["F8_E8M0", "U8", "BF16", "F16"])
def test_factors_may_be_powers_of_two_or_short_floats(kind: str, tmp_path: Path) -> None:
    tensors = fp8_layer(UP, (256, 256))
    factors = torch.tensor([[2.0**-3, 2.0**-9], [1.0, 2.0**-12]])
    stored = {
        "F8_E8M0": factors.to(torch.float8_e8m0fnu), "U8": (factors.log2() + 127).to(torch.uint8),
        "BF16": factors.bfloat16(), "F16": factors.half(),
    }[kind]  # fmt: skip
    config = BLOCKS
    folder = save(tmp_path, tensors | {f"{UP}_scale_inv": stored}, CONFIG | {"quantization_config": config})
    expected = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(tensors[UP], stored, torch.bfloat16)
    assert same_bytes(decoded(folder)[UP], expected)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_factor_for_a_whole_weight_has_either_name(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    codes = fp8_layer(UP, (40, 72), (40, 72))[UP]
    tensors = {UP: codes, UP.replace("weight", name): torch.full(shape, 0.0371)}
    folder = save(tmp_path, tensors, CONFIG | {"quantization_config": FP8})
    assert same_bytes(decoded(folder)[UP], (codes.float() * torch.tensor(0.0371)).bfloat16())


@pytest.mark.parametrize(
    ("grid", "block"), [((2, 3), [128, 128]), ((1, 1), None), ((2, 1), None), ((2, 1), [4096, 4096])]
)
def test_fused_experts_of_an_fp8_checkpoint_are_decoded_as_transformers_does(
    grid: tuple[int, int], block: list[int] | None, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = fp8_layer(name, (3, 256, 384))[name]
    factors = torch.rand(3, *grid, generator=torch.Generator().manual_seed(1)) + 0.01
    config = CONFIG | {"quantization_config": FP8 | {"weight_block_size": block}}
    folder = save(tmp_path, {name: codes, f"{name}_scale_inv": factors}, config)
    expected = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(codes, factors, torch.bfloat16)
    assert same_bytes(decoded(folder)[name], expected)


@pytest.mark.parametrize("to", ["fp8_block", "int4:g32:asym", "nvfp4a16", "w4a16"])
def test_any_rows_are_those_of_the_whole(to: str, tmp_path: Path) -> None:
    quantize(save(tmp_path / "in", {UP: weight(300, 128)}), tmp_path / "out", to)
    whole = decoded(tmp_path / "out")[UP]
    readers = as_floats(open_source(tmp_path / "out")).readers
    with opened(readers) as files:
        for start, rows in ((0, 1), (299, 1), (31, 2), (100, 200), (128, 128), (127, 130), (0, 300)):
            buffer = bytearray(rows * 128 * 2)
            assert same_bytes(readers[UP].read(files, start, rows, buffer), whole[start : start + rows])


def test_rows_of_fused_experts_may_begin_inside_a_block_and_end_in_another_expert(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = fp8_layer(name, (3, 200, 130))
    config = CONFIG | {"quantization_config": BLOCKS}
    folder = save(tmp_path, tensors, config)
    whole = decoded(folder)[name].reshape(600, 130)
    readers = as_floats(open_source(folder)).readers
    with opened(readers) as files:
        for start, rows in ((0, 600), (100, 150), (199, 2), (399, 201), (130, 1)):
            found = readers[name].read(files, start, rows, bytearray(rows * 130 * 2))
            assert same_bytes(found, whole[start : start + rows])


def test_a_plain_weight_is_a_reader_of_its_own_bytes(tmp_path: Path) -> None:
    tensors = {UP: weight(40, 24, dtype=torch.bfloat16)}
    source = open_source(save(tmp_path, tensors))
    floats = as_floats(source)
    assert floats.source is source
    assert not floats.readers
    reader = floats.reader(source.entries[UP])
    with opened({UP: reader}) as files:
        assert same_bytes(reader.read(files, 7, 20, bytearray(20 * 24 * 2)), tensors[UP][7:27])


def test_a_quantized_checkpoint_looks_as_if_it_were_not(tmp_path: Path) -> None:
    tensors = {UP: weight(64, 128), DOWN: weight(128, 64), "model.norm.weight": weight(8)}
    text = json.dumps(CONFIG | {"a": 1e-05}, indent=4)
    source = save(tmp_path / "in", tensors)
    (source / "config.json").write_text(text)
    quantize(source, tmp_path / "out", "w8a8", ignore=(DOWN,))
    seen = as_floats(open_source(tmp_path / "out"), dtype=torch.float16)
    floats = seen.source
    assert seen.readers.keys() == {UP}
    facts = {name: (entry.dtype, entry.shape, entry.nbytes) for name, entry in floats.entries.items()}
    assert facts == {
        UP: ("F16", (64, 128), 64 * 128 * 2), DOWN: ("F32", (128, 64), 128 * 64 * 4),
        "model.norm.weight": ("F32", (8,), 32),
    }  # fmt: skip
    assert floats.config == json.loads(text)
    assert floats.config_text == text[: text.rindex("\n}")] + "\n}"


def test_scales_in_another_shard_are_found(tmp_path: Path) -> None:
    tensors = fp8_layer(UP, (128, 128))
    shards = {UP: "model-00001-of-00002.safetensors", f"{UP}_scale_inv": "model-00002-of-00002.safetensors"}
    for name, shard in shards.items():
        save_file({name: tensors[name]}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    config = CONFIG | {"quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    readers = as_floats(open_source(tmp_path)).readers
    assert [path.name for path in readers[UP].files] == list(shards.values())
    expected = tensors[UP].float() * tensors[f"{UP}_scale_inv"]
    assert same_bytes(decoded(tmp_path)[UP], expected.bfloat16())


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"torch_dtype": "float16"}, "F16"),
        ({"text_config": {"dtype": "float32"}}, "F32"),
        ({"dtype": "float64"}, "BF16"),
        ({}, "BF16"),
    ],
)
def test_floats_have_the_dtype_of_the_configuration_or_bfloat16(
    named: dict[str, object], expected: str, tmp_path: Path
) -> None:
    config = CONFIG | named | {"quantization_config": BLOCKS}
    floats = as_floats(open_source(save(tmp_path, fp8_layer(UP, (8, 8)), config)))
    assert floats.readers[UP].entry.dtype == expected


def test_scales_of_quantized_inputs_leave_with_the_codes(tmp_path: Path) -> None:
    extra = {UP.replace("weight", kind): torch.ones(1) for kind in ("input_scale", "activation_scale")}
    kept = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    config = CONFIG | {"quantization_config": BLOCKS}
    folder = save(tmp_path, fp8_layer(UP, (8, 8)) | extra | kept, config)
    floats = as_floats(open_source(folder))
    assert floats.source.entries.keys() == {UP, *kept}
    assert {entry.name for entry in floats.readers[UP].input_scales} == extra.keys()


def test_codes_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path) -> None:
    good = fp8_layer(UP, (256, 256))
    short = {UP: good[UP], f"{UP}_scale_inv": torch.ones(2, 1)}
    fp4 = {UP: torch.zeros(4, 4, dtype=torch.int8), f"{UP}_scale_inv": torch.ones(1, 1)}
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({UP: good[UP]}, "it has 0 tensors of factors, but must have one"),
        ({f"{UP}_scale_inv": torch.ones(1, 1)}, "is there, but its codes are missing"),
        (short, r"its factors have shape \[2, 1\], but must have \[2, 2\]"),
        (fp4, "its codes are I8, but must be F8_E4M3"),
        ({UP: good[UP], f"{UP}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, "its factors are I32"),
        (good | {f"{UP}_scale": torch.ones(1)}, "it has several tensors of weight_scale_inv"),
        ({"v": good[UP].view(-1), "v_scale_inv": torch.ones(1)}, r"shape \[65536\], but must be a matrix"),
    ]
    config = CONFIG | {"quantization_config": BLOCKS}
    for number, (tensors, rule) in enumerate(cases):
        folder = save(tmp_path / str(number), tensors, config)
        with pytest.raises(CheckpointError, match=f"cannot be dequantized: .*{rule}.*; pass the original"):
            as_floats(open_source(folder))


@pytest.mark.parametrize(
    ("change", "error", "rule"),
    [
        ({"fmt": "e5m2"}, UnsupportedError, "fp8 weights with fmt 'e5m2' cannot be read; known is 'e4m3'"),
        ({"weight_block_size": [128]}, CheckpointError, r"weight_block_size .* is \[128\], but must be two"),
        ({"weight_block_size": [0, 128]}, CheckpointError, "must be two positive numbers"),
        ({"quant_method": "spqr"}, CheckpointError, "quant_method is 'spqr', but only compressed-tensors"),
        ({"transform_config": {"u": {}}}, UnsupportedError, "its transform_config is not empty"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, UnsupportedError, "its sparsity_config is not"),
    ],
)
def test_a_configuration_that_is_not_read_is_refused(
    change: dict[str, object], error: type[Exception], rule: str, tmp_path: Path
) -> None:
    config = CONFIG | {"quantization_config": FP8 | change}
    folder = save(tmp_path, fp8_layer(UP, (8, 8)), config)
    with pytest.raises(error, match=rule):
        as_floats(open_source(folder))


def test_codes_next_to_those_that_the_configuration_describes_are_refused(tmp_path: Path) -> None:
    quantize(save(tmp_path / "in", {UP: weight(64, 128)}), tmp_path / "out", "w4a16")
    extra = {"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    folder = save(tmp_path / "both", tensors_of(tmp_path / "out") | extra, None)
    (folder / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"it holds 'a\.qweight', I32.*does not say how"):
        as_floats(open_source(folder))


def test_channels_are_rescaled_in_the_order_of_the_model_where_a_file_has_another(tmp_path: Path) -> None:
    write, _ = SOURCES["gguf"]
    floats = as_floats(open_source(write(tmp_path)))
    plain = floats.reader(floats.source.entries[Q])
    assert plain.of is not None
    assert plain.of.form.rows is not None
    fold = ChannelFold(rows=torch.arange(256).remainder(9) * 8)
    changed = rescaled_floats(floats, {Q: fold}).reader(plain.entry)
    with opened({Q: plain}) as files:
        before, after = (reader.read(files, 0, 256, bytearray(256 * 512)) for reader in (plain, changed))
    assert same_bytes(after, fold.of(before))


def test_the_channels_of_one_expert_are_rescaled_and_no_other_ones(tmp_path: Path) -> None:
    write, _ = SOURCES["fused experts"]
    floats = as_floats(open_source(write(tmp_path / "source")))
    name = next(name for name in floats.source.entries if name.endswith("experts.down_proj"))
    plain = floats.reader(floats.source.entries[name])
    second = list(matrices(plain.entry))[1]
    fold = ChannelFold(columns=torch.arange(plain.columns).remainder(7) * 8)
    changed = rescaled_floats(floats, {f"{second.module}.weight": fold}).reader(plain.entry)
    rows, height = plain.shape[0], second.shape[0]
    with opened({name: plain}) as files:
        before, after = (x.read(files, 0, rows, bytearray(rows * x.row_bytes)) for x in (plain, changed))
    expected = before.clone()
    expected[height : 2 * height] = fold.of(before[height : 2 * height])
    assert rows > 2 * height
    assert same_bytes(after, expected)
    assert not same_bytes(after, before)


def chain_of(reader: RowReader) -> tuple[str, ...]:
    """Return the names of a reader and of those beneath it."""
    sources = reader.sources if isinstance(reader, Gathered) else (reader.of,)
    beneath = (chain_of(each) for each in sources if each is not None)
    return (type(reader).__name__, *(name for names in beneath for name in names))


CHAINS: dict[str, set[str]] = {
    "llama": {"StoredFloats", "Folded"},
    "tied": {"Folded", "Reordered"},
    "fused experts": {"Strided", "Gathered"},
    "gpt-oss": {"Transposed", "Gathered", "Reordered"},
    "deepseek": {"Transposed", "Gathered"},
    "linear attention": {"Gathered", "Reordered"},
    "fp8 experts": {"Decoded"},
    "gguf": {"Decoded", "Reordered"},
    "gguf of experts": {"Decoded", "Gathered", "Transposed"},
}
"""Sources, and readers that their plans are made of."""


@pytest.mark.parametrize("name", CHAINS)
def test_rows_and_columns_of_each_reader_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    write, cases = SOURCES[name]
    path, seen = write(tmp_path / "source"), dict[tuple[str, ...], RowReader]()
    for case in cases:
        for output in plan_of(path, case).processed:
            seen.setdefault(chain_of(output.reader), output.reader)
    assert {kind for chain in seen for kind in chain} >= CHAINS[name]
    for reader in seen.values():
        height, width = reader.shape
        step = min(height, reader.alignment)
        middle, last = height // step // 2 * step, range(height - step, height)
        buffers = [bytearray(height * reader.row_bytes) for _ in range(3)]
        with opened({"": reader}) as files:
            whole = reader.read(files, 0, height, buffers[0])
            rest = reader.read(files, middle, height - middle, buffers[1])
            band = reader.read_columns(files, last, (width // 4, width // 2), buffers[2])
        assert same_bytes(rest, whole[middle:])
        assert same_bytes(band, whole[last.start :, width // 4 : width // 4 + width // 2])
