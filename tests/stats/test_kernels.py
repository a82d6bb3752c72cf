"""The kernels learn what plain torch learns, bit for bit: any dtype, blocks, length, threads and poison."""

import itertools

import pytest
import torch
from tests.stats.every_statistic import name_of
from tests.stats.states import assert_same

from zeropoint import Granularity, only_backend
from zeropoint.layout.runs import Runs, runs_of
from zeropoint.ops.library import counter_for
from zeropoint.stats import AbsoluteMean, Histogram, MinMax, MovingAverage, Statistic

pytestmark = pytest.mark.rotating

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    (Granularity.tensor(), (1,)),
    (Granularity.tensor(), (67,)),
    (Granularity.tensor(), (3, 5, 1117)),
    (Granularity.tensor(), (400_003,)),
    (Granularity.tensor(), (1_100_003,)),
    (Granularity.channel(-1), (7, 6)),
    (Granularity.channel(-1), (301, 200)),
    (Granularity.channel(-1), (2, 70_000, 3)),
    (Granularity.channel(-1), (1100, 300)),
    (Granularity.channel(-1), (4200, 65)),
    (Granularity.channel(-1), (70, 2100)),
    (Granularity.channel(0), (5, 33)),
    (Granularity.channel(0), (3, 150_000)),
    (Granularity.channel(1), (4, 3, 7, 7)),
    (Granularity.channel(1), (40, 2, 2, 1000)),
    (Granularity.token(), (9, 130)),
    (Granularity.group(16), (3, 64)),
    (Granularity.group(30), (3, 64)),
    (Granularity.block(2, 3), (4, 9)),
]


def every(granularity: Granularity, shape: tuple[int, ...]) -> list[Statistic]:
    kinds = (MinMax, MovingAverage, AbsoluteMean, Histogram)
    return [kind(granularity=granularity, shape=shape) for kind in kinds]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of all magnitudes, of which some repeat, some are zero and some subnormal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    x = x.where(torch.rand(shape, generator=generator) > 0.3, -0.0).where(x.abs() > 1e-3, 1e-41)
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.crossed
@pytest.mark.parametrize(("granularity", "shape"), CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_those_of_plain_torch(
    granularity: Granularity, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = numbers(shape, dtype)
    for statistic in every(granularity, shape):
        with only_backend("reference"):
            expected = statistic.measure(x)
        for threads in (1, 2):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                assert_same(statistic.measure(x), expected)
            finally:
                torch.set_num_threads(before)


@pytest.mark.crossed
@pytest.mark.parametrize("poison", [float("nan"), float("-nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 100, 40_000, 99_999])
def test_numbers_that_are_not_finite_are_found_anywhere(
    poison: float, dtype: torch.dtype, where: int
) -> None:
    x = numbers((100_000,), dtype)
    x[where] = poison
    if str(poison) == "nan":
        x[where] = torch.copysign(x[where], torch.tensor(poison))
    for granularity, shape in ((Granularity.tensor(), (1,)), (Granularity.channel(-1), (10,))):
        for statistic in every(granularity, shape):
            data = x if shape == (1,) else x.reshape(-1, 10)
            with only_backend("reference"):
                expected = statistic.measure(data)
            assert int(expected["left_out"]) == 1
            assert_same(statistic.measure(data), expected)


@pytest.mark.crossed
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("poison", [(), (float("inf"), float("-inf"), float("nan"))], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_zeros_and_ends_of_either_sign(
    dtype: torch.dtype, poison: tuple[float, ...], rows: int
) -> None:
    """Every column of one number of these and then the same in every order of two others.

    Poison in any column has the extremes of all of them found without the kernel.
    """
    ends = [0.0, -0.0, 1e-7, -1e-7, 2.0, -2.0, *poison]
    kinds = torch.tensor(list(itertools.product(ends, repeat=min(rows, 3)))).t()
    x = torch.cat([kinds[:1].expand(rows - len(kinds), -1), kinds]).to(dtype).contiguous()
    assert x.shape == (rows, len(ends) ** min(rows, 3))
    for statistic in every(Granularity.channel(-1), tuple(x.shape)):
        with only_backend("reference"):
            expected = statistic.measure(x)
        assert_same(statistic.measure(x), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_one_sign_have_their_own_ends(dtype: torch.dtype, sign: int) -> None:
    """None of them is zero: an extreme next to it that nobody has would be seen."""
    for shape in ((5, 70), (16, 70), (600, 33)):
        x = sign * (numbers(shape, dtype).abs() + 1)
        for granularity in (Granularity.channel(-1), Granularity.channel(0), Granularity.tensor()):
            for statistic in every(granularity, shape):
                with only_backend("reference"):
                    expected = statistic.measure(x)
                assert_same(statistic.measure(x), expected)


@pytest.mark.crossed
@pytest.mark.parametrize("mantissa_bits", [0, 1, 7, 10])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bins_of_every_width_are_counted(mantissa_bits: int, dtype: torch.dtype) -> None:
    for shape in ((500,), (600_000,)):
        statistic, x = Histogram(mantissa_bits=mantissa_bits), numbers(shape, dtype)
        with only_backend("reference"):
            expected = statistic.measure(x)
        assert_same(statistic.measure(x), expected)


def test_more_numbers_than_sums_hold_are_moved_in_time() -> None:
    x = torch.full((3 << 20,), -1.9999999)
    found = AbsoluteMean().measure(x)
    assert AbsoluteMean().mean(found).item() == 0xFFFFFF / (1 << 23)
    assert int(found["counts"]) == len(x)
    assert int(Histogram().measure(x)["counts"].max()) == len(x)


@pytest.mark.parametrize("statistic", every(Granularity.tensor(), (1,)), ids=name_of)
def test_tensors_of_any_stride_are_read_as_their_numbers(statistic: Statistic) -> None:
    x = numbers((301, 64), torch.bfloat16)
    wide = torch.zeros(301, 128, dtype=torch.bfloat16)
    wide[:, ::2] = x
    for view in (x.t(), wide[:, ::2], x.flip(0)):
        assert_same(statistic.measure(view), statistic.measure(x))


def test_kernels_run_where_they_can_and_nowhere_else() -> None:
    x = torch.ones(3)
    assert counter_for(x) is not None
    assert counter_for(x.double()) is None
    assert counter_for(torch.ones(3, device="meta")) is None
    with only_backend("reference"):
        assert counter_for(x) is None


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (Granularity.tensor(), (), Runs(1, 1, 1)),
        (Granularity.tensor(), (3, 4), Runs(1, 1, 12)),
        (Granularity.channel(0), (1, 4), Runs(1, 1, 4)),
        (Granularity.channel(-1), (3, 4, 5), Runs(12, 5, 1)),
        (Granularity.token(), (3, 4, 5), Runs(1, 12, 5)),
        (Granularity.group(2), (3, 4), Runs(1, 6, 2)),
        (Granularity.group(3), (3, 4), None),
        (Granularity.block(2, 4), (4, 4), Runs(1, 2, 8)),
        (Granularity.block(2, 2), (4, 4), None),
        (Granularity.block(1, 2), (3, 4), Runs(1, 6, 2)),
    ],
)
def test_blocks_are_runs_where_neighbors_share_them(
    granularity: Granularity, shape: tuple[int, ...], expected: Runs | None
) -> None:
    assert runs_of(granularity, shape) == expected
