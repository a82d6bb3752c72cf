"""Kernel arguments of chained levels: records, ladders, level bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....ops.chain_levels import Lowered
from ....params.tensors import Params
from ..encode.chained_rows import LEVELS, LevelArrays
from ..machine.named_records import pack
from .arrays import NO_BYTES, flat_array


class ChainRecords:
    """The constants of a chain."""

    def __init__(self, found: Lowered) -> None:
        self._chain, self._levels = pack(found.chain), pack(*found.levels)
        kinds = np.int32, np.float32, np.uint8
        ladder = (np.array(part or [0], kind) for part, kind in zip(found.ladder, kinds, strict=True))
        self._ladder = (*ladder,)
        self._count = len(found.levels)

    def arguments(self, params: Params) -> tuple[Any, ...]:
        """Fields of :class:`..encode.chained_rows.LevelArrays` that write the first tensors of ``params``."""
        levels: list[Any] = [flat_array(level).view(np.uint8) for level in params[: self._count]]
        levels += [NO_BYTES] * (LEVELS - len(levels))
        return (*LevelArrays(chain=self._chain, levels=self._levels, ladder=self._ladder, outs=(*levels,)),)
