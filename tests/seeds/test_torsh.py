"""The parameters of ToRSh (torsh_backend::quantization::QuantizationParams): a test for each thing they name.

The seven examples of its documentation hold word for word in ``zeropoint.params.torsh``. Formulas are written
anew in numpy.
"""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.params.torsh import QuantizationParams, QuantizedDType

F32 = np.float32


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def test_struct_quantization_params() -> None:
    made = [
        QuantizationParams.int8_symmetric(), QuantizationParams.uint8_asymmetric(),
        QuantizationParams.int4_symmetric(), QuantizationParams.new(0.5, 3),
        QuantizationParams.channel_wise(4, QuantizedDType.Int8),
        QuantizationParams.block_wise(8, QuantizedDType.UInt8),
    ]  # fmt: skip
    x = numbers(4, 16).abs()
    for params in made:
        scale, zero = params.scale[0], params.zero_point[0]
        low, high = params.scheme.qmin, params.scheme.qmax
        wanted = (np.clip(np.rint(x.numpy() / F32(scale)) + zero, low, high) - zero) * F32(scale)
        assert np.array_equal(zp.quantize(x, params.value).dequantize().numpy(), wanted)


def test_field_dtype() -> None:
    params = QuantizationParams.int4_symmetric()
    assert params.dtype is QuantizedDType.Int4
    assert params.dtype.bits() == 4
    assert [QuantizationParams.channel_wise(2, dtype).dtype for dtype in QuantizedDType] == list(
        QuantizedDType
    )
    with pytest.raises(zp.UnsupportedError, match="element int5 has no name in ToRSh"):
        _ = QuantizationParams(zp.QuantizationParams.new(1.0, 0, "int5")).dtype


def test_field_scheme() -> None:
    assert QuantizationParams.uint8_asymmetric().scheme == zp.Scheme.parse("uint8:tensor:asym")
    assert QuantizationParams.block_wise(32, QuantizedDType.Int8).scheme == zp.Scheme.parse("int8:g32")


def test_field_scale() -> None:
    params = QuantizationParams.new(255.0, 128)
    assert params.scale[0] == 255.0
    params = QuantizationParams.channel_wise(64, QuantizedDType.Int8)
    assert len(params.scale) == 64
    assert set(params.scale) == {1.0}


def test_field_zero_point() -> None:
    assert QuantizationParams.int8_symmetric().zero_point[0] == 0
    params = QuantizationParams.channel_wise(64, QuantizedDType.Int8)
    assert params.zero_point == [0] * 64
    assert QuantizationParams.new(1.0, 7).zero_point == [7]


def test_field_block_size() -> None:
    assert QuantizationParams.block_wise(128, QuantizedDType.Int8).block_size == 128
    others = (
        QuantizationParams.int8_symmetric(), QuantizationParams.channel_wise(4, QuantizedDType.Int8),
        QuantizationParams(zp.choose_params(numbers(4, 8), "int8:token")),
        QuantizationParams(zp.choose_params(numbers(4, 8), "int8:block2x2")),
    )  # fmt: skip
    assert [params.block_size for params in others] == [None] * 4


def test_field_min_val() -> None:
    params = QuantizationParams.int8_symmetric()
    assert params.min_val is None
    params.from_statistics(-2.5, 1.0)
    assert params.min_val == -2.5
    x = numbers(4, 8)
    assert QuantizationParams(zp.choose_params(x, "int8:channel")).min_val == x.min().item()


def test_field_max_val() -> None:
    params = QuantizationParams.int8_symmetric()
    assert params.max_val is None
    params.from_statistics(-2.5, 1.0)
    assert params.max_val == 1.0
    x = numbers(4, 8)
    assert QuantizationParams(zp.choose_params(x, "int8:channel")).max_val == x.max().item()


