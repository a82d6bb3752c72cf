"""Host side of value linear layers: arrays, threads over panels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ....ops.linear import Layer
from ....ops.lowering_refusals import element_refusal
from ....ops.registry import Request
from ....ops.threads import gradual_underflow, parts_for, share, thread_count
from ....params.tensors import Params
from ..entries import linear_from_values
from ..linear.from_values import PackedValues, Panels, work_floats
from ..linear.panels import PANEL
from ..machine.named_records import pack
from .arrays import NO_FLOATS, Stored, flat_array, stored_factors
from .calls import given_call
from .linear_codes import NO_BIAS, WORK_OF_ONE, shared
from .views import KINDS, view_of


def refusal(request: Request) -> str | None:
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
            share(linear_from_values, args, slots, elements)
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
