"""Dialect torch against torch.fake_quantize_*_affine, forward and gradient.

In float32, float16 and bfloat16 the forward agrees bit for bit, NaN and Inf included: NaN takes the smallest
code, Inf the end of its sign, and neither passes a gradient. Gradients agree as numbers: torch multiplies by
the mask, so that a masked negative gradient is -0.0 there and 0.0 here. For float64 torch computes with a
float32 scale and rounds each value to float32; zeropoint computes in float64, so only the codes agree.
"""

import math

import pytest
import torch

import zeropoint as zp
from zeropoint import QuantizationParams, Scheme

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALES = [1.0, 0.1, 0.0371, 1 / 3, 2.0**-7, 1234.5]
CODES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int2": (-2, 1),
    "int16": (-32768, 32767),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def inputs(scale: float, span: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ties, numbers next to them, numbers far outside, zeros, NaN and Inf."""
    steps = torch.arange(-span - 3, span + 3, dtype=torch.float64)
    ties = (torch.cat([steps + 0.5, steps]) * scale).to(dtype)
    near = [torch.nextafter(ties, torch.full_like(ties, way)) for way in (math.inf, -math.inf)]
    noise = torch.randn(4000, generator=torch.Generator().manual_seed(17), dtype=torch.float64) * span * scale
    ends = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 6e4, -6e4], dtype=dtype)
    return torch.cat([ties, *near, noise.to(dtype), ends])


def gradient(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-2, 3, y.numel()).reshape(y.shape).to(y.dtype)
    (result,) = torch.autograd.grad(y, x, weights)
    return result


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", CODES)
def test_per_tensor_forward_and_gradient_are_those_of_torch(
    element: str, scale: float, dtype: torch.dtype
) -> None:
    """Ties with odd and even zero points; the mask includes both ends."""
    low, high = CODES[element]
    data = inputs(scale, min(high - low, 600), dtype)
    for zero_point in sorted({low, low + 1, (low + high) // 2, 0, 1, high - 1, high}):
        params = QuantizationParams.new(scale, zero_point, f"{element}:tensor:asym:dialect=torch")
        ours, theirs = data.clone().requires_grad_(), data.clone().requires_grad_()
        y = zp.fake_quantize(ours, params)
        t = torch.fake_quantize_per_tensor_affine(theirs, scale, zero_point, low, high)
        assert torch.equal(bits(y), bits(t))
        assert torch.equal(gradient(y, ours), gradient(t, theirs))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("element", ["int8", "uint8", "int4"])
def test_per_channel_forward_and_gradient_are_those_of_torch(
    element: str, axis: int, dtype: torch.dtype
) -> None:
    low, high = CODES[element]
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(7, 5, 11, generator=generator) * (high - low) * 0.3).to(dtype)
    count = x.shape[axis]
    scales = torch.rand(count, generator=generator) + 0.05
    zero_points = torch.randint(low, high + 1, (count,), generator=generator, dtype=torch.int32)
    scheme = Scheme.parse(f"{element}:channel{axis}:asym:dialect=torch")
    grid = scheme.granularity.grid(tuple(x.shape))
    params = QuantizationParams(
        scheme=scheme,
        shape=tuple(x.shape),
        scales=(scales.reshape(grid),),
        zero_point=zero_points.reshape(grid),
        dtype=dtype,
    )
    params.validate()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = zp.fake_quantize(ours, params)
    t = torch.fake_quantize_per_channel_affine(theirs, scales, zero_points, axis % 3, low, high)
    assert torch.equal(bits(y), bits(t))
    assert torch.equal(gradient(y, ours), gradient(t, theirs))


@pytest.mark.parametrize("scale", SCALES)
def test_float64_has_the_codes_of_torch_and_values_of_its_own_precision(scale: float) -> None:
    params = QuantizationParams.new(scale, 3, "int8:tensor:asym:dialect=torch")
    kept = params.scales[0].double().item()
    x = torch.randn(20000, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 60 * scale
    y = zp.fake_quantize(x, params)
    t = torch.fake_quantize_per_tensor_affine(x, scale, 3, -128, 127)
    codes = torch.round(y / kept)
    assert torch.equal(y, codes * kept)
    assert torch.equal(codes, torch.round(t / kept))


def test_nan_takes_the_smallest_code_and_passes_no_gradient() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0], requires_grad=True)
    y = zp.fake_quantize(x, QuantizationParams.new(1.0, 0, "int8"))
    assert y.tolist() == [-128.0, 127.0, -128.0, 1.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("scheme", ["float8_e4m3fn", "float4_e2m1fn", "nf4", "float8_e4m3fnuz"])
def test_nan_stays_nan_where_the_element_is_no_integer(scheme: str) -> None:
    """Fake quantization passes NaN on, and Inf becomes the largest value."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    y = zp.fake_quantize(x, QuantizationParams.new(1.0, 0, scheme))
    top = float(zp.get_format(scheme).max)
    assert torch.isnan(y[0])
    assert y[1:].tolist() == [top, -top, 1.0]


def test_the_reciprocal_is_what_sets_the_dialect_apart() -> None:
    """Without this, the tests above could pass in any dialect."""
    x = torch.randn(100000, generator=torch.Generator().manual_seed(1)) * 50
    x = torch.cat([x, (torch.arange(-3000, 3000) + 0.5) * torch.tensor(0.0371)])
    torchs = QuantizationParams.new(0.0371, 0, "int16:tensor:dialect=torch")
    own = QuantizationParams.new(0.0371, 0, "int16:tensor")
    assert not torch.equal(zp.quantize(x, torchs).codes, zp.quantize(x, own).codes)
