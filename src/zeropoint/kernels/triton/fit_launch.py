"""The host side of the scales that fit integer codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...ops import reference
from ...ops.integer_fits import FITS, fits_codes, fits_of
from ...ops.registry import Request
from ...ops.window_search import picked, reach_of
from ...params.ladder import Ladder
from ...params.scale_windows import block_length, window_of
from ...params.tensors import Params, require_parameters
from ...schemes import Scheme
from .launches import value_table_on
from .segmentation import Segments, segments_of
from .specialization import constants_of
from .starts import bits, on_device, program

LONGEST = 128
"""Values of the longest blocks, whose sums 32 bits hold."""
_VALUES, _EXACT_VALUES = 1024, 256
"""Values of a program, which is a warp, and of one that computes in float64."""


class Fit(NamedTuple):
    """What the kernels are compiled for.

    size, many: values of a block, and blocks of a program. halvings: base-2 logarithm of size. low, high: the
    smallest and the largest code. ratios: how many scales are tried. places, first, least: of
    :class:`zeropoint.ops.integer_fits.Fits`. unit, weighted: as of :class:`.sweep_launch.Sweep`.
    """

    size: int
    many: int
    halvings: int
    low: int
    high: int
    ratios: int
    places: int
    first: float
    least: float
    unit: float = 1.0
    weighted: bool = False


def fits(scheme: Scheme, shape: tuple[int, ...]) -> bool:
    """Whether scales are those fitting integer codes, in known blocks."""
    return fits_codes(scheme) and block_length(scheme, shape) <= LONGEST


def fit_of(scheme: Scheme, size: int) -> Fit:
    """Compile-time constants for blocks of ``size`` values, a power of two."""
    tried = fits_of(scheme, size)
    return Fit(
        size=size, many=max(1, _VALUES // size), halvings=size.bit_length() - 1, low=scheme.qmin,
        high=scheme.qmax, ratios=len(tried.ratios), places=tried.places, first=tried.first, least=tried.least,
    )  # fmt: skip


class ScaleFit:
    """The kernels on tensors that fit one request."""

    room: Callable[[], Params] = staticmethod(list)
    """Memory for a run that is made before it: none."""

    def __init__(self, request: Request) -> None:
        scheme, shape, dtype = request.scheme, request.shape, request.own_dtype
        found = segments_of(scheme.granularity, shape, scheme.bits)
        assert isinstance(found, Segments)
        assert FITS == 2, "the kernel takes codes so often under the scale that fits the best ones"
        self._request, self._constants = (
            request,
            constants_of(request, found.shape, chosen=False, dividing=True),
        )
        size = block_length(scheme, shape)
        self._fit, self._ratios = fit_of(scheme, size), fits_of(scheme, size).ratios
        self._reach = reach_of(window_of(scheme, size, 2.0))
        self._ladder = Ladder.of(scheme.scales[0], dtype)

    def search_params(
        self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None
    ) -> Params:
        """See :attr:`zeropoint.ops.registry.Op.SEARCH_PARAMS`; under importance plain torch searches."""
        scheme, shape = self._request.scheme, self._request.shape
        require_parameters(scheme, params, shape)
        if importance is not None:
            return list(reference.search_params(x, scheme, params, importance))
        (start,) = params
        if 0 in shape:
            return [start]
        blocks, device, values = start.numel(), x.device, bits(x)
        fitted = torch.empty(start.shape, dtype=torch.float64, device=device)
        largest = torch.empty(start.shape, dtype=torch.float32, device=device)
        better = torch.empty(start.shape, dtype=torch.uint8, device=device)
        exact = self._fit._replace(many=max(1, _EXACT_VALUES // self._fit.size))
        with on_device(device):
            program("scale_fits.fit_scales")[(-(-blocks // self._fit.many),)](
                values, _on(self._ratios, device), fitted, largest, blocks, self._fit,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
            tried = picked(fitted > 0, self._ladder.store(self._ladder.near(fitted)), start)
            tried = picked(tried.float() * self._reach > largest, tried, start)
            scales = start.float().contiguous(), tried.float().contiguous()
            program("scale_fits.compare_scales")[(-(-blocks // exact.many),)](
                values, *scales, value_table_on(scheme, device), better, blocks, exact, self._constants,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return [picked(better > 0, tried, start)]

    def improve(self, x: torch.Tensor, params: Params, _: Params) -> None:
        """Replace the scales in place by the scales of least squared error."""
        params[0].copy_(self.search_params(x, params)[0])


@functools.lru_cache(maxsize=64)
def _on(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)
