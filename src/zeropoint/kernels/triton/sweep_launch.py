"""The host side of the searches of scales."""

from __future__ import annotations

import functools
import math
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
from .specialization import constants_of
from .starts import Start, bits

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

    size, many: values of a block, and blocks of a program. pieces: of a block, whose values a thread has, in
    :func:`.programs.scale_sweeps.sweep_nearly`. halvings: base-2 logarithm of size. power: whether
    scales are powers of two. mantissa, emin (biased like float32), magnitude_bits: of their format. inverse:
    whether scales are divided by the tensor's. first: code of the smallest scale. scales: how many
    there are. last: code of the largest. doubled: how many have a double that is a scale. normal: the least
    code of which, and of all above it, half is a scale. halving, empty, doubling, most: of
    :class:`zeropoint.params.scale_windows.Window`. end: ``most`` and a bit. safe: what outweighs roundings.
    free: how many of the largest scales that can be best clip nothing. unit: step of element codes. weighted:
    whether errors have weights. listed: whether blocks are listed.
    """

    size: int
    many: int
    pieces: int
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
    """Derive compile-time constants of a scheme's searches."""
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
        size=size, many=max(1, _VALUES // size), pieces=size // 8 if size <= 32 else 1,
        halvings=size.bit_length() - 1, power=power, mantissa=rule.mantissa, emin=1 if power else rule.emin,
        magnitude_bits=fmt.magnitude_bits if isinstance(fmt, FloatFormat) else 8,
        inverse=over_reciprocal(scheme, 0), first=first, scales=len(values), last=len(values) + first - 1,
        doubled=sum(2 * value in known for value in values), normal=normal,
        halving=window.halving, empty=window.empty, doubling=window.doubling, most=window.most,
        end=window.most * SAFE, safe=SAFE, free=0 if clips else octave, unit=rule.unit,
        weighted=weighted, listed=False,
    )  # fmt: skip


class Blocks(NamedTuple):
    """What :func:`.programs.scale_sweeps.sweep_exactly` takes at run time.

    cols: values of a row. pitch: weights between two rows.
    """

    blocks: int
    cols: int
    pitch: int


class Swept(NamedTuple):
    """A tensor in blocks, and the programs that take them."""

    cut: int | Blocks
    programs: int
    warps: int = 1


class ScaleSweep:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        self._request, self._scheme = request, request.scheme
        self._blocks = math.prod(self._scheme.granularity.grid(request.shape))
        self._constants = constants_of(request, None, chosen=False, dividing=True)
        # Copied, which is done on return: other threads read it on streams of their own.
        self._one = torch.ones(1, device="cpu").to(request.device)
        self._exact = functools.lru_cache(maxsize=4)(self._exactly)

    def search_params(
        self, x: torch.Tensor, params: Params, importance: torch.Tensor | None = None
    ) -> Params:
        require_parameters(self._scheme, params, self._request.shape)
        start, *coarser = params
        found = start.contiguous().clone()
        if 0 not in self._request.shape:
            self.improve(x, [found, *coarser], self.room(), importance)
        return [found, *coarser]

    def room(self) -> Params:
        """Allocate a run's scratch: a list of blocks, and its length."""
        device = self._request.device
        count = torch.zeros(1, dtype=torch.int32, device=device)
        return [torch.empty(self._blocks, dtype=torch.int32, device=device), count]

    def improve(
        self, x: torch.Tensor, params: Params, room: Params, importance: torch.Tensor | None = None
    ) -> None:
        """Replace finest scales by least-squares ones in place; see :meth:`room`."""
        scales, coarse = params[0].view(torch.uint8), self._coarse(params[1:])
        values, nearly = bits(x), self._nearly if importance is None else None
        if nearly is not None:
            room[1].zero_()
            nearly(values, scales, coarse, *room)
        weights, pitch = (self._one, 0) if importance is None else _weights(importance, x)
        exactly = self._exact(importance is not None, pitch)
        exactly(values, weights, scales, coarse, value_table_on(self._scheme, x.device), *room)

    @functools.cached_property
    def _nearly(self) -> Start | None:
        """Kernel measuring errors in float32; None without a proven bound."""
        sweep, element = self._sweep(weighted=False), self._constants.element
        # A bfloat16 over a power of two is one again, unless it is below all boundaries between codes.
        exact = element.quotient == Narrow.NONE or (sweep.power and element.quotient == Narrow.BFLOAT16)
        divides = element.scaling == ScaleBy.DIVIDE and exact
        if not divides or element.kind == Kind.CODEBOOK or sweep.size > _LONGEST_NEARLY:
            return None
        cut = Swept(cut=self._blocks, programs=-(-self._blocks // sweep.many))
        return Start("scale_sweeps.sweep_nearly", cut, self._constants._replace(cut=sweep), fused=True)

    def _exactly(self, weighted: bool, pitch: int) -> Start:
        """Return the kernel that measures errors in float64, as the reference does."""
        sweep = self._sweep(weighted=weighted)._replace(listed=not weighted and self._nearly is not None)
        sweep = sweep._replace(many=max(1, _EXACT_VALUES // sweep.size))
        programs = -(-self._blocks // sweep.many)
        cut = Blocks(blocks=self._blocks, cols=self._request.shape[-1], pitch=pitch)
        swept = Swept(cut=cut, programs=min(programs, _PROGRAMS) if sweep.listed else programs)
        return Start("scale_sweeps.sweep_exactly", swept, self._constants._replace(cut=sweep))

    def _sweep(self, *, weighted: bool) -> Sweep:
        return sweep_of(self._scheme, self._request.shape, self._request.own_dtype, weighted=weighted)

    def _coarse(self, coarser: Params) -> torch.Tensor:
        """Load the tensor's scale as float32, 1 if none."""
        if not coarser:
            return self._one
        if coarser[0].dtype is torch.float32:
            return coarser[0].contiguous()
        fmt = self._scheme.scales[1].format_for(format_of(self._request.own_dtype))
        return load_scale(coarser[0], fmt, torch.float32).reshape(1).contiguous()


def _weights(importance: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Float64 weights, and their row pitch: 0 if rows share them."""
    if importance is None:
        return torch.ones(1, dtype=torch.float64, device=x.device), 0
    wide = importance.to(x.device, torch.float64)
    if wide.numel() == x.shape[-1] and wide.shape[-1:] == x.shape[-1:]:
        return wide.contiguous(), 0
    return wide.expand(x.shape).contiguous(), x.shape[-1]
