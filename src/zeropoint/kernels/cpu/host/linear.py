"""Linear layers on codes or values; calls add tensors and threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ....formats import IntFormat
from ....ops import linear as layers
from ....ops import lowering
from ....ops.code_tables import code_order
from ....ops.linear import Layer
from ....ops.lowering import How
from ....ops.lowering_refusals import element_refusal, rule_refusal
from ....ops.registry import Request
from ....ops.threads import gradual_underflow, parts_for, share, thread_count
from ....params.effective import effective_scale
from ....params.tensors import Params, zero_point_of
from ....schemes import Scheme, ZeroPoint
from ..linear.chunks import MANY, Matrix, Slots
from ..linear.from_codes import code_slots, float_slots, work_bytes
from ..linear.from_values import PackedValues, Panels, value_slots, work_floats
from ..linear.panels import PANEL
from ..linear.products import HIGH, QUADS, adds_quads
from ..machine import descriptor as k
from ..machine.descriptor import Descriptor
from ..machine.intrinsics import LINE
from ..machine.named_records import pack
from .arrays import NO_FLOATS, Stored, block_factors, flat_array, stored_factors
from .calls import given_call
from .views import KINDS, View, view_of

_ANY_ROWS = 1 << 40
NO_BIAS = np.zeros(0, np.float32)
PACKING = 4
"""Codes of a weight that are packed in the time in which a number of the input is quantized."""
WORK_OF_ONE = 16
"""Products in the time of one element of other operators: what decides whether another thread pays."""


def codes_refusal(request: Request) -> str | None:
    """Return why the kernels cannot compute the layer, or None."""
    reason = layers.refusal(request)
    if reason is not None:
        return reason
    if request.dtype not in KINDS:
        return f"{request.dtype} is computed in float64"
    found = None if request.source is None else _input_of(request, request.source)
    return found if isinstance(found, str) else None


class LinearKernel:
    """The layer of a request, but for its tensors."""

    def __init__(self, request: Request) -> None:
        self._request, self._matrix = request, _matrix_of(request)
        self._numbers = pack(self._matrix)
        source = request.source
        self._source = None if source is None else _input_of(request, source)
        self._like = None if source is None else np.zeros(0, _code_dtype(request, self._matrix))
        self._kernel = float_slots if source is None else code_slots
        self._cut_for = functools.lru_cache(maxsize=64)(functools.partial(_cut, self._matrix))

    def run(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
        """Build the layer, which reads these tensors' memory each call."""
        request, (rows, cols) = self._request, self._request.shape
        # Names of this function, which a call reads faster than attributes.
        kernel, numbers, cut_for = self._kernel, self._numbers, self._cut_for
        source, like = self._source, self._like

        def arrays() -> tuple[Any, Any, Any]:
            of_bias = NO_BIAS if bias is None else flat_array(bias.detach().float())
            return flat_array(weight), _scales_of(request, params), of_bias

        made = arrays()
        held = made if shared(made, (weight, params[0], bias)) else None

        def layer(x: torch.Tensor, given: Params | None) -> torch.Tensor:
            out, count = x.new_empty((*x.shape[:-1], rows), dtype=torch.float32), x.numel() // cols
            if count == 0 or rows == 0:
                return out.to(x.dtype)
            codes, factors, of_bias = held or arrays()
            used = (
                (flat_array(x.float()),)
                if source is None
                else (like, flat_array(x), *source, _given(request, given, count))
            )
            cut, size, slots, elements = cut_for(count, thread_count())
            work = np.empty(size, np.uint8)
            args = *used, (codes, numbers, factors, of_bias), work, flat_array(out), cut
            if share(kernel, args, slots, elements) != k.OK:
                layers.refuse_input(request, x)
            return out if x.dtype is torch.float32 else out.to(x.dtype)

        return layer


def _code_dtype(request: Request, matrix: Matrix) -> type[np.signedinteger[Any]]:
    """Int8 if the processor multiplies whole steps of it, else int16."""
    source = request.source
    assert source is not None
    assert isinstance(source.element, IntFormat)
    plain = source.element.signed and source.zero_point is ZeroPoint.NONE
    whole = matrix.cols // matrix.groups % QUADS.lanes == 0
    return np.int8 if adds_quads() and whole and (plain or not matrix.grouped) else np.int16


