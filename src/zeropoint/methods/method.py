"""The method protocol: from weight, scheme and statistics to codes and report.

To add one, write a module in this package that defines ``METHOD``; its name is the module's name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from ..errors import UnsupportedError
from ..functional import row_errors
from ..ops.rotation import Rotation
from ..ops.row_errors import RowErrors
from ..schemes import Scheme
from ..tensor import QuantizedTensor

if TYPE_CHECKING:  # statistics are loaded where they are needed
    from ..stats import Accumulator, Statistics

MEAN_SQUARE = "mean_square"
"""The name of statistics that an importance matrix of llama.cpp holds."""
GRAM, CROSS, SUMS = "gram", "cross_gram", "pair_sums"
"""Statistics whose methods are solved in the order in which layers run."""
NO_CHANGES: Mapping[str, torch.Tensor] = MappingProxyType({})
NO_STATISTICS: Mapping[str, Statistics] = MappingProxyType({})
Needs: TypeAlias = "Mapping[str, Callable[[int], Accumulator]]"
"""By name, the accumulator of a layer's inputs for their number of features."""
NO_NEEDS: Needs = MappingProxyType({})


class Scope(enum.Enum):
    """The part of a weight that a method needs at once."""

    BLOCKS = "blocks"
    """Whole blocks that share parameters: such a part of a weight gets the codes that it has in the whole."""
    ROWS = "rows"
    """Whole rows, and whole blocks of them."""
    LAYER = "layer"
    """The whole weight of a layer."""
    BLOCK = "block"
    """All layers of a block of the model, which runs on data."""
    GROUP = "group"
    """Several layers, which share changes."""
    MODEL = "model"
    """All layers."""


class Bound(enum.Enum):
    """The limit on errors of a method's codes under stored scales."""

    SCHEME = "scheme"
    """The scheme: its rules pick the scales, and the closest codes are taken."""
    ROUNDING = "rounding"
    """Rounding, beyond what is clipped: the closest codes under scales that the method picks."""
    OUTPUT = "output"
    """Error feedback: of outputs on the statistics, where nothing clips (:mod:`.output_bound`)."""
    NONE = "none"
    """Nothing: codes are not always the closest under the scales as they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some input vectors of a layer, (vectors, columns) float32.

    Args:
        inputs: as the layer gets them where the layers before it are quantized.
        floats: the same ones where no layer is.
    """

    inputs: torch.Tensor
    floats: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerData:
    """A layer's data besides its weight and scheme.

    Args:
        statistics: of the layer's inputs, by the names in :attr:`Method.needs`.
        extremes: smallest and largest value of the whole tensor where the weight is a part of it.
        mean: mean of the scales of the whole tensor, where a layout stores them less it.
        codes: the source codes of the weight, for methods that convert them.
        out: an earlier result for the same scheme, shape and dtype, whose memory is used again.
        seen, held_out: vectors that are in the statistics, and others, to measure losses on.
        solved: the codes, where they are known already.
        low_rank: the layer's summand to the product with solved codes.
        own: how many vectors of the layer's own are in the statistics, which an expert also borrows.
    """

    statistics: Mapping[str, Statistics] = field(default_factory=lambda: NO_STATISTICS)
    extremes: tuple[float, float] | None = None
    mean: float | None = None
    codes: QuantizedTensor | None = None
    out: QuantizedTensor | None = None
    seen: Samples | None = None
    held_out: Samples | None = None
    solved: QuantizedTensor | None = None
    low_rank: LowRank | None = None
    own: int = 0


