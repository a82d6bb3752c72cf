"""Moments of a layer's inputs: Gram matrix, its diagonal, pair moments."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from ..errors import RangeError, ShapeError, UnsupportedError
from ..ops.feedback import gram, squares
from .accumulator import Accumulator, State, on_device


@dataclass(frozen=True, kw_only=True)
class _OfFeatures(Accumulator):
    """Base of accumulators of feature vectors along the last axis."""

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

    def measure(self, x: torch.Tensor) -> State:
        """Return the state of one batch; ShapeError for other features."""
        return self.update(self.start(), x)

    def vectors(self, x: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Return the finite vectors of ``x``, (vectors, features), and state counts."""
        self.check(x)
        rows = x.detach().reshape(-1, self.features)
        kept = rows if _is_finite(rows) else rows[torch.isfinite(rows).all(1)]
        return kept, _counts_of(kept, x)

    def counts(self) -> State:
        """Return the counts of no data."""
        return {name: torch.zeros((), dtype=torch.int64) for name in ("vectors", "seen", "left_out")}


def _is_finite(rows: torch.Tensor) -> bool:
    """Whether all numbers are finite, from one read."""
    return rows.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all())


def _counts_of(kept: torch.Tensor, x: torch.Tensor) -> State:
    """Return a state's counts for the kept vectors of ``x``."""
    return {
        "vectors": torch.tensor(len(kept), device=x.device),
        "seen": torch.tensor(kept.numel(), device=x.device),
        "left_out": torch.tensor(x.numel() - kept.numel(), device=x.device),
    }


def _joined(state: State, name: str, found: torch.Tensor, counts: State) -> State:
    """Return a state with sums ``found`` and counts grown by ``counts``."""
    return {name: found, **{key: state[key] + more for key, more in counts.items()}}


