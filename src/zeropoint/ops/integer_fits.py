"""Least-squares scales of integer codes per block, in exact sums.

For codes q of a block x, ``S = (x . q) / ||q||^2`` is the scale of least squared error, and the gain
``(x . q)^2 / ||q||^2`` is its reduction of ``||x||^2``. Codes are taken under scales s_k in steps of a
factor ``r = 2 ** (1 / 32)`` over the window of :mod:`zeropoint.params.scale_windows`, then twice under the
scale that fits the best ones, and the codes of the largest gain are kept. With S* the best real scale of all
and q* its codes, S* q* is the projection of x on q*; some s_k is within ``delta = sqrt(r) - 1`` of it,
relatively, so that

    E(S)  <=  ||x - s_k q*||^2  =  E(S*) + (s_k - S*)^2 ||q*||^2  <=  E(S*) + delta^2 ||x||^2,

0.012 % of the block's squares. To round S to its format, off by at most u of itself, adds ``u^2 ||x||^2``.

No order of adding changes a digit: numbers are taken in fixed point, as integers of as many binary places as
keep sums of products within 30 bits for blocks of up to 128, and within float64 for longer ones. That is off
by at most ``sqrt(n) 2 ** -places ||x||`` and changes roots of errors by at most twice as much. In all, the
gap is below ``2 ** -12 ||x||^2`` for blocks of up to 2 ** 16 values. On normal numbers int4 and int3 have at
most a thousandth more error than under the best real scales; int8, whose error is small against
``||x||^2``, has a twentieth in groups of 128 and a fifth in groups of 16.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..formats import IntFormat
from ..formats.division import over
from ..layout.blocks import reduce_blocks, spread_blocks, sum_blocks
from ..params.scale_windows import block_length, window_of
from ..schemes import Scheme
from .block_errors import Piece

_PER_OCTAVE = 32
_REACH = 1.04
"""How far below the lower end of the window a scale may be that fits codes: less than scales in steps."""
FITS = 2
"""How often codes are taken under the scale that fits the best ones."""
SHORT = 128
"""Values of blocks whose sums 32 bits hold."""
_SHORT_BITS, _LONG_BITS, _MOST_PLACES = 30, 52, 24


class Fits(NamedTuple):
    """What is tried for the blocks of a scheme.

    places: binary places of the largest magnitude of a block. first: the largest scale that is tried is the
    largest magnitude over this. ratios: first over each scale, float32. least: the smallest scale that is
    taken, over the largest magnitude.
    """

    places: int
    first: float
    ratios: tuple[float, ...]
    least: float


def fits_codes(scheme: Scheme) -> bool:
    """Return whether elements are integers under one level of scales."""
    whole = isinstance(scheme.element, IntFormat) and scheme.element_step == 1
    return whole and len(scheme.scales) == 1 and scheme.qmin < 0 < scheme.qmax


@functools.lru_cache(maxsize=256)
def fits_of(scheme: Scheme, count: int) -> Fits:
    """Return the candidates for blocks of ``count`` values."""
    window = window_of(scheme, count, 2.0)
    steps = math.ceil(_PER_OCTAVE * math.log2(window.doubling / window.halving)) + 1
    ratios = torch.tensor([2.0 ** (k / _PER_OCTAVE) for k in range(steps + steps % 2)]).tolist()
    sums = (scheme.element.bits - 1) + (max(count, 1) - 1).bit_length()
    places = min(_MOST_PLACES, (_SHORT_BITS if count <= SHORT else _LONG_BITS) - sums)
    first = float(torch.tensor(window.halving))
    return Fits(places=places, first=first, ratios=tuple(ratios), least=1 / (window.doubling * _REACH))


def fitted_scales(piece: Piece, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Return fitted float64 block scales, 0 where no codes fit.

    shape: of the whole tensor.
    """
    return _Blocks(piece, scheme, fits_of(scheme, block_length(scheme, shape))).scales()


class _Blocks:
    """The numbers of all blocks in fixed point."""

    def __init__(self, piece: Piece, scheme: Scheme, fits: Fits) -> None:
        self._scheme, self._fits = scheme, fits
        self._blocks, self._shape = scheme.granularity, tuple(piece.x.shape)
        self._amax = self._largest(piece.wide)
        # Powers of two are normal numbers, also for what float64 alone can hold.
        self._exponent = (fits.places - torch.frexp(self._amax).exponent).clamp(-1000, 1000)
        self._numbers = (piece.wide * self._spread(power(self._exponent))).round()
        self._float32 = self._numbers.float()

    def scales(self) -> torch.Tensor:
        """Return the best scales, 0 where none fits."""
        largest = self._largest(self._float32)
        first = torch.where(largest > 0, over(self._fits.first, largest), 0.0)
        best = torch.zeros_like(self._amax), torch.ones_like(self._amax)
        for ratio in self._fits.ratios:
            best = self._better(best, first * ratio)
        for _ in range(FITS):
            product, square = best
            best = self._better(best, torch.where(product > 0, square.float() / product.float(), 0.0))
        product, square = best
        fitted = torch.maximum(product / square * power(-self._exponent), self._amax * self._fits.least)
        return torch.where(product > 0, fitted, 0.0)

    def _better(
        self, best: tuple[torch.Tensor, torch.Tensor], inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the better codes' sums of products and squares; ties: later."""
        codes = (self._float32 * self._spread(inverse)).round()
        codes = codes.clamp(self._scheme.qmin, self._scheme.qmax).double()
        product = sum_blocks(self._numbers * codes, self._blocks)
        square = sum_blocks(codes * codes, self._blocks)
        better = (product > 0) & (product * product * best[1] >= best[0] * best[0] * square)
        return torch.where(better, product, best[0]), torch.where(better, square, best[1])

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        return reduce_blocks(values.abs(), self._blocks, "amax", 0.0)

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        return spread_blocks(values, self._blocks, self._shape)


def power(exponent: torch.Tensor) -> torch.Tensor:
    """Return powers of two, float64, built from bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
