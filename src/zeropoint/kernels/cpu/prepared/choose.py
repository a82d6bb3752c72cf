"""Scales chosen from the data into memory held between calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ....errors import NonFiniteError
from ....formats.torch_dtypes import format_of, storage_dtype
from ....ops import reference
from ....ops.registry import Params, Request
from ....ops.threads import over_rows
from ....params import arithmetic
from ....params.arithmetic import Ranges
from ....schemes import Granularity, Scheme, ZeroPoint
from .. import layout as k
from ..arrays import NO_BYTES, NO_FLOATS, code_order, flat_array, has_sign, row_view
from ..layout import Layout
from ..layout import ScaleRule as Rule
from ..lowering import KINDS, View, element_of, rule_of
from ..quantize import amax_rows, quantize_rows, range_rows


class ScaleMemory:
    """The arrays into which a kernel writes the scales of a call, and their way into its tensors.

    Scales that are stored as float32 are written where they belong; others are rounded on the way.
    """

    def __init__(self, wanted: Request) -> None:
        scheme, count = wanted.scheme, wanted.scheme.granularity.block_count(wanted.shape)
        self._floats = rule_of(scheme, wanted.dtype).how in (k.LINEAR, k.AFFINE)
        stored = storage_dtype(scheme.scales[0].format_for(format_of(wanted.dtype)))
        self._direct = self._floats and stored == torch.float32
        own = count if self._floats and not self._direct else 0
        self._scales: Any = np.empty(own, np.float32)
        self._wide = torch.from_numpy(self._scales)
        affine = scheme.zero_point is not ZeroPoint.NONE
        self.zeros: Any = np.empty(count, np.float32) if affine else NO_FLOATS
        self._offsets = torch.from_numpy(self.zeros) if affine else None
        self.nbytes: int = self._scales.nbytes + (self.zeros.nbytes if affine else 0)

    def arrays(self, params: Params) -> tuple[Any, Any]:
        """Return the arrays for float32 scales and for scale bytes of a call."""
        fine = params[0][0]
        if not self._floats:
            return NO_FLOATS, fine.view(torch.uint8).numpy().reshape(-1)
        return (fine.numpy().reshape(-1) if self._direct else self._scales), NO_BYTES

    def store(self, params: Params) -> None:
        """Write what the kernel left here into the tensors of the call."""
        (fine, *_), zero_point = params
        if self._floats and not self._direct:
            fine.view(-1).copy_(self._wide)
        if zero_point is not None and self._offsets is not None:
            zero_point.view(-1).copy_(self._offsets)


class CoarseScale:
    """The scale of a whole tensor, of a scheme with two levels."""

    def __init__(self, wanted: Request) -> None:
        self._wanted = wanted
        self._view, _ = row_view(_like(wanted), Granularity.tensor())
        self._amax: Any = np.empty(self._view.rows, np.float32)
        self.nbytes: int = self._amax.nbytes

    def into(self, x: torch.Tensor, coarse: torch.Tensor, rule: Rule) -> Rule:
        """Choose the scale of ``x``, store it in ``coarse`` and return the rule relative to it."""
        source, layout, out = flat_array(x), self._view.layout, self._amax
        over_rows(
            self._view.rows,
            x.numel(),
            lambda a, b: amax_rows(source, layout, out, np.uint64(a), np.uint64(b)),
        )
        top = out.max()
        require_finite(x, top)
        wanted = self._wanted
        amax = torch.full((1,) * x.ndim, float(top))
        ranges = Ranges(minimum=(amax, amax), maximum=(amax, amax), dtype=wanted.dtype, shape=wanted.shape)
        coarse.copy_(arithmetic.coarsest_scale(wanted.scheme, ranges))
        return rule._replace(coarse=np.float32(coarse.item()))


class BlockScales:
    """Scales of blocks that span rows, from a pass of its own over the data.

    The scale of a block follows from its extremes alone. So the kernel that chooses scales in one pass
    chooses them here from a tensor of (blocks, 2) extremes, whose codes nobody reads.
    """

    def __init__(self, wanted: Request, view: View) -> None:
        scheme, blocks = wanted.scheme, wanted.scheme.granularity.block_count(wanted.shape)
        self._scheme = scheme
        self._ranged = scheme.zero_point is not ZeroPoint.NONE or not has_sign(scheme)
        self._rows, width = row_view(_like(wanted), scheme.granularity)
        count = self._rows.rows * width
        self._high: Any = np.empty(count, np.float32)
        self._low: Any = np.empty(count if self._ranged else 0, np.float32)
        self._ends: Any = np.empty((blocks, 2), np.float32)
        self._codes: Any = np.empty(2 * blocks, np.uint8)
        self._places = _Places(view, self._rows.rows, width)
        self._layout = Layout(
            cols=np.uint64(2), block=np.uint64(2), row_blocks=np.uint64(1), row_bytes=np.uint64(2),
            bits=np.uint64(8), kind=KINDS[torch.float32], row_div=np.uint64(1), row_mod=np.uint64(blocks),
        )  # fmt: skip
        self._element = element_of(scheme, wanted.dtype, multiply=False)
        self._order = code_order(scheme)
        self.nbytes: int = self._high.nbytes + self._low.nbytes + self._ends.nbytes + self._codes.nbytes

    def choose(self, x: torch.Tensor, rule: Rule, memory: ScaleMemory, params: Params) -> None:
        """Choose the scales of ``x`` into the arrays of ``memory``; raises what the reference raises."""
        self._observe(x)
        scales, codes = memory.arrays(params)
        blocks = np.uint64(len(self._ends))
        state = quantize_rows(
            self._ends.reshape(-1), self._layout, self._element, rule, self._order, scales, codes,
            memory.zeros, self._codes, np.uint64(0), blocks,
        )  # fmt: skip
        if state != k.OK:
            refuse(x, self._scheme)

    def _observe(self, x: torch.Tensor) -> None:
        source, rows, layout = flat_array(x), self._rows.rows, self._rows.layout
        high, low = self._high, self._low
        over_rows(rows, x.numel(), lambda a, b: amax_rows(source, layout, high, np.uint64(a), np.uint64(b)))
        require_finite(x, high.max())
        if not self._ranged:
            self._places.merge(np.maximum, high, self._ends[:, 1])
            self._ends[:, 0] = self._ends[:, 1]
            return
        over_rows(
            rows, x.numel(), lambda a, b: range_rows(source, layout, low, high, np.uint64(a), np.uint64(b))
        )
        self._places.merge(np.minimum, low, self._ends[:, 0])
        self._places.merge(np.maximum, high, self._ends[:, 1])


class _Places:
    """Which rows of per-row statistics belong to which row of parameters: ``(row // div) % mod``."""

    def __init__(self, view: View, rows: int, width: int) -> None:
        self._div, self._mod = int(view.layout.row_div), int(view.layout.row_mod)
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


def _like(wanted: Request) -> torch.Tensor:
    """Return a tensor of the request's shape and dtype without memory."""
    return torch.empty(wanted.shape, dtype=wanted.dtype, device="meta")


def require_finite(x: torch.Tensor, top: Any) -> None:
    """Raise NonFiniteError with the place in ``x`` unless its largest magnitude is finite."""
    if not math.isfinite(top):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")


def refuse(x: torch.Tensor, scheme: Scheme) -> None:
    """Let the reference find and name what a kernel refused."""
    reference.choose_params(x, scheme)
    raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
