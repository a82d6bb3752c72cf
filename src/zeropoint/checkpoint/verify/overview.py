"""Facts of a checkpoint for a report: sizes, errors, code samples.

Sizes come from headers, errors from the manifest, where there is one; of each layer a few rows are
decoded. The original is not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import ZeropointError, size_of
from ...formats import Format
from ...formats.rounding import Special
from ...methods import NEAREST
from ...results import Result
from ...tensor import QuantizedTensor
from ..read.decoding import alignment, read_rows
from ..read.quantized_layers import StoredLayer, StoredLayers
from ..read.storage import OpenFiles, Place
from .inspection import Inspection, inspect_checkpoint
from .integrity import read_manifest

_ROWS = 32
"""Rows of a layer that are decoded, from its middle."""
BARS = 32
"""Most bars of a histogram of codes."""
NUMBERS = ("relative", "sqnr_db", "largest", "clipped", "zero_blocks", "lost_blocks")
_LOSS = ("seen", "held_out", "vectors", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSample:
    """Codes of some rows of a layer.

    Args:
        bars: shares of the values of the format in rising order, or of as many equal ranges of them.
        ends: share of the smallest and the largest value of the format.
        zeros: share of codes that mean zero.
        peak: the largest magnitude over the root mean square; 4 or 5 for normal numbers.
        octaves: log2 of the largest block scale over the smallest one that is not zero.
    scales: shares of block scales in equal ranges of their logarithm, rising; empty without scales.
    """

    bars: tuple[float, ...]
    ends: float
    zeros: float
    peak: float
    octaves: float
    scales: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """A quantized layer.

    Args:
        module: its name.
        scheme: of its weight.
        method: what chose its codes, or None where no manifest says so.
        shape: of the weight; of each expert of fused ones.
        values: how many it has.
        nbytes: of its tensors.
        float_bytes: of the weight in the dtype that it was quantized from.
        record: what the manifest has about it, by the names of :data:`NUMBERS`.
        loss: what it has about outputs of a weight that was solved on data: ``seen`` and ``held_out``, shares
            of their squares, ``vectors`` and ``own``, on how many inputs.
        sample: of its codes, or None where they cannot be decoded alone.
    """

    module: str
    scheme: str
    method: str | None
    shape: tuple[int, int]
    values: int
    nbytes: int
    float_bytes: int
    record: Mapping[str, float | None]
    loss: Mapping[str, float | None]
    sample: CodeSample | None

    @property
    def relative(self) -> float | None:
        """The relative error, or None where it is not known."""
        return self.record.get("relative")

    @property
    def bits(self) -> float:
        """Bits that a value takes."""
        return 8 * self.nbytes / max(1, self.values)

    @property
    def keeping_bytes(self) -> int:
        """Bytes that files grow by where it is kept as floats."""
        return self.float_bytes - self.nbytes

    @property
    def clipped(self) -> float:
        """The share of values beyond the range of their block."""
        return (self.record.get("clipped") or 0.0) / max(1, self.values)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for a large error, where one is seen."""
        found = []
        if self.sample is not None and self.sample.peak > _OUTLIERS:
            found.append(f"outliers: the largest value is {self.sample.peak:.0f} times the root mean square")
        if self.clipped > _CLIPS:
            found.append(f"range: {self.clipped:.2%} of values are clipped")
        zeros, tokens = self.record.get("zero_blocks"), self.loss.get("own")
        if zeros:
            found.append(f"underflow: {zeros:,.0f} blocks are zeros alone")
        if tokens is not None and tokens < self.shape[1]:
            found.append(f"few tokens: {tokens:,.0f} for {self.shape[1]:,} inputs")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as values that JSON holds."""
        return {
            **asdict(self),
            "bits": self.bits,
            "keeping_bytes": self.keeping_bytes,
            "clipped_share": self.clipped,
            "reasons": list(self.reasons),
        }


_OUTLIERS, _CLIPS = 12.0, 0.05
"""Share of clipping that is unusual: searched scales clip one or two percent of normal numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFacts:
    """An unquantized tensor, and the manifest's reason, if any."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Overview(Result):
    """Facts about a checkpoint.

    name: of its folder or file. inspection: what headers say. layers: that are quantized, in the order of the
    files. kept: all other tensors. identity: what the manifest says that it was made of.
    """

    name: str
    inspection: Inspection
    layers: tuple[LayerFacts, ...]
    kept: tuple[KeptFacts, ...]
    identity: Mapping[str, str]

    @property
    def relative(self) -> float | None:
        """The root mean square of layers' relative errors, weighted by values."""
        known = [(e, layer.values) for layer in self.layers if (e := layer.relative) is not None]
        total = sum(values for _, values in known)
        return math.sqrt(sum(e * e * values for e, values in known) / total) if total else None

    @property
    def float_bytes(self) -> int:
        """Bytes of the model with all layers as floats."""
        return sum(layer.float_bytes for layer in self.layers) + sum(kept.nbytes for kept in self.kept)

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        size = f"{size_of(self.float_bytes)} -> {size_of(self.inspection.nbytes)}"
        error = (
            ""
            if self.relative is None
            else f", relative error of layers {self.relative:.4f} (root mean square)"
        )
        return f"{self.name}: {size}{error}", *self.inspection.lines

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return {
            "name": self.name,
            "bytes": self.inspection.nbytes,
            "float_bytes": self.float_bytes,
            "bits_per_value": self.inspection.bits_per_value,
            "relative": self.relative,
            "summary": list(self.lines),
            "layers": [layer.to_dict() for layer in self.layers],
            "kept": [asdict(kept) for kept in self.kept],
            "identity": dict(self.identity),
        }


