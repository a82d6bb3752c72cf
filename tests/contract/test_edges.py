"""Cases in which kernels once differed from the reference, one test each."""

import math

import pytest
import torch
from tests.contract.test_random_schemes import agree, by_default, on_both, quantized, same

import zeropoint as zp
from zeropoint.ops import library
from zeropoint.schemes import Scheme


def test_a_center_is_added_to_scales_that_kernels_read() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    for scheme in (
        "int4:g4:center=float32@tensor",
        "int8:channel:center=float32@tensor",
        "nf4:g4:center=input@token",
    ):
        q = zp.quantize(x, scheme)
        assert bool(((q.dequantize() - x).abs() <= q.error_bound().max()).all())
        plan = zp.plan("dequantize", q.params, (2, 8))
        assert torch.equal(plan.run(q), q.dequantize())


@pytest.mark.parametrize(
    "text", ["codebook[-1,-0.5]:g8:scale=signed/float32", "codebook[1,0.5]:g8:scale=signed"]
)
def test_numbers_of_a_sign_that_elements_lack_are_refused_under_signed_scales(text: str) -> None:
    scheme = Scheme.parse(text)
    x = torch.tensor([[-3.0, 1.0, 0.5, 0.25] * 4])
    assert on_both(lambda: quantized(x, scheme)) == (zp.RangeError, zp.RangeError)


def test_the_better_one_of_two_scales_of_a_block_of_zeros_is_not_zero() -> None:
    q = both(torch.zeros(3, 16), "normal3:g16:scale=four_over_six/ue5m3")
    assert bool((q.scales[0].view(torch.uint8) > 0).all())


@pytest.mark.parametrize("scheme", ["int4:g16:scale=search/float64", "e4m3:g32:scale=search/float64"])
def test_searched_scales_of_float64_keep_their_precision(scheme: str) -> None:
    q = both(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), scheme)
    assert not torch.equal(q.scales[0], q.scales[0].float().double())


def test_zeros_under_infinite_scales_have_the_signs_of_quotients() -> None:
    x = torch.tensor([[-3e37, 2e37, 1e37, 3e38, 1e38, -2e38]])
    q = both(x, "e3m4b14finite:g3:scale=signed/e4m3:scale2=floor@token")
    assert q.data.tolist() == [[0, 128, 128, 0, 0, 128]]


def test_a_scale_of_scales_that_are_all_zero_is_a_value_of_its_format() -> None:
    x = torch.full((1, 36), -0.5)
    q = as_the_reference(x, "bfloat16:g3:scale=rceil:scale2=linear/int8f7@g12:offset=minimum_late/float32")
    assert bool((q.dequantize() - x).abs().max() <= q.error_bound().max())


def test_digits_of_a_searched_scale_are_compared_as_whole_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(5, generator=generator) * 1e-18
        q = as_the_reference(x, "digits5[-1,0,1]:token:scale=search1/input")
        assert bool((q.scales[0] > 0).all())


def test_shapes_that_kernels_have_no_pass_for_are_refused_as_by_the_reference() -> None:
    as_the_reference(torch.tensor(0.5), "int8_mx:cast")
    two_levels = Scheme.parse("microexponent:tensor:scale=floor:scale2=floor/ue5m0b15finitens@channel1")
    for value, error in ((1.0, zp.ShapeError), (1e38, zp.RangeError)):
        x = torch.full((1, 80), value)
        assert by_default(lambda x=x: zp.quantize(x, two_levels)) == (error, error)


def test_a_real_zero_point_past_the_dtype_is_refused_on_both() -> None:
    x = torch.tensor([[0.5, 1.0, 111.625, 111.625]], dtype=torch.float16)
    scheme = Scheme.parse("uint6:block2x2:asym=real:dialect=compressed-tensors-oneshot")
    assert on_both(lambda: quantized(x, scheme)) == (zp.RangeError, zp.RangeError)


