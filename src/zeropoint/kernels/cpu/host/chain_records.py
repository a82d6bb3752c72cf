"""Kernel arguments of chained levels: records, ladders, and the bytes of each level."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....ops.chain_levels import Lowered
from ....params.tensors import Params
from ..encode.chained_rows import CHAIN, LEVELS, Chain
from ..encode.level_numbers import LEVEL, Level
from ..machine.descriptor import by_name, packed
from .arrays import NO_BYTES, flat_array


class ChainRecords:
    """The constants of a chain."""

    def __init__(self, found: Lowered) -> None:
        self._chain = packed(CHAIN, by_name(Chain, found.chain))
        self._levels = np.concatenate([packed(LEVEL, by_name(Level, level)) for level in found.levels])
        kinds = np.int32, np.float32, np.uint8
        self._ladder = [np.array(part or [0], kind) for part, kind in zip(found.ladder, kinds, strict=True)]
        self._count = len(found.levels)

    def arguments(self, params: Params) -> tuple[Any, ...]:
        """Return the arguments of a kernel that writes the levels of ``params``, which come first in it."""
        levels: list[Any] = [flat_array(level).view(np.uint8) for level in params[: self._count]]
        levels += [NO_BYTES] * (LEVELS - len(levels))
        return self._chain, self._levels, *self._ladder, *levels
