"""MovingAverageFakeQuantize: activation ranges that follow training data."""

from __future__ import annotations

from ..params import QuantizationParams
from ..stats import MovingAverage, Observer
from .fake_quantize import FakeQuantize


class MovingAverageFakeQuantize(FakeQuantize):
    """Fake quantization under moving averages of extremes seen in training.

        low += rate (min x - low),    high += rate (max x - high),    params = parameters of low..high

    A :class:`~zeropoint.training.FakeQuantize` with an observer. In evaluation mode the parameters stay.
    Processes of torch.distributed share one range over all their data. A batch without finite numbers
    changes nothing.

    Args:
        params: where the parameters start; the first batch replaces them.
        rate: weight of the newest batch, in (0, 1].
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.

    Raises:
        ZeropointError: what :class:`~zeropoint.stats.MovingAverage` and ``FakeQuantize`` raise.

    Source: the moving ranges of activations in arXiv:1712.05877, section 3.1.

    Example:
        >>> import torch
        >>> quantizer = MovingAverageFakeQuantize(QuantizationParams.new(1.0, 0, "int8"), rate=0.5)
        >>> for largest in (127.5, 63.75):
        ...     y = quantizer(torch.tensor([-largest, largest]))
        >>> quantizer.params.scales[0]
        tensor([0.7500])
    """

    def __init__(self, params: QuantizationParams, *, rate: float = 0.01, enabled: bool = True) -> None:
        statistic = MovingAverage(granularity=params.scheme.granularity, shape=params.shape, rate=rate)
        super().__init__(params, enabled=enabled, observer=Observer(statistic))
