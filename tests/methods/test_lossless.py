"""Codes that become other codes: their values stay what they were, or the conversion is refused."""

from dataclasses import replace

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.formats import get_format
from zeropoint.methods import LOSSLESS, LOSSLESS_OR_NEAREST, LayerData, LayerResult, method_named
from zeropoint.methods.lossless import difference, is_exact_reciprocal
from zeropoint.params import QuantizationParams
from zeropoint.schemes import Scheme
from zeropoint.tensor import QuantizedTensor

NVFP4 = "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor"


def weight() -> torch.Tensor:
    """Return numbers of many sizes, a row of zeros and one of negative ones."""
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(3)) ** 3
    x[5] = 0.0
    x[6] = -x[6].abs()
    return x


def converted(q: QuantizedTensor, to: str, method: str = LOSSLESS, **data: object) -> LayerResult:
    values = q.dequantize(torch.float32)
    return method_named(method).quantize(values, Scheme.parse(to), LayerData(codes=q, **data))


SAME_VALUES = [
    # The same numbers in both.
    ("int4:g128:asym:scale=float16", "int4:g128:asym:scale=float16:dialect=compressed-tensors"),
    ("q4_k", "q4_k"),
    ("mxfp4", "mxfp4_e2m1"),
    ("nf4:g64", "nf4:g64"),
    # Scales in another format, or of smaller blocks; codes of more bits; zero points in another range.
    ("int4:g128:scale=float16", "int4:g128"),
    ("int4:g32:scale=bfloat16", "int4:g32:scale=float16"),
    ("int4:g128:scale=float16", "q4_0"),
    ("int4:channel:scale=float16", "q4_0"),
    ("int8:g128:scale=float16", "q8_0"),
    ("int4:g128:asym:scale=float16", "uint4:g32:asym"),
    ("int4:g32:asym:scale=float16", "uint8:g32:asym"),
    ("int4:g64:scale=float16", "int8:g64:scale=float16"),
    ("int4:g64:scale=float16", "uint4:g64:asym:scale=float16"),
    ("float8_e4m3fn:block8x64", "float8_e4m3fn:g64"),
    # A negative scale has an equal where there is a zero point.
    ("q4_0", "int4:g32:asym:scale=float16"),
    ("q5_0", "uint5:g32:asym:scale=float16"),
    # Powers of two are numbers of float8 under the right scale of the tensor.
    ("mxfp4", NVFP4),
    ("mxfp4_e2m1", f"{NVFP4}:dialect=compressed-tensors"),
    ("float4_e2m1fn:g8:scale=ceil", f"{NVFP4.replace('g16', 'g4')}:dialect=modelopt"),
    ("mxfp6_e2m3", NVFP4.replace("float4_e2m1fn", "float6_e2m3fn")),
]


@pytest.mark.parametrize(("source", "target"), SAME_VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_value_stays_what_it_was(source: str, target: str, dtype: torch.dtype) -> None:
    q = zp.quantize(weight().to(dtype), source)
    before = [q.data.clone(), *(x.clone() for x in q.params.stored)]
    result = converted(q, target).q
    assert result.scheme == Scheme.parse(target)
    assert torch.equal(result.dequantize(torch.float32), q.dequantize(torch.float32))
    result.params.validate()
    after = [q.data, *q.params.stored]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(after, before, strict=True)
    )


@pytest.mark.parametrize("target", ["q4_0", "int4:g32:scale=signed/float16"])
def test_codes_under_positive_scales_come_from_a_kernel_where_scales_may_be_negative(target: str) -> None:
    q = zp.quantize(weight(), "int4:g32:scale=float16")
    with zp.only_backend("cpu"):
        result = converted(q, target).q
    assert torch.equal(result.dequantize(), q.dequantize())


@pytest.mark.parametrize("dialect", ["", ":dialect=compressed-tensors"])
@pytest.mark.parametrize("extremes", [None, (0.0, 0.0)])
def test_zeros_have_parameters_that_are_numbers(dialect: str, extremes: tuple[float, float] | None) -> None:
    q = zp.quantize(torch.zeros(4, 64), "mxfp4")
    result = converted(q, NVFP4 + dialect, extremes=extremes).q
    result.params.validate()
    assert result.params.stored[1].tolist() == [[1.0]]
    assert not bool(result.dequantize(torch.float32).any())


REFUSED = [
    ("nf4:g64", "int8:g64", "does not hold the values of nf4:g64: "),
    ("int4:g32", "q4_0", "is not representable in float16, the scales of"),
    ("int8:g32:scale=float16", "int4:g32:scale=float16", "does not hold the values of"),
    ("int4:g32:asym:scale=float16", "q4_0", "does not hold the values of"),
    ("int4:g32", "int4:g64", "has one scale where int4:g32 has several"),
    ("q4_k", "q5_k", "the parameters of"),
    ("q4_1", "int4:g32:asym:scale=float16", "do not follow from those of"),
    ("int4:g32", NVFP4, "do not follow from those of int4:g32"),
    ("nvfp4", "mxfp4", "has one scale where"),
]