@pytest.mark.parametrize("zero_point", [0, -7, 100])
def test_formula_scale_times_code_minus_zero_point(zero_point: int) -> None:
    params = QuantizationParams.new(0.3, zero_point)
    q = zp.quantize(numbers(50, 3) * 20, params.value)
    codes = q.codes.numpy().astype(np.int32)
    assert len(np.unique(codes)) > 50
    assert np.array_equal(q.dequantize().numpy(), F32(0.3) * (codes - zero_point).astype(F32))


def codes_of(element: str) -> list[int]:
    """Return the codes of numbers from far below to far above, at scale 1."""
    return (
        zp.quantize(torch.arange(-400.0, 400.0), zp.QuantizationParams.new(1.0, 0, element))
        .codes.unique()
        .tolist()
    )


def test_type_value_int8() -> None:
    assert codes_of(QuantizedDType.Int8.value) == list(range(-128, 128))


def test_type_value_uint8() -> None:
    assert QuantizedDType.UInt8.bits() == 8
    codes = zp.quantize(torch.arange(-400.0, 400.0), QuantizationParams.uint8_asymmetric().value).codes
    assert codes.unique().tolist() == list(range(256))


def test_type_value_int4() -> None:
    assert codes_of(QuantizedDType.Int4.value) == list(range(-8, 8))
    assert zp.quantize(torch.zeros(10), QuantizationParams.int4_symmetric().value).data.numel() == 5


@pytest.mark.parametrize(
    ("text", "axes"), [("int8:tensor", (0, 1)), ("uint8:tensor:asym", (0, 1)), ("int8:channel", (1,))]
)
def test_scheme_values(text: str, axes: tuple[int, ...]) -> None:
    x = numbers(4, 32)
    low, high = x.numpy().min(axes, keepdims=True), x.numpy().max(axes, keepdims=True)
    largest = np.maximum(abs(low), abs(high))
    scale = (high - low) / F32(255) if "asym" in text else largest / F32(127.5)
    assert np.array_equal(zp.choose_params(x, text).scales[0].numpy(), scale)


def test_scheme_values_of_blocks() -> None:
    x = numbers(4, 32)
    wanted = np.abs(x.numpy().reshape(4, 4, 8)).max(-1) / F32(127.5)
    assert np.array_equal(zp.choose_params(x, "int8:g8").scales[0].numpy(), wanted)


def test_int8_symmetric() -> None:
    params = QuantizationParams.int8_symmetric()
    assert params.zero_point[0] == 0
    assert (params.dtype, params.scale) == (QuantizedDType.Int8, [1.0])
    assert zp.quantize(torch.tensor([-500.0, 0.5, 1.5, 500.0]), params.value).codes.tolist() == [
        -128,
        0,
        2,
        127,
    ]


def test_new() -> None:
    params = QuantizationParams.new(255.0, 128)
    assert params.scale[0] == 255.0
    assert params.zero_point[0] == 128
    assert params.dtype is QuantizedDType.UInt8
    for scale, zero in ((0.0, 0), (-1.0, 0), (math.nan, 0), (math.inf, 0), (1.0, 300), ("a", 0)):
        with pytest.raises(zp.RangeError):
            QuantizationParams.new(scale, zero)  # type: ignore[arg-type]


def test_uint8_asymmetric() -> None:
    params = QuantizationParams.uint8_asymmetric()
    assert params.zero_point[0] == 128
    assert params.dtype is QuantizedDType.UInt8


def test_int4_symmetric() -> None:
    params = QuantizationParams.int4_symmetric()
    assert params.dtype.bits() == 4
    assert (params.scale, params.zero_point) == ([1.0], [0])


