r"""Bias correction for the mean output error of a rounded weight.

    b' = b + W mu - Q mu~ = b + W (mu - mu~) + (W - Q) mu~

mu is the mean of the layer's inputs in the float model, mu~ the mean of its inputs where the layers before
are quantized. The mean of the layer's outputs then equals the float model's. Inputs that are zero on average,
as behind a norm without a bias, leave nothing to correct.

Source: Data-free quantization (Nagel et al., arXiv:1906.04721), section 4.2; here with means of both streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from ..ops.feedback import product
from ..stats import PairSums
from .input_statistics import statistics_of
from .method import SUMS, LayerData, Needs
from .step import Corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasCorrection:
    """Correct the mean of outputs."""

    name: ClassVar[str] = "bias"
    rank: ClassVar[int] = 6
    reason: ClassVar[str] = "it takes up what rounding leaves of errors"
    formula: ClassVar[str] = "b + W mu - Q mu~"
    source: ClassVar[str] = "bias correction (arXiv:1906.04721, section 4.2)"
    parameter: ClassVar[str] = "bias"
    takes: ClassVar[Needs] = MappingProxyType({SUMS: lambda features: PairSums(features=features)})

    def corrected(self, weight: torch.Tensor, values: torch.Tensor, data: LayerData) -> Corrected:
        """Return the change of the bias; CalibrationError without both sums."""
        sums = statistics_of(weight, data, SUMS, PairSums, self.name)
        wide, count = weight.double(), int(sums["vectors"])
        moved = product(wide, sums["difference"].unsqueeze(1) / count)[:, 0]
        lost = product(wide - values.double(), sums["inputs"].unsqueeze(1) / count)[:, 0]
        added = (moved + lost).float()
        return Corrected(added=added, note=f"by {float(added.double().square().mean().sqrt()):.2g}")


STEP = BiasCorrection()
