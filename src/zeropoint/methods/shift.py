r"""Shift of a weight that compensates input errors from earlier quantized layers.

    minimize over V:  |W X - V X~|^2     =>     V = W + W (X - X~) X~^T (X~ X~^T)^-1
    target = W + a W (X - X~) X~^T (X~ X~^T + damping)^-1,      0 <= a <= 1

X are the inputs in the float model, X~ the inputs where the layers before are quantized. Codes that come
close to the target on X~ then come close to W X. The strength a is half of the one that has the least error
on vectors that are held out: the best for each layer alone is too much for the model, since every layer makes
up for the same error, and other texts differ more than held-out parts of one (docs/evidence/methods.md).

GPTAQ (arXiv:2504.02692), QEP (arXiv:2504.09629) and Qronos (arXiv:2505.11695) minimize the same error, with
strengths of 0.25, 0.5 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from ..errors import CalibrationError
from ..ops.feedback import product, solve
from ..schemes import Scheme
from ..stats import CrossGram, GramMatrix
from .factored import factored
from .input_statistics import statistics_of
from .method import CROSS, GRAM, LayerData, Needs, Samples
from .step import Moved

UNKNOWN = 0.25
"""The strength where nothing is held out: GPTAQ's."""
_CAUTION = 0.5
"""Share of the best strength that is taken."""
_STEPS = 16
"""Strengths are multiples of its inverse, so that no rounding of a sum decides about codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Compensate for errors of the inputs."""

    name: ClassVar[str] = "shift"
    rank: ClassVar[int] = 5
    reason: ClassVar[str] = "it compensates for errors of the inputs that the codes will see"
    formula: ClassVar[str] = "W + a W (X - X~) X~^T (X~ X~^T + damping)^-1"
    source: ClassVar[str] = "GPTAQ (arXiv:2504.02692), QEP (arXiv:2504.09629), Qronos (arXiv:2505.11695)"
    takes: ClassVar[Needs] = MappingProxyType(
        {
            GRAM: lambda features: GramMatrix(features=features),
            CROSS: lambda features: CrossGram(features=features),
        }
    )

    def __call__(
        self,
        weight: torch.Tensor,
        target: torch.Tensor,
        data: LayerData,
        scheme: Scheme,  # noqa: ARG002 (as the protocol)
    ) -> Moved:
        """Return the shifted target; raises CalibrationError without statistics of both inputs."""
        seen = statistics_of(weight, data, GRAM, GramMatrix, self.name)
        cross = data.statistics.get(CROSS)
        if cross is None:
            raise CalibrationError(
                f"step {self.name} needs inputs of the float and of the quantized model; calibrate a "
                "model, or a checkpoint, with data"
            )
        whole = factored(seen)
        mean = cross["cross"] / int(cross["vectors"])
        wide = weight.double()
        full = solve(product(wide, mean), whole.upper, whole.pivots, whole.order)
        strength = _strength(wide, full, data.held_out)
        return Moved(target=target + strength * full, note=f"strength {strength:g}")


STEP = Shift()


def _strength(weight: torch.Tensor, full: torch.Tensor, held_out: Samples | None) -> float:
    """Return half of the best strength on held-out vectors, in closed form.

    weight, full: the weight and the full correction, (rows, columns).
    """
    if held_out is None:
        return UNKNOWN
    missed = product(weight, (held_out.floats - held_out.inputs).T)
    moved = product(full, held_out.inputs.T)
    size = float(moved.square().sum())
    best = float((missed * moved).sum()) / size if size > 0 else 0.0
    return round(min(1.0, max(0.0, best)) * _CAUTION * _STEPS) / _STEPS
