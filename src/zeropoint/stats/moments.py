"""Second moments of a layer's inputs: the Gram matrix, which GPTQ needs, and its diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import RangeError, ShapeError
from .accumulator import Accumulator, State


@dataclass(frozen=True, kw_only=True)
class _OfFeatures(Accumulator):
    """An accumulator of vectors of ``features`` numbers, which lie along the last axis."""

    features: int

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 1:
            raise RangeError(f"features (={self.features!r}) must be a whole number, at least 1")

    def check(self, x: torch.Tensor) -> None:
        """Raise ShapeError unless the last axis of ``x`` holds the features."""
        super().check(x)
        if x.ndim == 0 or x.shape[-1] != self.features:
            raise ShapeError(
                f"x (shape {tuple(x.shape)}) must have {self.features} features along its last axis; give "
                "the accumulator the number of inputs of its layer"
            )

    def vectors(self, x: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Return the finite vectors of ``x``, (vectors, features) float64, and the counts of a state."""
        self.check(x)
        rows = x.detach().reshape(-1, self.features).double()
        good = torch.isfinite(rows).all(1)
        kept = rows if bool(good.all()) else rows[good]
        return kept, {
            "vectors": torch.tensor(len(kept), device=x.device),
            "seen": torch.tensor(kept.numel(), device=x.device),
            "left_out": torch.tensor(x.numel() - kept.numel(), device=x.device),
        }

    def counts(self) -> State:
        """Return the counts of no data."""
        return {name: torch.zeros((), dtype=torch.int64) for name in ("vectors", "seen", "left_out")}


@dataclass(frozen=True, kw_only=True)
class GramMatrix(_OfFeatures):
    """``X^T X`` over all input vectors, in float64: the Hessian of a layer's squared output error, halved.

    A vector with a value that is not finite is left out as a whole. State: ``gram`` (features, features)
    float64 and ``vectors``, the number of them. Source: GPTQ (arXiv:2210.17323), section 2.

    Args:
        features: of an input vector.

    Example:
        >>> gram = GramMatrix(features=2)
        >>> gram.update(gram.start(), torch.tensor([[1.0, 2.0], [3.0, 0.0]]))["gram"]
        tensor([[10.,  2.],
                [ 2.,  4.]], dtype=torch.float64)
    """

    def start(self) -> State:
        """Return the Gram matrix of no vectors."""
        return {"gram": torch.zeros(self.features, self.features, dtype=torch.float64), **self.counts()}

    def measure(self, x: torch.Tensor) -> State:
        """Return the Gram matrix of one batch; raises ShapeError for another number of features."""
        rows, counts = self.vectors(x)
        return {"gram": rows.T @ rows, **counts}


@dataclass(frozen=True, kw_only=True)
class MeanSquare(_OfFeatures):
    """The mean of ``x^2`` of each feature, the diagonal of the Gram matrix: llama.cpp's importance matrix.

    A vector with a value that is not finite is left out as a whole. State: ``squares`` (features,) float64
    and ``vectors``.

    Args:
        features: of an input vector.

    Example:
        >>> square = MeanSquare(features=2)
        >>> square.mean(square.update(square.start(), torch.tensor([[1.0, 2.0], [3.0, 0.0]])))
        tensor([5., 2.], dtype=torch.float64)
    """

    def start(self) -> State:
        """Return sums over no vectors."""
        return {"squares": torch.zeros(self.features, dtype=torch.float64), **self.counts()}

    def measure(self, x: torch.Tensor) -> State:
        """Return the sums of one batch; raises ShapeError for another number of features."""
        rows, counts = self.vectors(x)
        return {"squares": rows.square().sum(0), **counts}

    def mean(self, state: State) -> torch.Tensor:
        """Return the mean square of each feature, (features,) float64; zeros without data.

        Args:
            state: a state of this accumulator.
        """
        return state["squares"] / state["vectors"].clamp(min=1)
