"""Headroom: a range of NVFP4 inputs above the values of calibration."""

import math

import pytest
import torch

from zeropoint.errors import RangeError, SchemeError
from zeropoint.schemes import Granularity
from zeropoint.stats import BlockMaxima, Headroom, statistic_named

CASES = ("plain", "outlier", "channels", "zeros", "dust")
MODELOPT = {
    ("plain", 16384.0): 19274.087890625,
    ("plain", 256.0): 301.1576232910156,
    ("outlier", 16384.0): 19274.087890625,
    ("outlier", 256.0): 10509.271484375,
    ("channels", 16384.0): 31040.732421875,
    ("channels", 256.0): 31040.732421875,
    ("zeros", 16384.0): 12497.7001953125,
    ("zeros", 256.0): 195.2765655517578,
}
"""NVFP4ActHeadroomCalibrator of nvidia-modelopt 0.47 on :func:`inputs`."""
THEIR_BINS = 2 ** (80 / 512 / 2)
"""Half a bin of theirs, as a factor: 512 bins for 80 powers of two."""


def inputs(kind: str) -> torch.Tensor:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    if kind == "outlier":
        x[3, 7] = 1e4
    if kind == "channels":
        x = x * torch.logspace(-4, 4, 256)
    if kind == "zeros":
        x[:, ::2] = 0
        x[:400] = 0
    if kind == "dust":
        x[:100] *= 1e-9
    return x


def end_of(statistic: BlockMaxima, *batches: torch.Tensor) -> float:
    state = statistic.start()
    for batch in batches:
        state = statistic.update(state, batch)
    low, high = statistic.range(state)
    assert low.item() == -high.item()
    return high.item()


@pytest.mark.parametrize(("kind", "rho"), MODELOPT)
def test_ranges_are_within_half_a_bin_of_modelopt_s(kind: str, rho: float) -> None:
    found = end_of(BlockMaxima(rule=Headroom(rho=rho)), *inputs(kind).split(100))
    assert 1 / THEIR_BINS / 1.01 < found / MODELOPT[kind, rho] < THEIR_BINS * 1.01


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("rho", [1.0, 256.0, 16384.0])
def test_ranges_of_bfloat16_follow_from_sorted_blocks(kind: str, rho: float) -> None:
    x = inputs(kind).bfloat16()
    blocks = sorted(v for v in x.float().abs().reshape(-1, 16).amax(-1).tolist() if v)
    step = 1 + 2**-7  # at most from a bfloat16 number to the next one, the end of its bin

    upper = blocks[math.ceil(len(blocks) * 0.9999) - 1]
    kept = [v for v in blocks if v >= upper / 1e6]
    anchor = kept[math.ceil(len(kept) / 100) - 1]
    least = max(rho * anchor, upper)
    assert least <= end_of(BlockMaxima(rule=Headroom(rho=rho)), x) <= least * step


def test_batches_and_ragged_rows_give_the_range_of_all_blocks() -> None:
    x = inputs("channels")
    whole = end_of(BlockMaxima(), x)
    assert end_of(BlockMaxima(), *x.split(7)) == whole
    statistic = BlockMaxima()
    halves = [statistic.measure(part) for part in x.chunk(2)]
    assert statistic.range(statistic.merge(*halves))[1].item() == whole
    padded = torch.cat([x, torch.zeros(512, 11)], dim=1)
    assert end_of(BlockMaxima(), padded[:, :250]) == end_of(
        BlockMaxima(), torch.nn.functional.pad(x[:, :250], (0, 6))
    )


def test_blocks_that_are_not_finite_are_left_out_and_counted() -> None:
    x = inputs("plain")
    x[0, 3], x[1, 20] = math.nan, -math.inf
    clean = torch.cat([x[0, 16:], x[1, :16], x[1, 32:], x[2:].flatten()])
    statistic = BlockMaxima()
    state = statistic.measure(x)
    assert (int(state["seen"]), int(state["left_out"])) == (512 * 16 - 2, 2)
    assert statistic.range(state)[1].item() == end_of(BlockMaxima(), clean)


def test_only_zeros_have_the_range_zero() -> None:
    assert end_of(BlockMaxima(), torch.zeros(4, 32)) == 0


def test_other_granularities_and_ratios_are_refused() -> None:
    with pytest.raises(SchemeError, match="headroom is a range of a whole tensor, not one per channel"):
        BlockMaxima(granularity=Granularity.channel(-1), shape=(8,))
    for rho in (0.0, 28672.0, math.nan):
        with pytest.raises(RangeError, match=r"must lie above 0 and below 28672"):
            statistic_named(f"headroom:{rho}")
