"""FakeQuantize of oxicuda-quant: a test for each thing that it names, formulas anew in numpy."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.stats import MinMax, Observer
from zeropoint.training import FakeQuantize, GradientMask

KINDS = [
    (bits, symmetric)
    for bits in range(1, 17)
    for symmetric in (True, False)
    if (bits, symmetric) != (1, True)
]
"""Of one symmetric bit the seed says nothing; two's complement would be -1 and 0, here it is -1 and 1."""
ANY: Any = "a"


def ends(bits: int, symmetric: bool) -> tuple[int, int]:
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def made(bits: int, symmetric: bool) -> tuple[FakeQuantize, np.float32, int]:
    """Return a quantizer with its scale and its zero point, that of the middle when it has one."""
    scale, zero = np.float32(0.37 / bits), 0 if symmetric else 2 ** (bits - 1)
    return FakeQuantize(bits, symmetric, float(scale), zero), scale, zero


def numbers(bits: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(0.0, 0.3 * 2.0**bits / bits, 400)
    return x.astype(np.float32)


def by_formula(x: np.ndarray, scale: np.float32, zero: int, low: int, high: int) -> np.ndarray:
    """Return ``(clamp(round(x / s) + z, low, high) - z) * s`` in float32, ties to even."""
    codes = np.clip(np.rint(x / scale) + np.float32(zero), low, high)
    result: np.ndarray = (codes - np.float32(zero)) * scale
    return result


def test_struct_fake_quantize() -> None:
    quantizer = zp.FakeQuantize(8, True, 0.1, 0)
    assert isinstance(quantizer, torch.nn.Module)
    assert quantizer(torch.tensor([0.26])).item() == np.float32(3) * np.float32(0.1)


def test_field_bits() -> None:
    assert [FakeQuantize(bits, symmetric).bits for bits, symmetric in KINDS] == [bits for bits, _ in KINDS]


def test_field_symmetric() -> None:
    assert [FakeQuantize(bits, symmetric).symmetric for bits, symmetric in KINDS] == [
        kind for _, kind in KINDS
    ]


def test_field_scale() -> None:
    quantizer = FakeQuantize(8, True, 0.1, 0)
    assert quantizer.scale == torch.tensor([0.1])
    quantizer.update_params(0.5)
    assert quantizer.scale.tolist() == [0.5]


def test_field_zero_point() -> None:
    quantizer = FakeQuantize(8, True, 0.1, 0)
    assert quantizer.zero_point == 0
    affine = FakeQuantize(8, False, 0.1, 3)
    assert affine.zero_point == 3
    affine.update_params(0.1, 7)
    assert affine.zero_point == 7


def test_field_enabled() -> None:
    quantizer, x = FakeQuantize(4), torch.tensor([0.3])
    assert quantizer.enabled
    quantizer.enabled = False
    assert quantizer(x) is x
    quantizer.enabled = True
    assert quantizer(x).item() == 0.0


def test_new() -> None:
    for bits, symmetric in KINDS:
        quantizer, scale, zero = made(bits, symmetric)
        assert (quantizer.bits, quantizer.symmetric) == (bits, symmetric)
        assert quantizer.scale.item() == scale
        assert int(quantizer.zero_point) == zero
        kept = FakeQuantize.from_bits(bits, symmetric=symmetric, scale=float(scale), zero_point=zero)
        assert kept.params == quantizer.params


def test_with_defaults() -> None:
    for bits, symmetric in KINDS:
        quantizer = FakeQuantize(bits, symmetric)
        assert (quantizer.scale.item(), int(quantizer.zero_point), quantizer.enabled) == (1.0, 0, True)
    assert FakeQuantize(8).params == FakeQuantize(8, True).params


@pytest.mark.parametrize(
    "arguments",
    [
        (0,), (17,), (-1,), (8.0,), ("8",), (True,), (8, True, 0.0), (8, True, -1.0), (8, True, math.nan),
        (8, True, math.inf), (8, True, 1.0, 3), (8, False, 1.0, 256), (8, False, 1.0, -1),
    ],
)  # fmt: skip
def test_errors_of_new(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(zp.RangeError):
        FakeQuantize(*arguments)


def test_update_params() -> None:
    quantizer, x = FakeQuantize(8, False, 1.0, 0), numbers(4)
    quantizer.update_params(0.25, 100)
    wanted = by_formula(x, np.float32(0.25), 100, 0, 255)
    assert np.array_equal(quantizer(torch.from_numpy(x)).numpy(), wanted)


@pytest.mark.parametrize(
    "arguments",
    [
        (0.0, 0),
        (-1.0, 0),
        (math.nan, 0),
        (math.inf, 0),
        (1.0, 256),
        (1.0, -1),
        (1.0, 0.5),
        (torch.ones(2), 0),
    ],
)
def test_errors_of_update_params(arguments: tuple[Any, Any]) -> None:
    quantizer = FakeQuantize(8, False, 0.5, 3)
    with pytest.raises((zp.RangeError, zp.ShapeError)):
        quantizer.update_params(*arguments)
    assert quantizer.params == FakeQuantize(8, False, 0.5, 3).params


def test_quant_range() -> None:
    for bits, symmetric in KINDS:
        found = FakeQuantize(bits, symmetric).quant_range()
        assert found == ends(bits, symmetric)
        assert [type(end) for end in found] == [int, int]


def test_float_range() -> None:
    for bits, symmetric in KINDS:
        quantizer, scale, zero = made(bits, symmetric)
        wanted = [np.float32(end - zero) * scale for end in ends(bits, symmetric)]
        assert [end.item() for end in quantizer.float_range()] == wanted


def test_forward() -> None:
    for bits, symmetric in KINDS:
        quantizer, scale, zero = made(bits, symmetric)
        x = np.concatenate([numbers(bits), (np.arange(-9, 9) + np.float32(0.5)) * scale]).astype(np.float32)
        wanted = by_formula(x, scale, zero, *ends(bits, symmetric))
        assert len(np.unique(wanted)) > min(bits, 3)
        assert np.array_equal(quantizer(torch.from_numpy(x)).numpy(), wanted)
    for no_tensor in ([1.0], numbers(4)):
        with pytest.raises(zp.DtypeError, match=r"must be a torch\.Tensor"):
            FakeQuantize(8)(no_tensor)


def test_forward_when_not_enabled() -> None:
    x = torch.from_numpy(numbers(4))
    assert FakeQuantize.from_bits(4, enabled=False)(x) is x


def test_backward() -> None:
    quantizer = FakeQuantize(4, True, 0.5, 0)
    quantizer.mask = GradientMask.RANGE
    x = torch.tensor([3.5, 3.51, 3.74, -4.0, -4.2, 0.3, math.nan, math.inf])
    assert quantizer.backward(torch.full((8,), 2.0), x).tolist() == [2, 0, 0, 2, 0, 2, 0, 0]
    for bits, symmetric in KINDS:
        quantizer, scale, zero = made(bits, symmetric)
        quantizer.mask = GradientMask.RANGE
        low, high = (np.float32(end - zero) * scale for end in ends(bits, symmetric))
        values, grad = numbers(bits, 1), numbers(3, 2)
        found = quantizer.backward(torch.from_numpy(grad), torch.from_numpy(values)).numpy()
        assert np.array_equal(found, np.where((low <= values) & (values <= high), grad, 0))
        leaf = torch.from_numpy(values).requires_grad_()
        y = quantizer(leaf)
        assert np.array_equal(y.detach().numpy(), by_formula(values, scale, zero, *ends(bits, symmetric)))
        y.backward(torch.from_numpy(grad))
        assert leaf.grad is not None
        assert np.array_equal(leaf.grad.numpy(), found)


def test_backward_of_blocks_passes_where_each_is_in_its_range() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 2
    quantizer = FakeQuantize(zp.QuantizationParams.given("int4:channel", torch.arange(1.0, 7.0) / 10))
    quantizer.mask = GradientMask.RANGE
    scale = np.arange(1, 7, dtype=np.float32)[:, None] / np.float32(10)
    inside = (x.numpy() >= -8 * scale) & (x.numpy() <= 7 * scale)
    assert 0 < inside.sum() < 60
    assert np.array_equal(quantizer.backward(torch.ones(6, 10), x).numpy(), inside.astype(np.float32))


def test_errors_of_backward() -> None:
    with pytest.raises(zp.ShapeError, match=r"grad \(shape \(3,\)\) must have the shape of x, \(2,\)"):
        FakeQuantize(8).backward(torch.ones(3), torch.ones(2))


def test_quantization_noise() -> None:
    for bits, symmetric in KINDS:
        quantizer, scale, zero = made(bits, symmetric)
        x = numbers(bits, 3)
        error = by_formula(x, scale, zero, *ends(bits, symmetric)).astype(np.float64) - x
        assert quantizer.quantization_noise(torch.from_numpy(x)).item() == pytest.approx(
            np.mean(error**2), rel=1e-12
        )


def test_clone() -> None:
    quantizer = FakeQuantize(8, False, 0.5, 3)
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert other.params == quantizer.params
        other.update_params(1.0, 4)
        assert quantizer.params == FakeQuantize(8, False, 0.5, 3).params
    assert copy.deepcopy(FakeQuantize(8)).zero_point == 0


def test_debug() -> None:
    assert repr(FakeQuantize(8, False, 0.5, 3)) == "FakeQuantize(uint8:tensor:asym, scales 0.5, zero_point 3)"
    text = repr(FakeQuantize(4, scale=0.25, enabled=False))
    assert text == "FakeQuantize(int4:tensor, scales 0.25, not enabled)"


def test_associated_observer() -> None:
    quantizer = FakeQuantize(8, False, observer=Observer(MinMax()))
    low, high = np.float32(0), np.float32(0)
    for seed in range(3):
        x = numbers(4, seed)
        y = quantizer(torch.from_numpy(x))
        low, high = min(low, x.min()), max(high, x.max())
        scale = (high - low) / np.float32(255)
        zero = int(np.rint(-low / scale))
        assert (quantizer.scale.item(), int(quantizer.zero_point)) == (scale, zero)
        assert np.array_equal(y.numpy(), by_formula(x, scale, zero, 0, 255))
    quantizer.eval()
    quantizer(torch.full((2,), 1e6))
    assert quantizer.scale.item() == scale
    with pytest.raises(zp.SchemeError, match="are part of params"):
        FakeQuantize(quantizer.params, False)
