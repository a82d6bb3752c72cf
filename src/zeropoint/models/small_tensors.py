"""Small tensors of a calibration, measured later and many at a time.

A tensor that several layers read is measured once; a small one is copied, and waits for others.
"""

from __future__ import annotations

import weakref

import torch

from ..stats import Accumulator, Observer, State
from ..stats.observer import update_together

SMALL = 1 << 19
"""Bytes of a tensor up to which a copy of it is measured later, with others."""
HELD = 1 << 25
"""Bytes of copies that wait to be measured."""


class LatestTensor:
    """Last observed tensor: its measure, or a copy for later."""

    def __init__(self, x: torch.Tensor, observer: Observer, *, waits: bool) -> None:
        self._statistic = observer.statistic
        self._tensor = weakref.ref(x)
        # Tensors of inference mode count no changes, and are measured each time.
        self._version = None if x.is_inference() else x._version
        self.copy: torch.Tensor | None = None
        self.state: State = {}
        if waits and x.nbytes <= SMALL:
            self._statistic.check(x)
            self.copy = x.clone()
        else:
            self.state = observer.measure(x)

    @property
    def suspicious(self) -> bool:
        """Whether some number may be NaN or Inf."""
        return self.copy is not None or bool(self.state["left_out"])

    def is_of(self, x: torch.Tensor, statistic: Accumulator) -> bool:
        """Return whether it is what ``statistic`` would see of ``x`` now."""
        same = self._tensor() is x and not x.is_inference() and x._version == self._version
        return same and self._statistic is statistic


class WaitingTensors:
    """Queue of copied small tensors, deduplicated and measured in bulk.

    A call costs more than the numbers of a small tensor do, the more so between the products of two layers:
    its code and data are not in the caches then.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, list[Observer]]] = []
        self._seers: set[Observer] = set()
        self._held = 0

    def add(self, observer: Observer, copy: torch.Tensor) -> None:
        """Queue a copy for an observer, with others of the tensor."""
        if self._held > HELD or (self._copies and self._copies[-1][0].device != copy.device):
            self.take()
        self._seers.add(observer)
        last, seers = self._copies[-1] if self._copies else (None, [])
        if last is copy and observer not in seers:
            seers.append(observer)
        else:
            self._copies.append((copy, [observer]))
            self._held += copy.nbytes

    def make_way(self, observer: Observer) -> None:
        """Flush the queue if any copy is for an observer, in order."""
        if observer in self._seers:
            self.take()

    def take(self) -> None:
        """Take in all that waits."""
        groups: dict[tuple[Observer, ...], list[torch.Tensor]] = {}
        for copy, seers in self._copies:
            groups.setdefault(tuple(seers), []).append(copy)
        if sum(map(len, groups)) > len(self._seers):  # some saw copies with others, and then without
            groups = {(one,): [copy for copy, seers in self._copies if one in seers] for one in self._seers}
        self._copies, self._seers, self._held = [], set(), 0
        for together, copies in groups.items():
            update_together(together, copies)
