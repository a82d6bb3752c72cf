"""Pact against the equations of its paper, and as it is deployed."""

import math

import pytest
import torch
from tests.tensors import normal
from torch.func import functional_call

import zeropoint as zp
from zeropoint.training import Pact


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [0.5, 1.7])
def test_forward_and_gradients_are_those_of_the_paper(alpha: float, bits: int) -> None:
    """y = round(clip(x, 0, alpha) (2^k - 1) / alpha) alpha / (2^k - 1), and the clip's own derivatives."""
    x, dy = normal(500, dtype=torch.float64), normal(500, dtype=torch.float64, seed=1)
    x[:4] = torch.tensor([0.0, -0.0, alpha, math.nextafter(alpha, 0.0)])
    quantizer = Pact(f"uint{bits}:tensor:scale=float64", alpha, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    y.backward(dy)
    steps = 2**bits - 1
    total = 0.0
    for i, value in enumerate(x.tolist()):
        clipped = min(max(value, 0.0), alpha)
        assert y[i].item() == pytest.approx(round(clipped * steps / alpha) * alpha / steps, rel=1e-12)
        assert leaf.grad[i].item() == (dy[i].item() if 0 <= value < alpha else 0.0)
        total += dy[i].item() if value >= alpha else 0.0
    assert math.isclose(quantizer.alpha.grad.item(), total, rel_tol=1e-12)
    assert total != 0.0


def test_the_gradients_are_the_differences_of_the_clip_without_its_rounding() -> None:
    """Gradcheck in float64, away from kinks."""
    x = normal(50, dtype=torch.float64)
    quantizer = Pact("uint4:tensor:scale=float64", 1.0, dtype=torch.float64)

    def stand_in(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        clipped = torch.minimum(x.clamp(min=0), alpha)
        ours = functional_call(quantizer, {"alpha": alpha}, (x,))
        return clipped.detach() + (ours - ours.detach())

    alpha = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert 0 < int((x > 0.8).sum()) < 50
    assert torch.autograd.gradcheck(stand_in, (x.requires_grad_(), alpha), eps=1e-7)


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["uint2", "uint4:tensor:scale=bfloat16", "uint8", "uint1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forward_is_the_deployed_round_trip(scheme: str, dtype: torch.dtype) -> None:
    x = normal(6, 40, dtype=dtype).requires_grad_()
    quantizer = Pact(scheme, 1.3)
    y = quantizer(x)
    y.float().square().sum().backward()
    assert torch.equal(y, zp.quantize(x, quantizer.params).dequantize())
    assert y.dtype == x.grad.dtype == dtype
    assert quantizer.alpha.grad.dtype == torch.float32
    quantizer.params.validate()
    assert quantizer.float_range()[1].item() == pytest.approx(1.3, rel=2.0**-8)


def test_nan_and_infinity_have_no_gradient() -> None:
    """Infinity lies past alpha and counts for it; NaN counts for nothing."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.25], requires_grad=True)
    quantizer = Pact("uint4", 1.0)
    quantizer(x).backward(torch.ones(4))
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert quantizer.alpha.grad.item() == 1.0


def test_an_alpha_driven_to_zero_or_below_comes_back() -> None:
    quantizer = Pact("uint4", 1.0)
    with torch.no_grad():
        quantizer.alpha.fill_(-2.0)
    x = normal(256).abs()
    quantizer.params.validate()
    assert torch.isfinite(quantizer(x)).all()
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.2)
    for _ in range(100):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    assert quantizer.alpha.item() > 1.0
    assert quantizer.quantization_noise(x) < 0.02


@pytest.mark.parametrize(
    "scheme", ["int4", "uint4:channel", "uint4:tensor:asym", "mxfp4", "uint4:tensor:scale=ceil"]
)
def test_other_schemes_are_refused(scheme: str) -> None:
    with pytest.raises(zp.SchemeError, match="must be of unsigned integers with one linear scale a tensor"):
        Pact(scheme, 1.0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_a_first_alpha_that_is_not_positive_and_finite_is_refused(alpha: float) -> None:
    with pytest.raises(zp.RangeError, match=rf"alpha \(={alpha}\) must be positive and finite"):
        Pact("uint4", alpha)
