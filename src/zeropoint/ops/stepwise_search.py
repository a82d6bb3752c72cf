"""Stepwise search from given scales and zero points, without candidate windows.

Zero points of whole codes are fitted with their scales (:mod:`.affine_fits`). Coarse scales, scales under
offsets, and other powers of errors are searched in steps. Each block keeps the best of all trials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..params import QuantizationParams
from ..params.ladder import Ladder
from ..params.scale_windows import SHRINKING
from ..schemes import ZeroPoint
from .affine_fits import fits_affine, fitted_parameters
from .block_errors import Piece

_ZERO_POINT_MOVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One level's float64 scales, zero points, and block errors."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    error: torch.Tensor


class StepwiseSearch:
    """Search of one level's scales, each block by its own errors."""

    def __init__(self, piece: Piece, params: QuantizationParams, index: int) -> None:
        self._piece, self._params, self._index = piece, params, index
        self._wide, self._level = piece.wide, params.scheme.scales[index]
        self._ladder = Ladder.of(self._level, piece.x.dtype)
        # Zero points go with the finest scales.
        self._zero = params.zero_point if index == 0 else None

    def run(self) -> QuantizationParams:
        """Return the parameters with the best scales that were found."""
        start = self._tried(self._ladder.load(self._params.scales[self._index]), self._zero)
        scheme, piece = self._params.scheme, self._piece
        if piece.power == 2 and fits_affine(scheme):
            # A rule promises how far scales shrink, and not all fits do as it says.
            best = self._fitted(start if scheme.search is None else self._stepped(start))
            return self._made(best.scale, best.zero)
        best = self._stepped(start)
        return self._made(best.scale, best.zero)

    def _stepped(self, start: _Found) -> _Found:
        """Return the best scales, and zero points, in steps from the start."""
        best = self._climb(start, self._climb(start, start, up=True))
        if self._zero is not None:
            for end in self._ends():
                best = self._climb(start, best, end=end)
        best = self._refined(best)
        if self._zero is not None:
            best = self._refined(self._shifted(best))
        return best

    def _fitted(self, start: _Found) -> _Found:
        """Return the parameters that fit codes best, or the start."""
        scale, zero = fitted_parameters(self._piece, self._params.scheme, self._params.shape)
        near = torch.where(scale > 0, self._ladder.near(scale), start.scale)
        best = self._better(start, near, self._whole(zero))
        # The scale was rounded to its format.
        return self._shifted(best) if self._params.scheme.zero_point is ZeroPoint.REAL else best

    def _made(self, scale: torch.Tensor, zero: torch.Tensor | None) -> QuantizationParams:
        scales = list(self._params.scales)
        scales[self._index] = self._ladder.store(scale)
        kept = self._params.zero_point if zero is None else zero
        return replace(self._params, scales=tuple(scales), zero_point=kept)

    def _tried(self, scale: torch.Tensor, zero: torch.Tensor | None) -> _Found:
        """Return the errors under scales that the level can store."""
        error = self._piece.errors(self._made(scale, zero), self._level.granularity)
        if self._params.scheme.search is not None:
            # A rule promises how far a block can reach past its codes.
            least = self._ladder.load(self._params.scales[self._index]) / SHRINKING
            error = torch.where(scale < least, torch.inf, error)
        return _Found(scale=scale, zero=zero, error=error)

    def _decoded(self, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Return the float64 values of codes under parameters."""
        return self._piece.decoded(self._made(scale, zero))

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum over each block of the level."""
        return self._piece.sums(values, self._level.granularity)

    def _better(self, best: _Found, scale: torch.Tensor, zero: torch.Tensor | None) -> _Found:
        """Return ``best`` with blocks replaced whose error is smaller."""
        tried = self._tried(scale, zero)
        return _merged(tried.error < best.error, tried, best)

    def _climb(self, start: _Found, best: _Found, *, up: bool = False, end: float | None = None) -> _Found:
        """Step through scales below or above the start while any block gains.

        end: the code whose value stays where it is; the code of zero if None. A block stops after as many
        steps in a row without gain as :attr:`Ladder.patience` says.
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
        """Try scales between the steps, and twice the codes' least-squares scale."""
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
        """Move zero points: integers by one, reals to zero mean error."""
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
        """Return zero points that keep ``end``'s value; ratio: old/new scales."""
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