@pytest.mark.parametrize(("element", "zero"), [("int8", 0), ("uint8:asym", 128), ("int4", 0)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channel_wise(axis: int, element: str, zero: int) -> None:
    params = QuantizationParams.channel_wise(64, QuantizedDType.Int8)
    assert len(params.scale) == 64
    assert len(params.zero_point) == 64
    x = numbers(5, 5, 5)
    shaped = zp.QuantizationParams.channel_wise(5, element, axis=axis).with_range(
        torch.arange(5.0) * -1.0, torch.arange(5.0) + 1
    )
    q = zp.quantize(x, shaped)
    side = [5 if place == axis % 3 else 1 for place in range(3)]
    assert tuple(q.scales[0].shape) == tuple(side)
    plain = zp.QuantizationParams.channel_wise(5, element, axis=axis)
    if plain.zero_point is not None:
        assert plain.zero_point.flatten().tolist() == [zero] * 5
    scheme, s = q.scheme, q.scales[0].numpy()
    z = np.zeros(side) if q.zero_point is None else q.zero_point.numpy()
    wanted = np.clip(np.rint(x.numpy() / s) + z, scheme.qmin, scheme.qmax)
    assert np.array_equal(q.codes.numpy(), wanted)


@pytest.mark.parametrize("shape", [(128,), (256,), (4, 256), (3, 200)])
def test_block_wise(shape: tuple[int, ...]) -> None:
    params = QuantizationParams.block_wise(128, QuantizedDType.Int8)
    assert params.block_size == 128
    params.from_statistics(-3.0, 3.0)
    x = numbers(*shape)
    q = zp.quantize(x, params.value)
    assert tuple(q.scales[0].shape) == (*shape[:-1], -(-shape[-1] // 128))
    assert np.array_equal(q.codes.numpy(), np.clip(np.rint(x.numpy() / (F32(3) / F32(127.5))), -128, 127))


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-1.0, 3.0), (0.0, 0.0), (-7.5, 0.25), (1.0, 5.0)])
def test_from_statistics(low: float, high: float) -> None:
    params = QuantizationParams.int8_symmetric()
    params.from_statistics(low, high)
    largest = F32(max(abs(low), abs(high)))
    assert params.scale[0] == (largest / F32(127.5) if largest else 1.0)
    affine = QuantizationParams.uint8_asymmetric()
    affine.from_statistics(low, high)
    width = F32(max(high, 0.0)) - F32(min(low, 0.0))
    scale = width / F32(255) if width else F32(1.0)
    assert affine.scale[0] == scale
    assert affine.zero_point[0] == np.rint(-F32(min(low, 0.0)) / scale)


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)])
def test_error_for_invalid_statistics(low: float, high: float) -> None:
    params = QuantizationParams.int8_symmetric()
    with pytest.raises(zp.ZeropointError, match=r"must (not exceed|be finite)"):
        params.from_statistics(low, high)
    assert params.scale == [1.0]


def test_validate() -> None:
    good = QuantizationParams.channel_wise(3, QuantizedDType.Int8)
    good.validate()
    ones, zeros = torch.ones(3), torch.zeros(3, dtype=torch.int32)
    for scale, zero in (
        (ones[:2], zeros), (ones * 0, zeros), (-ones, zeros), (ones * math.nan, zeros),
        (ones * math.inf, zeros), (ones, zeros[:2]), (ones, zeros + 256), (ones, zeros - 1), (ones, None),
    ):  # fmt: skip
        broken = zp.QuantizationParams(
            scheme=zp.Scheme.parse("uint8:channel:asym"), shape=(3,), scales=(scale,), zero_point=zero
        )
        with pytest.raises(zp.ZeropointError):
            QuantizationParams(broken).validate()


def test_num_parameter_sets() -> None:
    made = (
        QuantizationParams.int8_symmetric(), QuantizationParams.channel_wise(64, QuantizedDType.Int8),
        QuantizationParams(zp.choose_params(numbers(4, 256), "int8:g128")),
    )  # fmt: skip
    assert [params.num_parameter_sets() for params in made] == [1, 64, 8]
    assert [len(params.scale) for params in made] == [1, 64, 8]


def test_is_per_channel() -> None:
    assert QuantizationParams.channel_wise(64, QuantizedDType.Int8).is_per_channel()
    for text in ("int8:tensor", "int8:token", "int8:g8"):
        assert not QuantizationParams(zp.choose_params(numbers(4, 16), text)).is_per_channel()


