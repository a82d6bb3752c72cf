"""Memory that plans hold: factors of blocks, and scales chosen from data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....formats import IntFormat
from ....formats.torch_dtypes import format_of, storage_dtype
from ....ops.code_tables import code_order
from ....ops.lowering import element_of, needs_range, rule_of
from ....ops.registry import HeldKernel, Request
from ....params.tensors import Params, zero_point_of
from ....schemes import Granularity, Scheme, TensorScale, ZeroPoint
from ..encode.rows import QuantizeArrays, quantize
from ..machine import descriptor as k
from ..machine.descriptor import Descriptor, RowLayout, with_coarse
from ..machine.named_records import pack
from .arrays import NO_BYTES, NO_FLOATS, Stored, block_factors, stored_factors
from .calls import ScaleMemory, refuse
from .statistics import RowExtremes
from .views import KINDS, View, stored_rule, view_of

_CONVERTED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Dtypes of scales that torch itself converts to float32 in place."""


def load_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Return why :class:`Factors` cannot load the scheme's scales in place, or None."""
    own = format_of(dtype)
    if scheme.center is not None:
        return f"the center of {scheme} is added by the reference"
    if any(storage_dtype(level.format_for(own)) not in _CONVERTED for level in scheme.scales):
        return f"scales of {scheme} are decoded by the reference"
    if len(scheme.scales) > 2 or any(
        level.granularity != Granularity.tensor() for level in scheme.scales[1:]
    ):
        return f"scale levels of {scheme} are combined by the reference"
    return None


class Factors:
    """Float32 factor and zero point per block, given or filled per call.

    Holds the same numbers as the backend computes for a call of its own: the product of the scale levels and
    the step of integer codes.

    params: the given ones, which are copied; None: each call brings its own, which fill the arrays in place,
        unless :func:`load_refusal` says why not.
    dividing: whether a zero factor becomes Inf, by which every value divides to zero.
    arrays: factors and zero points.
    """

    def __init__(self, wanted: Request, params: Params | None, *, dividing: bool) -> None:
        scheme, shape = wanted.scheme, wanted.shape
        self._scheme, self._given, lost = scheme, params is not None, 0
        if params is None:
            count, zeroed = scheme.granularity.block_count(shape), scheme.zero_point is not ZeroPoint.NONE
            values = np.ones(count, np.float32)
            zeros = np.zeros(count if zeroed else len(NO_FLOATS), np.float32)
            lost = count if dividing and len(scheme.scales) > 1 else 0
        else:
            # Copies: later changes to the caller's tensors must not reach some plans and miss others.
            found = block_factors(scheme, params, shape, wanted.own_dtype, dividing=dividing)
            values, zeros = map(np.array, found)
        self.arrays: tuple[Any, Any] = values, zeros
        self._factors, self._offsets = torch.from_numpy(values), torch.from_numpy(zeros)
        self._lost = np.empty(lost, np.bool_)
        step = scheme.element.step if isinstance(scheme.element, IntFormat) else 1
        self._step = np.float32(float(step))
        self.nbytes: int = values.nbytes + zeros.nbytes + self._lost.nbytes

    def held(self, run: Callable[..., None]) -> HeldKernel:
        """Return a kernel that holds these arrays alone."""
        return _held(run, self.nbytes, given=self._given)

    def load(self, params: Params | None) -> tuple[Any, Any]:
        """Return the arrays, of a call's ``params`` unless others were given before."""
        if params is None:
            return self.arrays
        levels, zero_point = len(self._scheme.scales), zero_point_of(self._scheme, params)
        if levels:
            self._factors.copy_(params[0].reshape(-1))
        if levels > 1:
            self._combine(params[1].reshape(()))
        if self._step != 1:
            self._factors.mul_(float(self._step))
        if zero_point is not None:
            self._offsets.copy_(zero_point.reshape(-1))
        return self.arrays

    def _combine(self, coarse: torch.Tensor) -> None:
        scheme, (values, _) = self._scheme, self.arrays
        inverse = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
        if inverse and not scheme.scales[0].rule.power_of_two:
            self._factors.div_(coarse)
        else:
            self._factors.mul_(coarse)
        if self._lost.size:
            np.equal(values, 0, out=self._lost)
            np.copyto(values, np.float32(math.inf), where=self._lost)


class StoredScales:
    """Scales for the dequantizing kernel: stored bytes if known, else factors.

    params: as of :class:`Factors`.
    """

    def __init__(self, wanted: Request, params: Params | None) -> None:
        scheme, own = wanted.scheme, wanted.own_dtype
        self._wanted, self._loaded, self._fixed, self._nbytes = wanted, None, None, 0
        if params is not None:
            stored = stored_factors(scheme, params, wanted.shape, own)
            factors, codes, zeros = (np.array(array) for array in stored[:3])
            self._fixed = stored._replace(factors=factors, codes=codes, zeros=zeros)
            self._nbytes = factors.nbytes + codes.nbytes + zeros.nbytes
        elif stored_rule(scheme, own) is None:
            self._loaded = Factors(wanted, None, dividing=False)
            self._nbytes = self._loaded.nbytes

    def held(self, run: Callable[..., None]) -> HeldKernel:
        """Return a kernel that holds these scales alone."""
        return _held(run, self._nbytes, given=self._fixed is not None)

    def load(self, params: Params | None) -> Stored:
        """Return the scales, of a call's ``params`` unless others were given before."""
        if self._fixed is not None:
            return self._fixed
        assert params is not None
        wanted = self._wanted
        if self._loaded is None:
            return stored_factors(wanted.scheme, params, wanted.shape, wanted.own_dtype)
        factors, zeros = self._loaded.load(params)
        return Stored(factors=factors, codes=NO_BYTES, zeros=zeros)


def _held(run: Callable[..., None], nbytes: int, *, given: bool) -> HeldKernel:
    return HeldKernel(run=run, workspace_bytes=0 if given else nbytes, parameter_bytes=nbytes if given else 0)


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
        state = quantize(descriptor, *arrays, 0, len(self._ends), 1, 0)
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
