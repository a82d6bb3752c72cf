"""Packed weights: tiles and rows are those of the whole, and no cast, copy or file changes a byte."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import ShapeError, UnsupportedError
from zeropoint.models import PackedWeight, calibrate, quantize_model
from zeropoint.recipes import model_preset
from zeropoint.schemes import PRESETS, Scheme

WEIGHTS = sorted(
    {preset.weight for preset in PRESETS.values()}
    | {"float8_e4m3fn:block3x5", "int4:block2x8:scale=float16:asym", "uint8:channel-1:asym", "int8:tensor"}
    | {"int4:g8:scale=float8_e4m3fn:scale2=float32@block4x16", "int8:block1000x3"}
)
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": nn.Module.half,
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "double": nn.Module.double,
}


def packed(text: str, rows: int, columns: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows * columns)
    return PackedWeight(zp.quantize(torch.randn(rows, columns, generator=generator), text))


def model(preset: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(70, 33), nn.ReLU(), nn.Linear(33, 5, bias=False))
    data = [torch.randn(9, 70)]
    calibration = calibrate(net, preset, data) if model_preset(preset).needs_calibration else None
    return quantize_model(net, preset, calibration=calibration).model.eval()


def same_bytes(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = dict(a.named_buffers()), dict(b.named_buffers())
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.crossed
@pytest.mark.parametrize("text", WEIGHTS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 7), (37, 70), (257, 131), (300, 33)])
def test_tiles_are_the_rows_of_the_whole_bit_for_bit(text: str, rows: int, columns: int) -> None:
    weight = packed(text, rows, columns)
    whole, step = weight.quantized().dequantize(), weight.block_rows
    for count in {step, 3 * step, rows}:
        starts = range(0, rows, max(step, count - count % step))
        tiles = [weight.tile(start, min(rows, start + starts.step)) for start in starts]
        assert torch.equal(torch.cat(tiles), whole), (text, count)


@pytest.mark.crossed
@pytest.mark.parametrize("text", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 37])
def test_rows_by_number_are_the_rows_of_the_whole_or_refused(text: str, rows: int) -> None:
    weight, index = packed(text, rows, 70), torch.tensor([rows - 1, 0, rows // 2] * 40)
    if weight.rows_are_apart:
        assert torch.equal(weight.rows(index), weight.quantized().dequantize()[index])
        assert weight.rows(index[:0]).shape == (0, 70)
    else:
        with pytest.raises(UnsupportedError, match="share blocks; dequantize the whole weight"):
            weight.rows(index)


def test_a_number_that_is_no_row_is_refused() -> None:
    for number in (-1, 37):
        with pytest.raises(IndexError, match="index out of range"):
            packed("int8:channel", 37, 70).rows(torch.tensor([0, number]))


@pytest.mark.parametrize(("start", "stop"), [(1, 4), (0, 3), (0, 12), (-4, 4), (8, 4)])
def test_tiles_that_cut_blocks_or_leave_the_weight_are_refused(start: int, stop: int) -> None:
    message = (
        rf"^rows {start} to {stop} must lie in 0 to 10 and not cut blocks of 4 rows of int8:block4x32; take"
    )
    with pytest.raises(ShapeError, match=message):
        packed("int8:block4x32", 10, 64).tile(start, stop)
    assert packed("int8:block4x32", 10, 64).tile(8, 10).shape == (2, 64)


def test_only_blocks_taller_than_a_row_hold_rows_together() -> None:
    heights = {text: packed(text, 300, 64).block_rows for text in WEIGHTS}
    tall = {text: height for text, height in heights.items() if height != 1}
    assert tall == {
        PRESETS["fp8_block"].weight: 128,
        "float8_e4m3fn:block3x5": 3,
        "int4:block2x8:scale=float16:asym": 2,
        "int4:g8:scale=float8_e4m3fn:scale2=float32@block4x16": 4,
    }


@pytest.mark.crossed
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_casts_of_a_model_leave_packed_weights_and_scales_alone(preset: str, cast: str) -> None:
    before = model(preset)
    after = CASTS[cast](copy.deepcopy(before))
    assert same_bytes(before, after)
    dtype = next(parameter.dtype for parameter in after.parameters())
    assert dtype != torch.float32
    x = torch.randn(4, 70)
    with torch.no_grad():
        expected, found = before(x), after(x.to(dtype))
    assert found.dtype == dtype
    # The cast may move an input across a tie of 4 bits, or the largest of a block across a power of two.
    # Scales that were cast too gave 0.99.
    drift = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert drift < (1e-6 if cast == "double" else 0.15)


@pytest.mark.parametrize("preset", PRESETS)
def test_copies_and_files_of_a_model_hold_the_same_bytes(preset: str) -> None:
    first = model(preset)
    whole, state = io.BytesIO(), io.BytesIO()
    torch.save(first, whole)
    torch.save(first.state_dict(), state)
    whole.seek(0)
    state.seek(0)
    fresh = model(preset)
    for buffer in fresh.buffers():
        buffer.zero_()
    fresh.load_state_dict(torch.load(state), strict=True)
    copies = {
        "deepcopy": copy.deepcopy(first),
        "pickle": pickle.loads(pickle.dumps(first)),
        "torch.save": torch.load(whole, weights_only=False),
        "state_dict": fresh,
    }
    x = torch.randn(4, 70)
    with torch.no_grad():
        expected = first(x)
        for how, other in copies.items():
            assert same_bytes(first, other), how
            assert torch.equal(other(x), expected), how


def test_states_of_another_scheme_dtype_or_with_damaged_scales_are_refused() -> None:
    weight, state = packed("int4:g32", 4, 64), packed("int4:g32", 4, 64).state_dict()
    for wrong, text in (
        (packed("int5:g32", 4, 64).state_dict(), r"scheme of the state \(int5:g32\) must be that of the"),
        ({**state, "scale1": state["scale1"].double()}, "scale1 .dtype torch.float64. must be torch.float32"),
        ({**state, "scale1": -state["scale1"]}, r"scale 1 \(=-.*\) of block \(0, 0\) must be finite"),
        ({**state, "data": state["data"].to(torch.int16)}, "data .dtype torch.int16. must be torch.uint8"),
    ):
        with pytest.raises(RuntimeError, match=rf"packed weight \(the module itself\): {text}"):
            weight.load_state_dict(wrong)
    assert same_bytes(weight, packed("int4:g32", 4, 64))
    with pytest.raises(RuntimeError, match=r"packed weight 0\.weight: scheme of the state"):
        nn.Sequential(quantize_model(nn.Linear(64, 8), "w8a16").model).load_state_dict(
            nn.Sequential(quantize_model(nn.Linear(64, 8), "fp8_dynamic").model).state_dict()
        )


def test_a_weight_says_its_scheme_and_shape() -> None:
    assert repr(packed("mxfp4", 4, 64)) == f"PackedWeight({Scheme.parse('mxfp4')}, shape=(4, 64))"
