r"""Weight equalization: channels rescaled to one range on both sides.

    s_c = sqrt(max|w_c| of the layer before / max|w_c| of the layers that read it)

Needs no data. Behind a norm the layer before has no weights that are quantized, and ``s_c`` is
``1 / sqrt(max|w_c|)``. It is taken where outputs get a smaller error by it, see :mod:`.rescaling`.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction,
arXiv:1906.04721.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .rescaling import Channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalization:
    """Rescale channels by the ranges of the weights on their sides."""

    name: ClassVar[str] = "equalize"
    rank: ClassVar[int] = 1
    reason: ClassVar[str] = "it looks at weights alone, before steps that look at inputs"
    formula: ClassVar[str] = "s = sqrt(max|w| of the layer before / max|w| of the layer)"
    source: ClassVar[str] = "cross-layer equalization (arXiv:1906.04721)"

    def candidates(self, channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the one candidate."""
        given = 1.0 if channels.given is None else channels.given.double()
        yield "ranges", (given / channels.largest_weights) ** 0.5


STEP = Equalization()
