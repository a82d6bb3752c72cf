"""The scale of least squared error for each block: a search over the scales that the scheme can store.

    minimize over s, z:   sum_i (dequantize(quantize(w_i; s, z)) - w_i)^2        for each block

Each block is searched by itself, from the scale that round-to-nearest gives, and changed only where its error
gets smaller: no block is worse than under ``nearest``. Blocks of a coarser level are searched before those of
a finer one; offsets, and a scale of the whole tensor above others, stay as they are: rows are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import ClassVar

import torch

from ..errors import UnsupportedError
from ..formats import RoundingMode
from ..formats.torch_dtypes import wide_dtype
from ..functional import quantize
from ..layout.blocks import pairwise_sums
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..params.tensors import granularities
from ..schemes import Granularity, Scheme, ZeroPoint
from ..schemes.scale_rules import Store
from ..stats import Accumulator
from ..tensor import QuantizedTensor
from .ladder import Ladder
from .method import NO_DATA, NO_NEEDS, Bound, LayerData, LayerResult, Scope
from .nearest import METHOD as NEAREST

PIECE = 1 << 16
"""Values that are searched at once, whose temporaries stay in cache."""
LAYER_BYTES = 48
"""Memory that each value takes where all of them are searched at once."""
_ALL = 1 << 62
"""Height of a block that has all rows of any weight."""
_ZERO_POINT_MOVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastSquaredError:
    """Search the scale, and zero point, of least squared error for each block."""

    name: ClassVar[str] = "mse"
    formula: ClassVar[str] = "argmin over s, z of sum (dequantize(quantize(w; s, z)) - w)^2, for each block"
    source: ClassVar[str] = (
        "a sweep over the codes of block scales, as ScaleSweep does for NVFP4; a line search for others"
    )
    needs: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = NO_NEEDS

    def scope(self, scheme: Scheme) -> Scope:
        """Blocks, unless the scale that is searched is that of the whole tensor."""
        searched = (scheme.scales[index].granularity for index in _searched(scheme))
        return Scope.LAYER if Granularity.tensor() in searched else Scope.BLOCKS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse casts, random rounding, and scales that are rounded after the elements were encoded."""
        return unsearchable(self.name, scheme)

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (the same for all)
        """Return that of rounding: scales clip where that helps."""
        return Bound.ROUNDING

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of the temporaries of a whole weight; those of pieces do not grow with it."""
        return LAYER_BYTES if self.scope(scheme) is Scope.LAYER else 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes whose squared error is at most that of ``nearest`` in every block.

        Raises UnsupportedError for a scheme with a refusal, and what :func:`zeropoint.quantize` raises.

        >>> METHOD.quantize(
        ...     torch.tensor([[1.0, 1.0, 0.95, 1.6]]), Scheme.parse("int2:channel")
        ... ).q.dequantize()
        tensor([[1.1375, 1.1375, 1.1375, 1.1375]])
        """
        refusal = self.refusal(scheme)
        if refusal is not None:
            raise UnsupportedError(refusal)
        return searched(weight, NEAREST.quantize(weight, scheme, data).q)


METHOD = LeastSquaredError()


def unsearchable(name: str, scheme: Scheme) -> str | None:
    """Return why the method ``name`` finds no scales for ``scheme`` by trying them, or None."""
    if not scheme.scales:
        return f"method {name} chooses scales, and {scheme} has none; use method nearest"
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        return f"method {name} compares errors, which {scheme} draws at random; use half_even"
    if any(level.stores(Store.LATE) for level in scheme.levels):
        return f"method {name} encodes with stored scales, and {scheme} rounds them later; use method nearest"
    return None


def searched(
    weight: torch.Tensor, start: QuantizedTensor, importance: torch.Tensor | None = None
) -> LayerResult:
    """Return ``weight`` under the scales of least error that are found from those of ``start``.

    importance: weights of the squared errors, float64, broadcast against ``weight``; all alike if None.
    """
    if weight.numel() == 0:
        return LayerResult(q=start)
    weights = None if importance is None else importance.expand(weight.shape)
    with torch.no_grad(), gradual_underflow():
        found = [
            _searched_params(x, params, None if weights is None else weights[rows])
            for rows, x, params in _pieces(weight.detach(), start.params)
        ]
    return LayerResult(q=quantize(weight, _joined(start.params, found), out=start))