def test_blocks_of_one_value_decode_to_it_where_scales_are_rounded_late() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0, 2.5, 2.5, 2.5, 1.0, 2.0, 3.0]])
    q = both(x, "codebook[0.25,0.75]:g3:scale=linear_late/float16:offset=minimum_late/float16")
    assert torch.equal(q.dequantize()[:, :6], x[:, :6])


def test_a_scale_of_scales_that_underflows_is_the_smallest_of_its_format() -> None:
    q = as_the_reference(torch.full((2, 4), 3200.0), "fp64:g1:scale=floor:scale2=signed/e4m3@block2x2")
    assert bool((q.scales[1].float() > 0).all())


@pytest.mark.parametrize("element", ["int4", "normal4", "e2m1"])
def test_negative_scales_of_two_levels_are_read_as_they_are_stored(element: str) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    q = both(x, f"{element}:g16:scale=signed/e4m3:scale2=float32@tensor")
    assert bool((q.scales[0].float() < 0).any())
    assert bool(((q.dequantize() - x).abs() <= q.error_bound().max()).all())
    with zp.only_backend("reference"):
        expected = q.dequantize()
    assert torch.equal(q.dequantize(), expected)
    assert torch.equal(zp.plan("dequantize", q.params, (4, 32)).run(q), expected)


def test_a_range_past_float32_of_codes_past_it_has_a_scale() -> None:
    x = torch.tensor([[3.3895e38], [-4.2369e37]], dtype=torch.bfloat16)
    q = zp.quantize(x, "bf16:channel1:scale=input:offset=bfloat16")
    assert 0.5 < float(q.scales[0]) < 0.6
    assert bool(((q.dequantize().double() - x.double()).abs() <= q.error_bound()).all())


def test_sums_of_codes_and_zero_points_past_float16_are_within_the_bound() -> None:
    x = torch.tensor([[0.0176], [0.0332], [0.0094]], dtype=torch.float16)
    q = as_the_reference(x, "uint24f18:channel1:scale=float16:asym=real:dialect=torchao")
    error = (q.dequantize(torch.float64) - x.double()).abs().max()
    assert 0.01 < float(error) <= float(q.error_bound().max())


