import math

import pytest
import torch
from tests.tensors import normal

from zeropoint import Granularity, RangeError
from zeropoint.layout.blocks import reduce_blocks
from zeropoint.schemes.granularity import Anchor
from zeropoint.stats import MinMax, MovingAverage, State
from zeropoint.stats.statistic import block_extremes


def averaged(statistic: MovingAverage, *batches: torch.Tensor) -> State:
    state = statistic.start()
    for batch in batches:
        state = statistic.update(state, batch)
    return state


def test_minmax_is_what_torch_says() -> None:
    x = normal(1000)
    low, high = MinMax().range(MinMax().update(MinMax().start(), x))
    assert (low.item(), high.item()) == tuple(float(end) for end in torch.aminmax(x))


def test_minmax_keeps_float64_and_the_ends_of_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        x = torch.tensor([info.max, -info.max, info.smallest_normal], dtype=dtype)
        state = MinMax().update(MinMax().start(), x)
        assert (state["minimum"].item(), state["maximum"].item()) == (-info.max, info.max)
        assert int(state["left_out"]) == 0


@pytest.mark.crossed
@pytest.mark.parametrize("shape", [(1500, 700), (3, 350_000), (1_050_000,), (700, 3, 501)])
@pytest.mark.parametrize(
    "granularity",
    [
        Granularity.tensor(),
        Granularity.channel(0),
        Granularity.channel(-1),
        Granularity.group(64),
        Granularity.token(),
        Granularity.block(400),
        Granularity(extents=(400,), anchor=Anchor.FIRST),
        Granularity(extents=(5000,), anchor=Anchor.FIRST),
    ],
    ids=str,
)
def test_pieces_have_the_extremes_of_the_whole(shape: tuple[int, ...], granularity: Granularity) -> None:
    x = normal(*shape)
    for data in (x, x.transpose(0, -1)):
        low, high = block_extremes(data, data, granularity)
        assert torch.equal(low, reduce_blocks(data, granularity, "amin", math.inf))
        assert torch.equal(high, reduce_blocks(data, granularity, "amax", -math.inf))


def test_a_number_that_is_not_finite_shows_in_the_extremes_of_its_piece() -> None:
    x = normal(1500, 700)
    x[1200, 3] = math.nan
    assert block_extremes(x, x, Granularity.channel(-1))[0].isnan().nonzero().tolist() == [[0, 3]]


def test_a_moving_average_follows_torch_s_observer() -> None:
    ours, theirs = MovingAverage(rate=0.25), torch.ao.quantization.MovingAverageMinMaxObserver(0.25)
    batches = normal(5, 20)
    state = averaged(ours, *batches)
    for batch in batches:
        theirs(batch)
    low, high = ours.range(state)
    # Theirs is float32, rounded at each of five steps.
    torch.testing.assert_close(low.float().reshape(()), theirs.min_val, rtol=1e-6, atol=0)
    torch.testing.assert_close(high.float().reshape(()), theirs.max_val, rtol=1e-6, atol=0)


def test_a_moving_average_depends_on_the_order_of_batches() -> None:
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0])
    ends = [
        MovingAverage(rate=0.5).range(averaged(MovingAverage(rate=0.5), *p))[1].item()
        for p in ((a, b), (b, a))
    ]
    assert ends == [2.0, 2.0]
    fading = MovingAverage(rate=0.25)
    assert fading.range(averaged(fading, a, b))[1].item() == 1.5
    assert fading.range(averaged(fading, b, a))[1].item() == 2.5


def test_averages_move_by_the_rate_in_double_precision_and_stay_where_nothing_is_finite() -> None:
    batches = [normal(4, seed=seed) for seed in range(5)]
    batches[2] = torch.full((4,), math.nan)
    statistic = MovingAverage(rate=0.1)
    state, want = statistic.start(), None
    for batch in batches:
        state = statistic.update(state, batch)
        if batch is not batches[2]:
            largest = batch.max().item()
            want = largest if want is None else want + 0.1 * (largest - want)
    assert statistic.range(state)[1].item() == want


def test_separate_averages_merge_with_their_counts_of_batches() -> None:
    statistic = MovingAverage(rate=0.5)
    one = averaged(statistic, torch.tensor([-1.0, 4.0]))
    three = averaged(statistic, *[torch.tensor([-5.0, 8.0])] * 3)
    for merged in (statistic.merge(one, three), statistic.merge(three, one)):
        low, high = statistic.range(merged)
        assert (low.item(), high.item()) == (-4.0, 7.0)
        assert int(merged["batches"]) == 4


def test_merging_with_nothing_leaves_an_average_as_it_is() -> None:
    statistic = MovingAverage()
    state = averaged(statistic, *normal(7, 3))
    for merged in (statistic.merge(state, statistic.start()), statistic.merge(statistic.start(), state)):
        assert all(torch.equal(merged[name], state[name]) for name in state)


def test_parts_of_a_batch_count_as_one_batch() -> None:
    statistic, first, second = MovingAverage(rate=0.1), normal(8), normal(8, seed=1) * 3
    whole = averaged(statistic, first, second)
    state = averaged(statistic, first)
    parts = statistic.merge_batches(statistic.measure(second[:3]), statistic.measure(second[3:]))
    shared = statistic.fold(state, parts)
    assert all(torch.equal(shared[name], whole[name]) for name in whole)


def test_a_part_without_finite_numbers_does_not_pull_the_average() -> None:
    statistic, x = MovingAverage(rate=0.1), torch.tensor([2.0, 3.0])
    parts = statistic.merge_batches(statistic.measure(torch.tensor([math.nan])), statistic.measure(x))
    assert statistic.range(statistic.fold(statistic.start(), parts))[0].item() == 2.0


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_a_rate_outside_its_interval_is_refused(rate: float) -> None:
    with pytest.raises(RangeError, match=r"rate \(=.*\) must be above 0 and at most 1"):
        MovingAverage(rate=rate)
