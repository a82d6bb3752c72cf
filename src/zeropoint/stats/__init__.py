"""What we learn from data: statistics that merge across batches and processes, and the ranges they give."""

from .absolute_mean import AbsoluteMean
from .clipping import Everything, Percentile
from .counted import Counted
from .divergence import LeastDivergence
from .extremes import MinMax, MovingAverage
from .histogram import ClipRule, Histogram
from .least_error import LeastError
from .named import StatisticFor, statistic_named
from .observer import Observer, name_observers
from .statistic import Batch, State, Statistic

__all__ = [
    "AbsoluteMean",
    "Batch",
    "ClipRule",
    "Counted",
    "Everything",
    "Histogram",
    "LeastDivergence",
    "LeastError",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "State",
    "Statistic",
    "StatisticFor",
    "name_observers",
    "statistic_named",
]
