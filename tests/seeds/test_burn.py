"""QuantizationScheme of burn 0.16: a test for each thing that its source has, formulas anew in numpy.

Numbers are compared bit for bit, in the dialect ``burn`` and in ``zeropoint.params.burn``, a view with its
names. Where burn's scale is 0 or Inf, no tensor can be quantized with it, and only the view has it.
"""

import copy
import json
import pickle

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.params.burn import (
    CalibrationRange,
    QuantizationParameters,
    QuantizationScheme,
    QuantizationType,
)
from zeropoint.stats import MinMax, Observer

F32 = np.float32
AFFINE = QuantizationScheme.PerTensorAffine(QuantizationType.QInt8)
SYMMETRIC = QuantizationScheme.PerTensorSymmetric(QuantizationType.QInt8)
LEAST = 2.0**-149
ENDS = [
    (0.0, 0.0), (0.0, LEAST), (-LEAST, LEAST), (0.0, 2.9e-36), (-1e-38, 2e-38), (-3e-37, 1e-38),
    (1e-40, 3e-40), (-3e38, 3e38), (0.0, 3.4e38), (-3.4e38, 1.0),
]  # fmt: skip
"""Ranges at the ends of float32."""


def ranges(count: int) -> list[tuple[float, float]]:
    """Return random ranges of all sizes and signs, as float32."""
    generator = np.random.default_rng(0)
    ends = generator.normal(size=(count, 2)) * 10.0 ** generator.uniform(-6, 6, (count, 1))
    return [(float(F32(min(pair))), float(F32(max(pair)))) for pair in ends]


def affine(low: float, high: float) -> tuple[np.float32, int]:
    """Return scale and offset in float32, an operation at a time."""
    with np.errstate(over="ignore"):
        least, most = min(F32(low), F32(0)), max(F32(high), F32(0))
        scale = (most - least) / F32(255)
        scale = F32(0.1) if scale == 0 else scale
        return scale, -int(np.trunc(least / scale - F32(-128)))


def symmetric(low: float, high: float) -> np.float32:
    with np.errstate(over="ignore"):
        result: np.float32 = max(abs(F32(low)), abs(F32(high))) * F32(2) / F32(254)
        return result


def bits(values: torch.Tensor) -> int:
    return int(values.reshape(()).view(torch.int32))


def usable(scale: np.float32) -> bool:
    return bool(0 < scale < np.inf)


def test_quantization_type_qint8() -> None:
    element = zp.Scheme.parse(QuantizationType.QInt8.value)
    assert (element.qmin, element.qmax, element.bits) == (np.iinfo(np.int8).min, np.iinfo(np.int8).max, 8)


def test_per_tensor_affine_qint8() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    scale, offset = affine(x.min().item(), x.max().item())
    shifted = (x.numpy() / scale + F32(offset)).astype(np.float64)
    away = np.copysign(np.floor(np.abs(shifted) + 0.5), shifted)
    assert np.array_equal(zp.quantize(x, AFFINE.scheme).codes.numpy(), np.clip(away, -128, 127))


def test_per_tensor_symmetric_qint8() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    ratio = (x.numpy() / symmetric(x.min().item(), x.max().item())).astype(np.float64)
    away = np.copysign(np.floor(np.abs(ratio) + 0.5), ratio)
    assert np.array_equal(zp.quantize(x, SYMMETRIC.scheme).codes.numpy(), np.clip(away, -127, 127))


def test_clone_and_copy() -> None:
    for scheme in (AFFINE, SYMMETRIC):
        assert copy.copy(scheme) == copy.deepcopy(scheme) == scheme
        assert copy.deepcopy(scheme.scheme) is scheme.scheme


def test_debug() -> None:
    assert repr(AFFINE) == "QuantizationScheme(text='int8:tensor:asym:dialect=burn')"
    assert str(SYMMETRIC.scheme) == "int8:tensor:narrow:dialect=burn"


def test_hash() -> None:
    again = QuantizationScheme.PerTensorAffine(QuantizationType.QInt8)
    assert len({AFFINE, SYMMETRIC, again}) == 2
    assert len({AFFINE.scheme, SYMMETRIC.scheme, zp.Scheme.parse("int8:asym:dialect=burn")}) == 2


def test_partial_eq_and_eq() -> None:
    assert QuantizationScheme.PerTensorAffine(QuantizationType.QInt8) == AFFINE != SYMMETRIC
    assert zp.Scheme.parse("int8:tensor:dialect=burn:asym") == AFFINE.scheme != SYMMETRIC.scheme


def test_partial_ord_and_ord() -> None:
    """Derived order: the variant that stands first is the smaller."""
    assert AFFINE < SYMMETRIC
    assert sorted([SYMMETRIC, AFFINE, SYMMETRIC]) == [AFFINE, SYMMETRIC, SYMMETRIC]
    assert sorted([SYMMETRIC.scheme, AFFINE.scheme]) == [AFFINE.scheme, SYMMETRIC.scheme]
    assert max(AFFINE.scheme, SYMMETRIC.scheme) is SYMMETRIC.scheme


def test_serialize_and_deserialize() -> None:
    for scheme in (AFFINE, SYMMETRIC):
        assert QuantizationScheme(json.loads(json.dumps(scheme.text))) == scheme
        assert zp.Scheme.parse(json.loads(json.dumps(str(scheme.scheme)))) is scheme.scheme
        assert pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
def test_compute_q_params(scheme: QuantizationScheme) -> None:
    for low, high in ranges(200):
        found = scheme.compute_q_params(CalibrationRange(low, high))
        params = zp.QuantizationParams.from_range(scheme.scheme, low, high)
        assert bits(found.scale) == bits(params.scales[0])
        if scheme is AFFINE:
            wanted, offset = affine(low, high)
            assert found.offset is not None
            assert params.zero_point is not None
            assert int(found.offset) == offset
            assert int(params.zero_point) == min(max(offset, -128), 127)
        else:
            wanted = symmetric(low, high)
            assert found.offset is params.zero_point is None
        assert bits(found.scale) == bits(torch.tensor(wanted))