@dataclass(frozen=True, kw_only=True)
class GramMatrix(_OfFeatures):
    """``X^T X`` over all input vectors, float64, for GPTQ.

    Half the Hessian of a layer's squared output error. Numbers are rounded to 12 significant bits, and 64
    vectors are summed in float32; see :func:`zeropoint.ops.feedback.gram`. One update with many vectors and
    several with multiples of 64 of them, all finite, give the same bytes. A vector with a value that is not
    finite is left out as a whole. State: ``gram`` (features, features) float64 and ``vectors``, the number of
    them. Source: GPTQ (arXiv:2210.17323), section 2.

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

    def update(self, state: State, x: torch.Tensor) -> State:
        """Return ``state`` after one more batch, added in order."""
        state = on_device(x.device, state)
        rows, counts = self.vectors(x)
        return _joined(state, "gram", gram(rows, into=state["gram"]), counts)


@dataclass(frozen=True, kw_only=True)
class MeanSquare(_OfFeatures):
    """Mean of ``x^2`` per feature: llama.cpp's importance matrix, the Gram diagonal.

    Squares are added in float64 in the order of vectors, so that batches of any size give the same bytes. A
    vector with a value that is not finite is left out as a whole. State: ``squares`` (features,) float64 and
    ``vectors``.

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

    def update(self, state: State, x: torch.Tensor) -> State:
        """Return ``state`` after one more batch, added in order."""
        state = on_device(x.device, state)
        rows, counts = self.vectors(x)
        return _joined(state, "squares", squares(rows, into=state["squares"]), counts)

    def mean(self, state: State) -> torch.Tensor:
        """Return the mean square of each feature, (features,) float64; zeros without data.

        Args:
            state: a state of this accumulator.
        """
        return state["squares"] / state["vectors"].clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class _OfPairs(_OfFeatures):
    """Base of accumulators over pairs of float and quantized-model inputs."""

    def measure(self, x: torch.Tensor) -> State:
        """Raise UnsupportedError: one batch is half of a pair."""
        raise UnsupportedError(
            f"{type(self).__name__} measures pairs of inputs, and a tensor of shape {tuple(x.shape)} is one; "
            "use measure_pair(float_inputs, inputs)"
        )

    def measure_pair(self, float_inputs: torch.Tensor, inputs: torch.Tensor) -> State:
        """Return the state of one batch.

        Args:
            float_inputs: of the layer in the float model, the features along their last axis.
            inputs: of the layer after quantized ones, of the same shape.

        Raises:
            ShapeError: for another number of features, or two shapes.
        """
        return self.update_pair(self.start(), float_inputs, inputs)

    @abstractmethod
    def update_pair(self, state: State, float_inputs: torch.Tensor, inputs: torch.Tensor) -> State:
        """Return ``state`` after one more batch, added in order.

        Args:
            state: a state of this accumulator, which is not changed.
            float_inputs, inputs: as :meth:`measure_pair` takes them.

        Raises:
            ShapeError: for another number of features, or two shapes.
        """

    def pairs(self, float_inputs: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 differences and inputs of finite pairs, or raise ShapeError."""
        self.check(float_inputs)
        self.check(inputs)
        if float_inputs.shape != inputs.shape:
            raise ShapeError(
                f"float_inputs (shape {tuple(float_inputs.shape)}) must be of the same vectors as inputs "
                f"(shape {tuple(inputs.shape)})"
            )
        near = inputs.detach().reshape(-1, self.features)
        difference = float_inputs.detach().reshape(-1, self.features).float() - near.float()
        # It is not finite where one of both is not.
        if not _is_finite(difference):
            good = torch.isfinite(difference).all(1)
            near, difference = near[good], difference[good]
        return difference, near


@dataclass(frozen=True, kw_only=True)
class CrossGram(_OfPairs):
    """Cross moments ``(X - X~)^T X~`` of a layer's inputs, float64.

    X are the inputs in the float model, X~ after quantized layers. The difference is rounded to float32; sums
    follow :class:`GramMatrix`. A pair of vectors with a value that is not finite is left out as a whole.
    State: ``cross`` (features, features) float64 and ``vectors``, the number of pairs. Source: QEP
    (arXiv:2504.09629), section 4.

    Args:
        features: of an input vector.

    Example:
        >>> cross = CrossGram(features=2)
        >>> cross.measure_pair(torch.tensor([[1.5, 2.0]]), torch.tensor([[1.0, 4.0]]))["cross"]
        tensor([[ 0.5000,  2.0000],
                [-2.0000, -8.0000]], dtype=torch.float64)
    """

    def start(self) -> State:
        """Return the matrix of no pairs."""
        return {"cross": torch.zeros(self.features, self.features, dtype=torch.float64), **self.counts()}

    def update_pair(self, state: State, float_inputs: torch.Tensor, inputs: torch.Tensor) -> State:
        """Return ``state`` after one more batch of pairs, added in order."""
        state = on_device(inputs.device, state)
        difference, near = self.pairs(float_inputs, inputs)
        return _joined(state, "cross", gram(difference, near, into=state["cross"]), _counts_of(near, inputs))


@dataclass(frozen=True, kw_only=True)
class PairSums(_OfPairs):
    """Float64 sums of X~ and of X - X~, for their means.

    X~ are a layer's inputs after quantized layers. The difference is rounded to float32; sums follow
    :class:`GramMatrix`, with vectors of ones. A pair of vectors with a value that is not finite is left out
    as a whole. State: ``difference`` and ``inputs``, (features,) float64, and ``vectors``, the number of
    pairs.

    Args:
        features: of an input vector.

    Example:
        >>> sums = PairSums(features=2)
        >>> state = sums.measure_pair(torch.tensor([[1.5, 2.0]]), torch.tensor([[1.0, 4.0]]))
        >>> state["difference"], state["inputs"]
        (tensor([ 0.5000, -2.0000], dtype=torch.float64), tensor([1., 4.], dtype=torch.float64))
    """

    def start(self) -> State:
        """Return the sums of no pairs."""
        zeros = torch.zeros(self.features, dtype=torch.float64)
        return {"difference": zeros, "inputs": zeros.clone(), **self.counts()}

    def update_pair(self, state: State, float_inputs: torch.Tensor, inputs: torch.Tensor) -> State:
        """Return ``state`` after one more batch of pairs, added in order."""
        state = on_device(inputs.device, state)
        difference, near = self.pairs(float_inputs, inputs)
        ones = near.new_ones(len(near), 1)
        counts = _counts_of(near, inputs)
        found = {
            name: gram(ones.to(x.dtype), x, into=state[name].unsqueeze(0))[0]
            for name, x in (("difference", difference), ("inputs", near))
        }
        return {**found, **{name: state[name] + more for name, more in counts.items()}}
