"""The host side of errors of codes, a row at a time."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from ...ops.registry import Request
from ...ops.row_errors import RowErrors, code_extent
from ...params.tensors import Params
from .launches import Launch, value_table_on
from .piece_cuts import Pieces, pieces_of
from .specialization import constants_of
from .starts import Start, bits

_PER_THREAD = 2
"""Pieces of a thread, which has float64 of all of their numbers."""
_FIGURES = 4


class ErrorMeasure:
    """The kernel on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        self._request, self._launch = request, Launch(request)

    @functools.cached_property
    def _start(self) -> Start:
        asked = self._request
        scheme, shape = asked.scheme, asked.shape
        cut = pieces_of(scheme.granularity, shape, scheme.bits, joins=False, each=_PER_THREAD)
        assert isinstance(cut, Pieces)
        constants = constants_of(asked, cut.shape, chosen=False)
        return Start("part_errors.measure_pieces", cut, constants._replace(extent=code_extent(scheme)))

    def measure(self, x: torch.Tensor, data: torch.Tensor, params: Params) -> RowErrors:
        shape, rows = self._request.shape, math.prod(self._request.shape[:-1])
        if 0 in shape:
            none = np.zeros(rows)
            return RowErrors(squares=none, errors=none, largest=none, clipped=none.astype(np.int64))
        start, values = self._start, value_table_on(self._request.scheme, x.device)
        parts = torch.empty((rows, start.programs // rows, _FIGURES), dtype=torch.float64, device=x.device)
        start(bits(x), data.contiguous(), *self._launch.scales(params), values, parts)
        sums, most = parts[..., :-1].sum(1), parts[..., -1].amax(1, keepdim=True)
        squares, errors, clipped, largest = torch.cat([sums, most], 1).T.contiguous().cpu().numpy()
        return RowErrors(squares=squares, errors=errors, largest=largest, clipped=clipped.astype(np.int64))
