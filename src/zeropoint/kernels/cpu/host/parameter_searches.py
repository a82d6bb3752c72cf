"""Parameters of least squared error from those of a start: which kernel finds them, or plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....ops import affine_fits, lowering, scale_search
from ....ops.registry import Request
from ....ops.threads import share
from ....params import QuantizationParams
from ....params.ladder import Ladder
from ....params.tensors import Params
from ....schemes import Scheme, ZeroPoint
from .. import entries
from ..machine.descriptor import pack
from .arrays import flat_array
from .scale_searches import decoded
from .views import View, view_of
from .window_ends import in_whole_blocks

_NO_WEIGHTS = np.zeros(1, np.float64)
_Search = Callable[[torch.Tensor, Params, torch.Tensor | None], Params]


class SearchParamsKernel:
    """Parameters of least squared error."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._search = _search_of(request.scheme, request.shape, request.dtype)

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None) -> Params:
        """See :class:`zeropoint.ops.registry.Op`."""
        if self._search is not None and x.numel():
            return self._search(x, params, importance)
        start = QuantizationParams.of(self._request.scheme, tuple(x.shape), x.dtype, params)
        return scale_search.searched(x, start, decoded, importance=importance).stored


def _search_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> _Search | None:
    """Return the search by a kernel, or None where plain torch searches."""
    view = view_of(scheme, shape, dtype)
    if not isinstance(view, View) or not view.one_pass or not in_whole_blocks(view):
        return None
    if affine_fits.fits_affine(scheme) and scheme.search is None and not scheme.offsets:
        return AffineSearch(scheme, shape, dtype).run
    return None


class AffineSearch:
    """Scales and zero points of whole codes; see :mod:`zeropoint.ops.affine_fits`."""

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        view = view_of(scheme, shape, dtype)
        assert isinstance(view, View)
        element = lowering.element_of(scheme, dtype, multiply=False)
        self._descriptor = pack(view.layout, element, lowering.rule_of(scheme, dtype))
        self._rows, self._shape = view.rows, shape
        ladder = Ladder.of(scheme.scales[0], dtype)
        places = affine_fits.places_of(scheme, int(view.layout.block))
        real = scheme.zero_point is ZeroPoint.REAL
        self._widths = np.array(affine_fits.WIDTHS, np.float64)
        self._numbers = np.array((ladder.least, ladder.most, affine_fits.MOST_INVERSE), np.float64)
        self._counts = places, affine_fits.PLACES_OF_RANGE, affine_fits.PATIENCE, affine_fits.FITS, real

    def run(self, x: torch.Tensor, params: Params, importance: torch.Tensor | None) -> Params:
        """See :class:`zeropoint.ops.registry.Op`."""
        scale, zero = (level.to(torch.float32, copy=True) for level in params)
        weights, pitch = _weights_of(importance, self._shape)
        counts = np.array((*self._counts, importance is not None, pitch), np.uint64)
        args = flat_array(x), self._descriptor, weights, self._widths, self._numbers, counts
        outputs = flat_array(scale), flat_array(zero)
        share(entries.search_affine, (*args, *outputs), self._rows, math.prod(self._shape))
        return scale.to(params[0].dtype), zero.to(params[1].dtype)


def _weights_of(importance: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Return weights as a flat array, and how many lie between two rows of ``shape``: 0 of all alike."""
    if importance is None:
        return _NO_WEIGHTS, 0
    wide = importance.to(torch.float64)
    if wide.numel() != shape[-1] or wide.shape[-1:] != shape[-1:]:
        return _doubles(wide.expand(shape)), shape[-1]
    return _doubles(wide), 0


def _doubles(x: torch.Tensor) -> Any:
    return flat_array(x.contiguous()).view(np.float64)
