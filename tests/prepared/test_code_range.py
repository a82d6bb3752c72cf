"""Codes stay in the range that the caller chose, forward and backward, at every width, on every backend."""

import pytest
import torch

import zeropoint as zp
from zeropoint.layout.blocks import spread_blocks
from zeropoint.prepared import plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCHEMES = (
    "int8:tensor", "int8:channel", "int8:token", "int4:g8", "int5:g8", "uint8:channel:asym", "uint8:tensor",
    "uint4:g8:asym", "int7:channel1", "int8:block2x16", "uint3:token:asym=real", "int2:g16",
    "int8:g32:narrow",
)  # fmt: skip
SHAPE = (6, 64)


def data(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal data."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def limits_of(scheme: zp.Scheme) -> list[tuple[int, int]]:
    """Return all codes, all but one at each end, a single one, and an uneven range."""
    low, high = scheme.qmin, scheme.qmax
    return [(low, high), (low + 1, high - 1), (low + 1, low + 1), (low, (low + high + 1) // 2)]


def steps_of(x: torch.Tensor, params: zp.QuantizationParams) -> torch.Tensor:
    """Return ``round(x / scale) + zero_point`` by the formula alone, a real one inside the rounding."""
    scale = params.effective_scale()
    assert scale is not None
    blocks = params.scheme.granularity
    ratio = x.to(scale.dtype) / spread_blocks(scale, blocks, SHAPE)
    if params.zero_point is None:
        return ratio.round()
    zero = spread_blocks(params.zero_point, blocks, SHAPE)
    return (ratio + zero).round() if zero.is_floating_point() else ratio.round() + zero


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_clamped_to_the_range_and_the_gradient_stops_there(
    scheme: str, backend: str, dtype: torch.dtype
) -> None:
    if backend == "cpu" and dtype is torch.float64:
        with zp.only_backend("cpu"), pytest.raises(zp.UnsupportedError, match="computed in float64"):
            plan("quantize", zp.quantize(data(torch.float32).abs(), scheme).params, SHAPE, dtype)
        return
    unsigned = scheme == "uint8:tensor"  # which has no code for a negative number
    params = zp.quantize(data(dtype).abs() if unsigned else data(dtype), scheme).params
    x, slope = data(dtype, 1) * 1.5, data(dtype, 2)
    steps = steps_of(x, params)
    with zp.only_backend(backend):
        quantizing, faking, going_back = (
            plan(op, params, SHAPE, dtype) for op in ("quantize", "fake_quantize", "fake_quantize_backward")
        )
        for low, high in limits_of(params.scheme):
            q = quantizing.within(low, high).run(x)
            assert torch.equal(q.codes.to(steps.dtype), steps.clamp(low, high)), (low, high)
            assert torch.equal(faking.within(low, high).run(x), q.dequantize())
            inside = (steps >= low) & (steps <= high)
            assert torch.equal(going_back.within(low, high).run(slope, x), slope * inside)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_numbers_that_are_not_finite_take_an_end_of_the_range_in_training(backend: str) -> None:
    params = zp.QuantizationParams.new(0.5, 2, "int8:tensor:asym")
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    with zp.only_backend(backend):
        values = plan("fake_quantize", params, (4,)).within(-3, 5).run(x)
        slopes = plan("fake_quantize_backward", params, (4,)).within(-3, 5).run(torch.ones(4), x)
        with pytest.raises(zp.NonFiniteError, match=r"contains nan at \(0,\); 3 non-finite"):
            plan("quantize", params, (4,)).within(-3, 5).run(x)
    # The values of codes -3, 5, -3 and 2 under zero point 2.
    assert values.tolist() == [-2.5, 1.5, -2.5, 0.0]
    assert slopes.tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_any_shape_has_a_range(shape: tuple[int, ...], backend: str) -> None:
    x = torch.full(shape, 9.0)
    # A scale of 0.5 where there is a block.
    params = zp.quantize(torch.full(shape, 63.5), "int8:tensor:narrow").params
    with zp.only_backend(backend):
        values = plan("fake_quantize", params, shape).within(-3, 5).run(x)
    assert torch.equal(values, torch.full(shape, 2.5))


def test_a_code_of_sixteen_bits_has_a_range() -> None:
    params = zp.QuantizationParams.from_range("int16:tensor", -1.0, 1.0)
    x = torch.tensor([-1.0, -0.01, 0.0, 0.3, 1.0])
    q = plan("quantize", params, (5,)).within(-1000, 1000).run(x)
    assert q.codes.tolist() == [-1000, -328, 0, 1000, 1000]


def test_a_range_is_part_of_the_plan_alone() -> None:
    params = zp.QuantizationParams.new(1.0)
    whole = plan("quantize", params, (2,))
    narrow = whole.within(-2, 2)
    x = torch.tensor([5.0, -5.0])
    assert narrow.run(x).codes.tolist() == [2, -2]
    assert whole.run(x).codes.tolist() == [5, -5]
    assert narrow.within(-3, 3).run(x).codes.tolist() == [3, -3]


def test_ranges_without_meaning_are_refused() -> None:
    params = zp.QuantizationParams.new(1.0)
    with pytest.raises(zp.RangeError, match=r"code range -129\.\.0 must lie in -128\.\.127, the codes of"):
        plan("quantize", params, (2,)).within(-129, 0)
    with pytest.raises(zp.RangeError, match=r"code range 3\.\.2 must lie in"):
        plan("quantize", params, (2,)).within(3, 2)
    with pytest.raises(zp.RangeError, match=r"code range 0\.\.1 needs given parameters and values to clip"):
        plan("quantize", "int8", (2,)).within(0, 1)
    with pytest.raises(zp.RangeError, match="needs given parameters and values to clip"):
        plan("dequantize", params, (2,)).within(0, 1)
    floats = zp.quantize(torch.ones(2), "float8_e4m3fn:tensor").params
    with pytest.raises(zp.SchemeError, match="float8_e4m3fn has no integer code range"):
        plan("quantize", floats, (2,)).within(0, 1)
