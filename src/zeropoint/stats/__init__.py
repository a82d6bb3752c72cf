"""Calibration statistics that merge across batches and processes, and their ranges."""

from .absolute_mean import AbsoluteMean
from .accumulator import Accumulator, State, Statistics
from .clipping import NoClipping, Percentile
from .divergence import LeastDivergence
from .extremes import MinMax, MovingAverage
from .headroom import BlockMaxima, Headroom
from .histogram import ClipRule, Histogram
from .histogram_counts import HistogramCounts
from .least_error import LeastError
from .moments import CrossGram, GramMatrix, MeanSquare, PairSums
from .named import StatisticFor, statistic_named
from .observer import Observer, name_observers
from .statistic import Batch, Statistic

__all__ = [
    "AbsoluteMean",
    "Accumulator",
    "Batch",
    "BlockMaxima",
    "ClipRule",
    "CrossGram",
    "HistogramCounts",
    "NoClipping",
    "GramMatrix",
    "Headroom",
    "Histogram",
    "LeastDivergence",
    "LeastError",
    "MeanSquare",
    "MinMax",
    "MovingAverage",
    "Observer",
    "PairSums",
    "Percentile",
    "State",
    "Statistic",
    "StatisticFor",
    "Statistics",
    "name_observers",
    "statistic_named",
]