NO_DATA = LayerData()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a weight's codes are from it.

    Args:
        squares, squared_error: sums of squares of the values and of the errors.
        largest: largest error.
        clipped: values past the last code.
    """

    squares: float
    squared_error: float
    largest: float
    clipped: int

    @property
    def relative(self) -> float:
        """Root of relative squared error; 0 for a weight of zeros."""
        return (self.squared_error / self.squares) ** 0.5 if self.squares else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    """Output error on statistics and its bound, as shares of squared outputs.

    loss: of the codes, against the target. bound: the most that it can be where no row clips. over: rows of
    more than their bound, in which something clips. statistics: SHA-256 of the sums of the Gram matrix.
    """

    loss: float
    bound: float
    over: int
    statistics: str

    @property
    def text(self) -> str:
        """The error and its bound, in words."""
        return f"{self.loss:.3%} of the squares of outputs, and at most {self.bound:.3%} where nothing clips"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A product of two narrow matrices, added to a layer's output.

    left: (rows, rank). right: (rank, columns).
    """

    left: torch.Tensor
    right: torch.Tensor

    def product(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix of full size, computed in ``dtype``, (rows, columns)."""
        return self.left.to(dtype) @ self.right.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """A layer's quantized weight, changes and errors.

    Args:
        q: the weight in codes, or the rotated weight where there is a ``rotation``.
        rotation: the transform of the input before it is multiplied with ``q``, or None.
        changes: summands to other parameters of the layer, by name, float32.
        errors: how far each row is from the weight, where the method had to find that out.
        notes: what the steps of a chain found.
        outputs: the error of outputs on the statistics, against the target, and its bound, where it is known.
        low_rank: the layer's summand to the product with its codes, or None.
    """

    q: QuantizedTensor
    changes: Mapping[str, torch.Tensor] = field(default_factory=lambda: NO_CHANGES)
    rotation: Rotation | None = None
    errors: RowErrors | None = None
    notes: tuple[str, ...] = ()
    outputs: OutputError | None = None
    low_rank: LowRank | None = None

    def on(self, device: torch.device) -> LayerResult:
        """Return codes and changes on a device.

        Args:
            device: where they are wanted.
        """
        return replace(
            self, q=self.q.to(device), changes={name: x.to(device) for name, x in self.changes.items()}
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the deployed weight: rotated back where codes are rotated.

        Args:
            dtype: of the result; the weight's if None.
        """
        values = self.q.dequantize(dtype)
        if self.low_rank is not None:
            values = (values.float() + self.low_rank.product(torch.float32)).to(values.dtype)
        return values if self.rotation is None else self.rotation.unrotate(values)

    def report(self, weight: torch.Tensor) -> Report:
        """Return the error of the codes against ``weight``, the quantized tensor.

        Rotated codes are compared with the rotated weight: sums of squares are the same.

        Args:
            weight: the float weight.
        """
        if self.low_rank is not None:
            weight = weight - self.low_rank.product(torch.float32).to(weight.dtype)
        errors = row_errors(weight if self.rotation is None else self.rotation.rotate(weight), self.q)
        return Report(
            squares=float(errors.squares.sum()),
            squared_error=float(errors.errors.sum()),
            largest=float(errors.largest.max(initial=0.0)),
            clipped=int(errors.clipped.sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Output error relative to the float model, as shares of squares.

    Args:
        vectors: of inputs that were learned from, with borrowed ones of an expert.
        own: the same without borrowed ones.
        seen, held_out: the loss on some of these, and on others; None where there are none.
        notes: what the steps of a chain found.
        outputs: the error on all vectors that were learned from, against the target of the codes, and its
            bound, if known.
        together: where the weights of a block were rounded together, the error of the block's output against
            the float model before and after, as shares of its squares on held-out windows.
    """

    vectors: int = 0
    own: int = 0
    seen: float | None = None
    held_out: float | None = None
    notes: tuple[str, ...] = ()
    outputs: OutputError | None = None
    together: tuple[float, float] | None = None


class Method(Protocol):
    """An algorithm that quantizes one layer's weight; a stateless value.

    name: its module's name, as recipes and the command line spell it. formula: what it minimizes or
    computes. source: the paper or standard. needs: empty for a method without data, as by default. takes: the
    statistics that it uses if present, needed ones included; by default these alone.

    Of methods, ``scheme`` is the weight's.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (see the class)

    @property
    def formula(self) -> str: ...  # noqa: D102

    @property
    def source(self) -> str: ...  # noqa: D102

    @property
    def needs(self) -> Needs:  # noqa: D102
        return NO_NEEDS

    @property
    def takes(self) -> Needs:  # noqa: D102
        return self.needs

    def scope(self, scheme: Scheme) -> Scope:
        """Return the part of a weight needed at once under ``scheme``."""

    def refusal(self, scheme: Scheme) -> str | None:  # noqa: ARG002 (none by default)
        """Return the reason and remedy for an unsupported scheme, or None."""
        return None

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (the same for most)
        """Return the limit on errors of results under ``scheme``; by default rounding."""
        return Bound.ROUNDING

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the bytes per value besides the weight and its codes."""

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes.

        Args:
            weight: finite, of the dtypes of :func:`zeropoint.quantize`; a part of a larger one where the
                scope allows.
            data: statistics of the inputs of the layer.

        Raises:
            UnsupportedError: for a scheme with a refusal.
            CalibrationError: where statistics are missing, and what :func:`zeropoint.quantize` raises.
        """


def require_scheme(method: Method, scheme: Scheme) -> None:
    """Raise UnsupportedError for a scheme that a method refuses."""
    refusal = method.refusal(scheme)
    if refusal is not None:
        raise UnsupportedError(refusal)
