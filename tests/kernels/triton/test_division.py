"""Quotients on a GPU are made of fused multiplications and additions, and have IEEE's codes all the same.

Without a GPU the interpreter runs the same kernels with an ``fma`` of one rounding, which its own has not.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE

import zeropoint as zp
from zeropoint.kernels.triton import launches
from zeropoint.kernels.triton.specialization import Constants, constants_of
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op

pytestmark = pytest.mark.rotating

Floats = npt.NDArray[np.float32]


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return ``a * b + c`` with one rounding: in float64 products are exact, and sums are rounded to odd."""
    with np.errstate(all="ignore"):
        product, term = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + term
        part = total - product
        off = (product - (total - part)) + (term - part)
        toward = np.where(off > 0, np.inf, -np.inf)
        even = (total.view(np.int64) & 1) == 0
        inexact = (off != 0) & np.isfinite(total) & even
        return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def test_fma_rounds_once() -> None:
    one, step = np.float32([1]), np.float32([2.0**-23])
    # Rounded first, the products are 1 + 2 steps, and of the second sum a tie is left, which goes to even.
    a = one + step
    assert fused(a, a, -(one + 2 * step)).item() == 2.0**-46
    assert fused(a, a, np.float32([2.0**-24])).item() == 1 + 2 * 2.0**-23 + 2.0**-23


@pytest.fixture(autouse=True)
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels fuse on the host, too."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    def constants(*arguments: Any, **named: Any) -> Constants:
        made = constants_of(*arguments, **named)
        return made._replace(fused=True)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)
    monkeypatch.setattr(launches, "constants_of", constants)


def assert_codes_of_the_reference(x: torch.Tensor, scheme: str, scales: torch.Tensor) -> None:
    params = zp.QuantizationParams(
        scheme=zp.Scheme.parse(scheme), shape=tuple(x.shape), scales=(scales,), dtype=x.dtype
    )
    with zp.only_backend("reference"):
        expected = zp.quantize(x, params).data
    # A launch of its own: those that are kept were made for other tests.
    here = x.to(DEVICE)
    launch = launches.Launch(request(Op.QUANTIZE, here, params.scheme))
    found = launch.quantize(here, [scales.to(DEVICE)], seed=params.scheme.rounding.seed).cpu()
    assert torch.equal(found, expected)


def next_to_ties(power: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of all mantissas, and values within two units of quarters of their steps."""
    generator = torch.Generator().manual_seed(power + 200)
    bits = torch.randint(0, 1 << 23, (rows, 1), generator=generator, dtype=torch.int32)
    bits[:64] = (1 << 23) - 1 - torch.arange(64)[:, None]  # reciprocals just above a power of two
    scales = (bits + (127 << 23)).view(torch.float32) * 2.0**power
    halves = torch.randint(-512, 512, (rows, 256), generator=generator) / 4
    near = (halves.double() * scales.double()).float()
    steps = torch.randint(-2, 3, near.shape, generator=generator, dtype=torch.int32)
    x = (near.view(torch.int32) + steps).view(torch.float32)
    x[:, ::16] = -0.0
    return torch.where(torch.isfinite(x), x, 0.0), scales


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8:channel", "float8_e4m3fn:channel", "float4_e2m1fn:channel"])
@pytest.mark.parametrize("power", [0, -59, 59, -61, 61, -100, 100])
def test_quotients_next_to_ties_have_the_codes_of_the_reference(scheme: str, power: int) -> None:
    x, scales = next_to_ties(power, 4096 if DEVICE == "cuda" else 128)
    assert_codes_of_the_reference(x, scheme, scales)


@pytest.mark.parametrize("rounding", ["stochastic(5)", "ceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quotients_that_are_not_rounded_to_nearest_are_ieee_numbers(
    rounding: str, dtype: torch.dtype
) -> None:
    for power in (0, -59, 12, 61):
        x, scales = next_to_ties(power, 1024 if DEVICE == "cuda" else 64)
        x[:, 1::16] = 2.0**-133  # which has a quotient that is no zero, or is one
        assert_codes_of_the_reference(x.to(dtype), f"int8:channel:round={rounding}", scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["int4:channel", "float8_e4m3fn:channel", "float4_e2m1fn:channel"])
def test_short_quotients_have_the_codes_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    for power in (0, -6):
        x, scales = next_to_ties(power, 1024 if DEVICE == "cuda" else 128)
        assert_codes_of_the_reference(x.to(dtype), scheme, scales)
    # Quotients of numbers over themselves times few bits are ties, which products with reciprocals miss.
    factors = (torch.rand(256, 1, generator=torch.Generator().manual_seed(0)) + 1).to(dtype).float()
    ties = (factors * (torch.arange(-128, 128) / 4)).to(dtype)
    assert not torch.equal(torch.round(ties.float() * (1 / factors)), torch.round(ties.float() / factors))
    assert_codes_of_the_reference(ties, scheme, factors)
    worst = torch.full((2, 1), 2 - 2.0**-23)
    assert_codes_of_the_reference(torch.tensor([[0.25, 0.5, 1.0, 2.0] * 64] * 2, dtype=dtype), scheme, worst)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int4:channel", "float4_e2m1fn:channel", "float6_e2m3fn:channel"])
def test_values_just_past_the_largest_are_clamped(scheme: str, dtype: torch.dtype) -> None:
    most = float(zp.Scheme.parse(scheme).element.max)
    for end in (1.05, 1.15, 1.3, 2.1):  # of the largest number, below and above the middle to the next
        x, scales = torch.linspace(-end * most, end * most, 256).expand(3, -1), torch.tensor([1.0, 0.37, 5.0])
        assert_codes_of_the_reference((x * scales[:, None]).to(dtype), scheme, scales[:, None])


def test_values_far_from_their_scale_are_clamped() -> None:
    exponents, some = torch.arange(-149, 128), torch.arange(-149, 128, 4)
    x = torch.ldexp(torch.ones(277), exponents) * torch.tensor([1.0, -1.5]).repeat(139)[:277]
    x = torch.where(torch.isfinite(x), x, 1.0).expand(len(some), -1).contiguous()
    for scheme in ("int8:channel", "float8_e5m2:channel"):
        scales = torch.ldexp(torch.ones(len(some), 1), some.clamp(min=-127)[:, None])
        assert_codes_of_the_reference(x, scheme, scales)


def test_products_with_reciprocals_alone_would_have_other_codes() -> None:
    x, scales = next_to_ties(0, 128)
    assert not torch.equal(torch.round(x * (1 / scales)), torch.round(x / scales))
