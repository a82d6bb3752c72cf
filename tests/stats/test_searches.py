import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from zeropoint import Granularity, QuantizationParams, Scheme, fake_quantize
from zeropoint.stats import Histogram, HistogramCounts, LeastDivergence, LeastError
from zeropoint.stats.candidates import magnitudes
from zeropoint.stats.divergence import CELLS, divergences
from zeropoint.stats.least_error import squared_errors

pytestmark = pytest.mark.rotating


def heavy_tailed(count: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()


def error(x: torch.Tensor, scheme: str, low: float, high: float) -> float:
    y = fake_quantize(x, QuantizationParams.from_range(scheme, low, high))
    return float(((y - x).double() ** 2).mean())


def picked(
    rule: LeastError | LeastDivergence, x: torch.Tensor, mantissa_bits: int = 5
) -> tuple[float, float]:
    statistic = Histogram(rule=rule, mantissa_bits=mantissa_bits)
    low, high = statistic.range(statistic.measure(x))
    return low.item(), high.item()


def counted(x: torch.Tensor, mantissa_bits: int = 5) -> HistogramCounts:
    statistic = Histogram(mantissa_bits=mantissa_bits)
    return statistic.counted(statistic.measure(x))[0]


@pytest.mark.parametrize(
    "text",
    ["int8", "int4", "int4:tensor:narrow", "int2", "float8_e4m3fn", "float4_e2m1fn", "nf4:tensor", "int3"],
)
def test_the_least_error_is_that_of_a_brute_force_search_on_the_data(text: str) -> None:
    x = heavy_tailed()
    amax = float(x.abs().max())
    brute = min(error(x, text, -reach, reach) for reach in np.linspace(amax / 100, amax, 400))
    # Bins hide where in 1/32 a number lies, which matters as much as an 8-bit float's own rounding does; fine
    # bins hide nothing, but ranges are tried in steps of 1/32 of a power of two.
    rule = LeastError(scheme=Scheme.parse(text))
    assert error(x, text, *picked(rule, x)) <= 1.12 * brute
    assert error(x, text, *picked(rule, x, mantissa_bits=10)) <= 1.02 * brute


@pytest.mark.parametrize("text", ["uint8:tensor:asym", "uint4:tensor:asym", "int4:tensor:asym=real"])
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_both_ends_of_an_affine_range_are_found(text: str, skew: float) -> None:
    x = heavy_tailed(1500)
    x = x * torch.where(x > 0, 1.0, 1.0 - skew) + skew
    lows, highs = (
        np.append(np.geomspace(end / 200, end, 40), 0.0) for end in (float(x.min()), float(x.max()))
    )
    brute = min(error(x, text, min(low, 0.0), high) for low in lows for high in highs if high > 0)
    assert error(x, text, *picked(LeastError(scheme=Scheme.parse(text)), x)) <= 1.02 * brute


@pytest.mark.crossed
@pytest.mark.parametrize("element", ["float4_e2m1fn", "float8_e4m3fn", "int8_mx", "float6_e3m2fn"])
@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_the_best_power_of_two_is_found_under_every_rule(element: str, rule: str) -> None:
    text = f"{element}:tensor:scale={rule}"
    for shift in (-3, 0, 5):
        x = heavy_tailed() * 1.37 * 2.0**shift
        brute = min(error(x, text, -(2.0**j), 2.0**j) for j in range(-15, 20))
        low, high = picked(LeastError(scheme=Scheme.parse(text)), x)
        assert math.frexp(high)[0] == 0.5
        assert error(x, text, low, high) <= 1.001 * brute


def test_the_power_past_the_largest_magnitude_is_tried() -> None:
    # The floor rule gives 1.9 the scale 1/4, whose largest number is 1.5; the next one holds 2.
    x = torch.full((100,), 1.9)
    scheme = Scheme.parse("float4_e2m1fn:tensor:scale=floor")
    assert picked(LeastError(scheme=scheme), x) == (0.0, 2.0)
    assert error(x, str(scheme), 0.0, 2.0) < error(x, str(scheme), 0.0, 1.9)


def test_the_error_of_points_is_that_of_the_data() -> None:
    x, scheme = heavy_tailed(20_000), Scheme.parse("int6")
    reach = np.array([40.0, 10.0, 2.0])
    ours = squared_errors(counted(x), -reach, reach, scheme)
    real = [error(x, "int6", -r, r) for r in reach.tolist()]
    # Points stand evenly for each bin, wherever its numbers lie.
    np.testing.assert_allclose(ours, real, rtol=0.02)


def test_one_outlier_does_not_set_the_range_of_few_bits() -> None:
    x = torch.cat([torch.randn(10_000, generator=torch.Generator().manual_seed(0)), torch.tensor([30.0])])
    for rule in (LeastError(scheme=Scheme.parse("int4")), LeastDivergence(scheme=Scheme.parse("int4"))):
        assert 2 < picked(rule, x)[1] < 6


def test_ranges_too_small_for_their_scale_are_left_out() -> None:
    # Scales in float16 end at 2 ** -24; the search would go far below.
    scheme = Scheme.parse("int8:tensor:scale=float16")
    x = heavy_tailed() * 1e-5
    low, high = picked(LeastError(scheme=scheme), x)
    QuantizationParams.from_range(scheme, low, high).validate()
    assert low < 0 < high


def divergence_by_the_book(x: torch.Tensor, threshold: float) -> float:
    """KL of int8 narrow, from a histogram of the magnitudes themselves, one cell and one code at a time."""
    edges = np.arange(CELLS + 1) / CELLS * threshold
    magnitude = x.abs().double().numpy()
    p = np.histogram(magnitude[magnitude < threshold], edges)[0].astype(float)
    codes = [round((a + b) / 2 / (threshold / 127)) for a, b in pairwise(edges)]
    q = np.zeros(CELLS)
    for code in set(codes):
        cells = [i for i, c in enumerate(codes) if c == code and p[i] > 0]
        for i in cells:
            q[i] = sum(p[cells]) / len(cells)
    p[-1] += (magnitude >= threshold).sum()
    p, q = p / p.sum(), q / q.sum()
    return sum(p[i] * math.log(p[i] / q[i]) if q[i] > 0 else math.inf for i in range(CELLS) if p[i] > 0)


def test_the_divergence_is_that_of_the_book() -> None:
    # Every cell of a threshold of 1 is a whole bin at 10 mantissa bits, of numbers from a half to 1, and all
    # data lie in the middle of cells, so that spreading them over bins changes no cell.
    generator = torch.Generator().manual_seed(0)
    cells = 1024 + (torch.randn(30_000, generator=generator).abs() * 300).long().clamp(max=4000)
    x = (cells + 0.5) / 2048 * torch.where(torch.rand(30_000, generator=generator) < 0.5, -1.0, 1.0)
    scheme = Scheme.parse("int8:tensor:narrow")
    block = counted(x, mantissa_bits=10)
    ours = divergences(block, np.array([1.0]), scheme)
    np.testing.assert_allclose(ours, divergence_by_the_book(x, 1.0), rtol=1e-9)


def test_the_least_divergence_is_picked_and_near_that_of_the_data() -> None:
    x = heavy_tailed(100_000).clamp(-60, 60)
    scheme = Scheme.parse("int8:tensor:narrow")
    block = counted(x, mantissa_bits=10)
    thresholds = magnitudes(scheme, block.amax)
    all_of_them = divergences(block, thresholds, scheme)
    best = thresholds[int(np.argmin(all_of_them))]
    assert picked(LeastDivergence(scheme=scheme), x, mantissa_bits=10)[1] == min(best, float(x.max()))
    assert np.isfinite(all_of_them[0])
    assert all_of_them.min() < all_of_them[0]


def test_a_divergence_of_evenly_spread_data_is_zero_without_clipping() -> None:
    # Each code's cells hold the same, so that sharing them changes nothing.
    x = (torch.arange(2048.0) + 0.5) / 2048
    block = counted(torch.cat([x, torch.tensor([1.0])]), mantissa_bits=10)
    assert divergences(block, np.array([1.0]), Scheme.parse("int8"))[0] < 1e-3


def test_an_unsigned_range_starts_at_zero() -> None:
    x = heavy_tailed().abs()
    for text in ("uint8", "uint8:tensor:asym", "uint4"):
        scheme = Scheme.parse(text)
        for rule in (LeastError(scheme=scheme), LeastDivergence(scheme=scheme)):
            low, high = picked(rule, x)
            assert 0 <= low <= float(x.min())
            assert high > 0


def test_the_divergence_of_an_affine_range_is_that_of_its_own_codes() -> None:
    x = heavy_tailed().abs()
    reach = np.array([8.0, 4.0, 1.0])
    plain, affine = Scheme.parse("uint6"), Scheme.parse("int6:tensor:asym")
    alone = divergences(counted(x), reach, plain)
    np.testing.assert_allclose(divergences(counted(x), reach, affine), alone, rtol=1e-12)
    # Codes of negative numbers lie at mirrored places, but for ties.
    np.testing.assert_allclose(divergences(counted(-x), reach, affine), alone, rtol=0.01)
    # With both signs, half of the codes are left for each; nothing is clipped at the largest magnitude.
    whole = np.array([float(x.max())])
    both = divergences(counted(torch.cat([x, -x])), whole, affine)
    assert both > 1.2 * divergences(counted(x), whole, affine)


def test_mirrored_data_have_the_mirrored_range() -> None:
    x = heavy_tailed() + 1
    for text in ("int8:tensor:narrow", "float4_e2m1fn:tensor:scale=floor"):
        rule = LeastDivergence(scheme=Scheme.parse(text))
        low, high = picked(rule, x)
        assert picked(rule, -x) == (-high, -low)


def test_blocks_are_searched_alone() -> None:
    scheme = Scheme.parse("int4:channel")
    x = torch.stack([heavy_tailed(500), heavy_tailed(500) * 1000])
    for rule in (LeastError(scheme=scheme), LeastDivergence(scheme=scheme)):
        statistic = Histogram(granularity=Granularity.channel(0), shape=(2, 1), rule=rule)
        low, high = statistic.range(statistic.measure(x))
        assert [(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)] == [
            picked(rule, row) for row in x
        ]


def test_a_plain_cast_has_no_range_to_search() -> None:
    x = heavy_tailed(100)
    scheme = Scheme.parse("float8_e4m3fn:tensor:cast")
    ends = (float(x.min()), float(x.max()))
    assert picked(LeastError(scheme=scheme), x) == ends
    assert picked(LeastDivergence(scheme=scheme), x) == ends


def test_numbers_at_the_ends_of_float32_can_be_searched() -> None:
    for scale in (1e38, 1e-40):
        x = torch.linspace(-1, 1, 101) * scale
        low, high = picked(LeastError(scheme=Scheme.parse("int8")), x)
        assert -1.01 * scale < low < 0 < high < 1.01 * scale