@pytest.mark.parametrize(("source", "target", "message"), REFUSED)
def test_what_would_change_a_value_is_refused_with_the_reason(source: str, target: str, message: str) -> None:
    q = zp.quantize(weight(), source)
    with pytest.raises(UnsupportedError) as caught:
        converted(q, target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def blocks(*largest: float) -> torch.Tensor:
    """Return a row of blocks of 32 values, each with one of these magnitudes and its third."""
    return torch.cat([torch.tensor([x, x / 3]).repeat(16) for x in largest])[None]


@pytest.mark.parametrize(("binades", "fits"), [(17, True), (18, False)])
def test_nvfp4_holds_blocks_of_mxfp4_whose_magnitudes_span_seventeen_binades(
    binades: int, fits: bool
) -> None:
    q = zp.quantize(blocks(6.0, 6.0 / 2**binades), "mxfp4_e2m1")
    if fits:
        assert torch.equal(converted(q, NVFP4).q.dequantize(), q.dequantize())
        return
    with pytest.raises(UnsupportedError, match=r"up to 6\.0 and down to .* too far apart for those of"):
        converted(q, NVFP4)


def test_a_block_of_small_codes_under_a_large_scale_takes_the_scale_that_its_codes_allow() -> None:
    """A scale of 2 ** 20 above that of its neighbor, but for codes of 0.5 alone."""
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, 3], codes[0, 40] = 1, 7
    exponents = torch.tensor([[127 + 17, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    params = QuantizationParams.of(Scheme.parse("mxfp4_e2m1"), (1, 64), torch.float32, [exponents])
    q = QuantizedTensor(data=zp.pack(codes, 4), params=params, shape=(1, 64), dtype=torch.float32)
    assert q.dequantize()[0, 3] == 2.0**16
    assert torch.equal(converted(q, NVFP4).q.dequantize(), q.dequantize())


def with_every_scale_and_code(scheme: str, tensor_scale: torch.Tensor) -> QuantizedTensor:
    """Return NVFP4 with a block for each positive number of float8_e4m3fn, which holds all codes."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(126)[None]
    params = QuantizationParams.of(
        Scheme.parse(scheme), (1, 2016), torch.float32, [scales, tensor_scale.reshape(1, 1)]
    )
    return QuantizedTensor(data=zp.pack(codes, 4), params=params, shape=(1, 2016), dtype=torch.float32)


def test_nvfp4_goes_between_factors_and_divisors_where_the_reciprocal_gives_all_products() -> None:
    """For 18 % of all tensor scales; no neighbor of the reciprocal serves for the others."""
    dialects = [f"{NVFP4}:dialect={name}" for name in ("modelopt", "compressed-tensors")]
    bits = torch.randint(1 << 23, (4096,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    scales = (bits + (118 << 23)).view(torch.float32)
    numbers = (torch.arange(8, 16) / 8)[None]
    near = [1 / scales]
    for _ in range(2):
        near += [near[-1].nextafter(torch.tensor(torch.inf))]
    near += [(1 / scales).nextafter(torch.tensor(0.0))]
    serves = [(numbers * scales[:, None] == numbers / other[:, None]).all(1) for other in near]
    assert not (serves[1] | serves[2] | serves[3]).any()
    assert int(serves[0].sum()) == 759
    for scale, exact in zip(scales[:24], serves[0][:24].tolist(), strict=True):
        assert is_exact_reciprocal(scale, get_format("float8_e4m3fn")) is exact
        q = with_every_scale_and_code(dialects[0], scale)
        if exact:
            found = converted(q, dialects[1]).q
            assert torch.equal(found.dequantize(), q.dequantize())
            assert torch.equal(converted(found, dialects[0]).q.dequantize(), q.dequantize())
        else:
            with pytest.raises(UnsupportedError, match="does not hold the values of"):
                converted(q, dialects[1])


def test_a_part_takes_the_tensor_scale_of_the_whole() -> None:
    q = zp.quantize(blocks(6.0, 6.0 / 2**10), "mxfp4_e2m1")
    whole = converted(q, NVFP4).q
    small = zp.quantize(blocks(6.0 / 2**10), "mxfp4_e2m1")
    part = converted(small, NVFP4, extremes=(-1.0, 6.0)).q
    assert torch.equal(part.scales[1], whole.scales[1])
    assert torch.equal(part.scales[0].view(torch.uint8), whole.scales[0].view(torch.uint8)[:, 2:])


def test_floats_are_refused_since_there_is_nothing_to_convert() -> None:
    for name in (LOSSLESS, LOSSLESS_OR_NEAREST):
        method = method_named(name)
        assert method.refusal(Scheme.parse("int4:g32")) is not None
        with pytest.raises(UnsupportedError, match="gives int4:g32 to codes alone, not to floats;"):
            method.quantize(weight(), Scheme.parse("int4:g32"))


def test_what_cannot_be_kept_is_quantized_anew_where_that_is_allowed() -> None:
    q = zp.quantize(weight(), "nf4:g64")
    found = converted(q, "int8:g64", LOSSLESS_OR_NEAREST).q
    expected = zp.quantize(q.dequantize(), "int8:g64")
    assert torch.equal(found.data, expected.data)
    kept = converted(q, "nf4:g32", LOSSLESS_OR_NEAREST).q
    assert torch.equal(kept.dequantize(), q.dequantize())


def test_zero_points_become_offsets_with_less_error_than_rounding_anew() -> None:
    q = zp.quantize(weight(), "int4:g128:asym:scale=float16")
    values = q.dequantize()
    found = converted(q, "q4_1", LOSSLESS_OR_NEAREST).q
    anew = zp.quantize(values, "q4_1")
    error, other = ((x.dequantize() - values).square().sum() for x in (found, anew))
    assert 0 < error < other / 1000


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_differ_unless_they_are_the_same_infinity(number: float) -> None:
    q = zp.quantize(torch.linspace(-1, 1, 64).reshape(2, 32), "float8_e5m2:channel")
    values = q.dequantize()
    assert difference(values, q) is None
    assert difference(-values, q) is not None
    changed = values.clone()
    changed[1, 3] = number
    assert str(difference(changed, q)).startswith("1 of 64 values differ, the first at [1, 3]")
    data = q.data.clone()
    data[1, 3] = 0x7C if number == torch.inf else 0x7F  # Inf and NaN of float8_e5m2
    special = replace(q, data=data)
    assert (difference(special.dequantize(), special) is None) == (number == torch.inf)
