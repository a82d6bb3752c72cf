"""The gradient mask of fake_quantize against the definition: 1 where the rounded value needs no clipping."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import zeropoint as zp
from zeropoint import QuantizationParams
from zeropoint.formats import FloatFormat, Overflow, RoundingMode, exact

MODES = [mode for mode in RoundingMode if mode is not RoundingMode.STOCHASTIC]
FLOATS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float6_e2m3fn",
    "float4_e2m1fn",
    "ue4m3",
    "ue5m3",
]


def mask(x: torch.Tensor, params: QuantizationParams) -> list[float]:
    leaf = x.clone().requires_grad_()
    (result,) = torch.autograd.grad(zp.fake_quantize(leaf, params).sum(), leaf)
    return result.tolist()


def fits(fmt: FloatFormat, value: float, mode: RoundingMode) -> bool:
    try:
        exact.encode(fmt, Fraction(value), mode, Overflow.ERROR)
    except zp.RangeError:
        return False
    return True


@pytest.mark.crossed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_the_mask_of_a_float_format_is_where_the_specification_has_no_overflow(
    name: str, mode: RoundingMode
) -> None:
    fmt = zp.get_format(name)
    assert isinstance(fmt, FloatFormat)
    step = Fraction(2) ** (fmt.emax - fmt.mantissa_bits)
    points = [float(fmt.max + step * Fraction(k, 4)) for k in range(-4, 8)]
    points += [float(fmt.smallest * Fraction(k, 4)) for k in range(5)]
    points += [math.nextafter(p, q) for p in points for q in (math.inf, -math.inf)]
    x = torch.tensor([s * p for p in points for s in (1, -1)], dtype=torch.float64)
    params = QuantizationParams.new(1.0, 0, f"{name}:tensor:round={mode.value}")
    assert mask(x, params) == [float(fits(fmt, v, mode)) for v in x.tolist()]


@pytest.mark.crossed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("narrow", [False, True])
def test_the_mask_of_an_integer_format_is_inclusive_on_the_rounded_value(
    mode: RoundingMode, narrow: bool
) -> None:
    low, high = (-7 if narrow else -8), 7
    x = torch.arange(-40, 40, dtype=torch.float64) / 4
    params = QuantizationParams.new(1.0, 0, f"int4:tensor{':narrow' if narrow else ''}:round={mode.value}")
    fmt = zp.get_format("int16")
    codes = [exact.encode(fmt, Fraction(v), mode) for v in x.tolist()]
    rounded = [c - 65536 if c > 32767 else c for c in codes]
    assert mask(x, params) == [float(low <= r <= high) for r in rounded]


def test_the_mask_of_stochastic_rounding_uses_the_bits_of_the_forward() -> None:
    x = torch.full((4000,), 7.5)
    params = QuantizationParams.new(1.0, 0, "int5:tensor:round=stochastic(9)")
    up = zp.quantize(x, params).codes == 8
    edge = QuantizationParams.new(1.0, 0, "int4:tensor:round=stochastic(9)")
    assert mask(x, edge) == (~up).float().tolist()
    assert 0 < int(up.sum()) < 4000


@pytest.mark.parametrize("scheme", ["int8", "float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_nan_and_infinity_pass_no_gradient(scheme: str) -> None:
    params = QuantizationParams.new(1.0, 0, scheme)
    assert mask(torch.tensor([math.nan, math.inf, -math.inf, 0.5]), params) == [0.0, 0.0, 0.0, 1.0]


def test_a_block_of_scale_zero_passes_gradients_of_finite_values_only() -> None:
    base = zp.choose_params(torch.ones(1, 32), "nvfp4")
    scales = (torch.zeros(1, 2, dtype=torch.float8_e4m3fn), base.scales[1])
    params = QuantizationParams(scheme=base.scheme, shape=(1, 32), scales=scales)
    x = torch.ones(1, 32)
    x[0, :3] = torch.tensor([math.inf, math.nan, -math.inf])
    assert mask(x, params) == [[0.0, 0.0, 0.0] + [1.0] * 29]


def test_the_mask_of_a_codebook_is_its_span() -> None:
    params = QuantizationParams.new(2.0, 0, "nf4:tensor")
    assert mask(torch.tensor([-2.1, -2.0, 0.0, 2.0, 2.1]), params) == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8:channel", "mxfp4", "nvfp4", "uint4:g4:asym", "mx9", "nf4:g8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_has_the_dtype_and_values_of_the_incoming_one_inside_the_range(
    scheme: str, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    leaf = (x / 2).requires_grad_()
    params = zp.choose_params(x, scheme)
    weights = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    (result,) = torch.autograd.grad(zp.fake_quantize(leaf, params), leaf, weights)
    assert result.dtype == dtype
    assert torch.equal(result, weights)


def test_gradients_flow_through_strided_input() -> None:
    leaf = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    params = QuantizationParams.new(1.0, 0, "int8")
    zp.fake_quantize(leaf.t()[::2], params).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum(0).tolist() == [8.0, 0.0] * 3


def test_a_clipped_value_passes_no_gradient_where_the_scale_learns_too() -> None:
    x = torch.tensor([0.3, 100.0, -2.0, -100.0], requires_grad=True)
    scale = torch.tensor([0.5], requires_grad=True)
    params = replace(QuantizationParams.new(0.5, 0, "int4:tensor"), scales=(scale,))
    zp.fake_quantize(x, params).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scale.grad is not None
    assert float(scale.grad) != 0.0
