"""Scales of large blocks: one kernel for extremes, another for scales."""

from __future__ import annotations

import math

import torch

from ...ops.registry import Request
from .piece_cuts import BlockShape, SmallBlocks
from .specialization import constants_of
from .starts import Start, words
from .tile_cuts import tiles_of

_NOTES = 4
"""Numbers before the extremes, which begin at 16 bytes."""
_BLOCKS = 128
"""Blocks of a program."""
_FEWEST = 8
"""Values of which a part of a block has the extremes, at least: each part is an access of memory."""
_NOTHING = -(1 << 31)
"""Rank of what no number is below."""


class TwoPasses:
    """The kernels on tensors of one request and of some strides."""

    def __init__(self, request: Request, strides: tuple[int, ...]) -> None:
        scheme = request.scheme
        found = tiles_of(
            scheme.granularity, request.shape, strides, scheme.bits, request.dtype.itemsize, whole=False
        )
        self.count = math.prod(scheme.granularity.grid(request.shape))
        self.known = found is not None and found.shape.block_lines * found.shape.block_elements >= _FEWEST
        if found is None:
            return
        constants = constants_of(request, found.shape, chosen=True)
        self._extremes = Start("matrix_tiles.tile_extremes", found, constants)
        blocks = SmallBlocks(self.count, BlockShape(_BLOCKS, 1, 1), -(-self.count // _BLOCKS), _BLOCKS // 32)
        self._scales = Start("matrix_tiles.block_scales", blocks, constants._replace(cut=blocks.shape))

    def __call__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        coarse: torch.Tensor,
        notes: torch.Tensor,
    ) -> None:
        """Write scales and zero points; notes: of :func:`new_notes`."""
        found, least, most = notes[_NOTES:].view(3, -1)
        self._extremes(words(x), found, least, most)
        self._scales(found, least, most, scales, zeros, coarse, notes)


def new_notes(device: torch.device, blocks: int = 0) -> torch.Tensor:
    """Return cleared notes of a run, int32: see :mod:`.programs.whole_tensors`.

    blocks: how many of them have extremes of their own, which follow.
    """
    room = -(-blocks // 4) * 4
    made = torch.zeros(_NOTES + 3 * room, dtype=torch.int32, device=device)
    if blocks:
        made[_NOTES + room :] = _NOTHING
    return made
