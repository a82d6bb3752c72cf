"""The host side of the gradient of fake quantization."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...formats import FloatFormat, IntFormat
from ...ops.reference import float_bounds
from ...ops.registry import Request
from ...params.effective import effective_scale
from ...params.tensors import Params, require_parameters, zero_point_of
from ...schemes import Scheme
from .launches import bits, on_device
from .segmentation import Segments, segments_of
from .specialization import constants_of

_WORDS = {2: torch.int16, 4: torch.int32}


class Backward:
    """The kernel on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        scheme = request.scheme
        found = segments_of(scheme.granularity, request.shape, scheme.bits)
        assert isinstance(found, Segments)
        self._request, self._segments = request, found
        self._constants = constants_of(request, found, chosen=False)
        # Triton takes seconds to import, and is not needed where no tensor is on a GPU.
        from . import gradient_masks as kernels

        self._kernel = kernels.pass_within

    def run(
        self, grad: torch.Tensor, x: torch.Tensor, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :attr:`zeropoint.ops.registry.Op.FAKE_QUANTIZE_BACKWARD`."""
        out = torch.empty(x.shape, dtype=grad.dtype, device=x.device) if out is None else out
        if 0 in x.shape:
            return out
        element, words = self._constants.element, _WORDS[grad.itemsize]
        low, high = _ends(self._request.scheme) or (float(element.low), float(element.high))
        exact = _divides_by_powers(self._request.scheme)
        tensors = bits(x), grad.contiguous().view(words), *self._factors(params), out.view(words)
        with on_device(x.device):
            self._kernel[(self._segments.programs,)](
                *tensors, self._segments.cut, low, high, exact, self._constants,
                num_warps=self._segments.warps, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def _factors(self, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what values are divided by, Inf where the scale was lost, and zero points: float32."""
        asked = self._request
        scheme = asked.scheme
        require_parameters(scheme, params, asked.shape)
        factors = effective_scale(scheme, params, asked.shape, asked.own_dtype)
        if factors is None:
            factors = torch.ones(scheme.granularity.block_count(asked.shape), device=asked.device)
        factors = torch.where(factors == 0, torch.inf, factors.to(torch.float32))
        if isinstance(scheme.element, IntFormat) and scheme.element.fraction_bits:
            factors = factors * float(scheme.element_step)
        zero = zero_point_of(scheme, params)
        zeros = factors if zero is None else zero.to(torch.float32)
        return factors.contiguous(), zeros.contiguous()


@functools.lru_cache(maxsize=256)
def _ends(scheme: Scheme) -> tuple[float, float] | None:
    """Return the smallest and the largest float32 quotient that is not clipped; None of integers."""
    if isinstance(scheme.element, IntFormat):
        return None
    low, high, closed = float_bounds(scheme)
    return _inward(low, 1, closed=closed), _inward(high, -1, closed=closed)


def _inward(end: float, toward: int, *, closed: bool) -> float:
    """Return the float32 nearest to ``end`` on the side ``toward``, ``end`` itself if it counts."""
    near = np.float32(end)
    off = (float(near) - end) * toward
    if off < 0 or (off == 0 and not closed):
        near = np.nextafter(near, np.float32(toward * np.inf))
    return float(near)


def _divides_by_powers(scheme: Scheme) -> bool:
    """Return whether all quotients are products: with 2 ** -127 to 2 ** 127, which float32 holds."""
    powers = len(scheme.scales) == 1 and scheme.scales[0].rule.power_of_two
    return powers and isinstance(scheme.element, FloatFormat)
