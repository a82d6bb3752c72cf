"""Host side of chained scale levels, such as llama.cpp's K-quants.

One kernel finds the extremes of blocks. Plain torch computes the few scales of all levels from them, and a
second kernel encodes.
"""

from __future__ import annotations

import torch

from ...ops import reference
from ...ops.reference_backend import Codes, filled
from ...ops.registry import Request
from ...params import arithmetic, chains
from ...params.tensors import Params
from ...schemes.scale_rules import Pick
from .block_ends import Ends, block_ends, largest_of, ranges_of
from .launches import ALLOCATES, Launch, zeros_of
from .two_passes import new_notes


class ChainedLevels:
    """The kernels on tensors that fit one request, whose scheme is chained."""

    def __init__(self, request: Request) -> None:
        self._request, self._launch = request, Launch(request)

    def choose_params(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        """Return the parameters that ``x`` gives; raises NonFiniteError."""
        if 0 in self._request.shape:
            return reference.choose_params(x, self._request.scheme, extremes)
        return list(self._chosen(x, extremes).tensors)

    def quantize_dynamic(
        self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None, *, seed: int = 0
    ) -> Codes:
        """Return codes and the parameters that ``x`` gives."""
        if 0 in self._request.shape:
            return reference.quantize_dynamic(x, self._request.scheme, extremes)
        chosen, data, notes = self._chosen(x, extremes), self._launch.packed(x), new_notes(x.device)
        scales = chosen.scale.to(torch.float32).contiguous()
        zero = chosen.offset if chosen.zero_point is None else chosen.zero_point
        given = scales, scales, scales, scales if zero is None else zeros_of(zero)
        self._launch.encode(x, given, data, notes, seed)
        found = data, list(chosen.tensors)
        return found if out is None else filled(out, *found)

    def _chosen(self, x: torch.Tensor, extremes: Ends) -> chains.Chosen:
        scheme = self._request.scheme
        reference.require_whole(scheme, extremes)
        ends, signed = block_ends(x, scheme.granularity, extremes), scheme.scales[0].picks(Pick.SIGNED)
        largest = largest_of(x, scheme.granularity) if signed else None
        found = ranges_of([ends] * len(scheme.scales), x, largest)
        arithmetic.require_chosen(scheme, found)
        return chains.choose(scheme, found)

    def hold(self, _: Params | None, **__: int) -> str:
        return ALLOCATES
