"""Parameters of the dialects against their own formulas and observers."""

import numpy as np
import pytest
import torch
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

import zeropoint as zp

F32 = np.float32


def burn_affine(minimum: np.float32, maximum: np.float32) -> tuple[np.float32, int]:
    """QuantizationScheme::compute_q_params of burn v0.16, PerTensorAffine(QInt8), one operation a line."""
    a, b = -128, 127
    low = np.minimum(minimum, F32(0))
    high = np.maximum(maximum, F32(0))
    scale = (high - low) / F32(b - a)
    if scale == 0:
        scale = F32(0.1)
    return scale, -int(low / scale - F32(a))


def test_burn_adds_the_offset_inside_a_rounding_half_away_from_zero() -> None:
    x = np.random.default_rng(3).normal(0, 2, 5000).astype(F32)
    scale, offset = burn_affine(x.min(), x.max())
    ties = ((np.arange(-100, 100) + F32(0.5)) * scale).astype(F32)
    data = np.concatenate([x, np.clip(ties, x.min(), x.max())])
    inside = data / scale + F32(offset)
    wanted = np.clip(np.copysign(np.floor(np.abs(inside).astype(np.float64) + 0.5), inside), -128, 127)
    q = zp.quantize(torch.from_numpy(data), "int8:tensor:asym:dialect=burn")
    assert q.scales[0].item() == scale
    assert q.codes.tolist() == wanted.astype(int).tolist()


OBSERVED = [
    ("int8:tensor:asym:dialect=torch", torch.qint8, torch.per_tensor_affine),
    ("uint8:tensor:asym:dialect=torch", torch.quint8, torch.per_tensor_affine),
    ("int8:tensor:dialect=torch", torch.qint8, torch.per_tensor_symmetric),
]
SAMPLES = [
    torch.randn(1000, generator=torch.Generator().manual_seed(5)),
    torch.rand(1000, generator=torch.Generator().manual_seed(6)) + 1,
    -torch.rand(1000, generator=torch.Generator().manual_seed(7)) - 0.25,
    torch.randn(1000, generator=torch.Generator().manual_seed(8)) * 1e-12,
    torch.randn(1000, generator=torch.Generator().manual_seed(9)) * 1e12,
    torch.zeros(4),
    torch.full((3,), 0.7),
]


@pytest.mark.crossed
@pytest.mark.parametrize(("scheme", "dtype", "kind"), OBSERVED)
@pytest.mark.parametrize("x", SAMPLES)
def test_torch_parameters_are_those_of_the_min_max_observer(
    scheme: str, dtype: torch.dtype, kind: torch.qscheme, x: torch.Tensor
) -> None:
    observer = MinMaxObserver(dtype=dtype, qscheme=kind)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    params = zp.choose_params(x, scheme)
    assert params.scales[0].tolist() == scale.tolist()
    assert (0 if params.zero_point is None else params.zero_point.item()) == zero_point.item()


@pytest.mark.parametrize("axis", [0, 1])
def test_torch_parameters_per_channel_are_those_of_the_observer(axis: int) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(10)) * torch.logspace(-3, 3, 6)[:, None]
    x = x if axis == 0 else x.t()
    observer = PerChannelMinMaxObserver(ch_axis=axis, dtype=torch.quint8, qscheme=torch.per_channel_affine)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    params = zp.choose_params(x, f"uint8:channel{axis}:asym:dialect=torch")
    assert params.zero_point is not None
    assert params.scales[0].flatten().tolist() == scale.tolist()
    assert params.zero_point.flatten().tolist() == zero_point.tolist()


def dynamic_quantize_linear(x: np.ndarray) -> tuple[np.float32, int]:
    """DynamicQuantizeLinear-11 of the ONNX operator document, in float32."""
    low, high = np.minimum(x.min(), F32(0)), np.maximum(x.max(), F32(0))
    scale = (high - low) / F32(255)
    return scale, int(np.clip(np.rint(F32(0) - low / scale), 0, 255))


@pytest.mark.parametrize("seed", range(20))
def test_onnx_parameters_are_those_of_dynamic_quantize_linear(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.normal(), 3, 200).astype(F32)
    scale, zero_point = dynamic_quantize_linear(x)
    params = zp.choose_params(torch.from_numpy(x), "uint8:tensor:asym:dialect=onnx")
    assert params.zero_point is not None
    assert params.scales[0].item() == scale
    assert params.zero_point.item() == zero_point