def overview(path: Place | str, *, sampled: bool = True) -> Overview:
    """Return facts about the checkpoint at ``path``.

    path: a directory, a file, or the URL of either. sampled: whether some rows of each layer are decoded.
    Raises CheckpointError when files are damaged or hostile.
    """
    inspection = inspect_checkpoint(path)
    records: dict[str, Mapping[str, Any]] = {}
    manifest = read_manifest(inspection.source, records)
    stored = inspection.stored
    with OpenFiles() as files:
        layers = () if stored is None else tuple(_facts(stored, files if sampled else None, records))
    others = inspection.tensors if stored is None else stored.others
    reasons = {} if manifest is None else manifest.kept
    return Overview(
        name=Path(str(path)).name,
        inspection=inspection,
        layers=layers,
        kept=tuple(
            KeptFacts(
                name=e.name, dtype=e.dtype, shape=tuple(e.shape), nbytes=e.nbytes, reason=reasons.get(e.name)
            )
            for e in others
        ),
        identity={} if manifest is None else manifest.identity,
    )


def _facts(
    stored: StoredLayers, files: OpenFiles | None, records: Mapping[str, Mapping[str, Any]]
) -> Iterator[LayerFacts]:
    for layer in stored.layers:
        record = records.get(layer.module, {})
        yield LayerFacts(
            module=layer.module,
            scheme=str(layer.weight),
            shape=layer.shape,
            values=layer.values,
            method=str(record.get("method", NEAREST)) if record else None,
            nbytes=layer.nbytes,
            float_bytes=layer.values * layer.dtype.itemsize,
            record=_numbers_in(record, NUMBERS),
            loss=_numbers_in(record.get("loss"), _LOSS),
            sample=None if files is None else _sample(layer, files),
        )


