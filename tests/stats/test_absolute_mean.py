import math
from fractions import Fraction

import pytest
import torch

from zeropoint import Granularity, RangeError, quantize
from zeropoint.stats import AbsoluteMean

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mean_is_the_exact_sum_divided_once(dtype: torch.dtype) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 3000)
    x = x.to(dtype)
    statistic = AbsoluteMean()
    exact = sum(Fraction(abs(value)) for value in x.double().tolist()) / 3000
    assert statistic.mean(statistic.measure(x)).item() == float(exact)


def test_subnormal_and_largest_numbers_are_summed_exactly() -> None:
    bits = torch.tensor([1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0], dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    exact = sum(Fraction(abs(value)) for value in x.double().tolist()) / 12
    statistic = AbsoluteMean()
    assert statistic.mean(statistic.measure(x)).item() == float(exact)
    assert statistic.mean(statistic.measure(x[:1])).item() == 2.0**-149


def test_float64_is_rounded_to_float32_and_its_ends_are_held() -> None:
    statistic = AbsoluteMean()
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert statistic.mean(statistic.measure(third)).item() == third.float().item()
    huge = torch.tensor([1e300], dtype=torch.float64)
    assert statistic.mean(statistic.measure(huge)).item() == torch.finfo(torch.float32).max


def test_blocks_have_their_own_means_and_counts() -> None:
    statistic = AbsoluteMean(granularity=Granularity.group(3), shape=(2, 5))
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0, math.nan], [0.0, 0.0, 0.0, -8.0, 2.0]])
    assert statistic.mean(statistic.measure(x)).tolist() == [[2.0, 4.0], [0.0, 5.0]]


def test_ternary_codes_follow_bitnet() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    statistic = AbsoluteMean()
    params = statistic.params(statistic.measure(weight), "ternary:tensor")
    gamma = weight.abs().double().mean().float()
    want = (weight / gamma).round().clamp(-1, 1)
    torch.testing.assert_close(quantize(weight, params).dequantize() / params.scales[0], want, rtol=0, atol=0)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_a_factor_that_gives_no_range_is_refused(factor: float) -> None:
    with pytest.raises(RangeError, match=r"factor \(=.*\) must be positive and finite"):
        AbsoluteMean(factor=factor)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "granularity", [Granularity.tensor(), Granularity.channel(0), Granularity.channel(-1)]
)
@pytest.mark.parametrize("lowest", [1, 40, 200, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_exact_however_far_apart_their_numbers_lie(
    lowest: int | None, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Numbers with all their bits set, and one that is ``reach`` exponents smaller; or the largest ones."""
    fraction = 0x7FFFFF if dtype == torch.float32 else 0x7F0000
    for reach in (*range(10, 26), *range(31, 37)):
        for count, place in ((512, 500), (4096, 5)):
            top = 254 - reach % 3 if lowest is None else lowest + reach
            fields = torch.full((count,), top, dtype=torch.int32)
            fields[place] = top - reach
            x = (fields << 23 | fraction).view(torch.float32).to(dtype)
            exact = sum(Fraction(value) for value in x.double().tolist())
            columns = granularity == Granularity.channel(-1)
            x = x.reshape(-1, 1).repeat(1, 33) if columns else x.reshape(1, -1)
            statistic = AbsoluteMean(granularity=granularity, shape=tuple(x.shape))
            state = statistic.measure(x)
            for mean, limbs in zip(
                statistic.mean(state).flatten().tolist(), state["limbs"].reshape(-1, 10).tolist(), strict=True
            ):
                assert mean == float(exact / count)
                assert sum(limb << 32 * i for i, limb in enumerate(limbs)) == exact * 2**149


@pytest.mark.parametrize("granularity", [Granularity.tensor(), Granularity.channel(-1)])
def test_any_numbers_of_float16_have_an_exact_sum(granularity: Granularity) -> None:
    x = torch.tensor([65504.0, 2.0**-24, 1023 * 2.0**-24, 2.0**-14, 0.333, 0.0]).half().repeat(1000)
    columns = x.reshape(-1, 1).repeat(1, 70) if granularity == Granularity.channel(-1) else x
    statistic = AbsoluteMean(granularity=granularity, shape=tuple(columns.shape))
    exact = sum(Fraction(value) for value in x.double().tolist())
    for limbs in statistic.measure(columns)["limbs"].reshape(-1, 10).tolist():
        assert sum(limb << 32 * i for i, limb in enumerate(limbs)) == exact * 2**149


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_length_keep_to_themselves(dtype: torch.dtype) -> None:
    """Numbers near each other, which are added many at a time, in rows that end anywhere in a step."""
    for length in (31, 63, 64, 65, 127, 511, 513, 576, 2049):
        x = (1 + torch.rand(5, length, generator=torch.Generator().manual_seed(length))).to(dtype)
        x[3] = 0
        x[2, ::3] = 0
        x[1, -1] = -256
        statistic = AbsoluteMean(granularity=Granularity.channel(0), shape=tuple(x.shape))
        exact = [float(sum(Fraction(abs(v)) for v in row) / length) for row in x.double().tolist()]
        assert statistic.mean(statistic.measure(x)).flatten().tolist() == exact


@pytest.mark.parametrize(
    ("element", "by_mean", "by_largest"), [("binary", 0.61, 2.0), ("ternary", 0.55, 0.7)]
)
def test_ternary_and_binary_weights_are_scaled_by_their_mean_as_in_their_papers(
    element: str, by_mean: float, by_largest: float
) -> None:
    """A scheme alone takes the largest magnitude, under which most codes of normal numbers are far off."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    statistic = AbsoluteMean(granularity=Granularity.channel(0), shape=(64, 256))
    params = statistic.params(statistic.measure(x), f"{element}:channel")
    off = [
        float((quantize(x, by).dequantize() - x).norm() / x.norm()) for by in (params, f"{element}:channel")
    ]
    assert off[0] < by_mean
    assert off[1] > by_largest
