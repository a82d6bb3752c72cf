"""Kernel calls resolved but for data, per scheme, shape and dtype.

What a call needs is spread over many small objects, and between two calls on large tensors the data pushes
all of them out of the caches: finding them again took a tenth of the time of a kernel on 4096 x 4096 numbers.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np
import torch

from ....errors import ShapeError
from ....formats import FloatFormat
from ....layout import packing
from ....ops import lowering, reference
from ....ops.code_tables import code_order, value_table
from ....ops.lowering import How, needs_range
from ....ops.lowering_refusals import rule_refusal
from ....ops.threads import WORTH_A_THREAD, parts_for, share
from ....params.tensors import Params, parameter_tensors
from ....schemes import Granularity, Scheme
from ..decode.fake import (
    BackwardArrays,
    FakeQuantizeArrays,
    fake_quantize_backward_rows,
    fake_quantize_rows,
)
from ..decode.level_products import LevelPairArrays, level_rows
from ..decode.rows import DequantizeArrays, dequantize
from ..encode.boundaries import ROOM
from ..encode.outer_scale import choose_outer, largest_bits_of_rows
from ..encode.rows import QuantizeArrays, quantize
from ..machine import descriptor as k
from ..machine.descriptor import Descriptor, with_coarse
from ..machine.named_records import pack
from . import rare_kernels
from .arrays import NO_BYTES, NO_FLOATS, Levels, Stored, code_step, flat_array, levels_of
from .views import View, rows_of_levels, stored_rule, view_of


def flat_bytes(data: torch.Tensor, count: int) -> Any:
    """View packed codes as an array; ShapeError for memory off limits."""
    if data.numel() != count or data.dtype is not torch.uint8 or not data.is_contiguous():
        laid = "contiguous" if data.is_contiguous() else "not contiguous"
        raise ShapeError(
            f"data ({data.dtype} of shape {tuple(data.shape)}, {laid}) must be {count} contiguous bytes, "
            "those of all packed codes"
        )
    return flat_array(data)


class GivenCall:
    """Calls under given parameters, on tensors of ``shape``.

    dtype: of the values, in or out. own_dtype: of the tensor that the parameters belong to. code_range:
    smallest and largest integer code in use, or None for the scheme's.
    """

    def __init__(
        self,
        scheme: Scheme,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        own_dtype: torch.dtype,
        code_range: tuple[int, int] | None,
    ) -> None:
        view, element = view_of(scheme, shape, dtype), lowering.element_of(scheme, own_dtype, multiply=False)
        assert isinstance(view, View)
        if code_range is not None:
            low, high = code_range
            element = element._replace(low=low, high=high)
        self.rows, self.count = view.rows, math.prod(shape)
        self._bytes = math.prod(packing.packed_shape(shape, scheme.bits))
        self.order, self.table = code_order(scheme), value_table(scheme)
        self.descriptor = pack(Descriptor(view.layout, element))
        rule = stored_rule(scheme, own_dtype)
        self._stored_descriptor = (
            self.descriptor if rule is None else pack(Descriptor(view.layout, element, rule))
        )
        moved = element._replace(zero_place=lowering.ZeroPlace.PRODUCT)
        self._moved_descriptor = pack(Descriptor(view.layout, moved))

    def descriptor_of(self, stored: Stored) -> Any:
        """Descriptor for a kernel that reads stored scales."""
        if stored.coarse is None:
            return self._stored_descriptor
        return with_coarse(self._stored_descriptor, stored.coarse)

    def codes_in(self, data: torch.Tensor) -> Any:
        """View packed codes; raises ShapeError for a wrong number of bytes."""
        return flat_bytes(data.contiguous(), self._bytes)

    def quantize(self, x: torch.Tensor, factors: Any, zeros: Any, data: torch.Tensor) -> None:
        """Write the packed codes of ``x``; raises NonFiniteError."""
        if self.count == 0:
            return
        target = flat_bytes(data, self._bytes)
        arrays = QuantizeArrays(flat_array(x), self.order, factors, NO_BYTES, zeros, target, NO_BYTES)
        if share(quantize, (self.descriptor, *arrays), self.rows, self.count) == k.BAD_VALUE:
            reference.require_finite(x)

    def dequantize(
        self, data: torch.Tensor, stored: Stored, out: torch.Tensor, offset: torch.Tensor | None = None
    ) -> None:
        """Write the values of packed codes; offset: float32 per block, or None."""
        if self.count == 0:
            return
        zeros = stored.zeros if offset is None else flat_array(offset)
        descriptor = self.descriptor_of(stored) if offset is None else self._moved_descriptor
        arrays = DequantizeArrays(
            source=self.codes_in(data),
            table=self.table,
            scales=stored.factors,
            scale_codes=stored.codes,
            zeros=zeros,
            out=flat_array(out),
        )
        share(dequantize, (descriptor, *arrays), self.rows, self.count)

    def fake_quantize(
        self, x: torch.Tensor, divisors: Any, multipliers: Any, zeros: Any, out: torch.Tensor
    ) -> None:
        """Write the values of the codes of ``x``; see :func:`..decode.fake.fake_quantize_rows`."""
        if self.count == 0:
            return
        arrays = FakeQuantizeArrays(
            x=flat_array(x),
            order=self.order,
            table=self.table,
            divisors=divisors,
            multipliers=multipliers,
            zeros=zeros,
            out=flat_array(out),
        )
        share(fake_quantize_rows, (self.descriptor, *arrays), self.rows, self.count)

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, bounds: Any, factors: Any, zeros: Any, out: torch.Tensor
    ) -> None:
        """Write the straight-through gradient; see :func:`..decode.fake.fake_quantize_backward_rows`."""
        if self.count == 0:
            return
        arrays = BackwardArrays(
            grad=flat_array(grad), x=flat_array(x), divisors=factors, zeros=zeros, out=flat_array(out)
        )
        share(fake_quantize_backward_rows, (self.descriptor, bounds, *arrays), self.rows, self.count)


given_call = functools.lru_cache(maxsize=1024)(GivenCall)
"""Look up the call under parameters that each run brings."""


class LevelsCall:
    """Decoding calls under two scale levels, which the kernel multiplies."""

    def __init__(self, scheme: Scheme, levels: Levels, call: GivenCall) -> None:
        self._tables, self._call = levels.tables, call
        self._kinds = pack(levels.kinds._replace(unit=float(code_step(scheme))))

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor) -> None:
        """Write the values of packed codes."""
        call, (fine, coarse) = self._call, (flat_array(level).view(np.uint8) for level in params)
        levels = LevelPairArrays(fine=fine, coarse=coarse, tables=self._tables)
        args = call.codes_in(data), call.descriptor, call.table, (*levels,), self._kinds, flat_array(out)
        share(level_rows, args, call.rows, call.count)


@functools.lru_cache(maxsize=1024)
def levels_call(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, own_dtype: torch.dtype
) -> LevelsCall | None:
    """Call for a scheme of two scale levels in rows, or None."""
    levels, view = levels_of(scheme, shape, own_dtype), view_of(scheme, shape, dtype)
    if levels is None or not isinstance(view, View) or not view.one_pass:
        return None
    blocks = levels.kinds.per
    rows = None if scheme.granularity.grid(shape)[-1] % blocks else rows_of_levels(scheme, shape, blocks)
    return (
        None if rows is None else LevelsCall(scheme, levels, given_call(scheme, rows, dtype, own_dtype, None))
    )


class OnePass:
    """One-pass calls that choose scales and codes of ``shape``.

    searched: the kernel that searches scales, where they are searched, and what says which it tries; see
    :mod:`.window_ends`. two_levels: whether the scales are relative to one of the whole tensor.
    chooses_outer: whether a kernel chooses that one, too.
    """

    def __init__(
        self,
        scheme: Scheme,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        view: View,
        searched: tuple[Any, ...] | None = None,
    ) -> None:
        self._searched = searched
        rule = lowering.rule_of(scheme, dtype)
        multiply = rule.how is How.POWER and isinstance(scheme.element, FloatFormat)
        element = lowering.element_of(scheme, dtype, multiply=multiply)
        self._descriptor = pack(Descriptor(view.layout, element, rule))
        self._order = code_order(scheme)
        self._rows, self._count = view.rows, math.prod(shape)
        self.two_levels = len(scheme.scales) > 1
        ranged = needs_range(scheme) or searched is not None
        outer = None if ranged else lowering.outer_rule_of(scheme, dtype)
        self._outer, self.chooses_outer = None if outer is None else pack(outer), outer is not None
        self._bytes = math.prod(packing.packed_shape(shape, scheme.bits))
        self.scales = ChosenScales(scheme, shape, dtype)
        few = multiply and scheme.bits == FOUR_BITS and dtype is not torch.float32
        self._tables = _tables_of(scheme, dtype) if few else None

    def shaped(self, scales: ChosenScales) -> OnePass:
        """Return the same call with scales of another shape."""
        other = copy.copy(self)
        other.scales = scales
        return other

    def run(
        self,
        x: torch.Tensor,
        data: torch.Tensor,
        params: Params,
        memory: ScaleMemory,
        coarse: float | None = None,
    ) -> int:
        """Write codes, scales and zero points; coarse: given scale of the tensor.

        Returns OK, BAD_VALUE or BAD_SCALE; after the latter two what was written means nothing.
        """
        scales, codes = memory.arrays(params)
        source, target, zeros = flat_array(x), flat_bytes(data, self._bytes), memory.zeros
        descriptor = self._descriptor if coarse is None else with_coarse(self._descriptor, coarse)
        if self._outer is not None and coarse is None:
            descriptor = descriptor.copy()
            bits = share(largest_bits_of_rows, (source, descriptor), self._rows, self._count)
            state: int = choose_outer(bits, self._outer, descriptor, flat_array(params[1]))
            if state != k.OK:
                return state
        if self._searched is not None:
            search, *tried = self._searched
            written = scales if self.scales.floats else codes
            found = source, descriptor, *tried, self._order, written, target
            state = share(search, found, self._rows, self._count)
            memory.store(params)
            return state
        kept = self._take_tables()
        arrays = QuantizeArrays(source, self._order, scales, codes, zeros, target, kept)
        state = share(quantize, (descriptor, *arrays), self._rows, self._count)
        if self._tables is not None and kept is not NO_BYTES:
            self._tables.append(kept)
        memory.store(params)
        return state

    def _take_tables(self) -> Any:
        """Take free tables for a single-threaded call, else one byte."""
        if self._tables is None or parts_for(self._rows, self._count) > 1:
            return NO_BYTES
        try:
            return self._tables.pop()
        except IndexError:
            return np.zeros(ROOM, np.uint8)


FOUR_BITS = 4


@functools.lru_cache(maxsize=64)
def _tables_of(scheme: Scheme, dtype: torch.dtype) -> list[Any]:
    """List filled tables of scales and boundaries that no call uses.

    Gain: quantizing 64 x 1024 or 512 x 1024 float16 numbers to mxfp4 takes three quarters of the time.
    """
    return [np.zeros(ROOM, np.uint8)]


@functools.lru_cache(maxsize=1024)
def one_pass(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> OnePass | None:
    """Call that takes one pass; None if empty or two passes."""
    view = view_of(scheme, shape, dtype)
    assert isinstance(view, View)
    if 0 in shape or rule_refusal(scheme.start, dtype) is not None or not view.one_pass:
        return None
    if scheme.search is None:
        return OnePass(scheme, shape, dtype, view)
    searched = rare_kernels.window_search(scheme, view, dtype)
    return None if searched is None else OnePass(scheme, shape, dtype, view, searched)


@functools.lru_cache(maxsize=1024)
def flat_pass(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> OnePass | None:
    """Call for a small one-scale tensor as one row, or None.

    So its extremes need no pass of their own.
    """
    small = len(shape) > 1 and math.prod(shape) < WORTH_A_THREAD
    one_scale = len(scheme.scales) == 1 and scheme.granularity == Granularity.tensor()
    if not small or not one_scale or shape[-1] * scheme.bits % 8:
        return None
    found = one_pass(scheme, (math.prod(shape),), dtype)
    return None if found is None else found.shaped(ChosenScales(scheme, shape, dtype))


class ChosenScales:
    """Finest scales and zero points chosen by calls on ``shape``.

    floats: whether the kernel writes them as float32 rather than bytes; direct: whether that is how they are
    stored. blocks: their number. zeroed: whether there are zero points. packed_shape: of the codes.
    """

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._made = made = parameter_tensors(scheme, shape, dtype)
        self.packed_shape = packing.packed_shape(shape, scheme.bits)
        self.floats = lowering.rule_of(scheme, dtype).how in (How.LINEAR, How.AFFINE)
        self.direct = self.floats and made[0][1] == torch.float32
        self.blocks, self.zeroed = math.prod(made[0][0]), len(made) > len(scheme.scales)

    def empty(self) -> list[torch.Tensor]:
        """Allocate scales of all levels and zero points."""
        return [torch.empty(grid, dtype=dtype, device="cpu") for grid, dtype in self._made]


class ScaleMemory:
    """Arrays for a kernel's scales, and their copy to a call's tensors.

    Scales that are stored as float32 are written where they belong; others are rounded on the way.
    """

    def __init__(self, scales: ChosenScales) -> None:
        apart = scales.floats and not scales.direct
        self._chosen = scales
        self._scales = np.empty(scales.blocks, np.float32) if apart else NO_FLOATS
        self.zeros: Any = np.empty(scales.blocks, np.float32) if scales.zeroed else NO_FLOATS
        self.nbytes = 4 * scales.blocks * (apart + scales.zeroed)

    def arrays(self, params: Params) -> tuple[Any, Any]:
        """Arrays of a call's float32 scales and of scale bytes."""
        fine = params[0]
        if not self._chosen.floats:
            return NO_FLOATS, flat_array(fine)
        return (flat_array(fine) if self._chosen.direct else self._scales), NO_BYTES

    def store(self, params: Params) -> None:
        """Write what the kernel left here into the tensors of the call."""
        if self._chosen.floats and not self._chosen.direct:
            params[0].view(-1).copy_(torch.from_numpy(self._scales))
        if self._chosen.zeroed:
            params[-1].view(-1).copy_(torch.from_numpy(self.zeros))


def refuse(x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None = None) -> None:
    """Raise the reference's error for refused scales; extremes: whole tensor's."""
    reference.choose_params(x, scheme, extremes)
    raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