def _sample(layer: StoredLayer, files: OpenFiles) -> CodeSample | None:
    """Return a sample of codes from a layer's middle, or None."""
    step = max(1, alignment(layer))
    rows = min(layer.shape[0], -(-_ROWS // step) * step)
    start = max(0, layer.shape[0] - rows) // 2 // step * step
    try:
        return sample_of(read_rows(layer, files, start, rows))
    except ZeropointError:
        return None


def sample_of(q: QuantizedTensor) -> CodeSample | None:
    """Return facts about a tensor's codes, or None without finite values."""
    values = q.dequantize(torch.float32)
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return None
    square = math.sqrt(_sum_of_squares(finite) / finite.numel())
    numbers = _numbers(q)
    low, high = float(numbers.min()), float(numbers.max())
    ends = _share((numbers == low) | (numbers == high)) if high > low else 0.0
    octaves = _octaves(q)
    return CodeSample(
        bars=_bars(numbers, q.scheme.element),
        ends=ends,
        zeros=_share(numbers == 0),
        peak=_rounded(float(finite.abs().max()) / square) if square else 0.0,
        octaves=_rounded(float(octaves.max() - octaves.min())) if octaves.numel() else 0.0,
        scales=_ranges(octaves) if octaves.numel() else (),
    )


def _sum_of_squares(values: torch.Tensor) -> float:
    """Return a sum that no number of threads changes."""
    squares = values.double().square().flatten()
    return math.fsum(float(squares[at : at + _PIECE].sum()) for at in range(0, squares.numel(), _PIECE))


_PIECE = 1 << 12
"""Numbers that torch adds in one thread."""


def _share(found: torch.Tensor) -> float:
    return _rounded(int(found.sum()) / max(1, found.numel()))


def _rounded(value: float) -> float:
    """Return six digits: those that no processor changes, and that anybody reads."""
    return float(f"{value:.6g}")


def _ranges(octaves: torch.Tensor) -> tuple[float, ...]:
    """Return shares of scales in equal ranges of log2."""
    low, high = float(octaves.min()), float(octaves.max())
    if low == high:
        return (1.0,)
    counts = torch.histc(octaves.float(), bins=_SCALE_BARS, min=low, max=high)
    return tuple(round(float(count) / octaves.numel(), 5) for count in counts)


_SCALE_BARS = 16


def _numbers(q: QuantizedTensor) -> torch.Tensor:
    """Return the codes' values before scales, or decoded values, as float32."""
    table = _table(q.scheme.element)
    if table is None or tuple(q.codes.shape) != q.shape:
        return q.dequantize(torch.float32)
    return torch.tensor(table)[q.codes.long() & (len(table) - 1)]


@lru_cache(maxsize=64)
def _table(element: Format) -> tuple[float, ...] | None:
    """Return a format's code values up to 8 bits, or None."""
    if element.bits > _BITS:
        return None
    try:
        found = [element.number(code) for code in range(1 << element.bits)]
    except (ZeropointError, AttributeError):  # codes that mean several values, or none
        return None
    return tuple(math.nan if isinstance(number, Special) else float(number) for number in found)


_BITS = 8


def _bars(numbers: torch.Tensor, element: Format) -> tuple[float, ...]:
    """Return shares of values in rising order, by value or by range."""
    table = _table(element)
    finite = numbers[torch.isfinite(numbers)]
    levels = sorted({value for value in table or () if math.isfinite(value)})
    if levels and len(levels) <= BARS:
        edges = torch.tensor(levels)
        counts = torch.bincount(torch.searchsorted(edges, finite.flatten()), minlength=len(levels))
    else:
        most = float(finite.abs().max()) or 1.0
        counts = torch.histc(finite, bins=BARS, min=-most, max=most)
    shares = counts.double() / max(1, finite.numel())
    return tuple(round(float(share), 5) for share in shares)


def _octaves(q: QuantizedTensor) -> torch.Tensor:
    """Return log2 of the block scales that are not zero."""
    if not q.scales:
        return torch.empty(0, dtype=torch.float64)
    scales = q.scales[0].double().abs()
    return torch.log2(scales[(scales > 0) & torch.isfinite(scales)])


def _numbers_in(record: object, names: Iterable[str]) -> dict[str, float | None]:
    """Return a manifest record's numbers by name; None if not finite."""
    if not isinstance(record, Mapping):
        return {}
    return {name: _number(record[name]) for name in names if name in record}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None
