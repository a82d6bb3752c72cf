"""What a checkpoint holds: tensors, dtypes, sizes, and how it is quantized, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ZeropointError, count, size_of
from .entries import TensorEntry
from .source import Source, open_source
from .storage import Place
from .stored import Stored, configuration, find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSummary:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeSummary:
    """All layers of one scheme: how many, the numbers they hold, and the bytes of their tensors."""

    scheme: str
    layout: str
    layers: int
    values: int
    nbytes: int

    @property
    def bits_per_value(self) -> float:
        """Average bits a number takes, scales and zero points counted."""
        return 8 * self.nbytes / max(1, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection:
    """A summary of a checkpoint.

    quantization: None when it is not quantized, else what the configuration names as its method. schemes:
    empty unless that method is read here. kept_values: numbers of all other tensors. problems: what is wrong
    with quantized layers.
    """

    source: Source
    dtypes: tuple[DtypeSummary, ...]
    quantization: str | None
    schemes: tuple[SchemeSummary, ...]
    ignore: tuple[str, ...]
    kept_values: int
    problems: tuple[str, ...]

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor, in the order of the files."""
        return tuple(self.source.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(summary.nbytes for summary in self.dtypes)

    @property
    def values(self) -> int:
        """Numbers of the model: quantized ones as many as they were, the others as they are."""
        return self.kept_values + sum(summary.values for summary in self.schemes)

    @property
    def bits_per_value(self) -> float:
        """Average bits a number of the model takes."""
        return 8 * self.nbytes / max(1, self.values)

    @property
    def summary(self) -> tuple[str, ...]:
        """The size, bits and quantization method of the whole."""
        tensors, shards = count(len(self.source.entries), "tensor"), count(len(self.source.shards), "file")
        state = "not quantized" if self.quantization is None else f"quantized by {self.quantization}"
        values = f"{count(self.values, 'value')} at {self.bits_per_value:.3f} bits"
        return f"{tensors} in {shards}, {size_of(self.nbytes)}", f"{values}, {state}"

    def __repr__(self) -> str:
        return "\n".join(self.summary)


def inspect(path: Place | str) -> Inspection:
    """Return a summary of the checkpoint at ``path``.

    Raises CheckpointError when files are damaged or hostile.
    """
    source = open_source(path)
    stored: Stored | None = None
    method: str | None = None
    problems: list[str] = []
    try:
        config = configuration(source)
        method = None if config is None else str(config.get("quant_method", "unknown"))
        if config is not None:
            stored = find_layers(source)
            problems += map(str, stored.problems)
    except ZeropointError as error:
        problems.append(str(error))
    others = source.entries.values() if stored is None else stored.others
    return Inspection(
        source=source,
        dtypes=_dtypes(source.entries.values()),
        quantization=method,
        schemes=() if stored is None else _schemes(stored),
        ignore=() if stored is None else stored.ignore,
        kept_values=sum(math.prod(e.shape) for e in others),
        problems=tuple(problems),
    )


def _dtypes(entries: Iterable[TensorEntry]) -> tuple[DtypeSummary, ...]:
    found: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault(entry.dtype, []).append(entry)
    return tuple(
        DtypeSummary(
            dtype=dtype, tensors=len(group), values=sum(math.prod(e.shape) for e in group),
            nbytes=sum(e.nbytes for e in group),
        )
        for dtype, group in found.items()
    )  # fmt: skip


def _schemes(stored: Stored) -> tuple[SchemeSummary, ...]:
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for layer in stored.layers:
        key = (str(layer.weight), layer.layout.value)
        found.setdefault(key, []).append((layer.values, layer.nbytes))
    return tuple(
        SchemeSummary(
            scheme=scheme, layout=layout, layers=len(group), values=sum(v for v, _ in group),
            nbytes=sum(n for _, n in group),
        )
        for (scheme, layout), group in found.items()
    )  # fmt: skip