@pytest.mark.parametrize("text", ["int8:tensor", "int4:g16", "uint8:tensor:asym", "uint4:channel:asym"])
def test_quantization_error_bound(text: str) -> None:
    for seed in range(20):
        x = numbers(4, 64, seed=seed)
        q = zp.quantize(x, text)
        bound = QuantizationParams(q.params).quantization_error_bound()
        error = float((q.dequantize().double() - x.double()).abs().max())
        assert 0 < error <= bound
        assert bound <= 1.6 * float(q.scales[0].max())


@pytest.mark.parametrize("text", ["uint8:tensor:asym:scale=ue4m3", "uint16:tensor:asym:scale=bfloat16"])
@pytest.mark.parametrize("end", [8.4, 1.0037, 3.3])
def test_quantization_error_bound_with_coarse_scales(text: str, end: float) -> None:
    x = torch.linspace(0, end, 1001)
    q = zp.quantize(x, text)
    error = float((q.dequantize().double() - x.double()).abs().max())
    assert error <= QuantizationParams(q.params).quantization_error_bound() < 0.3 * end


def test_compression_ratio() -> None:
    made = (
        QuantizationParams.int8_symmetric(), QuantizationParams.uint8_asymmetric(),
        QuantizationParams.int4_symmetric(), QuantizationParams.channel_wise(64, QuantizedDType.Int8),
        QuantizationParams.block_wise(128, QuantizedDType.Int4),
    )  # fmt: skip
    assert [params.compression_ratio() for params in made] == [4, 4, 8, 4, 8]
    real = QuantizationParams(zp.choose_params(numbers(64, 100), "int8:channel"))
    assert real.compression_ratio() == 32 * 6400 / (8 * 6400 + 32 * 64)


def test_clone() -> None:
    params = QuantizationParams(zp.choose_params(numbers(4, 8), "uint8:channel:asym"))
    before = params.scale
    for other in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
        assert other.min_val == params.min_val
        other.from_statistics(-1.0, 1.0)
        assert other.scale != before == params.scale


def test_debug() -> None:
    text = repr(QuantizationParams.new(0.5, 3))
    assert "int8:tensor:asym" in text
    assert "scales 0.5, zero_point 3" in text


def test_send_sync_freeze() -> None:
    params, x = QuantizationParams.new(0.1, 3), numbers(100, 100)
    wanted = zp.quantize(x, params.value).codes
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: zp.quantize(x, params.value).codes, range(6)))
    assert all(torch.equal(codes, wanted) for codes in found)
    with pytest.raises(AttributeError, match="cannot assign to field 'shape'"):
        params.value.shape = (2,)  # type: ignore[misc]


def test_scales_and_zero_points_that_are_assigned_are_those_that_quantize() -> None:
    params = QuantizationParams.channel_wise(4, QuantizedDType.UInt8)
    params.scale[2] = 0.5
    assert params.scale == [1.0, 1.0, 0.5, 1.0]
    assert params.value.scales[0].flatten().tolist() == [1.0, 1.0, 0.5, 1.0]
    params.scale = [0.25] * 4
    x = numbers(4, 16).abs()
    assert torch.equal(
        zp.quantize(x, params.value).dequantize(),
        zp.quantize(
            x, zp.QuantizationParams.new(0.25, params.zero_point[0], "uint8:tensor:asym")
        ).dequantize(),
    )
    affine = QuantizationParams.uint8_asymmetric()
    affine.zero_point[0] = 7
    assert (affine.zero_point, affine.value.zero_point.flatten().tolist()) == ([7], [7])


def test_assignments_that_are_no_parameters_are_refused_and_change_nothing() -> None:
    params = QuantizationParams.channel_wise(2, QuantizedDType.Int8)
    with pytest.raises(zp.ShapeError, match="must hold 2 numbers, one for each block"):
        params.scale.append(1.0)
    with pytest.raises(zp.RangeError, match="must be finite"):
        params.scale[0] = -1.0
    with pytest.raises(zp.UnsupportedError, match="is symmetric and has no zero point"):
        params.zero_point[0] = 3
    assert params.scale == [1.0, 1.0]
    assert params.zero_point == [0, 0]
