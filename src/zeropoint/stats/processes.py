"""States of several processes, gathered by torch.distributed and merged by rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import distributed

from .accumulator import State

Merge = Callable[[State, State], State]


def shares_work() -> bool:
    """Whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def gathered(state: State, merge: Merge) -> State:
    """Return the merged states of all processes, each of which must call.

    Gathers rather than reduces, so that any merge works, and all processes compute the same one.
    """
    if not shares_work():
        return state
    everyone: list[State] = [{} for _ in range(distributed.get_world_size())]
    for name in sorted(state):
        mine = state[name].contiguous()
        parts = [torch.empty_like(mine) for _ in everyone]
        distributed.all_gather(parts, mine)
        for whole, part in zip(everyone, parts, strict=True):
            whole[name] = part
    return reduce(merge, everyone)
