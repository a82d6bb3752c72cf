"""Search of the best positive scale per block, among all possible ones.

The candidates follow from :mod:`zeropoint.params.scale_windows`, for scales without zero points. Where a
scale has at most 8 bits, each of them is tried: no other scale that can be stored has less error, up to the
roundings of quotients.

Wider scales of integers under the second power are fitted to codes (:mod:`.integer_fits`). Others, s_k, are
tried in steps of a factor r = 2 ** (1 / 16) from the upper end of the window down, then twice the
least-squares scale of the best codes, which has at most their error. With S* the best scale of all and q its
codes, S* q is the projection of x on q; so, with ``delta = sqrt(r) - 1`` the largest relative distance of S*
from a step,

    E(s_k)  <=  ||x - s_k q||^2  =  E(S*) + (s_k - S*)^2 ||q||^2  <=  E(S*) + delta^2 ||x||^2,

and the gap of the found scale to the best is at most 0.05 % of the block's own squares, up to the rounding of
s_k to its format; it is a hundredth of that on most data. Under weights of the errors the same holds of
weighted squares, for integers too, which then take these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..formats.division import divided
from ..formats.torch_dtypes import wide_dtype
from ..layout.blocks import reduce_blocks, spread_blocks
from ..params import QuantizationParams
from ..params.ladder import Ladder
from ..params.scale_windows import Window, block_length, window_of
from ..schemes import Scheme
from .block_errors import Piece, powers
from .integer_fits import fits_codes, fitted_scales

_PER_OCTAVE = 16
_STEP: float = 2.0 ** (1 / _PER_OCTAVE)
PARTS = tuple(2.0 ** (-step / _PER_OCTAVE) for step in range(_PER_OCTAVE))
"""The steps of an octave."""
_SHORT = 256
"""Most values of a block whose largest one says enough about what is clipped."""
_CHECKED = 4
"""After how many steps the sums over blocks are made that say what is clipped."""
SAFE = 1 + 2.0**-20
"""Outweighs the roundings of products, so that what is not tried is worse."""


class WindowSearch:
    """The search of all blocks of a piece at once."""

    def __init__(self, piece: Piece, params: QuantizationParams) -> None:
        self._piece, self._params = piece, params
        scheme = params.scheme
        self._blocks = scheme.granularity
        window = window_of(scheme, block_length(scheme, params.shape), piece.power)
        # Any weights of errors leave no lower end.
        self._window = window if piece.importance is None else replace(window, doubling=torch.inf)
        self._ladder = Ladder.of(scheme.scales[0], piece.x.dtype)
        self._by_largest = clips_by_largest(scheme, params.shape, piece.importance is not None)
        # Compared with scales in the wide dtype, in which kernels compare them, too.
        self._amax = reduce_blocks(piece.x.abs(), self._blocks, "amax", 0.0).to(wide_dtype(piece.x.dtype))

    def run(self) -> QuantizationParams:
        """Return the parameters with the best scales."""
        start = self._params.scales[0]
        limit = self._error(start)
        if self._ladder.table is not None:
            best, error = self._of_table(self._ladder.table.to(start.device), limit)
        elif self._piece.importance is None and self._piece.power == 2 and fits_codes(self._params.scheme):
            best, error = self._of_codes(start)
        else:
            best, error = self._fitted(*self._of_steps(start, limit))
        return self._with(picked(error < limit, best, start))

    def _with(self, stored: torch.Tensor) -> QuantizationParams:
        return replace(self._params, scales=(stored, *self._params.scales[1:]))

    def _error(self, stored: torch.Tensor) -> torch.Tensor:
        return self._piece.errors(self._with(stored), self._blocks)

    def _factor(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the product with coarser levels, in the wide dtype."""
        factor = self._with(stored).effective_scale()
        assert factor is not None
        return factor

    def _clipped(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a lower bound of the clipping error."""
        end, power = self._factor(stored).double() * (self._window.most * SAFE), self._piece.power
        if self._by_largest:
            return powers((self._amax.double() - end).clamp(min=0), power)
        past = self._piece.wide.abs() - spread_blocks(end, self._blocks, self._params.shape)
        return self._piece.sums(powers(past.clamp(min=0), power), self._blocks)

    def _of_table(self, table: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best scales of ``table`` and errors, Inf without candidates."""
        codes = self._ladder.store(table)
        low, high = self._ends(table.tolist(), codes)
        stored, error = _at(codes, torch.zeros_like(high)), torch.full_like(limit, torch.inf)
        place, alive = high, (high >= low) & (limit > 0)
        while bool(alive.any()):
            tried = _at(codes, place.clamp(min=0))
            alive = alive & ~(self._clipped(tried) > torch.minimum(error, limit) * SAFE)
            found = self._error(tried)
            better = alive & (found <= error)
            stored, error = picked(better, tried, stored), torch.where(better, found, error)
            place = place - 1
            alive = alive & (place >= low)
        return stored, error

    def _ends(self, values: list[float], codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the smallest and largest candidate scale."""
        window, known = self._window, set(values)
        doubled = sum(2 * value in known for value in values)
        low = self._count(codes, lambda factor: factor * window.doubling <= self._amax).clamp(max=doubled)
        high = self._count(codes, lambda factor: factor * window.halving < self._amax) - 1
        for place in (place for place, value in enumerate(values) if value / 2 not in known):
            factor = self._factor(_at(codes, torch.full_like(high, place)))
            high = torch.where(factor * window.empty < self._amax, high.clamp(min=place), high)
        return low, high

    def _count(self, codes: torch.Tensor, holds: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return for how many leading scales ``holds`` is true."""
        least = torch.zeros_like(self._amax, dtype=torch.int64)
        most = least + len(codes)
        while bool((least < most).any()):
            middle = (least + most) // 2
            true = holds(self._factor(_at(codes, middle.clamp(max=len(codes) - 1)))) & (middle < most)
            least, most = torch.where(true, middle + 1, least), torch.where(true, most, middle)
        return least

    def _of_codes(self, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales fitted to the best codes, or the start, and errors."""
        scale = fitted_scales(self._piece, self._params.scheme, self._params.shape)
        tried = picked(scale > 0, self._stored(scale), start)
        stored = picked(self._inside(tried), tried, start)
        return stored, self._error(stored)

    def _of_steps(self, start: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best of scales in steps of a factor, and errors."""
        stored, error = start, torch.full_like(limit, torch.inf)
        top = divided(self._amax.double(), self._window.halving)
        alive, step = (self._amax > 0) & (limit > 0), 0
        checked = checked_after(by_largest=self._by_largest)
        while bool(alive.any()):
            near = top * (PARTS[step % _PER_OCTAVE] * 2.0 ** -(step // _PER_OCTAVE))
            # A block of zeros has no scale in steps from zero.
            tried = picked(near > 0, self._stored(near), start)
            alive = alive & (near > self._ladder.least) & self._inside(tried)
            step += 1
            if step % checked == 0:
                alive = alive & ~(self._clipped(tried) > torch.minimum(error, limit) * SAFE)
            found = self._error(tried)
            better = alive & (found <= error)
            stored, error = picked(better, tried, stored), torch.where(better, found, error)
        return stored, error

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        return self._ladder.store(self._ladder.near(scale))

    def _inside(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the mask of scales inside the window, within a step."""
        end: torch.Tensor = self._factor(stored) * reach_of(self._window)
        return end > self._amax

    def _fitted(self, stored: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return twice-refitted least-squares scales, where better."""
        piece = self._piece
        for _ in range(2):
            decoded = piece.decoded(self._with(stored))
            share = piece.sums(decoded * piece.wide, self._blocks)
            share = share / piece.sums(decoded.square(), self._blocks)
            share = torch.where(torch.isfinite(share) & (share > 0), share, 1.0)
            tried = self._stored(self._ladder.load(stored) * share)
            found = self._error(tried)
            better = (found < error) & self._inside(tried)
            stored, error = picked(better, tried, stored), torch.where(better, found, error)
        return stored, error


def clips_by_largest(scheme: Scheme, shape: tuple[int, ...], weighted: bool) -> bool:
    """Return whether a block's largest magnitude bounds its clipping well."""
    return not weighted and block_length(scheme, shape) <= _SHORT


def checked_after(*, by_largest: bool) -> int:
    """Return the number of steps between clipping checks."""
    return 1 if by_largest else _CHECKED


def reach_of(window: Window) -> float:
    """Return the upper bound of amax over a taken scale."""
    return window.doubling * _STEP


def _at(codes: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return stored scales by index; torch indexes bytes, not all float8."""
    return codes.view(torch.uint8)[place].view(codes.dtype)


def picked(mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return stored scales ``a`` where ``mask`` holds, else ``b``."""
    if a.itemsize > 1:
        return torch.where(mask, a, b)
    return torch.where(mask, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)
