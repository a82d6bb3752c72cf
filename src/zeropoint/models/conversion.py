"""What became of a model and of each of its layers, to be printed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import size_of
from ..recipes import Assignment, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one layer.

    gives: its schemes, or None with the reason why it was left alone. nbytes: of its weights before and now;
    those that are tied to an earlier layer's, whose name is ``tied_to``, count there. error: root of the
    squared error over the squared weights.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    gives: Assignment | None
    reason: str
    nbytes: tuple[int, int]
    error: float
    tied_to: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        facts = f"{self.name or 'model'} ({f'{self.type} {shape}'.strip()})"
        if self.gives is None:
            return f"{facts}: kept, {self.reason}"
        if self.gives.weight is None:
            return f"{facts}: {self.gives}"
        if self.tied_to:
            return f"{facts}: {self.gives}; its weight is that of {self.tied_to}"
        share = self.nbytes[1] / self.nbytes[0] if self.nbytes[0] else 0.0
        return f"{facts}: {self.gives}; {share:.1%} of the original size, error {self.error:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted model, and what became of each layer that has parameters, in the model's order."""

    model: nn.Module
    layers: tuple[Converted, ...]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all these weights before and now; tied ones count once."""
        return sum(layer.nbytes[0] for layer in self.layers), sum(layer.nbytes[1] for layer in self.layers)

    def __str__(self) -> str:
        before, now = self.nbytes
        lines = [
            *map(str, self.layers),
            f"weights: {size_of(before)} -> {size_of(now)} ({now / max(1, before):.1%})",
        ]
        return "\n".join(lines)


def weight_bytes(module: nn.Module, counted: set[int]) -> int:
    """Return the bytes of a layer's own weights, biases left out, that are not counted yet; count them.

    Those of a parametrized layer are what its weights are computed from.
    """
    own = module.parameters(recurse=is_parametrized(module))
    weights = [p for p in own if p.ndim > 1 and id(p) not in counted]
    counted.update(map(id, weights))
    return sum(weight.nbytes for weight in weights)


def kept_layer(module: nn.Module, decision: Decision, counted: set[int]) -> Converted:
    """Return what is told of a layer that a decision leaves alone; ``counted`` as in :func:`weight_bytes`."""
    subject, nbytes = decision.subject, weight_bytes(module, counted)
    return Converted(
        name=subject.name,
        type=subject.type,
        shape=subject.shape,
        gives=None,
        reason=decision.rule.reason,
        nbytes=(nbytes, nbytes),
        error=0.0,
    )
