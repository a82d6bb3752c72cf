import math

import numpy as np
import pytest
import torch
from tests.tensors import normal

from zeropoint import Granularity, RangeError, ShapeError
from zeropoint.stats import Histogram, Percentile
from zeropoint.stats.histogram import bin_edges


def every_sixteen_bit_number(dtype: torch.dtype) -> torch.Tensor:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[torch.isfinite(x)]


@pytest.mark.parametrize("mantissa_bits", [0, 5, 7, 10])
def test_counts_are_those_of_numpy_on_the_same_edges(mantissa_bits: int) -> None:
    statistic = Histogram(mantissa_bits=mantissa_bits)
    x = normal(5000) * torch.logspace(-44, 38, 5000)
    x = x[torch.isfinite(x)]
    positive, negative = statistic.measure(x)["counts"][0].numpy()
    edges, values = bin_edges(mantissa_bits), x.double().numpy()
    minus = np.signbit(values)
    np.testing.assert_array_equal(positive, np.histogram(values[~minus], edges)[0])
    np.testing.assert_array_equal(negative, np.histogram(-values[minus], edges)[0])


def test_edges_are_float32_numbers_in_order_and_end_past_the_largest() -> None:
    edges = bin_edges(5)
    assert len(edges) == Histogram().bins + 1
    assert (np.diff(edges) > 0).all()
    assert edges[0] == 0
    assert edges[-1] == 2.0**128 > torch.finfo(torch.float32).max
    normal = edges[32:]
    assert (np.diff(normal) / normal[:-1] <= 1 / 32).all()


def test_with_seven_bits_every_bfloat16_number_has_a_bin_of_its_own() -> None:
    x = every_sixteen_bit_number(torch.bfloat16)
    counts = Histogram(mantissa_bits=7).measure(x)["counts"]
    assert counts.min() == counts.max() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_sixteen_bit_number_is_counted_where_float32_is(dtype: torch.dtype) -> None:
    x = every_sixteen_bit_number(dtype)
    ours, wide = Histogram().measure(x), Histogram().measure(x.float())
    assert torch.equal(ours["counts"], wide["counts"])
    assert int(ours["counts"].sum()) == len(x)


def test_float64_past_float32_is_counted_in_the_last_bin() -> None:
    state = Histogram().measure(torch.tensor([1e300, -1e300, math.inf], dtype=torch.float64))
    assert state["counts"][0, :, -1].tolist() == [1, 1]
    assert int(state["left_out"]) == 1
    assert Histogram().range(state)[1].item() == 1e300


def test_more_elements_than_are_counted_at_once_are_all_counted() -> None:
    x = normal(600_001)
    for statistic, data in (
        (Histogram(), x),
        (Histogram(granularity=Granularity.channel(0), shape=(3, 1)), x[:600_000].reshape(3, -1)),
    ):
        assert int(statistic.measure(data)["counts"].sum()) == data.numel()


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("percent", "rank"), [(50.5, 5050), (90, 9000), (99, 9900), (99.9, 9990), (99.995, 10_000), (100, 10_000)]
)
@pytest.mark.parametrize("mean", [0.0, 3.0, -100.0])
def test_percentiles_lie_in_the_bin_of_numpy_s(percent: float, rank: int, mean: float) -> None:
    x = normal(10_000) + mean
    statistic = Histogram(rule=Percentile(percent=percent))
    low, high = (end.item() for end in statistic.range(statistic.measure(x)))
    values = x.double().numpy()
    # A little less than percent, which numpy reads in binary: 99.9 would be the 9991st of 10,000.
    exact = np.percentile(values, percent - 1e-9, method="inverted_cdf")
    mirrored = -np.percentile(-values, percent - 1e-9, method="inverted_cdf")
    assert exact == np.sort(values)[rank - 1]
    # The outer end of the bin: at most 1/32 beyond, never within.
    assert exact <= high <= exact + abs(exact) / 32 + 1e-30
    assert mirrored - abs(mirrored) / 32 - 1e-30 <= low <= mirrored
    assert float(x.min()) <= low <= high <= float(x.max())


def test_percent_is_read_in_decimal() -> None:
    # In binary, 99.9 is a little more than that: of 1000 numbers it would clip none.
    x = torch.cat([torch.ones(999), torch.tensor([50.0])])
    statistic = Histogram(rule=Percentile(percent=99.9))
    assert statistic.range(statistic.measure(x))[1].item() < 1.1


def test_a_hundred_percent_are_the_extremes() -> None:
    x = normal(100)
    statistic = Histogram(rule=Percentile(percent=100))
    low, high = statistic.range(statistic.measure(x))
    assert (low.item(), high.item()) == (x.min().item(), x.max().item())


@pytest.mark.parametrize("percent", [50, 0, 100.5, -1, math.nan])
def test_a_percent_that_leaves_no_range_is_refused(percent: float) -> None:
    with pytest.raises(RangeError, match=r"percent \(=.*\) must be above 50 and at most 100"):
        Percentile(percent=percent)


def test_histograms_that_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"histograms of 100000 blocks \(12451 MiB\) must take at most 512 MiB"
    ):
        Histogram(granularity=Granularity.channel(-1), shape=(100_000,))
    with pytest.raises(RangeError, match=r"mantissa_bits \(=11\) must lie in 0\.\.10"):
        Histogram(mantissa_bits=11)


def test_edges_that_are_made_while_subnormals_are_flushed_are_those_of_any_time() -> None:
    expected = bin_edges(4).copy()
    bin_edges.cache_clear()
    assert torch.set_flush_denormal(True)
    try:
        found = bin_edges(4)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found, expected)
    assert found[8] > 0
