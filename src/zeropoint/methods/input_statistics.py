"""Input statistics of a layer for a method, checked against its weight."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CalibrationError
from ..stats import Accumulator, Statistics
from .method import LayerData


def statistics_of(
    weight: torch.Tensor, data: LayerData, need: str, kind: type[Accumulator], method: str
) -> Statistics:
    """Return the statistics ``need`` of a weight's inputs, with data.

    kind: their accumulator, of a number of features. method: the name of the requesting method. Raises
    CalibrationError for absent statistics, and for another number of inputs.
    """
    found = data.statistics.get(need)
    if found is None or not isinstance(found.accumulator, kind):
        raise CalibrationError(
            f"method {method} needs the {need} of the layer's inputs; pass calibration data"
        )
    found.require_data()
    accumulator: Any = found.accumulator
    if weight.ndim == 0 or weight.shape[-1] != accumulator.features:
        raise CalibrationError(
            f"{need} is of {accumulator.features} inputs, and the weight has shape {tuple(weight.shape)}; "
            "calibrate the model that is quantized"
        )
    return found
