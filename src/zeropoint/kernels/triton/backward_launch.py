"""The host side of the gradient of fake quantization."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...formats import IntFormat
from ...ops.reference import float_bounds
from ...ops.registry import HeldKernel, Request
from ...params.tensors import Params
from ...schemes import Scheme
from .launches import ALLOCATES, Given, Launch
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
