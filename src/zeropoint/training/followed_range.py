"""FollowedRange: the range of an activation follows the data while the model trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..params import QuantizationParams
from ..stats import MovingAverage, Observer
from .fake_quantize import FakeQuantize
from .quantizer import Quantizer


class FollowedRange(Quantizer):
    """Fake quantization under the moving average of the extremes that it sees in training mode.

        low += rate (min x - low),    high += rate (max x - high),    params = those of low..high

    In evaluation mode the parameters stay. The gradient is that of
    :class:`~zeropoint.training.FakeQuantize`. Processes of torch.distributed see one range, that of all their
    data. A batch without finite numbers changes nothing.

    params: where the parameters start; the first batch replaces them. rate: weight of the newest batch, in
    (0, 1].

    Raises what :class:`~zeropoint.stats.MovingAverage` and ``FakeQuantize`` raise. Source: the moving ranges
    of activations in arXiv:1712.05877, section 3.1.

    >>> quantizer = FollowedRange(QuantizationParams.new(1.0, 0, "int8"), rate=0.5)
    >>> for largest in (127.5, 63.75):
    ...     y = quantizer(torch.tensor([-largest, largest]))
    >>> quantizer.params.scales[0]
    tensor([0.7500])
    """

    def __init__(self, params: QuantizationParams, *, rate: float = 0.01, enabled: bool = True) -> None:
        super().__init__(params.scheme, enabled=enabled)
        statistic = MovingAverage(granularity=params.scheme.granularity, shape=params.shape, rate=rate)
        self.observer = Observer(statistic)
        self.quantizer = FakeQuantize(params)

    @property
    def params(self) -> QuantizationParams:
        """The parameters of the present range."""
        return self.quantizer.params

    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, after the range has followed ``x``."""
        if self.training:
            self.observer(x)
            if int(self.observer.get_buffer("seen")) > 0:
                found = self.observer.params(self.scheme, dtype=self.quantizer.dtype)
                self.quantizer.update_params(found)
        return self.quantizer.simulate(x)

    def reseed(self, seed: int) -> None:
        """Give stochastic rounding another seed; see :meth:`Quantizer.reseed`."""
        super().reseed(seed)
        self.quantizer.reseed(seed)

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Leave the check to observer and quantizer, which hold all tensors."""
