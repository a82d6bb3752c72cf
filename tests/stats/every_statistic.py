"""One statistic of each kind, for tests that hold for all of them."""

from zeropoint import Granularity, Scheme
from zeropoint.stats import (
    AbsoluteMean,
    Histogram,
    LeastDivergence,
    LeastError,
    MinMax,
    MovingAverage,
    NoClipping,
    Percentile,
    Statistic,
)

INT8 = Scheme.parse("int8")
RULES = (NoClipping(), Percentile(percent=99), LeastError(scheme=INT8), LeastDivergence(scheme=INT8))
EXACT = (MinMax(), AbsoluteMean(), *(Histogram(rule=rule) for rule in RULES))
ALL: tuple[Statistic, ...] = (*EXACT, MovingAverage())
LAST = Granularity.channel(-1)
CHANNELS: tuple[Statistic, ...] = (
    MinMax(granularity=LAST, shape=(6,)),
    AbsoluteMean(granularity=LAST, shape=(6,)),
    *(Histogram(granularity=LAST, shape=(6,), rule=rule) for rule in RULES),
    MovingAverage(granularity=LAST, shape=(6,)),
)


def name_of(value: object) -> str:
    """Return how a test's case is called."""
    rule = getattr(value, "rule", None)
    return type(value if rule is None else rule).__name__
