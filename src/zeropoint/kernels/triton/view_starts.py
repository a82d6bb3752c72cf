"""Kernels for non-contiguous tensors, and for blocks that span rows."""

from __future__ import annotations

import functools

import torch

from ...ops.registry import Op, Request
from .specialization import Constants, constants_of
from .starts import Start, bits
from .tile_cuts import tiles_of
from .two_passes import TwoPasses

Strides = tuple[int, ...]


class Views:
    """Kernels of a request by strides; given: constants under given scales."""

    def __init__(self, request: Request, given: Constants) -> None:
        self._request, self._given = request, given
        self.start = functools.cache(self._start)
        self.two_passes = functools.cache(functools.partial(TwoPasses, request))

    def _start(self, strides: Strides, op: Op) -> Start | None:
        """Kernel of an operator on such strides, if it reads once."""
        asked, chosen = self._request, op is Op.QUANTIZE_DYNAMIC
        scheme = asked.scheme
        found = tiles_of(
            scheme.granularity, asked.shape, strides, scheme.bits, asked.dtype.itemsize, whole=chosen
        )
        if found is None:
            return None
        constants = constants_of(asked, found.shape, chosen=True) if chosen else self._given
        name = "matrix_tiles.fake_quantize_tiles" if op is Op.FAKE_QUANTIZE else "matrix_tiles.quantize_tiles"
        return Start(name, found, constants._replace(cut=found.shape))

    def chooses(self, x: torch.Tensor, *, one_block: bool) -> bool:
        """Whether kernels choose scales of ``x`` and encode it without a copy.

        one_block: whether the tensor is one block, whose scale takes numbers in any order.
        """
        strides = x.stride()
        return self.start(strides, Op.QUANTIZE_DYNAMIC) is not None or (
            self.start(strides, Op.QUANTIZE) is not None and (one_block or self.two_passes(strides).known)
        )

    def planned(self, *, one_block: bool) -> torch.Tensor:
        """Meta tensor with the request's strides if readable, else contiguous."""
        asked = self._request
        whole = torch.empty(asked.shape, device="meta")
        if asked.strides is None or 0 in asked.shape or asked.op is Op.DEQUANTIZE:
            return whole
        x = torch.empty_strided(asked.shape, asked.strides, device="meta")
        if asked.op is not Op.QUANTIZE_DYNAMIC:
            return x if self.start(asked.strides, asked.op) is not None else whole
        # The scale of a whole tensor takes its numbers in any order, but without gaps.
        gaps = (one_block or len(asked.scheme.scales) > 1) and not _by_strides(x).is_contiguous()
        return x if self.chooses(x, one_block=one_block) and not gaps else whole


def _by_strides(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its axes in the order of memory."""
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor for kernels, in any order."""
    ordered = _by_strides(x)
    return bits(ordered if ordered.is_contiguous() else x)
