import pytest

from zeropoint import RangeError, Scheme
from zeropoint.errors import CalibrationError
from zeropoint.stats import (
    AbsoluteMean,
    Histogram,
    LeastDivergence,
    LeastError,
    MinMax,
    MovingAverage,
    Percentile,
    Statistic,
    statistic_named,
)

SCHEME = Scheme.parse("int4:channel-1")
WHERE = {"granularity": SCHEME.granularity, "shape": (1, 8)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minmax", MinMax(**WHERE)),
        ("moving_average", MovingAverage(**WHERE)),
        ("moving_average:0.5", MovingAverage(rate=0.5, **WHERE)),
        ("absolute_mean", AbsoluteMean(**WHERE)),
        ("absolute_mean:2.5", AbsoluteMean(factor=2.5, **WHERE)),
        ("percentile:99.99", Histogram(rule=Percentile(percent=99.99), **WHERE)),
        ("mse", Histogram(rule=LeastError(scheme=SCHEME), **WHERE)),
        ("entropy", Histogram(rule=LeastDivergence(scheme=SCHEME), **WHERE)),
    ],
)
def test_a_name_says_which_statistic_for_which_scheme(name: str, expected: Statistic) -> None:
    assert statistic_named(name)(SCHEME, (1, 8)) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("min_max", r"statistic \(='min_max'\) is unknown; did you mean minmax\?"),
        ("percentil:99", r"statistic \(='percentil:99'\) is unknown; did you mean percentile\?"),
        (
            "kl",
            r"statistic \(='kl'\) is unknown; known are absolute_mean, entropy, headroom, minmax,",
        ),
        ("percentile", r"statistic \(='percentile'\) needs a number; write percentile:99\.99 for example"),
        (
            "percentile:",
            r"statistic \(='percentile:'\) must be percentile:PERCENT with a decimal number, got",
        ),
        ("mse:3", r"statistic \(='mse:3'\) takes no number; write mse"),
        ("moving_average:fast", r"must be moving_average:RATE with a decimal number, got 'fast'"),
    ],
)
def test_a_misspelled_name_is_refused_with_what_was_meant(name: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        statistic_named(name)


def test_a_function_that_makes_statistics_is_itself() -> None:
    def mine(_: Scheme, shape: tuple[int, ...]) -> Statistic:
        return MinMax(shape=shape)

    assert statistic_named(mine) is mine
    with pytest.raises(
        CalibrationError, match=r"^statistic \(=MinMax\(.*\)\) must be a name such as 'minmax'"
    ):
        statistic_named(MinMax())  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "what"), [("percentile:40", "percent"), ("moving_average:2", "rate")])
def test_a_number_out_of_range_is_refused_before_any_data(name: str, what: str) -> None:
    with pytest.raises(RangeError, match=rf"{what} \(=.*\) must be above"):
        statistic_named(name)
