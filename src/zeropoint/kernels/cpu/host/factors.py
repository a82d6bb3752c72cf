"""Kernel divisors and multipliers: block factors, given or loaded each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....formats import IntFormat
from ....formats.torch_dtypes import format_of, storage_dtype
from ....ops.registry import HeldKernel, Request
from ....params.tensors import Params, zero_point_of
from ....schemes import Granularity, Scheme, TensorScale, ZeroPoint
from .arrays import NO_BYTES, NO_FLOATS, Stored, block_factors, stored_factors
from .views import stored_rule

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
    """Float32 factor and zero point per block, given or filled by each call.

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
