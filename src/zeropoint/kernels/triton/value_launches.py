"""Host side of kernels of values and codes: gradients and errors."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from ...formats import IntFormat
from ...ops.reference import float_bounds
from ...ops.registry import HeldKernel, Request
from ...ops.row_errors import RowErrors, code_extent
from ...params.tensors import Params
from ...schemes import Scheme
from .launches import ALLOCATES, Given, Launch, value_table_on
from .piece_cuts import Pieces, pieces_of
from .specialization import constants_of
from .starts import Start, bits

_WORDS = {2: torch.int16, 4: torch.int32}


class Backward:
    """The kernel on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        self._launch = Launch(request)
        element = self._launch.given.element
        ends = _ends(request.scheme) or (float(element.low), float(element.high))
        self._ends = torch.tensor(ends, dtype=torch.float32, device=request.device)

    @functools.cached_property
    def _start(self) -> Start:
        return Start("gradient_masks.pass_within", self._launch.pieces, self._launch.given)

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor | None = None, *,
        seed: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty(x.shape, dtype=grad.dtype, device=x.device) if out is None else out
        if 0 not in x.shape:
            self._mask(self._launch.scales(params), grad, x, out, seed)
        return out

    def _mask(self, given: Given, grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor, seed: int) -> None:
        words = _WORDS[grad.itemsize]
        gradient = grad.contiguous().view(words)
        self._start(bits(x), gradient, *given, self._ends, out.view(words), numbers=(seed,))

    def hold(self, params: Params | None, seed: int = 0) -> HeldKernel | str:
        if params is None and not self._launch.reads_scales:
            return ALLOCATES
        tables = self._launch.held_tables()
        own = None if params is None else [each.detach().clone() for each in params]
        given = None if own is None else self._launch.scales(own, tables)

        def run(
            grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor, params: Params | None = None
        ) -> None:
            if 0 not in x.shape:
                scales = self._launch.scales(params or [], tables) if given is None else given
                self._mask(scales, grad, x, out, seed)

        room = 0 if tables is None else tables.nbytes
        if own is None:
            return HeldKernel(run=run, workspace_bytes=room)
        return HeldKernel(run=run, parameter_bytes=sum(each.nbytes for each in own) + room)


@functools.lru_cache(maxsize=256)
def _ends(scheme: Scheme) -> tuple[float, float] | None:
    """Float32 quotients at the ends of clipping; None of integers."""
    if isinstance(scheme.element, IntFormat):
        return None
    low, high, closed = float_bounds(scheme)
    return _inward(low, 1, closed=closed), _inward(high, -1, closed=closed)


def _inward(end: float, toward: int, *, closed: bool) -> float:
    """Float32 nearest to ``end`` towards ``toward``; ``end`` if it counts."""
    near = np.float32(end)
    off = (float(near) - end) * toward
    if off < 0 or (off == 0 and not closed):
        near = np.nextafter(near, np.float32(toward * np.inf))
    return float(near)


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
