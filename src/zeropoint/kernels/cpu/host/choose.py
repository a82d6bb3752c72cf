"""Scales of blocks chosen from the data into memory held between calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....ops.code_tables import code_order
from ....ops.lowering import element_of, needs_range, rule_of
from ....ops.registry import Request
from ....params.tensors import Params
from .. import entries
from ..encode.rows import QuantizeArrays
from ..machine import descriptor as k
from ..machine.descriptor import Descriptor, RowLayout, with_coarse
from ..machine.named_records import pack
from .arrays import NO_BYTES
from .calls import ScaleMemory, refuse
from .statistics import RowExtremes
from .views import KINDS, View, view_of


class BlockScales:
    """Scales of blocks spanning rows, from a separate pass over data.

    The scale of a block follows from its extremes alone. So the kernel that chooses scales in one pass
    chooses them here from a tensor of (blocks, 2) extremes, whose codes nobody reads.
    """

    def __init__(self, wanted: Request) -> None:
        scheme, blocks = wanted.scheme, wanted.scheme.granularity.block_count(wanted.shape)
        self._scheme = scheme
        self._rows = RowExtremes(wanted.shape, wanted.dtype, scheme.granularity, ranged=needs_range(scheme))
        self._ends: Any = np.empty((blocks, 2), np.float32)
        self._codes: Any = np.empty(2 * blocks, np.uint8)
        view = view_of(scheme, wanted.shape, wanted.dtype)
        assert isinstance(view, View)
        self._places = _Places(view, self._rows.rows, self._rows.width)
        kind = KINDS[torch.float32]
        layout = RowLayout(
            cols=2, block=2, row_blocks=1, row_bytes=2, bits=8, kind=kind, row_div=1, row_mod=blocks
        )
        element = element_of(scheme, wanted.dtype, multiply=False)
        self._descriptor = pack(Descriptor(layout, element, rule_of(scheme, wanted.dtype)))
        self._order = code_order(scheme)
        self.nbytes: int = self._rows.nbytes + self._ends.nbytes + self._codes.nbytes

    def choose(self, x: torch.Tensor, coarse: float | None, memory: ScaleMemory, params: Params) -> None:
        """Choose scales of ``x`` into ``memory``; raises the reference's errors."""
        self._observe(x)
        scales, codes = memory.arrays(params)
        descriptor = self._descriptor if coarse is None else with_coarse(self._descriptor, coarse)
        arrays = QuantizeArrays(
            x=self._ends.reshape(-1),
            order=self._order,
            scales=scales,
            scale_codes=codes,
            zeros=memory.zeros,
            out=self._codes,
            kept=NO_BYTES,
        )
        state = entries.quantize(descriptor, *arrays, 0, len(self._ends), 1, 0)
        if state != k.OK:
            refuse(x, self._scheme)

    def _observe(self, x: torch.Tensor) -> None:
        self._rows.find(x)
        self._places.merge(np.maximum, self._rows.high, self._ends[:, 1])
        if self._rows.ranged:
            self._places.merge(np.minimum, self._rows.low, self._ends[:, 0])
        else:
            self._ends[:, 0] = self._ends[:, 1]


class _Places:
    """Map from statistics rows to parameter rows: ``(row // div) % mod``."""

    def __init__(self, view: View, rows: int, width: int) -> None:
        self._div, self._mod = view.layout.row_div, view.layout.row_mod
        self._rows, self._width = rows, width

    def merge(self, ufunc: np.ufunc, values: Any, out: Any) -> None:
        """Reduce ``values`` (rows, width) into ``out`` (parameter rows, width), both flat."""
        div, mod, width = self._div, self._mod, self._width
        target = out.reshape(mod, width)
        whole, rest = divmod(self._rows, div)
        if rest == 0 and whole % mod == 0:
            ufunc.reduce(values.reshape(whole // mod, mod, div, width), axis=(0, 2), out=target)
            return
        # Only the last block of the first axis may be short.
        full = values[: whole * div * width].reshape(whole, div, width)
        ufunc.reduce(full, axis=1, out=target[:whole])
        ufunc.reduce(values[whole * div * width :].reshape(rest, width), axis=0, out=target[whole])
