"""Scale searches: a request's search, and the parameters it adds."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ops import lowering, reference
from ...ops.lowering import How
from ...ops.lowering_refusals import rule_refusal
from ...ops.reference_backend import Codes
from ...ops.registry import HeldKernel, Request
from ...ops.scale_search import searched_levels
from ...params.scale_windows import block_length, has_window
from ...params.tensors import Params
from .block_ends import Ends
from .fit_launch import ScaleFit, fits
from .launches import ALLOCATES, Launch
from .sweep_launch import LONGEST, SHORTEST, ScaleSweep
from .two_passes import new_notes


def search_refusal(request: Request) -> str | None:
    """Return why no kernel searches the scales of a request, or None."""
    scheme, shape = request.scheme.start, request.shape
    search = request.scheme.search
    if search is not None and (search.factor or search.power != 2):
        return f"scales of rule {search.text} are searched by the reference"
    if not has_window(scheme) or searched_levels(scheme) != [0]:
        return f"scales of {scheme} are searched by the reference, level after level and with zero points"
    reason = rule_refusal(scheme, request.own_dtype)
    if reason is not None:
        return reason
    swept = lowering.rule_of(scheme, request.own_dtype).how in (How.POWER, How.MINIFLOAT)
    size = block_length(scheme, shape)
    if not (swept or fits(scheme, shape)):
        return f"scales of level {scheme.scales[0]} of blocks of {size} values are searched by the reference"
    whole = bool(shape) and size == scheme.granularity.block_shape(shape)[-1] and shape[-1] % size == 0
    if not whole or size & (size - 1) or not SHORTEST <= size <= LONGEST:
        return f"blocks of {size} values in rows of {shape[-1:]} are searched by the reference"
    return None


class SearchedScales:
    """The kernels on tensors that fit one request, which is not refused."""

    def __init__(self, request: Request) -> None:
        asked = replace(request, scheme=request.scheme.start, strides=None)  # searches read rows
        swept = lowering.rule_of(asked.scheme, request.own_dtype).how is not How.LINEAR
        self._scheme, self._start = request.scheme, Launch(asked)
        self._search: ScaleSweep | ScaleFit = ScaleSweep(asked) if swept else ScaleFit(asked)

    def search_params(
        self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None
    ) -> Params:
        return self._search.search_params(x, params, importance)

    def choose_params(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        """Choose parameters of ``x`` by a searching rule; raises NonFiniteError."""
        reference.require_whole(self._scheme, extremes)
        return self.search_params(x, self._start.choose_params(x, extremes))

    def quantize_dynamic(self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None) -> Codes:
        """Return codes and the parameters that ``x`` gives by that rule."""
        reference.require_whole(self._scheme, extremes)
        data, params = self._start.quantize_dynamic(x, out, extremes)
        if 0 not in x.shape:
            self._search.improve(x, params, self._search.room())
            self._start.quantize(x, params, data)
        return data, params

    def hold(self, params: Params | None) -> HeldKernel | str:
        started = ALLOCATES if isinstance(self._search, ScaleFit) else self._start.hold(params)
        if isinstance(started, str) or 0 in self._start.shape:
            return started
        room, tables = self._search.room(), self._start.held_tables()
        notes = new_notes(room[0].device)

        def run(x: torch.Tensor, *, out: Codes) -> None:
            started.run(x, out=out)
            data, params = out
            self._search.improve(x, params, room)
            self._start.encode(x, self._start.scales(params, tables), data, notes)

        held = [*room, notes] if tables is None else [*room, notes, tables]
        return replace(
            started, run=run, workspace_bytes=started.workspace_bytes + sum(each.nbytes for each in held)
        )
