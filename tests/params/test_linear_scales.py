"""Linear scales: narrow storage, overflow and underflow, degenerate ranges, zero points at the ends."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch

import zeropoint as zp
from zeropoint import RangeError

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.crossed
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("narrow", [False, True])
def test_symmetric_scales_divide_by_half_the_steps_in_use(bits: int, narrow: bool) -> None:
    top = 2 ** (bits - 1) - 1
    divisor = float(top) if narrow else (2**bits - 1) / 2
    x = torch.tensor([0.3, -1.7, 0.9])
    params = zp.choose_params(x, f"int{bits}:tensor{':narrow' if narrow else ''}")
    assert params.scales[0].item() == (torch.tensor(1.7) / divisor).item()


@pytest.mark.parametrize("bits", range(2, 9))
def test_unsigned_symmetric_scales_serve_the_positive_side(bits: int) -> None:
    params = zp.choose_params(torch.tensor([0.3, -0.0, 1.7]), f"uint{bits}:tensor")
    assert params.scales[0].item() == (torch.tensor(1.7) / (2**bits - 1)).item()


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("scheme", "sign", "x"),
    [
        ("uint8:tensor", "negative", [1.0, -3.0]),
        ("uint4:g2:scale=floor", "negative", [1.0, -3.0]),
        ("uint8:g2:scale=ue4m3:scale2=float32@tensor", "negative", [1.0, -3.0]),
        ("uint12:tensor:scale=float16", "negative", [1.0, -3.0]),
        ("ue4m3:tensor", "negative", [1.0, -3.0]),
        ("uint8:cast", "negative", [1.0, -3.0]),
        ("codebook[0,0.5,1]:tensor", "negative", [1.0, -3.0]),
        ("codebook[-1,-0.5,0]:tensor", "positive", [-1.0, 3.0]),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_numbers_of_a_sign_that_the_elements_lack_are_refused(
    scheme: str, sign: str, x: list[float], backend: str
) -> None:
    message = rf"holds -?3\.0, but .* has no {sign} numbers; use a format with both signs"
    with (
        pytest.raises(zp.RangeError, match=message),
        zp.only_backend(backend) if backend == "reference" else nullcontext(),
    ):
        zp.quantize(torch.tensor(x), scheme)
    with pytest.raises(zp.RangeError, match=message):
        zp.choose_params(torch.tensor(x), scheme)


def test_given_parameters_clip_negative_numbers_of_unsigned_elements() -> None:
    params = zp.choose_params(torch.tensor([0.5, 1.0]), "uint8:tensor")
    assert zp.quantize(torch.tensor([-9.0, 1.0]), params).codes.tolist() == [0, 255]


@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "ue4m3", "ue5m3"])
def test_a_scale_is_rounded_to_the_nearest_number_of_its_format(scale: str) -> None:
    fmt = zp.get_format(scale)
    for amax in torch.linspace(100.0, 200.0, 37).tolist():
        params = zp.choose_params(torch.tensor([amax]), f"int8:tensor:scale={scale}")
        effective = params.effective_scale()
        assert effective is not None
        ideal, got = Fraction(float(torch.tensor(amax) / 127.5)), Fraction(float(effective))
        spacing = Fraction(2) ** (-fmt.mantissa_bits) * (1 if ideal >= 1 else Fraction(1, 2))
        assert abs(got - ideal) <= spacing / 2
        assert (got / spacing).denominator == 1


@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float8_e4m3fn", "ue4m3"])
def test_scales_rounded_up_never_clip(scale: str) -> None:
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(2))
    up = zp.choose_params(x, f"int8:g8:narrow:scale=linear_up/{scale}").effective_scale()
    near = zp.choose_params(x, f"int8:g8:narrow:scale={scale}").effective_scale()
    assert up is not None
    assert near is not None
    ideal = x.abs().amax(-1, keepdim=True) / 127
    assert (up >= ideal).all()
    assert (near < ideal).any()
    assert ((up == near) | (near < ideal)).all()


@pytest.mark.parametrize("scale", ["float16", "float8_e4m3fn", "ue4m3"])
def test_a_scale_that_underflows_its_format_is_refused_with_its_block(scale: str) -> None:
    """One small group among normal ones is found."""
    x = torch.ones(2, 12) * 1e3
    x[1, 4:8] = 1e-9
    message = (
        r"scale of block \(1, 1\) \(=7.84.*e-12\) does not fit .*@g4; use scale=float32 or a coarser block"
    )
    with pytest.raises(RangeError, match=message):
        zp.quantize(x, f"int8:g4:scale={scale}")


@pytest.mark.parametrize(
    ("scale", "amax"), [("float16", 1e7), ("float8_e4m3fn", 1e6), ("ue4m3", 1e6), ("float8_e5m2", 1e8)]
)
def test_a_scale_that_overflows_its_format_is_refused_with_its_block(scale: str, amax: float) -> None:
    x = torch.ones(2, 12)
    x[0, 11] = amax
    with pytest.raises(
        RangeError, match=r"scale of block \(0, 2\) \(=.*\) does not fit .*; use scale=float32"
    ):
        zp.quantize(x, f"int8:g4:scale={scale}")


def test_the_largest_scale_that_still_rounds_into_a_format_is_accepted() -> None:
    x = torch.tensor([[65504.0 * 127]])
    assert zp.choose_params(x, "int8:g4:narrow:scale=float16").scales[0].item() == 65504.0


@pytest.mark.crossed
@pytest.mark.parametrize("scale", STORED)
@pytest.mark.parametrize(
    "scheme", ["int8:channel", "int4:channel:narrow", "uint8:channel:asym", "float8_e4m3fn:channel"]
)
def test_a_zero_channel_has_scale_one_and_decodes_to_zero(scheme: str, scale: str) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0], [-0.0, 0.0]])
    q = zp.quantize(x, f"{scheme}:scale={scale}")
    assert q.scales[0].dtype == STORED[scale]
    assert q.scales[0][[0, 2]].flatten().tolist() == [1.0, 1.0]
    assert not q.dequantize()[[0, 2]].any()
    if q.zero_point is not None:
        assert q.zero_point[[0, 2]].flatten().tolist() == [0, 0]


@pytest.mark.crossed
@pytest.mark.parametrize("value", [3.0, -3.0, 1e-3, -1e30])
@pytest.mark.parametrize("scheme", ["int8", "int8:narrow", "uint8:asym", "int4:asym", "uint2:asym", "int16"])
def test_a_constant_tensor_is_within_half_a_step(scheme: str, value: float) -> None:
    """The range is widened to contain 0."""
    x = torch.full((5,), value)
    q = zp.quantize(x, scheme)
    effective = q.params.effective_scale()
    assert effective is not None
    # Half a step, and three roundings to float32 of the value itself.
    assert float((q.dequantize() - x).abs().max()) <= float(effective) / 2 * (1 + 2**-9) + abs(value) * 2**-22


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8:narrow", "uint8:asym", "int8:channel:narrow", "int8:g32:narrow"])
@pytest.mark.parametrize("value", [5.0, -5.0, 0.25])
def test_a_single_element_is_kept_to_the_last_bits(scheme: str, value: float) -> None:
    """The only element is the end of the range."""
    x = torch.tensor([value])
    assert float((zp.quantize(x, scheme).dequantize() - x).abs()) <= abs(value) * 2**-23


@pytest.mark.parametrize(
    "scheme", ["int8", "uint8:asym", "int4:g4", "float8_e4m3fn", "nf4:g4", "int8:scale=bfloat16"]
)
def test_subnormal_data_have_a_normal_scale_and_decode_to_what_is_near(scheme: str) -> None:
    """No reciprocal is Inf; the least scale is the least normal float32."""
    x = torch.tensor([1e-40, -1e-41, 3e-45, 0.0])
    q = zp.quantize(x, scheme)
    assert float(q.scales[0].float().min()) == 2.0**-126
    assert torch.isfinite(1.0 / q.scales[0].float()).all()
    assert float((q.dequantize() - x).abs().max()) <= 2.0**-126


@pytest.mark.parametrize(
    "scheme", ["int8", "uint8:asym", "float8_e4m3fn", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4:g4", "mx9"]
)
def test_the_largest_float32_gives_no_infinity(scheme: str) -> None:
    """Neither ``x * inv`` nor ``max - min`` may overflow."""
    largest = torch.finfo(torch.float32).max
    for x in (torch.tensor([largest, 1.0, 0.0, -1.0]), torch.tensor([largest, -largest, 0.0, 1.0])):
        q = zp.quantize(x, scheme)
        assert all(torch.isfinite(s.float()).all() for s in q.scales)
        values = q.dequantize(torch.float64)
        assert float((values[0] - largest).abs()) <= float(q.error_bound().max())
        assert float((values[0] - largest).abs()) < 0.26 * largest


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(1.0, 3.0, 0), (-3.0, -1.0, 255), (0.0, 5.0, 0), (-5.0, 0.0, 255), (-1.0, 254.0, 1)],
)
def test_the_zero_point_stays_inside_the_codes_and_zero_stays_exact(
    low: float, high: float, wanted: int
) -> None:
    params = zp.QuantizationParams.from_range("uint8:asym", low, high)
    assert params.zero_point is not None
    assert params.zero_point.item() == wanted
    assert zp.fake_quantize(torch.zeros(1), params).item() == 0.0


@pytest.mark.crossed
@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("sign", ["", "u"])
def test_zero_is_exact_for_every_width_and_any_range(bits: int, sign: str) -> None:
    """The stored type holds every zero point."""
    generator = torch.Generator().manual_seed(bits)
    low, high = torch.randn(500, generator=generator), torch.randn(500, generator=generator)
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    params = zp.QuantizationParams.from_range(f"{sign}int{bits}:channel:asym", low, high, shape=(500, 1))
    params.validate()
    assert torch.equal(zp.fake_quantize(torch.zeros(500, 1), params), torch.zeros(500, 1))


def test_ranges_are_widened_to_contain_zero() -> None:
    params = zp.QuantizationParams.from_range("uint8:asym", 10.0, 12.0)
    assert params.scales[0].item() == (torch.tensor(12.0) / 255).item()


def test_a_real_zero_point_keeps_both_ends_of_the_range() -> None:
    x = torch.tensor([-1.0, 0.3, 2.0])
    q = zp.quantize(x, "uint4:tensor:asym=real")
    assert q.zero_point is not None
    assert q.zero_point.dtype == torch.float32
    assert q.codes.tolist()[0::2] == [0, 15]
    assert q.dequantize()[0::2].tolist() == pytest.approx(
        [-1.0, 2.0], rel=2**-21
    )  # three roundings to float32


@pytest.mark.parametrize("x", [[3e9, -3e9, 1e20, -1e20, 1e38, -1e38]])
@pytest.mark.parametrize(
    ("scheme", "low", "high"), [("int8", -128, 127), ("uint8:asym", 0, 255), ("int4", -8, 7)]
)
def test_values_far_past_the_range_saturate_at_their_own_end(
    scheme: str, low: int, high: int, x: list[float]
) -> None:
    """A conversion before the clamp would wrap at 2**31 and 2**63."""
    params = zp.QuantizationParams.new(1.0, 3 if "asym" in scheme else 0, scheme)
    assert zp.quantize(torch.tensor(x), params).codes.tolist() == [high, low] * 3


def test_an_outlier_makes_the_others_zero_and_the_bound_says_so() -> None:
    x = torch.tensor([1e30, 1.0, -1.0, 2.0])
    q = zp.quantize(x, "int8:narrow")
    assert q.codes.tolist() == [127, 0, 0, 0]
    assert float(q.error_bound()) >= 2.0


def test_mxint8_never_writes_minus_128_and_reads_it() -> None:
    """127.6 / 64 rounds to 128 and is clamped to 127."""
    x = torch.tensor([[127.6 / 64, -127.6 / 64, 1.0, 0.5]])
    q = zp.quantize(x, "mxint8")
    assert q.codes.tolist() == [[127, -127, 64, 32]]
    foreign = zp.QuantizedTensor(
        data=torch.tensor([[0x80, 0x40, 0, 0]], dtype=torch.uint8),
        params=q.params,
        shape=(1, 4),
        dtype=torch.float32,
    )
    assert foreign.dequantize().tolist() == [[-2.0, 1.0, 0.0, 0.0]]


@pytest.mark.crossed
@pytest.mark.parametrize("lane", range(16))
@pytest.mark.parametrize("scheme", ["int8:g16", "mxfp4", "nvfp4", "mx9", "nf4:g16", "uint4:g16:asym"])
def test_the_largest_of_a_block_is_found_in_every_lane(scheme: str, lane: int) -> None:
    base = zp.quantize(torch.tensor([[8.0] + [0.5] * 15]), scheme)
    x = torch.full((1, 16), 0.5)
    x[0, lane] = 8.0
    q = zp.quantize(x, scheme)
    assert torch.equal(q.scales[-1].view(torch.uint8), base.scales[-1].view(torch.uint8))
    assert float(q.dequantize()[0, lane]) == float(base.dequantize()[0, 0])
