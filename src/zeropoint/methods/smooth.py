r"""SmoothQuant: channels rescaled so that inputs and weights share outliers.

    s = max(|x|)^a / max(|w|)^(1 - a)

for some a between 0 and 1; the one under which quantized inputs and weights together give the least output
error is taken, see :mod:`.rescaling`.

Source: Xiao et al., SmoothQuant, arXiv:2211.10438, with one strength for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .rescaling import Channels

_STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """Rescale channels by the largest inputs and weights."""

    name: ClassVar[str] = "smooth"
    rank: ClassVar[int] = 2
    reason: ClassVar[str] = "it rescales what later steps and the codes see"
    formula: ClassVar[str] = "s = max|x|^a / max|w|^(1 - a), a of least output error"
    source: ClassVar[str] = "SmoothQuant (arXiv:2211.10438)"

    def candidates(self, channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a candidate for each strength."""
        inputs, weights = channels.inputs.double().abs().amax(0), channels.largest_weights
        for strength in _STRENGTHS:
            yield f"strength {strength:g}", inputs**strength / weights ** (1 - strength)


STEP = Smoothing()
