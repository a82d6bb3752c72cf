"""Files of bitsandbytes: its bytes and values, recorded and from the package, and files that are wrong."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import LLAMA, dequantized, quantize, save
from tests.codecs.problems import assert_wrong
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.bitsandbytes import CODEC
from zeropoint.codecs.bitsandbytes_state import StateForm
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.tensor_fields import WeightPart
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.formats import get_format

M = "a.up_proj.weight"
STATE = f"{M}.quant_state.bitsandbytes__nf4"
Tensors = dict[str, torch.Tensor]

# functional.quantize_4bit(x(), blocksize=64) of bitsandbytes 0.50.2 on a CPU: nf4, fp4, and nf4 with
# compress_statistics; and the SHA-256 of what dequantize_4bit makes of the last.
ROW = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1"
    "6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18"
)
LAST = "4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05"
NF4 = ROW + "77" * 32 + LAST
FP4 = (
    "bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5b"
    "e2a63d4bf5a92d63c4be5a12d73c5be2a12d7bf5a92a63c4be5a02d63c4be2a1"
    + "00" * 32
    + "c5be2a12d7bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be"
)
ABSMAX = [0.78125, 0.78125, 0.0, 0.78125]
TEXT = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 128]'
NESTED_TEXT = f'{TEXT}, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5859375}}'
NESTED_ABSMAX, NESTED_CODES = 0.5859375, [0xCF, 0xCF, 0x00, 0xCF]
NESTED_VALUES = "764a8a475ce0750beab08f344879fffd0a96adfe137c40e2b444da3f6cf53994"


def x() -> torch.Tensor:
    found = ((torch.arange(256) * 37 % 101).float() - 50).view(2, 128) / 64
    found[1, :64] = 0
    return found.bfloat16()


def table(name: str) -> torch.Tensor:
    return torch.tensor(get_format(name).values)  # type: ignore[union-attr]


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def plain() -> Tensors:
    """Return the tensors of nf4 as bitsandbytes writes them."""
    return {
        M: as_bytes(bytes.fromhex(NF4)).view(-1, 1), f"{M}.absmax": torch.tensor(ABSMAX),
        f"{M}.quant_map": table("nf4"), STATE: as_bytes(TEXT.encode() + b"}"),
    }  # fmt: skip


def nested() -> Tensors:
    """Return those with double quantization."""
    return plain() | {
        f"{M}.absmax": torch.tensor(NESTED_CODES, dtype=torch.uint8), STATE: as_bytes(NESTED_TEXT.encode()),
        f"{M}.nested_absmax": torch.tensor([NESTED_ABSMAX]), f"{M}.nested_quant_map": table("dynamic8"),
    }  # fmt: skip


def theirs(folder: Path, tensors: Tensors, **section: Any) -> Path:
    """Return a checkpoint of bitsandbytes."""
    found = {"quant_method": "bitsandbytes", "load_in_4bit": True, **section}
    return save(folder, tensors, {"model_type": "llama", "quantization_config": found})


def original(folder: Path, weight: torch.Tensor, **others: torch.Tensor) -> Path:
    return save(folder, {M: weight, **others}, LLAMA)


def decoded(folder: Path, out: Path) -> torch.Tensor:
    return dequantized(folder, out)[M]


@pytest.mark.parametrize(("text", "codes"), [("nf4", NF4), ("fp4_bnb", FP4)])
def test_the_bytes_are_those_of_bitsandbytes_but_for_absmax_of_zeros(
    text: str, codes: str, tmp_path: Path
) -> None:
    source = original(tmp_path / "in", x())
    quantize(source, tmp_path / "out", text, codec=CODEC)
    found = load_file(tmp_path / "out" / "model.safetensors")
    kind = text.partition("_")[0]
    state = STATE.removesuffix("nf4") + kind
    assert found.keys() == {M, f"{M}.absmax", f"{M}.quant_map", state}
    assert found[M].shape == (128, 1)
    assert found[M].numpy().tobytes().hex() == codes
    assert found[f"{M}.absmax"].tolist() == [0.78125, 0.78125, 1.0, 0.78125]
    assert torch.equal(found[f"{M}.quant_map"], table(text))
    assert found[state].numpy().tobytes().decode() == f"{TEXT}}}".replace("nf4", kind)
    assert not zp.verify_checkpoint(tmp_path / "out", source).problems


def test_the_configuration_is_that_of_transformers(tmp_path: Path) -> None:
    source = original(tmp_path / "in", x(), **{"a.down_proj.weight": torch.ones(64, 100)})
    quantize(source, tmp_path / "out", "nf4", codec=CODEC)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["a.down_proj"],
    }  # fmt: skip


@pytest.mark.parametrize("double", [False, True])
def test_files_of_bitsandbytes_are_read_with_its_values(double: bool, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "in", nested() if double else plain())
    seen = zp.inspect_checkpoint(folder)
    layout = "nf4 with double quantization" if double else "nf4"
    assert ([s.layout for s in seen.schemes], seen.problems) == ([layout], ())
    assert not zp.verify_checkpoint(folder).problems
    found = decoded(folder, tmp_path / "out")
    # A block of zeros is decoded to zeros, which here have no sign.
    assert (found.shape, found.dtype) == ((2, 128), torch.bfloat16)
    if double:
        assert hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest() == NESTED_VALUES
    else:
        assert torch.equal(found, zp.quantize(x(), "nf4").dequantize())


def test_second_blocks_that_run_over_rows_are_decoded_part_by_part() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (6 * 4096 // 2 * 3, 1), generator=generator, dtype=torch.uint8)
    absmax = torch.randint(129, 256, (len(codes) // 32,), generator=generator, dtype=torch.uint8)
    coarse = torch.rand(-(-len(absmax) // 256), generator=generator)
    codec, shape = replace(CODEC, form=StateForm(length=9, offset=0.25)), (6, 12288)
    layer = layer_scheme("nf4", codec)
    specs = {spec.suffix: spec for spec in codec.tensors(layer, shape, torch.float32)}
    scales = table("dynamic8")[absmax.int()] * coarse.repeat_interleave(256)[: len(absmax)] + 0.25
    values = table("nf4")[torch.stack([codes >> 4, codes & 15], 1).flatten().int()]
    wanted = (values.view(-1, 64) * scales[:, None]).view(shape)
    rows = (codes.view(6, -1), absmax.view(6, -1))
    for start, count in ((0, 6), (1, 1), (2, 3), (5, 1)):
        part = {
            "weight": rows[0][start : start + count],
            "weight.absmax": rows[1][start : start + count].flatten(),
        }
        first, number = specs["weight.nested_absmax"].span(start, count)
        both = {
            "weight.nested_absmax": coarse[first : first + number],
            "weight.nested_quant_map": table("dynamic8"),
        }
        q = codec.decode(layer, both | part, WeightPart(start, (count, 12288), torch.float32))
        assert torch.equal(q.dequantize(), wanted[start : start + count])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [64, 256])
def test_the_package_itself_gives_the_same_bytes(dtype: torch.dtype, block: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    given = (torch.randn(96, 512, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype)
    layer = layer_scheme(f"nf4:g{block}", CODEC)
    q = zp.quantize(given, layer.weight)
    ours = CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)
    codes, state = functional.quantize_4bit(
        given, blocksize=block, quant_type="nf4", compress_statistics=False
    )
    names = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    assert ours.keys() == {"weight", *names}
    for name, tensor in ({"weight": codes} | names).items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours[name], tensor)
    assert torch.equal(functional.dequantize_4bit(codes, state), q.dequantize())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_package_itself_gives_the_same_bytes_with_double_quantization(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    given = (torch.randn(300, 448, generator=torch.Generator().manual_seed(9)) * 0.02).to(dtype)
    # Of float32 sums, whose order is that of the machine, the exact one.
    monkeypatch.setattr(
        torch.Tensor, "mean", lambda t: torch.tensor(math.fsum(t.flatten().tolist()) / t.numel())
    )
    codes, state = functional.quantize_4bit(given, blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs = {f"{M}.{name}": tensor for name, tensor in state.as_dict(packed=True).items()} | {M: codes}
    ours, _ = double(given, tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name == STATE:
            assert bytes(ours[name].tolist()).rstrip(b" ") == bytes(tensor.tolist())
        else:
            assert torch.equal(ours[name], tensor), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_package_itself_decodes_its_files_to_the_same_values(
    kind: str, double: bool, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    given = torch.randn(80, 1024, generator=torch.Generator().manual_seed(4)).bfloat16()
    codes, state = functional.quantize_4bit(given, blocksize=64, quant_type=kind, compress_statistics=double)
    names = {f"{M}.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    folder = theirs(tmp_path / "in", {M: codes} | names)
    assert torch.equal(decoded(folder, tmp_path / "out"), functional.dequantize_4bit(codes, state))


def double(given: torch.Tensor, folder: Path, **limits: Any) -> tuple[Tensors, Path]:
    """Return what is written of a weight with double quantization."""
    source = original(folder / "in", given)
    limit = Limits(workers=2, **limits)
    quantize(source, folder / "out", "nf4_double", codec=CODEC, limits=limit)
    return load_file(folder / "out" / "model.safetensors"), source


@pytest.mark.parametrize("shape", [(96, 320), (3, 16384), (300, 64), (1, 64)])
def test_double_quantization_is_that_of_the_weight_as_one_row(shape: tuple[int, int], tmp_path: Path) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.02
    given[0, :64] = 0
    found, source = double(given, tmp_path, tile_values=1)
    q = zp.quantize(given.view(1, -1), CODEC.presets["nf4_double"].weight)
    assert q.params.center is not None
    state = json.loads(found[STATE].numpy().tobytes())
    assert state["nested_offset"] == float(q.params.center)
    swapped = (found[M] << 4 | found[M] >> 4).flatten()
    assert torch.equal(swapped, q.data.flatten())
    assert torch.equal(found[f"{M}.absmax"], q.scales[0].flatten())
    assert torch.equal(found[f"{M}.nested_absmax"], q.scales[1].flatten())
    assert torch.equal(found[f"{M}.nested_quant_map"], table("dynamic8"))
    # Blocks of zeros have the mean as absmax, more or less; codes of zero are zeros all the same.
    floats = decoded(tmp_path / "out", tmp_path / "floats")
    assert torch.equal(floats.flatten(), q.dequantize().bfloat16().flatten())
    assert not zp.verify_checkpoint(tmp_path / "out", source).problems
    assert [s.layout for s in zp.inspect_checkpoint(tmp_path / "out").schemes] == [
        "nf4 with double quantization"
    ]


def test_no_cut_of_a_weight_changes_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(640, 192, generator=torch.Generator().manual_seed(6)).bfloat16()
    whole, _ = double(given, tmp_path / "whole")
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 1)
    parts, _ = double(given, tmp_path / "parts", tile_values=1)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_absmax_that_is_off_by_more_than_its_rounding_is_seen(tmp_path: Path) -> None:
    given = torch.randn(64, 512, generator=torch.Generator().manual_seed(8))
    found, source = double(given, tmp_path)
    found[f"{M}.absmax"][7] = 255 - found[f"{M}.absmax"][7]
    save_file(found, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    problems = zp.verify_checkpoint(tmp_path / "out", source).problems
    assert [p.where for p in problems] == ["a.up_proj"]
    assert "times the proven bound" in problems[0].what


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", ["nf4", "nf4_double"])
def test_transformers_loads_what_is_written_with_our_values(text: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    transformers = pytest.importorskip("transformers")
    tiny_models.llama(seed=3, hidden_size=192, intermediate_size=320).save_pretrained(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "out", text, codec=CODEC)
    dequantized(tmp_path / "out", tmp_path / "floats")
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, wanted = (load(tmp_path / name, dtype=torch.float32) for name in ("out", "floats"))
    assert type(found.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert (found.model.layers[0].mlp.up_proj.weight.quant_state.nested) == (text == "nf4_double")
    for name, wanted_weight in wanted.named_parameters():
        weight = found.get_parameter(name)
        if hasattr(weight, "quant_state"):
            assert torch.equal(functional.dequantize_4bit(weight.data, weight.quant_state), wanted_weight)
    with torch.no_grad():
        assert bool(torch.isfinite(found(torch.arange(12)[None]).logits).all())


def edited(**changes: Any) -> torch.Tensor:
    """Return the JSON with double quantization, with other values."""
    return as_bytes(json.dumps(json.loads(NESTED_TEXT) | changes).encode())


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


WRONG: tuple[tuple[Callable[[], Tensors], str], ...] = (
    (lambda: plain() | {STATE.replace("nf4", "fp4"): edited()}, "it has 2 tensors"),
    (lambda: without(nested(), f"{M}.nested_absmax"), "nested_absmax is missing, which nf4 with double"),
    (lambda: plain() | {f"{M}.nested_absmax": torch.ones(1)}, r"weight\.nested_absmax has no place in nf4"),
    (lambda: nested() | {STATE: edited(blocksize=128)}, r"absmax is U8 of shape \[4\], but must be .*\[2\]"),
    (lambda: nested() | {STATE: edited(blocksize=True)}, "blocksize of its quant_state is True"),
)
"""What tests/hostile/layouts.py does not have."""


@pytest.mark.parametrize(("tensors", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    tensors: Callable[[], Tensors], rule: str, tmp_path: Path
) -> None:
    assert_wrong(theirs(tmp_path / "in", tensors()), "a.up_proj", rule)


def test_a_configuration_that_names_no_size_is_refused(tmp_path: Path) -> None:
    folder = theirs(tmp_path / "in", {M: torch.zeros(2, 64, dtype=torch.int8)}, load_in_4bit=False)
    with pytest.raises(UnsupportedError, match="has neither load_in_4bit nor load_in_8bit"):
        zp.verify_checkpoint(folder)


def test_weights_of_partial_blocks_are_refused() -> None:
    why = CODEC.refusal(layer_scheme("nf4", CODEC), (64, 100))
    assert why == "last axis 100 is not a multiple of the group, 64"


def test_a_kept_name_that_is_part_of_a_quantized_one_is_an_error(tmp_path: Path) -> None:
    source = original(tmp_path / "in", x(), **{"a.up.weight": torch.ones(64, 100)})
    with pytest.raises(CheckpointError, match=r"'a\.up' is kept, but loaders"):
        make_plan(open_source(source), "nf4", codec=CODEC)