def both(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor:
    """Return the kernels' result, which is the reference's."""
    assert zp.explain(x, scheme).chosen == "cpu"
    assert agree(*on_both(lambda: quantized(x, Scheme.parse(scheme))))
    return zp.quantize(x, scheme)


def as_the_reference(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor:
    """Return the result of what runs by default, which is the reference's."""
    assert agree(*by_default(lambda: quantized(x, Scheme.parse(scheme))))
    return zp.quantize(x, scheme)


@pytest.mark.parametrize(
    ("table", "number", "value"),
    [("-1,-0.5,0.5,0.25", 0.25, 0.25), ("0,1,1,2", 1.0, 1.0), ("0.5,0.25,1", 0.3, 0.25)],
)
def test_codes_of_an_unsorted_codebook_are_places_in_the_table(
    table: str, number: float, value: float
) -> None:
    q = both(torch.full((2, 40), number), f"codebook[{table}]:cast")
    assert q.dequantize().unique().tolist() == [value]


def test_a_codebook_whose_inner_entries_are_swapped_is_in_order() -> None:
    table = [n / 8 for n in range(16)]
    table[5], table[9] = table[9], table[5]
    x = torch.tensor([table, table[::-1]])
    q = both(x, f"codebook[{','.join(map(str, table))}]:cast")
    assert torch.equal(q.dequantize(), x)
    assert q.codes[0].tolist() == list(range(16))


@pytest.mark.parametrize("rule", ["even", "floor", "rceil"])
@pytest.mark.parametrize("element", ["float4_e2m1fn", "float8_e4m3fn", "int8_mx"])
def test_every_float16_amax_has_the_power_of_the_reference(element: str, rule: str) -> None:
    bits = torch.arange(0x7C00, dtype=torch.int16)
    x = torch.nn.functional.pad(bits.view(torch.float16)[:, None], (0, 31))
    q = both(x, f"{element}:g32:scale={rule}:dialect=compressed-tensors")
    assert q.scales[0].shape == (0x7C00, 1)


@pytest.mark.crossed
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("blocks", ["channel:scale=input", "g32:scale=even", "g32", "tensor:scale=input"])
def test_oneshot_writes_no_negative_zero_but_of_numbers(
    blocks: str, dtype: torch.dtype, element: str
) -> None:
    """Quotients that are zero lose their sign; what is rounded to zero keeps it in float8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4096, generator=generator)
    x = torch.where(torch.rand(6, 4096, generator=generator) < 0.5, -0.0, x)
    x[1] *= 2.0**-20
    x[2, 7::5] = -(2.0**-24)
    if dtype is not torch.float16:
        x[3] *= 2.0**-110
        x[4, 0], x[4, 1::3] = 2.0**100, -(2.0**-60)
        x[5, 0], x[5, 1::3] = 2.0**100, -(2.0**-133)
    x = x.to(dtype)
    both(x, f"{element}:{blocks}:dialect=compressed-tensors")
    q = both(x, f"{element}:{blocks}:dialect=compressed-tensors-oneshot")
    assert not torch.signbit(q.dequantize()[x == 0]).any()
    if element != "float4_e2m1fn" and blocks.startswith("channel"):
        assert torch.signbit(q.dequantize()[2, 7::5]).all()


def test_an_empty_range_has_the_zero_point_of_torchs_formula() -> None:
    q = both(torch.zeros(2, 4), "int8:channel:asym:dialect=torch")
    assert q.zero_point is not None
    assert q.zero_point.flatten().tolist() == [-128, -128]
    assert both(torch.zeros(2, 64), "int4:g32:asym:dialect=torch").zero_point is not None


def test_the_quotient_alone_is_rounded_for_torchs_zero_point() -> None:
    x = torch.tensor([[-5.0, 29.0]] * 2)
    for scheme in ("int8:tensor:asym:dialect=torch", "int8:channel:asym:dialect=torch"):
        q = both(x, scheme)
        assert q.zero_point is not None
        assert q.zero_point.flatten()[0] == -91


def test_the_scale_of_an_unsigned_tensor_follows_from_its_largest_number() -> None:
    x = torch.tensor([[0.0, 1.0, 0.5, 0.25] * 4, [1e-3] * 16])
    q = both(x, "uint8:g16:scale=ue4m3:scale2=float32@tensor")
    assert q.scales[1].item() == pytest.approx(1.0 / 255 / 448)


def test_negative_numbers_next_to_an_unsigned_tensor_scale_are_refused_on_both() -> None:
    """One took the largest magnitude, the other the largest positive number for the scale of the tensor."""
    x = torch.tensor([[-3.0, 1.0, 0.5, 0.25] * 4])
    scheme = Scheme.parse("uint8:g16:scale=ue4m3:scale2=float32@tensor")
    assert on_both(lambda: quantized(x, scheme)) == (zp.RangeError, zp.RangeError)
    assert on_both(lambda: zp.choose_params(x, scheme)) == (zp.RangeError, zp.RangeError)


@pytest.mark.parametrize("element", ["uint1", "uint2", "uint4", "uint8"])
def test_negative_zeros_of_unsigned_integers_have_the_least_power(element: str) -> None:
    q = both(torch.full((3, 4), -0.0), f"{element}:token:scale=floor")
    assert q.scales[0].view(torch.uint8).tolist() == [[0], [0], [0]]


@pytest.mark.parametrize("element", ["e3m0fn", "e2m0finite", "e4m0"])
def test_the_gradient_ends_at_the_middle_to_the_next_power(element: str) -> None:
    fmt = zp.get_format(element)
    top = float(fmt.max)
    x = torch.tensor([[1.0, top * 1.5, -top * 1.5, math.nextafter(top * 1.5, 0)] * 2], dtype=torch.float32)
    params = zp.QuantizationParams.new(1.0, scheme=f"{element}:tensor")
    given = [params.scales[0].reshape(1, 1)], params.text
    expected, found = on_both(lambda: library.fake_quantize_backward(torch.ones(1, 8), x, *given))
    assert torch.equal(expected, found)
    assert found[0, :3].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.crossed
@pytest.mark.parametrize("element", ["float8_e4m3fn", "nf4", "int4", "float4_e2m1fn"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_in_a_block_whose_scale_is_zero_is_a_zero(element: str, value: float) -> None:
    scheme = f"{element}:g2:scale=ue4m3:scale2=float32@tensor"
    q = zp.quantize(torch.tensor([[100.0, 1.0, 1e-9, -1e-9]]), scheme)
    assert float(q.scales[0].float()[0, 1]) == 0
    x = torch.tensor([[100.0, 1.0, value, -1e-9]])
    expected, found = on_both(lambda: zp.fake_quantize(x, q.params))
    assert same(expected, found)
    if not math.isnan(value):
        assert found[0, 2] == 0
        assert bool(torch.signbit(found[0, 2])) == (value < 0 and not element.startswith(("int", "nf4")))


@pytest.mark.parametrize("scheme", ["int8_mx:block1x1", "int8f6:tensor", "uint5f2:tensor:dialect=torch"])
def test_fixed_point_codes_by_linear_scales_run_on_the_reference(scheme: str) -> None:
    x = torch.tensor([[-1.026e-37, 1.0]])
    reported = zp.explain(x, scheme)
    assert reported.chosen == "reference"
    assert "powers of two" in reported.reasons["cpu"]
    assert zp.explain(x, "mxint8").chosen == "cpu"


@pytest.mark.parametrize("dialect", ["onnx-reference", "compressed-tensors"])
def test_a_quotient_past_float16_takes_the_largest_code(dialect: str) -> None:
    x = torch.tensor([[2.2011, 1.0, -0.3, 4.0]], dtype=torch.float16)
    assert int(both(x, f"e5m1:g1:scale=rceil:dialect={dialect}").codes[0, 0]) == 63
    both(x, f"e5m0:g1:scale=rceil:dialect={dialect}")


def test_scales_of_two_powers_are_divided_by_in_the_dialect_torch() -> None:
    x = torch.full((1, 8), 2.0**-140)
    x[0, :4] = 0
    q = both(x, "int8:g4:scale=floor:scale2=floor@tensor:dialect=torch")
    assert bool(torch.isfinite(q.dequantize()).all())


@pytest.mark.crossed
@pytest.mark.parametrize("granularity", ["g4", "channel", "block2x2", "token"])
@pytest.mark.parametrize("scale", ["float32", "rceil/codebook[4.0,1.0]", "float16"])
def test_a_tensor_without_axes_has_the_same_error_on_both(granularity: str, scale: str) -> None:
    x = torch.tensor(6.1875e30)
    for scheme in (f"int8:{granularity}:scale={scale}", f"nf4:{granularity}:scale={scale}"):
        found = on_both(lambda scheme=scheme: quantized(x, Scheme.parse(scheme)))
        assert found == (zp.ShapeError, zp.ShapeError)


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        ("e5m0b15ieee:channel1:scale=rceil:scale2=even@tensor", (1, 1, 1, 207)),
        ("int8:channel1:scale=floor:scale2=floor@tensor", (2, 1, 3, 64)),
        ("float8_e5m2:channel:scale=float8_ue4m3fn:scale2=ue3m2b3finite@tensor", (16,)),
    ],
)
def test_blocks_of_a_numbered_axis_are_theirs_when_kernels_take_rows(
    scheme: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert both(x, scheme).shape == shape


@pytest.mark.parametrize("codebook", ["[1.0,0.0,-1.0]", "[0.0,1.0,-1.0]", "[-1.0,0.0,1.0]"])
def test_codes_of_few_values_in_any_order_follow_from_chained_levels(codebook: str) -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    q = both(x, f"codebook{codebook}:g32:scale=linear/int6:scale2=float16@g256")
    assert len(q.codes.unique()) == 3
