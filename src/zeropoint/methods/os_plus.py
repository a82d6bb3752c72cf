r"""Outlier Suppression+: only channels whose inputs pass a threshold are shrunk.

    s = max(1, max|x| / t)

for thresholds ``t`` between the median of the channels' largest inputs and the largest of all; the one under
which quantized inputs and weights together give the least output error is taken, see :mod:`.rescaling`.
Other channels, which ``smooth`` rescales as well, keep the range that they have.

Source: Wei et al., Outlier Suppression+, arXiv:2304.09145, its scaling; the shift is what ``bias`` mends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .rescaling import Channels

_CANDIDATES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSuppression:
    """Shrink the channels of the largest inputs."""

    name: ClassVar[str] = "os_plus"
    rank: ClassVar[int] = 2
    reason: ClassVar[str] = "it rescales what later steps and the codes see"
    formula: ClassVar[str] = "s = max(1, max|x| / t), t of least output error"
    source: ClassVar[str] = "Outlier Suppression+ (arXiv:2304.09145)"

    def candidates(self, channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a candidate for each threshold, in equal ratios."""
        inputs = channels.inputs.double().abs().amax(0)
        largest, median = inputs.amax(), inputs[inputs > 0].median()
        for part in range(1, _CANDIDATES):
            threshold = largest * (median / largest) ** (part / _CANDIDATES)
            yield f"threshold {float(threshold):.3g}", (inputs / threshold).clamp_min(1.0)


STEP = OutlierSuppression()
