"""Statistics by name, as command lines, files and calls spell them."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import CalibrationError, near_misses
from ..schemes import Scheme
from .absolute_mean import AbsoluteMean
from .clipping import Percentile
from .divergence import LeastDivergence
from .extremes import MinMax, MovingAverage
from .headroom import BlockMaxima, Headroom
from .histogram import Histogram
from .least_error import LeastError
from .statistic import Statistic

StatisticFor = Callable[[Scheme, tuple[int, ...]], Statistic]
"""What to learn for a scheme, given the shape of a batch of one row."""


def _minmax(scheme: Scheme, shape: tuple[int, ...], _: float | None) -> Statistic:
    return MinMax(granularity=scheme.granularity, shape=shape)


def _moving_average(scheme: Scheme, shape: tuple[int, ...], rate: float | None) -> Statistic:
    plain = MovingAverage(granularity=scheme.granularity, shape=shape)
    return plain if rate is None else MovingAverage(granularity=plain.granularity, shape=shape, rate=rate)


def _absolute_mean(scheme: Scheme, shape: tuple[int, ...], factor: float | None) -> Statistic:
    return AbsoluteMean(granularity=scheme.granularity, shape=shape, factor=1.0 if factor is None else factor)


def _percentile(scheme: Scheme, shape: tuple[int, ...], percent: float | None) -> Statistic:
    assert percent is not None
    return Histogram(granularity=scheme.granularity, shape=shape, rule=Percentile(percent=percent))


def _mse(scheme: Scheme, shape: tuple[int, ...], _: float | None) -> Statistic:
    return Histogram(granularity=scheme.granularity, shape=shape, rule=LeastError(scheme=scheme))


def _entropy(scheme: Scheme, shape: tuple[int, ...], _: float | None) -> Statistic:
    return Histogram(granularity=scheme.granularity, shape=shape, rule=LeastDivergence(scheme=scheme))


def _headroom(scheme: Scheme, shape: tuple[int, ...], rho: float | None) -> Statistic:
    rule = Headroom() if rho is None else Headroom(rho=rho)
    return BlockMaxima(granularity=scheme.granularity, shape=shape, rule=rule)


_MAKERS: dict[str, Callable[[Scheme, tuple[int, ...], float | None], Statistic]] = {
    "minmax": _minmax,
    "moving_average": _moving_average,
    "absolute_mean": _absolute_mean,
    "percentile": _percentile,
    "mse": _mse,
    "entropy": _entropy,
    "headroom": _headroom,
}
_NUMBERS = {"moving_average": "RATE", "absolute_mean": "FACTOR", "percentile": "PERCENT", "headroom": "RHO"}
"""What the number after the colon is; only percentile cannot do without."""


def statistic_named(name: str | StatisticFor) -> StatisticFor:
    """Return a statistic's factory by name; functions are returned as they are.

    Args:
        name: ``minmax``, ``moving_average`` or ``moving_average:RATE``, ``absolute_mean`` or
            ``absolute_mean:FACTOR``, ``percentile:PERCENT``, ``mse`` (least squared error of the scheme),
            ``entropy`` (least Kullback-Leibler divergence), ``headroom`` or ``headroom:RHO`` (NVFP4 inputs,
            with room above the largest value); or a function of a scheme and a shape.

    Raises:
        CalibrationError: for anything else, another name, or a number that is missing or too many.
        RangeError: for one out of range.

    Example:
        >>> statistic_named("percentile:99.9")(Scheme.parse("int8"), (1, 8)).rule
        Percentile(percent=99.9)
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise CalibrationError(
            f"statistic (={name!r}) must be a name such as 'minmax', or a function of a scheme and a shape"
        )
    kind, colon, text = name.partition(":")
    if kind not in _MAKERS:
        raise CalibrationError(f"statistic (={name!r}) is unknown; {near_misses(kind, _MAKERS)}")
    number = _number(name, kind, text) if colon else None
    if kind == "percentile" and number is None:
        raise CalibrationError(f"statistic (={name!r}) needs a number; write percentile:99.99 for example")
    make = _MAKERS[kind]
    make(Scheme.parse("int8"), (1,), number)

    def made(scheme: Scheme, shape: tuple[int, ...]) -> Statistic:
        return make(scheme, shape, number)

    return made


def _number(name: str, kind: str, text: str) -> float:
    if kind not in _NUMBERS:
        raise CalibrationError(f"statistic (={name!r}) takes no number; write {kind}")
    try:
        return float(text)
    except ValueError as error:
        raise CalibrationError(
            f"statistic (={name!r}) must be {kind}:{_NUMBERS[kind]} with a decimal number, got {text!r}"
        ) from error