def _searched(scheme: Scheme) -> list[int]:
    """Return the levels that are searched, coarsest first: not that of the tensor above others."""
    last = len(scheme.scales) - 1
    fixed = last > 0 and scheme.scales[last].granularity == Granularity.tensor()
    return list(reversed(range(last if fixed else last + 1)))


def _heights(scheme: Scheme, shape: tuple[int, ...]) -> list[int]:
    """Return how many entries of the first axis share a number of each parameter; _ALL where all do."""
    return [blocks.block_shape((_ALL, *shape[1:]))[0] for blocks in granularities(scheme)]


def _pieces(
    weight: torch.Tensor, params: QuantizationParams
) -> Iterator[tuple[slice | EllipsisType, torch.Tensor, QuantizationParams]]:
    """Yield places along the first axis, the parts of ``weight`` there, of whole blocks, and parameters."""
    shape, scheme = tuple(weight.shape), params.scheme
    if not shape:
        yield ..., weight, params
        return
    heights = _heights(scheme, shape)
    step = math.lcm(*(heights[index] for index in _searched(scheme)))
    step *= max(1, PIECE // max(1, step * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])

        def own(tensor: torch.Tensor, height: int, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor if height == _ALL else tensor[start // height : -(-stop // height)]

        stored = list(map(own, params.stored, heights))
        part = QuantizationParams.of(scheme, (stop - start, *shape[1:]), params.dtype, stored)
        yield slice(start, stop), weight[start:stop], part


def _joined(whole: QuantizationParams, parts: list[QuantizationParams]) -> QuantizationParams:
    """Return the parameters of a weight from those of its pieces."""
    if len(parts) == 1:
        return parts[0]
    heights = _heights(whole.scheme, whole.shape)
    stored = [
        values if height == _ALL else torch.cat([part.stored[index] for part in parts])
        for index, (values, height) in enumerate(zip(whole.stored, heights, strict=True))
    ]
    return QuantizationParams.of(whole.scheme, whole.shape, whole.dtype, stored)


def _searched_params(
    x: torch.Tensor, params: QuantizationParams, importance: torch.Tensor | None
) -> QuantizationParams:
    """Return parameters of least squared error for a piece, starting from ``params``."""
    for index in _searched(params.scheme):
        params = _Search(x, params, index, importance).run()
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Scales of one level as float64 values, zero points, and the squared error of each block."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    error: torch.Tensor


class _Search:
    """The search for the scales of one level, all blocks at once and each by its own errors alone."""

    def __init__(
        self, x: torch.Tensor, params: QuantizationParams, index: int, importance: torch.Tensor | None
    ) -> None:
        self._x, self._params, self._index, self._importance = x, params, index, importance
        self._wide, self._wide_dtype = x.double(), wide_dtype(x.dtype)
        self._level = params.scheme.scales[index]
        self._ladder = Ladder.of(self._level, x.dtype)
        # Zero points go with the finest scales.
        self._zero = params.zero_point if index == 0 else None

    def run(self) -> QuantizationParams:
        """Return the parameters with the best scales that were found."""
        start = self._tried(self._ladder.load(self._params.scales[self._index]), self._zero)
        best = self._climb(start, self._climb(start, start, up=True))
        if self._zero is not None:
            for end in self._ends():
                best = self._climb(start, best, end=end)
        best = self._refined(best)
        if self._zero is not None:
            best = self._refined(self._shifted(best))
        return self._made(best.scale, best.zero)

    def _made(self, scale: torch.Tensor, zero: torch.Tensor | None) -> QuantizationParams:
        scales = list(self._params.scales)
        scales[self._index] = self._ladder.store(scale)
        kept = self._params.zero_point if zero is None else zero
        return replace(self._params, scales=tuple(scales), zero_point=kept)

    def _tried(self, scale: torch.Tensor, zero: torch.Tensor | None) -> _Found:
        """Return the errors under scales that the level can store."""
        return _Found(
            scale=scale, zero=zero, error=self._sums((self._decoded(scale, zero) - self._wide).square())
        )

    def _decoded(self, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Return what the codes under these parameters decode to, float64."""
        return quantize(self._x, self._made(scale, zero)).dequantize(self._wide_dtype).double()

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each block of the level, each value times its importance."""
        weighted = values if self._importance is None else values * self._importance
        return pairwise_sums(weighted, self._level.granularity)

    def _better(self, best: _Found, scale: torch.Tensor, zero: torch.Tensor | None) -> _Found:
        """Return ``best`` with the blocks replaced whose error is smaller under these parameters."""
        tried = self._tried(scale, zero)
        return _merged(tried.error < best.error, tried, best)

    def _climb(self, start: _Found, best: _Found, *, up: bool = False, end: float | None = None) -> _Found:
        """Step through the scales below, or above, those of ``start`` while that helps a block now and then.

        end: the code whose value stays where it is; that of zero if None. A block stops after as many steps
        in a row without gain as :attr:`Ladder.patience` says.
        """
        alive, misses = best.error > 0, torch.zeros_like(best.error)
        for step in range(1, 1 + (self._ladder.above if up else self._ladder.below)):
            if not bool(alive.any()):
                break
            scale = self._ladder.step(start.scale, step if up else -step)
            zero = self._zero if end is None else self._anchored(start.scale / scale, end)
            tried = self._tried(scale, zero)
            gains = alive & (tried.error < best.error)
            best = _merged(gains, tried, best)
            misses = torch.where(gains, 0.0, misses + 1)
            alive &= misses < self._ladder.patience
        return best

    def _refined(self, best: _Found) -> _Found:
        """Try scales between the steps, and twice the least-squares scale of the codes themselves."""
        if not self._ladder.fine:
            return best
        for factor in self._ladder.fine:
            best = self._better(best, self._ladder.near(best.scale * factor), best.zero)
        for _ in range(2):
            decoded = self._decoded(best.scale, best.zero)
            share = self._sums(decoded * self._wide) / self._sums(decoded.square())
            share = torch.where(torch.isfinite(share) & (share > 0), share, 1.0)
            best = self._better(best, self._ladder.near(best.scale * share), best.zero)
        return best

    def _shifted(self, best: _Found) -> _Found:
        """Move zero points: whole ones by one at a time, real ones to where the mean error is zero."""
        assert best.zero is not None
        if self._params.scheme.zero_point is ZeroPoint.REAL:
            left = self._sums(self._wide - self._decoded(best.scale, best.zero))
            steps = left / self._sums(torch.ones_like(self._wide)) / best.scale
            return self._better(best, best.scale, self._whole(best.zero.double() - steps))
        for move in (1, -1) * _ZERO_POINT_MOVES:
            assert best.zero is not None
            best = self._better(best, best.scale, self._whole(best.zero.double() + move))
        return best

    def _ends(self) -> tuple[float, float]:
        """Return the smallest and the largest code in use."""
        scheme = self._params.scheme
        return float(scheme.qmin), float(scheme.qmax)

    def _anchored(self, ratio: torch.Tensor, end: float) -> torch.Tensor:
        """Return zero points that keep the value of the code ``end``; ratio: old scales over new ones."""
        assert self._zero is not None
        return self._whole(end - (end - self._zero.double()) * ratio)

    def _whole(self, zero: torch.Tensor) -> torch.Tensor:
        """Return zero points as the scheme keeps them."""
        assert self._zero is not None
        if self._params.scheme.zero_point is ZeroPoint.REAL:
            return torch.where(torch.isfinite(zero), zero, self._zero.double()).to(self._zero.dtype)
        low, high = self._ends()
        return zero.round().clamp(low, high).to(self._zero.dtype)


def _merged(mask: torch.Tensor, a: _Found, b: _Found) -> _Found:
    """Return ``a`` where ``mask`` holds, else ``b``."""
    zero = None
    if a.zero is not None and b.zero is not None:
        zero = torch.where(mask, a.zero, b.zero)
    return _Found(
        scale=torch.where(mask, a.scale, b.scale), zero=zero, error=torch.where(mask, a.error, b.error)
    )
