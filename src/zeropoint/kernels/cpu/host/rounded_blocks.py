"""llama.cpp types with scales from extremes, rounded by search kernels.

The search of such a type has nothing to search, and gives the bytes of the reference wherever no number of a
block is zero as it is stored. The reciprocal of a scale that is may be infinite, and of minima of both signs
llama.cpp takes the first; the reference rounds such blocks.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from ....errors import RangeError
from ....ops import reference
from ....ops.ggml import block_types
from ....ops.reference_backend import filled
from ....ops.registry import Request
from ....params.tensors import Params
from ....schemes import Scheme
from ..machine.descriptor import OK
from .block_searches import Codes, SearchKernel
from .views import KINDS

_TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
_BLOCK = 32


@functools.lru_cache(maxsize=256)
def _is_rounded(scheme: Scheme) -> bool:
    name = block_types.type_of(scheme)
    return name in _TYPES and scheme == Scheme.parse(name)


def takes(request: Request) -> bool:
    """Return whether the kernels quantize what is asked for."""
    return (
        request.dtype in KINDS
        and request.own_dtype in KINDS
        and _is_rounded(request.scheme)
        and block_types.refusal(request.scheme, request.shape) is None
    )


class RoundedBlocksKernel:
    """Parameters and codes of blocks."""

    def __init__(self, request: Request) -> None:
        self._request, self._search = request, SearchKernel(request)

    def run(
        self, x: torch.Tensor, out: Codes | None = None, extremes: tuple[float, float] | None = None
    ) -> Codes:
        """See :class:`zeropoint.ops.registry.Op`; what the kernels refuse, the reference names."""
        scheme, state = self._request.scheme, None
        data, params = own = self._search.memory(x.dtype) if out is None else out
        if extremes is None:
            with contextlib.suppress(RangeError):
                state = self._search.fill(x, None, own)
        if state is None:
            return filled(own, *reference.quantize_dynamic(x, scheme, extremes))
        if state != OK:
            zero = functools.reduce(torch.bitwise_or, ((level == 0).reshape(-1) for level in params))
            codes, stored = reference.quantize_dynamic(x.detach().reshape(-1, _BLOCK)[zero], scheme)
            data.view(-1, codes.shape[-1])[zero] = codes
            for level, numbers in zip(params, stored, strict=True):
                level.view(-1)[zero] = numbers.view(-1)
        return own

    def hold(self, _: Params | None) -> str:
        """See :class:`zeropoint.ops.registry.PlanKernel`."""
        return "blocks of llama.cpp's types are rounded in memory of each call"
