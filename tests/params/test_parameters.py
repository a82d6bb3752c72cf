"""The contract of QuantizationParams: constructors, validation with its messages, what it counts."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import zeropoint as zp
from zeropoint import (
    DtypeError,
    NonFiniteError,
    QuantizationParams,
    RangeError,
    Scheme,
    SchemeError,
    ShapeError,
)

AFFINE = "uint8:tensor:asym"


@pytest.mark.parametrize("zero_point", [-128, -127, -1, 1, 3, 126, 127])
def test_new_with_a_zero_point_that_int8_holds_stays_int8(zero_point: int) -> None:
    params = QuantizationParams.new(0.5, zero_point)
    assert str(params.scheme) == "int8:tensor:asym"
    x = torch.tensor([0.0, 0.5, -0.5])
    assert zp.fake_quantize(x, params)[0].item() == 0.0


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, math.nan, math.inf, 2.0**-129, 1e-40])
def test_new_refuses_a_scale_that_is_not_positive_finite_and_invertible(scale: float) -> None:
    """torch accepts each of these."""
    with pytest.raises(
        RangeError, match=r"scale 1 \(=.*\) of block \(0,\) must be finite and at least 2\*\*-128"
    ):
        QuantizationParams.new(scale)


@pytest.mark.parametrize(
    ("scheme", "zero_point"),
    [
        ("int8:tensor", 128),
        ("int8:tensor", -129),
        (AFFINE, 256),
        (AFFINE, -1),
        ("int4:tensor", 8),
        ("int2:tensor", -3),
    ],
)
def test_new_refuses_a_zero_point_outside_the_codes(scheme: str, zero_point: int) -> None:
    low, high = Scheme.parse(scheme).qmin, Scheme.parse(scheme).qmax
    with pytest.raises(
        RangeError, match=rf"zero_point \(={zero_point}\) of block \(0,\) must lie in {low}\.\.{high}"
    ):
        QuantizationParams.new(1.0, zero_point, scheme)


def test_channel_wise_has_one_scale_a_channel() -> None:
    params = QuantizationParams.channel_wise(64)
    assert params.scales[0].numel() == params.num_parameter_sets == 64
    assert params.is_per_channel
    assert zp.quantize(torch.ones(64, 7), params).scales[0].shape == (64, 1)


def test_block_wise_has_one_block_of_the_given_size() -> None:
    params = QuantizationParams.block_wise(128)
    assert (params.block_size, params.num_parameter_sets, params.is_per_channel) == ((128,), 1, False)
    assert QuantizationParams.block_wise(32, "float4_e2m1fn").scheme.bits == 4


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, r"size \(=0\) must be a whole number, at least 1"), (-1, r"size \(=-1\) must be")],
)
def test_block_wise_refuses_a_size_below_one(size: int, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        QuantizationParams.block_wise(size)


def test_with_range_maps_the_range_to_all_codes() -> None:
    params = QuantizationParams.int8_symmetric().with_range(-2.0, 2.0)
    assert params.scales[0].item() == torch.tensor(2.0 / 127.5).item()
    # 2 / 127.5 is rounded up to float32, so -2 lies just inside half a step from -127.
    assert zp.quantize(torch.tensor([-2.0, -2.01, 2.0]), params).codes.tolist() == [-127, -128, 127]


def test_with_range_leaves_the_original_alone() -> None:
    before = QuantizationParams.int8_symmetric()
    assert before.with_range(-9.0, 9.0) != before
    assert before == QuantizationParams.int8_symmetric()


def test_with_range_refuses_a_minimum_above_the_maximum() -> None:
    with pytest.raises(
        RangeError, match=r"minimum \(=2.0\) must not exceed maximum \(=1.0\) of block \(0,\)"
    ):
        QuantizationParams.int8_symmetric().with_range(2.0, 1.0)


@pytest.mark.crossed
@pytest.mark.parametrize("bad", [(math.nan, 1.0), (0.0, math.nan), (-math.inf, 0.0), (0.0, math.inf)])
@pytest.mark.parametrize("scheme", ["int8:tensor", AFFINE, "mxfp4", "nvfp4", "nf4"])
def test_from_range_refuses_statistics_that_are_not_finite(scheme: str, bad: tuple[float, float]) -> None:
    with pytest.raises(NonFiniteError, match=r"range of block \(0,\) is .*; it must be finite"):
        QuantizationParams.from_range(scheme, *bad)


def test_from_range_takes_one_number_a_channel() -> None:
    low, high = torch.tensor([-1.0, -2.0, 0.5]), torch.tensor([3.0, 0.0, 0.75])
    params = QuantizationParams.from_range("uint8:channel:asym", low, high, shape=(3, 8))
    assert params.zero_point is not None
    assert params.scales[0].shape == (3, 1)
    assert params.zero_point.flatten().tolist() == [64, 255, 0]


def test_from_range_refuses_another_count_than_there_are_blocks() -> None:
    with pytest.raises(
        ShapeError, match=r"range \(shape \(2,\)\) must hold one number for each block of grid \(3, 1\)"
    ):
        QuantizationParams.from_range("int8:channel", torch.zeros(2), torch.ones(2), shape=(3, 8))
    with pytest.raises(ShapeError, match=r"range \(shape \(0,\)\) must hold"):
        QuantizationParams.from_range("int8:channel", torch.zeros(0), torch.ones(3), shape=(3, 8))


@pytest.mark.crossed
@pytest.mark.parametrize(
    "scheme", ["int8:channel", "uint4:g3:asym", "mxfp4", "nvfp4", "mx6", "mx9", "fp8", "nf4", "int8:cast"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_range_of_each_block_gives_the_parameters_of_the_tensor(scheme: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    chosen = zp.choose_params(x, scheme)
    assert chosen.minimum is not None
    assert chosen.maximum is not None
    again = QuantizationParams.from_range(scheme, chosen.minimum, chosen.maximum, shape=(5, 37), dtype=dtype)
    assert again == chosen


def test_a_scalar_tensor_has_one_block() -> None:
    params = zp.choose_params(torch.tensor(-3.0), "int8:tensor:narrow")
    assert params.num_parameter_sets == 1
    assert zp.quantize(torch.tensor(-3.0), params).codes.item() == -127
    assert (
        QuantizationParams.from_range("int8", torch.tensor([-3.0]), torch.tensor([0.0]), shape=()).shape == ()
    )


@pytest.mark.parametrize(
    ("scheme", "shape", "count"),
    [
        ("int8:tensor", (4, 70), 1),
        ("int8:channel", (4, 70), 4),
        ("int8:channel1", (4, 70), 70),
        ("int8:channel-1", (4, 70), 70),
        ("int8:token", (2, 4, 70), 8),
        ("int4:g32", (4, 70), 12),
        ("mxfp4", (4, 1), 4),
        ("float8_e4m3fn:block128x128", (300, 200), 6),
        ("nvfp4", (4, 70), 20),
        ("mx9", (1, 37), 19),
        ("int8:tensor", (0,), 0),
        ("int8:cast", (4, 70), 1),
    ],
)
def test_the_parameter_sets_are_the_finest_blocks(scheme: str, shape: tuple[int, ...], count: int) -> None:
    assert zp.choose_params(torch.ones(shape), scheme).num_parameter_sets == count


@pytest.mark.parametrize(
    ("scheme", "shape", "wanted"),
    [
        ("int8:tensor", (4, 6), False),
        ("int8:channel", (4, 6), True),
        ("int8:channel1", (4, 6), True),
        ("int8:channel-2", (4, 6), True),
        ("int8:token", (4, 6), False),
        ("int8:g3", (4, 6), False),
        ("int8:block2x2", (4, 6), False),
    ],
)
def test_per_channel_means_one_axis_and_nothing_finer(
    scheme: str, shape: tuple[int, ...], wanted: bool
) -> None:
    assert zp.choose_params(torch.ones(shape), scheme).is_per_channel is wanted


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype", "bits"),
    [
        ("int8:tensor", (10,), torch.float32, 80 + 32),
        ("int4:g128", (2, 256), torch.float32, 2048 + 4 * 32),
        ("int4:g128:scale=input", (2, 256), torch.bfloat16, 2048 + 4 * 16),
        ("int4:g128:scale=input", (2, 256), torch.float32, 2048 + 4 * 32),
        ("int4:g128:asym", (2, 256), torch.float32, 2048 + 4 * (32 + 4)),
        ("int4:g128:asym=real", (2, 256), torch.float32, 2048 + 4 * (32 + 32)),
        ("mxfp4", (1, 33), torch.float32, 33 * 4 + 2 * 8),
        ("nvfp4", (1, 33), torch.float32, 33 * 4 + 3 * 8 + 32),
        ("mx9", (1, 16), torch.float32, 16 * 8 + 8 + 8),
        ("int8:cast", (7,), torch.float32, 56),
    ],
)
def test_the_compression_ratio_counts_scales_and_zero_points(
    scheme: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int
) -> None:
    x = torch.ones(shape, dtype=dtype)
    assert zp.choose_params(x, scheme).compression_ratio == 32 * x.numel() / bits


def test_the_compression_ratio_of_an_empty_tensor_is_zero() -> None:
    assert zp.choose_params(torch.zeros(0), "int8").compression_ratio == 0


def test_validate_refuses_another_number_of_scales() -> None:
    params = replace(QuantizationParams.int8_symmetric(), scales=())
    with pytest.raises(SchemeError, match=r"scales \(length 0\) must number 1, as many as int8:tensor has"):
        params.validate()


def test_validate_refuses_scales_off_their_grid() -> None:
    """Both shapes are named."""
    params = replace(QuantizationParams.channel_wise(4), scales=(torch.ones(3, 1),))
    with pytest.raises(
        ShapeError, match=r"scale 1 \(shape \(3, 1\)\) must have shape \(4,\) for channel of a tensor"
    ):
        params.validate()


def test_validate_refuses_a_zero_point_off_its_grid() -> None:
    params = zp.choose_params(torch.ones(4, 2), "uint8:channel:asym")
    wrong = replace(params, zero_point=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"zero_point \(shape \(4,\)\) must have shape \(4, 1\)"):
        wrong.validate()


def test_validate_refuses_scales_of_another_dtype() -> None:
    params = replace(QuantizationParams.int8_symmetric(), scales=(torch.ones(1, dtype=torch.float64),))
    with pytest.raises(
        SchemeError, match=r"scale 1 \(dtype torch.float64\) must be torch.float32 for level float32"
    ):
        params.validate()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_validate_refuses_zero_points_of_another_dtype(dtype: torch.dtype) -> None:
    params = replace(QuantizationParams.uint8_asymmetric(), zero_point=torch.ones(1, dtype=dtype))
    with pytest.raises(SchemeError, match=rf"zero_point \(dtype {dtype}\) must be torch.int32"):
        params.validate()


def test_validate_refuses_a_missing_zero_point() -> None:
    with pytest.raises(SchemeError, match="zero_point must be given for scheme uint8:tensor:asym"):
        replace(QuantizationParams.uint8_asymmetric(), zero_point=None).validate()


def test_validate_refuses_a_zero_point_of_a_symmetric_scheme() -> None:
    params = replace(QuantizationParams.int8_symmetric(), zero_point=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(SchemeError, match="zero_point must be absent for scheme int8:tensor"):
        params.validate()


def test_validate_refuses_a_real_zero_point_that_is_not_finite() -> None:
    params = zp.choose_params(torch.tensor([1.0, 2.0]), "uint4:tensor:asym=real")
    with pytest.raises(RangeError, match="zero_point must be finite in every block"):
        replace(params, zero_point=torch.tensor([math.nan])).validate()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**-129])
def test_validate_names_the_block_of_a_bad_scale(scale: float) -> None:
    params = zp.choose_params(torch.ones(3, 2), "int8:channel")
    scales = params.scales[0].clone()
    scales[1, 0] = scale
    with pytest.raises(
        RangeError, match=r"scale 1 \(=.*\) of block \(1, 0\) must be finite and at least 2\*\*-128"
    ):
        replace(params, scales=(scales,)).validate()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_validate_refuses_nan_as_a_stored_nvfp4_scale(byte: int) -> None:
    params = zp.choose_params(torch.ones(1, 32), "nvfp4")
    scales = torch.tensor([[0x38, byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(RangeError, match=r"scale 1 \((=nan|byte 255)\) of block \(0, 1\) must be"):
        replace(params, scales=(scales, params.scales[1])).validate()


@pytest.mark.parametrize("byte", [0x80, 0xB8])
def test_validate_refuses_a_negative_nvfp4_scale(byte: int) -> None:
    params = zp.choose_params(torch.ones(1, 32), "nvfp4")
    scales = torch.tensor([[0x38, byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    message = rf"scale 1 \(byte {byte}\) of block \(0, 1\) must be one of the 128 codes of float8_ue4m3fn"
    with pytest.raises(RangeError, match=message):
        replace(params, scales=(scales, params.scales[1])).validate()


def test_validate_refuses_a_microexponent_of_two_bits() -> None:
    params = zp.choose_params(torch.ones(1, 16), "mx9")
    scales = torch.full((1, 8), 2, dtype=torch.uint8)
    with pytest.raises(
        RangeError, match=r"scale 1 \(byte 2\) of block \(0, 0\) must be one of the 2 codes of microexponent"
    ):
        replace(params, scales=(scales, params.scales[1])).validate()


def test_a_zero_scale_decodes_to_zero_and_only_finer_levels_may_have_one() -> None:
    """One level refuses a zero; in nvfp4 it marks a block of zeros, whatever its codes are."""
    params = zp.choose_params(torch.ones(1, 32), "nvfp4")
    zero = replace(params, scales=(torch.zeros(1, 2, dtype=torch.float8_e4m3fn), params.scales[1]))
    zero.validate()
    q = zp.QuantizedTensor(
        data=torch.full((1, 16), 0x77, dtype=torch.uint8), params=zero, shape=(1, 32), dtype=torch.float32
    )
    assert torch.equal(q.dequantize(), torch.zeros(1, 32))
    with pytest.raises(RangeError, match="scale 2"):
        replace(params, scales=(params.scales[0], torch.zeros(1, 1))).validate()


@pytest.mark.crossed
@pytest.mark.parametrize(
    "scheme",
    [
        "int8:tensor",
        AFFINE,
        "uint4:g3:asym=real",
        "mxfp4",
        "nvfp4",
        "mx6",
        "int4:channel:scale=input",
        "int32:tensor:asym",
        "int8:cast",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_chosen_parameters_are_valid_and_come_back_from_their_tensors(
    scheme: str, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    params = zp.choose_params(x, scheme)
    params.validate()
    again = QuantizationParams.from_tensors(params.scheme, params.shape, params.tensors(), params.dtype)
    assert again == params


def test_missing_tensors_are_named() -> None:
    params = zp.choose_params(torch.ones(1, 32), "nvfp4")
    tensors = {"scale1": params.scales[0]}
    with pytest.raises(SchemeError, match=r"tensors \['scale2'\] are missing for scheme float4_e2m1fn:g16"):
        QuantizationParams.from_tensors(params.scheme, params.shape, tensors)


def test_a_text_for_a_scheme_is_parsed_or_refused_at_once() -> None:
    params = QuantizationParams(scheme="int8:tensor", shape=(2,), scales=(torch.ones(1),))  # type: ignore[arg-type]
    assert params.scheme is zp.Scheme.parse("int8:tensor")
    params.validate()
    assert zp.quantize(torch.tensor([1.0, 2.0]), params).codes.tolist() == [1, 2]
    with pytest.raises(zp.SchemeError, match="int8"):
        QuantizationParams(scheme="int8:tensr", shape=(2,), scales=())  # type: ignore[arg-type]
    with pytest.raises(zp.SchemeError, match="7"):
        QuantizationParams(scheme=7, shape=(2,), scales=())  # type: ignore[arg-type]


def test_parameters_are_equal_when_scheme_shape_dtype_and_tensors_are() -> None:
    params = zp.choose_params(torch.ones(4, 32), "nvfp4")
    assert params == copy.deepcopy(params)
    assert params == params.to("cpu")
    assert params != replace(params, dtype=torch.bfloat16)
    assert params != replace(params, shape=(4, 31))
    assert params != replace(params, scales=(params.scales[0], params.scales[1] * 2))
    assert params != QuantizationParams.int8_symmetric()
    assert params != "nvfp4"
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_a_deep_copy_shares_no_memory() -> None:
    params = QuantizationParams.uint8_asymmetric()
    other = copy.deepcopy(params)
    other.scales[0].fill_(9.0)
    assert params.scales[0].item() == 1.0


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (QuantizationParams.int8_symmetric(), "QuantizationParams(int8:tensor, shape=(1,), scales 1)"),
        (
            QuantizationParams.uint8_asymmetric(),
            "QuantizationParams(uint8:tensor:asym, shape=(1,), scales 1, zero_point 128)",
        ),
        (
            zp.choose_params(torch.tensor([[127.5], [255.0]]), "int8:channel"),
            "QuantizationParams(int8:channel, shape=(2, 1), scales 1..2 x (2, 1))",
        ),
        (
            zp.choose_params(torch.zeros(0), "int8"),
            "QuantizationParams(int8:tensor, shape=(0,), scales of shape (0,))",
        ),
    ],
)
def test_the_repr_says_scheme_shape_and_the_extent_of_scales(params: QuantizationParams, text: str) -> None:
    assert repr(params) == text


def test_parameters_move_to_meta_and_still_validate_their_shapes() -> None:
    params = zp.choose_params(torch.ones(4, 32), "uint4:g8:asym").to("meta")
    params.validate()
    assert all(scale.is_meta for scale in params.scales)
    assert "of shape (4, 4)" in repr(params)
    with pytest.raises(ShapeError, match="must have shape"):
        replace(params, shape=(5, 32)).validate()


def test_parameters_of_one_channel_list_fit_another_tensor_with_as_many_channels() -> None:
    params = zp.choose_params(torch.tensor([[1.0], [2.0]]), "int8:channel:narrow")
    q = zp.quantize(torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 0.0]]), params)
    assert q.codes.tolist() == [[127, 64, 0], [127, 64, 0]]


@pytest.mark.parametrize("shape", [(4, 8), (2, 16), (64,), (3, 8)])
def test_parameters_of_another_grid_are_refused(shape: tuple[int, ...]) -> None:
    """The same count of groups in another arrangement is another tensor."""
    params = zp.choose_params(torch.ones(2, 8), "int4:g2")
    assert params.scales[0].shape == (2, 4)
    with pytest.raises(
        ShapeError, match=r"parameters for shape \(2, 8\) \(scales \[\(2, 4\)\]\) do not fit a tensor"
    ):
        zp.quantize(torch.ones(shape), params)


def test_a_fraction_is_a_zero_point_of_real_ones_only() -> None:
    params = QuantizationParams.new(0.5, 1.5, "uint4:tensor:asym=real")
    assert params.zero_point is not None
    assert params.zero_point.tolist() == [1.5]
    # Codes of x / 0.5 + 1.5, half to even.
    assert zp.quantize(torch.tensor([0.0, 1.0, 9.0]), params).codes.tolist() == [2, 4, 15]
    with pytest.raises(RangeError, match=r"zero_point \(=1\.5\) .* must be a whole number, or pass"):
        QuantizationParams.new(0.5, 1.5, "uint8:tensor:asym")


def test_an_error_bound_is_asked_for_with_a_dtype_of_floats() -> None:
    params = QuantizationParams.new(0.5)
    tensor: Any = torch.ones(3)
    with pytest.raises(
        DtypeError, match=r"a tensor of shape \(3,\)\) must be a dtype .* QuantizedTensor\.error"
    ):
        params.error_bound(tensor)
    with pytest.raises(DtypeError, match=r"dtype \(=torch\.int8\) must be a dtype of floats"):
        params.rounding_bound(torch.int8)
    assert params.error_bound(torch.float64) <= params.error_bound(torch.bfloat16)
