r"""AWQ: channels rescaled by input size, so important weights lose less.

    s = mean(|x|)^r                    or    s = mean(|x|)^r / mean(|w|)^(1 - r)

for some r between 0 and 1; the one of least output error is taken, see :mod:`.rescaling`.

Source: Lin et al., AWQ, arXiv:2306.00978; the second form is from its later releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .rescaling import Channels

_ALONE, _OVER_WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7), (0.1, 0.2, 0.3, 0.5)
"""Powers of the two forms; models that were looked at take 0.1 to 0.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationAware:
    """Rescale channels by the mean magnitude of inputs."""

    name: ClassVar[str] = "awq"
    rank: ClassVar[int] = 2
    reason: ClassVar[str] = "it rescales what later steps and the codes see"
    formula: ClassVar[str] = "s = mean|x|^r, or mean|x|^r / mean|w|^(1 - r), r of least output error"
    source: ClassVar[str] = "AWQ (arXiv:2306.00978)"

    def candidates(self, channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield both forms for each power."""
        inputs = channels.inputs.double().abs().mean(0)
        weights = torch.stack([reader.weight.double().abs().mean(0) for reader in channels.readers]).mean(0)
        for power in _ALONE:
            yield f"inputs^{power:g}", inputs**power
        for power in _OVER_WEIGHTS:
            yield f"inputs^{power:g} / weights^{1 - power:g}", inputs**power / weights ** (1 - power)


STEP = ActivationAware()
