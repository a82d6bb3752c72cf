"""The host side of the searches of scales."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...formats import FloatFormat
from ...formats.torch_dtypes import format_of
from ...ops import lowering
from ...ops.lowering import How, Kind, Narrow, ScaleBy
from ...ops.registry import Request
from ...ops.window_search import SAFE, clips_by_largest
from ...params.effective import over_reciprocal
from ...params.ladder import Ladder
from ...params.scale_windows import block_length, window_of
from ...params.stored import load_scale
from ...params.tensors import Params, require_parameters
from ...schemes import Scheme
from .launches import value_table_on
from .segmentation import Segments, segments_of
from .specialization import constants_of
from .starts import bits, on_device, program

SHORTEST, LONGEST = 8, 256
"""Values of the blocks that are searched: a program holds some in registers."""
_VALUES, _EXACT_VALUES = 1024, 256
"""Values of a program, which is a warp, and of one that computes in float64."""
_LONGEST_NEARLY = 128
"""Values of blocks whose sums of squares have a bound in float32."""
_PROGRAMS = 132 * 8
"""Programs that share the blocks of a list, whose length the host does not know."""


class Sweep(NamedTuple):
    """What the searches are compiled for.

    size, many: values of a block, and blocks of a program. halvings: base-2 logarithm of size. power: whether
    scales are powers of two. mantissa, emin (biased like float32), magnitude_bits: of their format. inverse:
    whether scales are divided by that of the tensor. first: code of the smallest scale. scales: how many
    there are. last: code of the largest. doubled: how many have a double that is a scale. normal: the least
    code of which, and of all above it, half is a scale. halving, empty, doubling, most: of
    :class:`zeropoint.params.scale_windows.Window`. end: ``most`` and a bit. safe: what outweighs roundings.
    free: how many of the largest scales that can be best clip nothing. unit: step of element codes. weighted:
    whether errors have weights. listed: whether blocks are listed.
    """

    size: int
    many: int
    halvings: int
    power: bool
    mantissa: int
    emin: int
    magnitude_bits: int
    inverse: bool
    first: int
    scales: int
    last: int
    doubled: int
    normal: int
    halving: float
    empty: float
    doubling: float
    most: float
    end: float
    safe: float
    free: int
    unit: float
    weighted: bool
    listed: bool


@functools.lru_cache(maxsize=256)
def sweep_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, *, weighted: bool) -> Sweep:
    """Return what the searches of a scheme that is not refused are compiled for."""
    rule, size = lowering.rule_of(scheme, dtype), block_length(scheme, shape)
    window, ladder = window_of(scheme, size, 2.0), Ladder.of(scheme.scales[0], dtype)
    assert ladder.table is not None
    assert weighted or clips_by_largest(scheme, shape, weighted=False)
    values, power = ladder.table.tolist(), rule.how is How.POWER
    known, fmt = set(values), scheme.scales[0].format_for(format_of(dtype))
    first = 0 if power else 1
    octave = 1 if power else 1 << rule.mantissa
    normal = 1 if power else 2 * octave
    # Down to half of the largest scale that can be best, no number is past twice that end.
    clips = 2 * window.halving > float(scheme.element.max) + float(scheme.element.largest_gap) / 2
    assert all(value / 2 in known for value in values[normal - first :])
    return Sweep(
        size=size, many=max(1, _VALUES // size), halvings=size.bit_length() - 1, power=power,
        mantissa=rule.mantissa, emin=1 if power else rule.emin,
        magnitude_bits=fmt.magnitude_bits if isinstance(fmt, FloatFormat) else 8,
        inverse=over_reciprocal(scheme, 0), first=first, scales=len(values), last=len(values) + first - 1,
        doubled=sum(2 * value in known for value in values), normal=normal,
        halving=window.halving, empty=window.empty, doubling=window.doubling, most=window.most,
        end=window.most * SAFE, safe=SAFE, free=0 if clips else octave, unit=rule.unit,
        weighted=weighted, listed=False,
    )  # fmt: skip


class ScaleSweep:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        found = segments_of(request.scheme.granularity, request.shape, request.scheme.bits)
        assert isinstance(found, Segments)
        self._request, self._constants = (
            request,
            constants_of(request, found.shape, chosen=False, dividing=True),
        )

    def search_params(
        self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None
    ) -> Params:
        """See :attr:`zeropoint.ops.registry.Op.SEARCH_PARAMS`."""
        scheme, shape = self._request.scheme, self._request.shape
        require_parameters(scheme, params, shape)
        if 0 in shape:
            return list(params)
        start, *coarser = params
        starts, values = start.contiguous().view(torch.uint8), bits(x)
        found = torch.empty_like(starts)
        sweep = sweep_of(scheme, shape, self._request.own_dtype, weighted=importance is not None)
        blocks, coarse = starts.numel(), self._coarse(coarser, x)
        unsure = count = starts
        with on_device(x.device):
            if importance is None and self._is_measured_nearly(sweep):
                unsure = torch.empty(blocks, dtype=torch.int32, device=x.device)
                count = torch.zeros(1, dtype=torch.int32, device=x.device)
                program("scale_sweeps.sweep_nearly")[(-(-blocks // sweep.many),)](
                    values, starts, coarse, unsure, count, found, blocks, sweep, self._constants,
                    num_warps=1, enable_fp_fusion=True,
                )  # fmt: skip
                sweep = sweep._replace(listed=True)
            sweep = sweep._replace(many=max(1, _EXACT_VALUES // sweep.size))
            programs = -(-blocks // sweep.many)
            if sweep.listed:
                programs = min(programs, _PROGRAMS)
            weights, pitch = _weights(importance, x)
            program("scale_sweeps.sweep_exactly")[(programs,)](
                values, weights, starts, coarse, value_table_on(scheme, x.device), unsure, count, found,
                blocks, shape[-1], pitch, sweep, self._constants, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return [found.view(start.dtype), *coarser]

    def _is_measured_nearly(self, sweep: Sweep) -> bool:
        """Return whether float32 tells most scales apart: of formats and blocks that it has bounds for."""
        element = self._constants.element
        divides = element.scaling == ScaleBy.DIVIDE and element.quotient == Narrow.NONE
        return divides and element.kind != Kind.CODEBOOK and sweep.size <= _LONGEST_NEARLY

    def _coarse(self, coarser: Params, x: torch.Tensor) -> torch.Tensor:
        """Return the scale of the whole tensor as float32, 1 where there is none."""
        if not coarser:
            return torch.ones(1, device=x.device)
        fmt = self._request.scheme.scales[1].format_for(format_of(self._request.own_dtype))
        return load_scale(coarser[0], fmt, torch.float32).reshape(1).contiguous()


def _weights(importance: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return weights, float64, and how many lie between two rows: 0 where all rows have the same."""
    if importance is None:
        return torch.ones(1, dtype=torch.float64, device=x.device), 0
    wide = importance.to(x.device, torch.float64)
    if wide.numel() == x.shape[-1] and wide.shape[-1:] == x.shape[-1:]:
        return wide.contiguous(), 0
    return wide.expand(x.shape).contiguous(), x.shape[-1]