def test_affine_range_widened_to_0() -> None:
    for low, high in ((1.0, 3.0), (-3.0, -1.0)):
        wanted = affine(min(low, 0.0), max(high, 0.0))
        params = zp.QuantizationParams.from_range(AFFINE.scheme, low, high)
        assert params.zero_point is not None
        assert (params.scales[0].item(), params.zero_point.item()) == (
            wanted[0],
            min(max(wanted[1], -128), 127),
        )


def test_affine_scale() -> None:
    assert zp.QuantizationParams.from_range(AFFINE.scheme, -1.0, 3.0).scales[0].item() == F32(4) / F32(255)


def test_affine_scale_0_becomes_a_tenth() -> None:
    for low, high in ((0.0, 0.0), (0.0, LEAST)):
        params = zp.QuantizationParams.from_range(AFFINE.scheme, low, high)
        assert params.zero_point is not None
        assert (params.scales[0].item(), params.zero_point.item()) == (F32(0.1), -128)
        assert affine(low, high) == (F32(0.1), -128)
        seen = AFFINE.compute_q_params(CalibrationRange(low, high))
        assert seen.offset is not None
        assert (seen.scale.item(), seen.offset.item()) == (F32(0.1), -128)


def test_affine_offset_is_truncated() -> None:
    # -(-1 / (4 / 255) + 128) = -64.25, from which the fraction is cut off.
    params = zp.QuantizationParams.from_range(AFFINE.scheme, -1.0, 3.0)
    assert params.zero_point is not None
    assert params.zero_point.item() == -64 == affine(-1.0, 3.0)[1]


def test_symmetric_scale() -> None:
    params = zp.QuantizationParams.from_range(SYMMETRIC.scheme, -1.0, 3.0)
    assert params.scales[0].item() == F32(2) * F32(3) / F32(254)


def test_symmetric_offset_none() -> None:
    assert zp.QuantizationParams.from_range(SYMMETRIC.scheme, -1.0, 3.0).zero_point is None
    assert SYMMETRIC.compute_q_params(CalibrationRange(-1.0, 3.0)).offset is None


def test_symmetric_range_of_0_has_no_rule() -> None:
    assert SYMMETRIC.compute_q_params(CalibrationRange(0.0, 0.0)).scale == symmetric(0.0, 0.0) == 0
    # A scale of 0 is none: the dialect takes that of the affine scheme, and the codes of zeros are zeros.
    q = zp.quantize(torch.zeros(4), SYMMETRIC.scheme)
    assert q.codes.tolist() == q.dequantize().tolist() == [0] * 4


def test_a_and_b() -> None:
    assert (AFFINE.scheme.qmin, AFFINE.scheme.qmax) == (-128, 127)
    assert (SYMMETRIC.scheme.qmin, SYMMETRIC.scheme.qmax) == (-127, 127)


def test_bit_for_bit_at_the_ends_of_float32() -> None:
    for low, high in ENDS:
        wanted, offset = affine(low, high)
        found = AFFINE.compute_q_params(CalibrationRange(low, high))
        assert found.offset is not None
        assert bits(found.scale) == bits(torch.tensor(wanted))
        assert int(found.offset) == offset
        if usable(wanted):
            params = zp.QuantizationParams.from_range(AFFINE.scheme, low, high)
            assert params.zero_point is not None
            assert bits(params.scales[0]) == bits(torch.tensor(wanted))
            assert int(params.zero_point) == min(max(offset, -128), 127)
        wanted = symmetric(low, high)
        assert bits(SYMMETRIC.compute_q_params(CalibrationRange(low, high)).scale) == bits(
            torch.tensor(wanted)
        )
        if usable(wanted):
            params = zp.QuantizationParams.from_range(SYMMETRIC.scheme, low, high)
            assert bits(params.scales[0]) == bits(torch.tensor(wanted))
    assert any(0 < symmetric(*ends) < np.finfo(F32).tiny for ends in ENDS)
    assert any(symmetric(*ends) == np.inf for ends in ENDS)


def test_calibration_range() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = AFFINE.compute_q_params(CalibrationRange(x.min(), x.max()))
    observer = Observer(MinMax())
    observer(x)
    params = observer.params(AFFINE.scheme)
    assert params.zero_point is not None
    assert (params.scales[0].item(), params.zero_point.item()) == affine(x.min().item(), x.max().item())
    assert bits(found.scale) == bits(params.scales[0])


def test_quantization_parameters() -> None:
    found = AFFINE.compute_q_params(CalibrationRange(-1.0, 3.0))
    assert isinstance(found, QuantizationParameters)
    assert (found.scale.dtype, found.scale.item()) == (torch.float32, F32(4) / F32(255))
    assert found.offset is not None
    assert (found.offset.dtype, found.offset.item()) == (torch.int32, -64)


def test_per_channel_commented_out_there() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    q = zp.quantize(x, "int8:channel:asym:dialect=burn")
    assert q.zero_point is not None
    extremes = zip(x.amin(1).tolist(), x.amax(1).tolist(), strict=True)
    pairs = zip(q.scales[0].flatten().tolist(), q.zero_point.flatten().tolist(), strict=True)
    assert list(pairs) == [affine(low, high) for low, high in extremes]
    q = zp.quantize(x, "int8:channel:narrow:dialect=burn")
    assert q.scales[0].flatten().tolist() == [symmetric(row.min().item(), row.max().item()) for row in x]
