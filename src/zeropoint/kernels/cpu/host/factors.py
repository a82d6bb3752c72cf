"""Kernel divisors and multipliers: block factors, given or loaded each call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ....formats import IntFormat
from ....formats.torch_dtypes import format_of, storage_dtype
from ....ops.registry import Request
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
    """Float32 factor and zero point per block, filled in place.

    Holds the same numbers as the backend computes for a call of its own: the product of the scale levels and
    the step of integer codes.

    dividing: whether a zero factor becomes Inf, by which every value divides to zero.
    """

    def __init__(self, wanted: Request, *, dividing: bool) -> None:
        scheme, shape = wanted.scheme, wanted.shape
        self._wanted, self._dividing = wanted, dividing
        self._in_place = load_refusal(scheme, wanted.own_dtype) is None
        count = scheme.granularity.block_count(shape)
        self.values: Any = np.ones(count, np.float32)
        self.zeros: Any = np.zeros(
            count if scheme.zero_point is not ZeroPoint.NONE else len(NO_FLOATS), np.float32
        )
        self._factors, self._offsets = torch.from_numpy(self.values), torch.from_numpy(self.zeros)
        self._lost = np.empty(count if dividing and len(scheme.scales) > 1 else 0, np.bool_)
        step = scheme.element.step if isinstance(scheme.element, IntFormat) else 1
        self._step = np.float32(float(step))
        self.nbytes: int = self.values.nbytes + self.zeros.nbytes + self._lost.nbytes

    def load(self, params: Params) -> None:
        """Take the parameters, contiguous tensors on the grids of the scheme."""
        if not self._in_place:
            self._copy(params)
            return
        levels, zero_point = len(self._wanted.scheme.scales), zero_point_of(self._wanted.scheme, params)
        if levels:
            self._factors.copy_(params[0].reshape(-1))
        if levels > 1:
            self._combine(params[1].reshape(()))
        if self._step != 1:
            np.multiply(self.values, self._step, out=self.values)
        if zero_point is not None:
            self._offsets.copy_(zero_point.reshape(-1))

    def _copy(self, params: Params) -> None:
        wanted = self._wanted
        values, zeros = block_factors(
            wanted.scheme, params, wanted.shape, wanted.own_dtype, dividing=self._dividing
        )
        self.values[:], self.zeros[:] = values, zeros

    def _combine(self, coarse: torch.Tensor) -> None:
        scheme = self._wanted.scheme
        inverse = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
        if inverse and not scheme.scales[0].rule.power_of_two:
            self._factors.div_(coarse)
        else:
            self._factors.mul_(coarse)
        if self._lost.size:
            np.equal(self.values, 0, out=self._lost)
            np.copyto(self.values, np.float32(math.inf), where=self._lost)


class Divisors:
    """Arrays by which kernels divide: given parameters, or each call's."""

    def __init__(self, wanted: Request, params: Params | None) -> None:
        self._loaded: Factors | None = None
        if params is None:
            self._loaded = Factors(wanted, dividing=True)
            self.values, self.zeros = self._loaded.values, self._loaded.zeros
            self.nbytes = self._loaded.nbytes
            return
        values, zeros = block_factors(wanted.scheme, params, wanted.shape, wanted.own_dtype, dividing=True)
        # Copies: later changes to the caller's tensors must not reach some plans and miss others.
        self.values, self.zeros = np.array(values), np.array(zeros)
        self.nbytes = self.values.nbytes + self.zeros.nbytes

    def load(self, params: Params | None) -> None:
        """Take the parameters of a call, unless they were given before."""
        if self._loaded is not None:
            assert params is not None
            self._loaded.load(params)


def multipliers(wanted: Request, params: Params) -> Any:
    """Factors of codes under given parameters; zero stays zero."""
    return np.array(block_factors(wanted.scheme, params, wanted.shape, wanted.own_dtype, dividing=False)[0])


class StoredScales:
    """Scales for the dequantizing kernel: stored bytes if known, else factors."""

    def __init__(self, wanted: Request, params: Params | None) -> None:
        self._loaded: Factors | None = None
        self._fixed: Stored | None = None
        self._wanted = wanted
        scheme, own = wanted.scheme, wanted.own_dtype
        self.nbytes = 0
        if params is not None:
            stored = stored_factors(scheme, params, wanted.shape, own)
            factors, codes, zeros = (np.array(array) for array in stored[:3])
            self._fixed = stored._replace(factors=factors, codes=codes, zeros=zeros)
            self.nbytes = factors.nbytes + codes.nbytes + zeros.nbytes
        elif stored_rule(scheme, own) is None:
            self._loaded = Factors(wanted, dividing=False)
            self.nbytes = self._loaded.nbytes

    def load(self, params: Params | None) -> Stored:
        """Return the scales for a call with ``params``."""
        if self._fixed is not None:
            return self._fixed
        assert params is not None
        wanted = self._wanted
        if self._loaded is None:
            return stored_factors(wanted.scheme, params, wanted.shape, wanted.own_dtype)
        self._loaded.load(params)
        return Stored(factors=self._loaded.values, codes=NO_BYTES, zeros=self._loaded.zeros)


def dequantize_refusal(wanted: Request) -> str | None:
    """Reason why held dequantization under changing parameters allocates, or None."""
    scheme, own = wanted.scheme, wanted.own_dtype
    return None if stored_rule(scheme, own) is not None else load_refusal(scheme, own)
