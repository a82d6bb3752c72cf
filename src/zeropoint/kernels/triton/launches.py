"""The host side of the kernels: tensors and launches of one request."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ...errors import NonFiniteError
from ...formats import Format
from ...formats.torch_dtypes import format_of
from ...layout import packing
from ...ops import reference
from ...ops.code_tables import value_table
from ...ops.lowering import How
from ...ops.reference_backend import Codes, filled
from ...ops.registry import HeldKernel, Op, Request, temporaries_of
from ...params import arithmetic
from ...params.effective import effective_offset, effective_scale
from ...params.stored import load_scale
from ...params.tensors import Params, parameter_tensors, require_parameters, zero_point_of
from ...schemes import Granularity, Scheme
from .block_ends import Ends, block_ends, ranges_of
from .piece_cuts import Pieces, pieces_of, small_blocks_of
from .segmentation import segments_of
from .specialization import Constants, constants_of, held_of
from .starts import ONCE, HeldStart, Start, bits, words
from .tile_cuts import contiguous_strides
from .two_passes import new_notes
from .view_starts import Views, in_order

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Scales, the tables of their codes, the scale of the whole tensor, and zero points."""
ALLOCATES = temporaries_of("triton")


class Launch:
    """The kernels on tensors that fit one request."""

    def __init__(self, request: Request) -> None:
        scheme = request.scheme
        pieces = pieces_of(scheme.granularity, request.shape, scheme.bits)
        assert isinstance(pieces, Pieces)
        self._request, self.pieces = request, pieces
        self.given = constants_of(request, pieces.shape, chosen=False)
        self._views = Views(request, self.given)

    @functools.cached_property
    def _quantize(self) -> Start:
        asked = self._request
        small = small_blocks_of(asked.scheme.granularity, asked.shape, asked.scheme.bits)
        if small is None or asked.scheme.offsets:
            return Start("pieces.quantize_pieces", self.pieces, self.given)
        return Start("small_blocks.quantize_small_blocks", small, self.given._replace(cut=small.shape))

    @functools.cached_property
    def _dequantize(self) -> Start:
        return Start("pieces.dequantize_pieces", self.pieces, self.given)

    @functools.cached_property
    def _fake_quantize(self) -> Start:
        return Start("pieces.fake_quantize_pieces", self.pieces, self.given)

    @functools.cached_property
    def _choose(self) -> Start | None:
        """Kernel that chooses and encodes in one read, for program-sized blocks."""
        asked = self._request
        scheme, shape = asked.scheme, asked.shape
        small = small_blocks_of(scheme.granularity, shape, scheme.bits)
        if small is not None:
            constants = constants_of(asked, small.shape, chosen=True)
            return Start("small_blocks.quantize_small_blocks", small, constants)
        found = segments_of(scheme.granularity, shape, scheme.bits)
        if isinstance(found, str) or not found.own:
            return self._views.start(contiguous_strides(shape), Op.QUANTIZE_DYNAMIC)
        return Start("segments.quantize_blocks", found, constants_of(asked, found.shape, chosen=True))

    def _start_for(self, x: torch.Tensor, op: Op) -> Start | None:
        """Kernel that reads ``x`` once; None: others need it contiguous."""
        if not x.is_contiguous():
            return self._views.start(x.stride(), op)
        return self._choose if op is Op.QUANTIZE_DYNAMIC else None

    def blocks_for(self, x: torch.Tensor) -> int:
        """Count blocks whose extremes need a first pass over ``x``."""
        if self._is_one_block or self._start_for(x, Op.QUANTIZE_DYNAMIC) is not None:
            return 0
        return self._views.two_passes(x.stride()).count

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor of values."""
        return self._request.shape

    @property
    def _empty(self) -> bool:
        return 0 in self.shape

    def choose_params(self, x: torch.Tensor, extremes: Ends = None) -> Params:
        """Choose parameters of ``x`` from kernel extremes; raises NonFiniteError."""
        scheme = self._request.scheme
        if self.chooses and extremes is None:
            return self.quantize_dynamic(x)[1]
        if self._empty or not scheme.scales:
            return reference.choose_params(x, scheme, extremes)
        found = [block_ends(x, level.granularity, extremes) for level in scheme.scales]
        return arithmetic.scales_from_ranges(scheme, ranges_of(found, x))

    def quantize(
        self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None, *, seed: int = 0
    ) -> torch.Tensor:
        """Return codes under given parameters; raises NonFiniteError."""
        out = self.packed(x) if out is None else out
        if not self._empty:
            notes = new_notes(x.device)
            self.encode(x, self.scales(params), out, notes, seed)
            if notes[0].item():
                reference.require_finite(x)
        return out

    def encode(
        self, x: torch.Tensor, given: Given, out: torch.Tensor, notes: torch.Tensor, seed: int = 0
    ) -> None:
        """Write codes under given scales; see :func:`new_notes`."""
        tiled = self._start_for(x, Op.QUANTIZE)
        if tiled is None:
            self._quantize(bits(x), *given, out, notes, numbers=(seed,))
        else:
            tiled(words(x), *given, out, notes, numbers=(seed,))

    def quantize_dynamic(
        self, x: torch.Tensor, out: Codes | None = None, extremes: Ends = None, *, seed: int = 0
    ) -> Codes:
        """Choose parameters and codes, in one read where blocks are segments."""
        scheme = self._request.scheme
        if not self.chooses or extremes is not None:
            params = self.choose_params(x, extremes)
            found = self.quantize(x, params, seed=seed), params
            return found if out is None else filled(out, *found)
        if out is None:
            made = parameter_tensors(scheme, self._request.shape, self._request.own_dtype)
            out = self.packed(x), [torch.empty(grid, dtype=dtype, device=x.device) for grid, dtype in made]
        x = self._readable(x)
        notes = new_notes(x.device, self.blocks_for(x))
        known = len(scheme.scales) > 1 and self._tensor_rule is None
        if known:
            self._find_coarse(x, out[1])
        self.choose_and_encode(x, out, notes, known=known, seed=seed)
        if notes[0].item() and len(scheme.scales) > 1 and not known:
            # The usual scale of the tensor may not fit where the reference finds another one.
            self._find_coarse(x, out[1])
            notes[0] = 0
            self.choose_and_encode(x, out, notes, known=True, seed=seed)
        if notes[0].item():
            reference.choose_params(x, scheme, extremes)
            raise AssertionError(f"the kernel refused scales of {scheme} that the reference accepts")
        return out

    def _find_coarse(self, x: torch.Tensor, params: Params) -> None:
        """Write the scale of the whole tensor; raises NonFiniteError."""
        scheme = self._request.scheme
        ends = block_ends(x, scheme.scales[1].granularity, None)
        params[1].copy_(arithmetic.coarsest_scale(scheme, ranges_of([ends, ends], x)).view_as(params[1]))

    def choose_and_encode(
        self, x: torch.Tensor, out: Codes, notes: torch.Tensor, *, known: bool = False,
        tables: torch.Tensor | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """Write codes and parameters; known: the tensor's scale is there already."""
        data, params = out
        constants, x = self._choosing, self._readable(x)
        scales = params[0] if constants.rule.how in (How.LINEAR, How.AFFINE) else params[0].view(torch.uint8)
        zeros = params[-1] if constants.element.zero_place else scales
        coarse = scales
        if len(self._request.scheme.scales) > 1:
            coarse, tables = params[1], self._new_tables() if tables is None else tables
            levels = _levels(self._finest, x.device)
            if known:
                self._fill_tables(levels, coarse, tables)
            else:
                self._amax(in_order(x), notes)
                self._coarse(notes, coarse, levels, tables)
        choose = self._start_for(x, Op.QUANTIZE_DYNAMIC)
        if choose is not None:
            places = scales if tables is None else tables
            choose(words(x), bits(scales), places, coarse, bits(zeros), data, notes, numbers=(seed,))
            return
        if self._is_one_block:
            self._amax(in_order(x), notes)
            self._tensor_scale(notes, bits(scales))
        else:
            self._views.two_passes(x.stride())(x, bits(scales), bits(zeros), coarse, notes)
        self.encode(x, self.scales(params, tables), data, notes, seed)

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """Copy ``x`` unless a kernel reads it as it lies."""
        known = x.is_contiguous() or self._views.chooses(x, one_block=self._is_one_block)
        return x if known else x.contiguous()

    @functools.cached_property
    def _choosing(self) -> Constants:
        """What the programs that choose scales are compiled for."""
        if self._choose is not None:
            return self._choose.constants
        return constants_of(self._request, None, chosen=True)

    @functools.cached_property
    def chooses(self) -> bool:
        """Whether kernels choose the finest scales."""
        if self._empty or not self._request.scheme.scales:
            return False
        strides = contiguous_strides(self._request.shape)
        return self._choose is not None or self._is_one_block or self._views.two_passes(strides).known

    @functools.cached_property
    def _is_one_block(self) -> bool:
        """Whether the tensor is one block, scaled by its magnitude alone."""
        scheme = self._request.scheme
        if len(scheme.scales) != 1 or math.prod(scheme.granularity.grid(self._request.shape)) != 1:
            return False
        rule = self._choosing.rule
        return rule.how in (How.LINEAR, How.POWER) and not rule.unsigned

    @functools.cached_property
    def _tensor_scale(self) -> Start:
        return Start("whole_tensors.tensor_scale", ONCE, self._choosing)

    @functools.cached_property
    def _tensor_rule(self) -> arithmetic.TensorRule | None:
        return arithmetic.tensor_rule(self._request.scheme, self._request.own_dtype)

    @functools.cached_property
    def _coarse(self) -> Start:
        return Start("whole_tensors.coarse_scale", ONCE, self._choosing)

    @functools.cached_property
    def _amax(self) -> Start:
        cut = pieces_of(Granularity.tensor(), self._request.shape, 8)
        assert isinstance(cut, Pieces)
        return Start("whole_tensors.tensor_amax", cut, self._choosing._replace(cut=cut.shape))

    def dequantize(self, data: torch.Tensor, params: Params, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of codes."""
        asked = self._request
        out = torch.empty(asked.shape, dtype=asked.dtype, device=data.device) if out is None else out
        if not self._empty:
            self._decode(data, self.scales(params), out)
        return out

    def _decode(self, data: torch.Tensor, given: Given, out: torch.Tensor) -> None:
        values = value_table_on(self._request.scheme, data.device)
        self._dequantize(data.contiguous(), *given, values, bits(out))

    def fake_quantize(
        self, x: torch.Tensor, params: Params, out: torch.Tensor | None = None, *, seed: int = 0
    ) -> torch.Tensor:
        """Return the values of the codes of ``x``."""
        asked = self._request
        out = torch.empty(asked.shape, dtype=asked.dtype, device=x.device) if out is None else out
        if not self._empty:
            self._round(x, self.scales(params), out, seed)
        return out

    def _round(self, x: torch.Tensor, given: Given, out: torch.Tensor, seed: int) -> None:
        tiled, values = self._start_for(x, Op.FAKE_QUANTIZE), value_table_on(self._request.scheme, x.device)
        if tiled is None:
            self._fake_quantize(bits(x), *given, values, bits(out), numbers=(seed,))
        else:
            tiled(words(x), *given, values, bits(out), numbers=(seed,))

    def hold(self, params: Params | None, seed: int = 0) -> HeldKernel | str:
        """Hold kernels and memory, without waiting; see :class:`zeropoint.ops.registry.PlanKernel`."""
        op, device = self._request.op, self._request.device
        if op not in _HELD or (op is Op.QUANTIZE_DYNAMIC and not self._chooses_alone):
            return ALLOCATES
        if params is None and not self.reads_scales:
            return ALLOCATES
        own = None if params is None else [each.detach().clone() for each in params]
        x = self._views.planned(one_block=self._is_one_block)
        blocks = self.blocks_for(x) if op is Op.QUANTIZE_DYNAMIC else 0
        notes, tables = new_notes(device, blocks), self.held_tables()
        if self.given.held.bytes and not self.given.held.coarse:
            _ = self._own_tables  # made now: a run may be part of a graph, and must not wait
        run: Callable[..., None]
        if self._empty:
            run = _nothing
        elif op is Op.QUANTIZE_DYNAMIC:
            run = functools.partial(self.choose_and_encode, notes=notes, tables=tables, seed=seed)
        elif own is None:

            def run(data: torch.Tensor, *, params: Params, out: torch.Tensor) -> None:
                self._decode(data, self.scales(params, tables), out)

        else:
            tiled = self._start_for(x, op)
            run = self._held(tiled, self.scales(own, tables), notes, (seed,))
        reads, room = op in (Op.QUANTIZE, Op.QUANTIZE_DYNAMIC), 0 if tables is None else tables.nbytes
        kept = 0 if own is None else sum(each.nbytes for each in own) + room
        return HeldKernel(
            run=run,
            workspace_bytes=(notes.nbytes if reads else 0) + (room if own is None else 0),
            parameter_bytes=kept,
            settle=functools.partial(_settle, notes) if reads else None,
            strided=not x.is_contiguous(),
        )

    def _held(
        self, tiled: Start | None, given: Given, notes: torch.Tensor, numbers: tuple[int, ...]
    ) -> Callable[..., None]:
        """Return the launch under given scales, whose addresses are fixed.

        tiled: the kernel for tensors that are not contiguous, or None.
        """
        op = self._request.op
        if op is Op.QUANTIZE:
            return HeldStart(tiled or self._quantize, None, *given, None, notes, numbers=numbers)
        values = value_table_on(self._request.scheme, self._request.device)
        if op is Op.FAKE_QUANTIZE:
            return HeldStart(tiled or self._fake_quantize, None, *given, values, None, numbers=numbers)
        return HeldStart(self._dequantize, None, *given, values, None)

    @property
    def _chooses_alone(self) -> bool:
        """Whether kernels choose all scales without results on the host."""
        scheme = self._request.scheme
        return self.chooses and (len(scheme.scales) == 1 or self._tensor_rule is not None)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return memory for codes."""
        shape = packing.packed_shape(self._request.shape, self._request.scheme.bits)
        return torch.empty(shape, dtype=torch.uint8, device=x.device)

    @property
    def _finest(self) -> Format:
        asked = self._request
        return asked.scheme.scales[0].format_for(format_of(asked.own_dtype))

    @functools.cached_property
    def _own_tables(self) -> torch.Tensor:
        """Tables of byte scales under no tensor scale."""
        device = self._request.device
        levels, tables = _levels(self._finest, device), self._new_tables()
        self._fill_tables(levels, levels, tables)
        if device.type == "cuda":  # other threads read the tables on streams of their own
            torch.cuda.current_stream(device).synchronize()
        return tables

    def _new_tables(self) -> torch.Tensor:
        return torch.empty((3, 256), dtype=torch.float32, device=self._request.device)

    def held_tables(self) -> torch.Tensor | None:
        """Memory for scale tables that change with a tensor's scale."""
        held = self.given.held
        return self._new_tables() if held.bytes and held.coarse else None

    @property
    def reads_scales(self) -> bool:
        """Whether kernels read stored scales, without factors from the host."""
        return held_of(self._request.scheme, self._request.own_dtype) is not None

    @functools.cached_property
    def _fill_tables(self) -> Start:
        return Start("held_scales.scale_tables", ONCE, self.given)

    def scales(self, params: Params, tables: torch.Tensor | None = None) -> Given:
        """Load scales, their tables, the tensor's scale, zero points or offsets.

        Where there are none, the scales take their places. tables: memory for those, :meth:`held_tables`.
        """
        asked, held = self._request, self.given.held
        scheme = asked.scheme
        require_parameters(scheme, params, asked.shape)
        if not self.reads_scales:
            factors = effective_scale(scheme, params, asked.shape, asked.own_dtype)
            if factors is None:
                factors = torch.ones(scheme.granularity.block_count(asked.shape), device=asked.device)
            scales = factors.to(torch.float32).contiguous()
        else:
            scales = params[0].contiguous().view(torch.uint8) if held.bytes else bits(params[0])
        coarse = bits(params[1]) if held.coarse else scales
        if not held.bytes:
            tables = scales
        elif not held.coarse:
            tables = self._own_tables
        else:
            tables = self._new_tables() if tables is None else tables
            self._fill_tables(_levels(self._finest, asked.device), coarse, tables)
        zero = zero_point_of(scheme, params)
        if scheme.offsets:
            zero = effective_offset(scheme, params, asked.shape, asked.own_dtype)
            assert zero is not None
            zero = zero.to(torch.float32)
        return scales, tables, coarse, scales if zero is None else zeros_of(zero)


_HELD = (Op.QUANTIZE, Op.QUANTIZE_DYNAMIC, Op.DEQUANTIZE, Op.FAKE_QUANTIZE)


def _nothing(*_: object, **__: object) -> None:
    """Run on a tensor without elements."""


def _settle(notes: torch.Tensor) -> None:
    """Synchronize; raise NonFiniteError if runs since met what does not fit."""
    if notes[0].item():
        notes[0] = 0
        raise NonFiniteError(
            "a run since the last call of synchronize() met NaN or Inf, a number of a sign that the scheme "
            "lacks, or a block whose scale does not fit its format; zeropoint.quantize says where"
        )


def zeros_of(zero: torch.Tensor) -> torch.Tensor:
    """Zero points or offsets for programs; bfloat16 as int16 bits."""
    return bits(zero.to(torch.int32) if zero.dtype is torch.int16 else zero)


@functools.lru_cache(maxsize=256)
def value_table_on(scheme: Scheme, device: torch.device) -> torch.Tensor:
    """Return the values of all codes of a scheme on a device."""
    return torch.from_numpy(value_table(scheme)).to(device)


@functools.lru_cache(maxsize=256)
def _levels(fmt: Format, device: torch.device) -> torch.Tensor:
    """Values of all codes of a scale format, NaN past them."""
    codes = torch.arange(1 << fmt.bits, device="cpu").to(torch.uint8)
    values = torch.full((256,), torch.nan, dtype=torch.float32, device="cpu")
    values[: len(codes)] = load_scale(codes, fmt, torch.float32)
    return values.to(device)