def _matrix_of(request: Request) -> Matrix:
    (rows, cols), element = request.shape, request.scheme.element
    assert isinstance(element, IntFormat)
    groups = request.scheme.granularity.grid(request.shape)[1]
    return Matrix(
        rows=rows,
        cols=cols,
        row_bytes=-(-cols * element.bits // 8),
        bits=element.bits,
        group=cols // groups,
        groups=groups,
        signed=element.signed,
        grouped=groups > 1 or request.source is None,
    )


def _input_of(request: Request, scheme: Scheme) -> tuple[Any, Any, int] | str:
    """Kernel arguments of the input, or why it cannot be quantized."""
    dtype = request.dtype
    reason = element_refusal(scheme) or (None if request.given else rule_refusal(scheme, dtype))
    if reason is not None:
        return reason
    rule = lowering.GIVEN if request.given else lowering.rule_of(scheme, dtype)
    if rule.how not in (How.GIVEN, How.LINEAR, How.AFFINE):
        return f"scales of {scheme} are not float numbers"
    view = view_of(scheme, (_ANY_ROWS, request.shape[1]), dtype)
    assert isinstance(view, View)
    assert isinstance(scheme.element, IntFormat)
    element = lowering.element_of(scheme, dtype, multiply=False)
    return pack(Descriptor(view.layout, element, rule)), code_order(scheme), int(scheme.element.signed)


def _given(request: Request, params: Params | None, count: int) -> tuple[Any, Any]:
    """Return the given scale and zero point as the kernel takes them."""
    if params is None or request.source is None:
        return NO_FLOATS, NO_FLOATS
    scheme, scale = request.source, params[0]
    if len(scheme.scales) == 1 and scale.dtype is torch.float32:
        zero = zero_point_of(scheme, params)
        return flat_array(scale), NO_FLOATS if zero is None else flat_array(zero.to(torch.float32))
    with gradual_underflow():
        return block_factors(scheme, params, (count, request.shape[1]), request.dtype, dividing=True)


def _scales_of(request: Request, params: Params) -> Any:
    """Float32 per row and group: the tensor's memory where possible."""
    stored, rows = params[0], request.shape[0]
    if len(params) > 1 or stored.dtype is not torch.float32 or stored.shape[0] != rows:
        with gradual_underflow():
            combined = effective_scale(request.scheme, params, request.shape, request.own_dtype)
        assert combined is not None
        stored = combined.to(torch.float32).expand(rows, -1).contiguous()
    return flat_array(stored)


def shared(arrays: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Return whether arrays are the memory of tensors, whose numbers may change."""
    pairs = zip(arrays, tensors, strict=True)
    return all(t is None or a.ctypes.data == t.data_ptr() for a, t in pairs)


def _cut(matrix: Matrix, count: int, threads: int) -> tuple[Any, int, int, int]:
    """Cut ``count`` rows for threads: row tiles, or few rows' columns.

    With the bytes of workspace, the slots, and the elements they are worth. Threads that share the rows pack
    or unpack the whole weight each, others quantize all rows.
    """
    rows, cols = matrix.rows, matrix.cols
    along = count >= 2 * HIGH * threads and count * PACKING >= rows
    height, whole = (HIGH, count) if along else (PANEL if count >= MANY else QUADS.wide, rows)
    elements = count * rows * cols // WORK_OF_ONE
    slots = parts_for(-(-whole // height), elements)
    cut = pack(Slots(input_rows=count, weight_rows=rows, along=along, height=height, slots=slots))
    size = work_bytes(-(-count // slots) + HIGH if along else count, matrix)
    return cut, slots * -(-size // LINE) * LINE, slots, elements


def values_refusal(request: Request) -> str | None:
    """Return why the kernels cannot compute the layer, or None."""
    if request.own_dtype not in KINDS or request.dtype not in KINDS:
        return f"{request.own_dtype} is computed in float64"
    if request.dtype is not torch.float32:
        return f"products of {request.dtype} are left to torch"
    if request.shape[1] == 0:
        return "there is nothing to multiply"
    view = view_of(request.scheme, request.shape, torch.float32)
    return element_refusal(request.scheme) or (view if isinstance(view, str) else None)


class ValueKernel:
    """The layer of a request, but for its tensors."""

    def __init__(self, request: Request) -> None:
        scheme, shape, own = request.scheme, request.shape, request.own_dtype
        self._request, self._panels = request, -(-shape[0] // PANEL)
        self._call = given_call(scheme, shape, request.dtype, own, request.code_range)
        self._cut_for = functools.lru_cache(maxsize=64)(self._cut)

    def run(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
        """Build the layer, which reads these tensors' memory each call."""
        rows, cols = self._request.shape

        def arrays() -> tuple[Any, ...]:
            with gradual_underflow():
                stored = self._stored(params)
            packed = PackedValues(
                desc=self._call.descriptor_of(stored),
                source=self._call.codes_in(weight),
                table=self._call.table,
                scales=stored.factors,
                scale_codes=stored.codes,
                zeros=stored.zeros,
            )
            return (*packed,), NO_BIAS if bias is None else flat_array(bias.detach().float())

        made = arrays()
        weights, of_bias = PackedValues(*made[0]), made[1]
        of_scales = weights.scale_codes if weights.scales is NO_FLOATS else weights.scales
        lasting = len(params) == 1 and shared((weights.source, of_scales, of_bias), (weight, params[0], bias))
        held = made if lasting else None

        def layer(x: torch.Tensor, _: Params | None) -> torch.Tensor:
            out, count = x.new_empty((*x.shape[:-1], rows)), x.numel() // cols
            if count == 0 or rows == 0:
                return out
            cut, slots, elements = self._cut_for(count, thread_count())
            work = np.empty(slots * work_floats(cols), np.float32)
            args = flat_array(x), *(held or arrays()), work, flat_array(out), cut
            share(value_slots, args, slots, elements)
            return out

        return layer

    def _stored(self, params: Params) -> Stored:
        asked = self._request
        return stored_factors(asked.scheme, params, asked.shape, asked.own_dtype)

    def _cut(self, count: int, threads: int) -> tuple[Any, int, int]:
        """Cut ``count`` rows for threads: shape, slots, and their elements."""
        rows, cols = self._request.shape
        elements = count * rows * cols // WORK_OF_ONE
        slots = min(threads, parts_for(self._panels, elements))
        shape = Panels(input_rows=count, cols=cols, rows=rows, panels=self._panels, slots=slots)
        return pack(shape), slots, elements
