"""Storable scales near a given one, by steps of codes or factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats import FloatFormat, Format
from ..formats.torch_dtypes import format_of, storage_dtype
from ..schemes import ScaleLevel
from .stored import load_scale, round_to, store

_PER_OCTAVE = 8
_OCTAVES = 10
"""Scales down to 1/1024 of the first one are tried, while they help."""
_TABLE_BITS = 8
_LEAST = 2.0**-126
"""The smallest scale that is tried: its reciprocal is finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ladder:
    """Steps between the scales of one level; float64 values keep their sign.

    table: all positive values that the level can store, ascending, or None where they are too many. dtype: in
    which scales are stored. below, above: most steps down and up; at twice the first scale the codes of the
    first one hold every value of the second, so that none above can be better. patience: steps without gain
    after which a search stops. fine: factors between two steps that are tried in the end.
    """

    level: ScaleLevel
    input_dtype: torch.dtype
    table: torch.Tensor | None
    below: int
    above: int
    patience: int
    fine: tuple[float, ...]

    @staticmethod
    def of(level: ScaleLevel, dtype: torch.dtype) -> Ladder:
        """Return the steps of ``level`` for a tensor of ``dtype``."""
        fmt = level.format_for(format_of(dtype))
        if fmt.bits > _TABLE_BITS:
            return Ladder(
                level=level,
                input_dtype=dtype,
                table=None,
                below=_OCTAVES * _PER_OCTAVE,
                above=_PER_OCTAVE - 1,
                patience=_PER_OCTAVE // 2,
                fine=tuple(2.0 ** (sign / n) for n in (16, 32) for sign in (1, -1)),
            )
        codes = torch.arange(fmt.code_count).to(torch.uint8).view(storage_dtype(fmt))
        values = load_scale(codes, fmt, torch.float64)
        table = torch.unique(values[torch.isfinite(values) & (values > 0)])
        octave = max(1, int((table > table[-1] / 2).sum()))
        return Ladder(
            level=level, input_dtype=dtype, table=table, below=min(len(table), _OCTAVES * octave),
            above=octave, patience=min(max(2, octave), _PER_OCTAVE), fine=(),
        )  # fmt: skip

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored scales as float64."""
        return load_scale(stored, self._format, torch.float64)

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales that the level can store in its storage dtype."""
        return store(scale, self._format)

    def step(self, scale: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the scales ``steps`` above, or below if negative; zeros stay."""
        if self.table is None:
            return self.near(scale * 2.0 ** (steps / _PER_OCTAVE))
        table = self.table.to(scale.device)
        place = torch.searchsorted(table, scale.abs()) + steps
        return torch.where(scale == 0, scale, table[place.clamp(0, len(table) - 1)].copysign(scale))

    @property
    def least(self) -> float:
        """The smallest scale tried outside of tables."""
        fmt = self._format
        return max(_LEAST, 2.0**fmt.emin if isinstance(fmt, FloatFormat) else float(fmt.smallest))

    @property
    def most(self) -> float:
        """The largest finite scale."""
        return float(self._format.max)

    def near(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the closest scales that the level can store; zeros stay."""
        found = round_to(scale.abs().clamp(self.least, self.most), self._format, up=False)
        return torch.where(scale == 0, scale, found.copysign(scale))

    @property
    def _format(self) -> Format:
        return self.level.format_for(format_of(self.input_dtype))
