"""The host side of linear layers on values of their weight: tensors to arrays, threads over panels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ....ops.linear import ValueCall, ValueKernel, Values
from ....ops.registry import Params
from ....ops.threads import gradual_underflow, parts_for, share, thread_count
from ..arrays import NO_FLOATS, flat_array, stored_factors
from ..calls import given_call
from ..entries import linear_from_values
from ..lowering import KINDS, element_refusal, view_of
from ..panels import PANEL
from ..values import work_floats
from .linear import NO_BIAS, WORK_OF_ONE, shared


def prepare(call: ValueCall) -> ValueKernel | str:
    """Return the kernel for ``call``, or why there is none."""
    scheme, (rows, cols), own = call.weight, call.shape, call.weight_dtype
    if own not in KINDS:
        return f"{own} is computed in float64"
    if cols == 0:
        return "there is nothing to multiply"
    view = view_of(scheme, call.shape, torch.float32)
    reason = element_refusal(scheme) or (view if isinstance(view, str) else None)
    if reason is not None:
        return reason
    given, panels = given_call(scheme, call.shape, torch.float32, own), -(-rows // PANEL)

    @functools.lru_cache(maxsize=64)
    def cut_for(count: int, threads: int) -> tuple[Any, int, int]:
        elements = count * rows * cols // WORK_OF_ONE
        slots = min(threads, parts_for(panels, elements))
        return np.array((count, cols, rows, panels, slots), np.uint64), slots, elements

    def bind(data: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Values:
        def arrays() -> tuple[Any, ...]:
            with gradual_underflow():
                stored = stored_factors(scheme, params, call.shape, own)
            scales = stored.factors, stored.codes, stored.zeros
            of_bias = NO_BIAS if bias is None else flat_array(bias.detach().float())
            return given.codes_in(data), given.told_of(stored), given.table, scales, of_bias

        codes, _, _, (factors, scale_codes, _), of_bias = made = arrays()
        one_level = len(params[0]) == 1 and params[1] is None
        of_scales = scale_codes if factors is NO_FLOATS else factors
        lasting = one_level and shared((codes, of_scales, of_bias), (data, params[0][0], bias))
        held = made if lasting else None

        def run(x: torch.Tensor) -> torch.Tensor:
            out, count = x.new_empty((*x.shape[:-1], rows)), x.numel() // cols
            if count == 0 or rows == 0:
                return out
            cut, slots, elements = cut_for(count, thread_count())
            work = np.empty(slots * work_floats(cols), np.float32)
            args = flat_array(x), *(held or arrays()), work, flat_array(out), cut
            share(linear_from_values, args, slots, elements)
            return out

        return run

    return bind
