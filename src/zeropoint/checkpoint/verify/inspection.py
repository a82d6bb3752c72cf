"""Inspection of a checkpoint from its headers: tensors, sizes, quantization."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...codecs.known import cache_scheme, is_quantized
from ...codecs.registry import method_in
from ...errors import ZeropointError, count, size_of
from ...results import Result
from ...schemes.scale_rules import FOUR_OVER_SIX
from ...signatures import by_signature
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration, find_layers
from ..read.source import Source, open_source
from ..read.storage import OpenFiles, Place, read_bytes
from ..read.tensor_entries import TensorEntry
from .consistency import cached_layers, claims_of_files, contradictions, other_tool
from .documents import inspection_document
from .integrity import Manifest, manifest_or_problem

_MOST_BITS = 64
"""More than any packed number has; a larger figure in a configuration is no width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSummary:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeSummary:
    """All layers of one scheme: their number, values and bytes.

    method: what chose their codes, or None where no manifest of ours says so.
    """

    scheme: str
    layout: str
    method: str | None
    layers: int
    values: int
    nbytes: int

    @property
    def bits_per_value(self) -> float:
        """Average bits a number takes, scales and zero points counted."""
        return 8 * self.nbytes / max(1, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(Result):
    """A summary of a checkpoint.

    quantization: None when it is not quantized, else what the configuration names as its method. packed_by:
    the tool whose layout is not read here, and bits: of its weights, where the configuration says so.
    schemes: empty unless the layout is read. cache: what the configuration says of a quantized cache of keys
    and values, or None. cached_layers: how many attention layers have scales of one. kept_values: numbers of
    all other tensors, None where it is not known which these are. problems: what is wrong with quantized
    layers. room: what block scales say of the rule that chose them, or None. stored: the layers that can be
    read, or None where none is quantized.
    """

    source: Source
    dtypes: tuple[DtypeSummary, ...]
    quantization: str | None
    packed_by: str | None
    bits: int | None
    schemes: tuple[SchemeSummary, ...]
    ignore: tuple[str, ...]
    cache: object
    cached_layers: int
    kept_values: int | None
    problems: tuple[str, ...]
    room: str | None = None
    stored: StoredLayers | None = None

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor, in the order of the files."""
        return tuple(self.source.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(summary.nbytes for summary in self.dtypes)

    @property
    def values(self) -> int | None:
        """Number of the model's values, before quantization, if known.

        None where they are packed in a layout that is not read here: words of codes are not numbers.
        """
        if self.kept_values is None:
            return None
        return self.kept_values + sum(summary.values for summary in self.schemes)

    @property
    def bits_per_value(self) -> float | None:
        """Average bits per value of the model, if its values are known."""
        return None if self.values is None else 8 * self.nbytes / max(1, self.values)

    @property
    def summary(self) -> tuple[str, ...]:
        """The size, bits and quantization method of the whole."""
        tensors, shards = count(len(self.source.entries), "tensor"), count(len(self.source.shards), "file")
        room = () if self.room is None else (self.room,)
        return f"{tensors} in {shards}, {size_of(self.nbytes)}", self._numbers, *room, *self._of_cache

    @property
    def _of_cache(self) -> tuple[str, ...]:
        """The line about cache scales, if there is any."""
        if self.cached_layers:
            silent = "" if self.cache is not None else ", of which the configuration says nothing"
            layers = count(self.cached_layers, "attention layer")
            return (f"scales of a quantized cache of keys and values in {layers}{silent}",)
        if self.cache is None:
            return ()
        return ("the configuration has a quantized cache of keys and values, and no layer has its scales",)

    @property
    def _numbers(self) -> str:
        """The numbers of values and bits, and the quantization."""
        method, bits = self.quantization, self.bits_per_value
        if self.packed_by is not None:
            width = "" if self.bits is None else f", {count(self.bits, 'bit')} a weight"
            return (
                f"packed by {self.packed_by}{width}; this layout is not read here, so values are not counted"
            )
        if self.values is None and method is None and not self.problems:
            return (
                "quantized, but no configuration says how, so values are not counted; pass the directory "
                "whose config.json does"
            )
        if self.values is None or bits is None:
            which = "some" if self.schemes else "its"
            return f"quantized by {method}; {which} layers cannot be read, so values are not counted"
        state = "not quantized" if method is None else f"quantized by {method}"
        return f"{count(self.values, 'value')} at {bits:.3f} bits, {state}"

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (*self.summary, *self.problems)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return inspection_document(self)


@by_signature
def inspect_checkpoint(path: Place | str) -> Inspection:
    """Return a summary of the checkpoint at ``path``.

    Args:
        path: a directory, a file, or the URL of either.

    Raises:
        CheckpointError: when files are damaged or hostile.
    """
    source = open_source(path)
    stored: StoredLayers | None = None
    config: Mapping[str, Any] | None = None
    method: str | None = None
    packed_by: str | None = None
    problems: list[str] = []
    manifest: Manifest | None = None
    try:
        config = configuration(source)
        packed_by = other_tool(source)
        problems += map(str, claims_of_files(source))
        if config is not None:
            method = method_in(config)
            stored = find_layers(source)
            problems += map(str, (*stored.problems, *contradictions(source, stored)))
            manifest, damaged = manifest_or_problem(source)
            problems += map(str, damaged)
    except ZeropointError as error:
        problems.append(str(error))
    own = (entry for entry in source.entries.values() if entry.use is None)
    unnamed = config is None and any(is_quantized(entry.name, entry.dtype) for entry in own)
    read = not stored.unread if stored is not None else packed_by is None and not problems and not unnamed
    others = source.entries.values() if stored is None else stored.others
    return Inspection(
        source=source,
        dtypes=_dtypes(source.entries.values()),
        quantization=method,
        packed_by=packed_by,
        bits=None if packed_by is None else _bits(config or {}),
        schemes=() if stored is None else _schemes(stored, manifest),
        ignore=() if stored is None else stored.ignore,
        cache=cache_scheme(config or {}),
        cached_layers=len(cached_layers(others)),
        kept_values=sum(math.prod(e.shape) for e in others) if read else None,
        problems=tuple(problems),
        room=None if stored is None or problems else room_left(stored),
        stored=stored,
    )


def _bits(config: Mapping[str, Any]) -> int | None:
    """Return the bits per weight in another tool's configuration, or None."""
    said = config.get("bits")
    return said if type(said) is int and 0 < said <= _MOST_BITS else None


def _dtypes(entries: Iterable[TensorEntry]) -> tuple[DtypeSummary, ...]:
    found: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault(entry.dtype, []).append(entry)
    return tuple(
        DtypeSummary(
            dtype=dtype,
            tensors=len(group),
            values=sum(math.prod(e.shape) for e in group),
            nbytes=sum(e.nbytes for e in group),
        )
        for dtype, group in found.items()
    )


def _schemes(stored: StoredLayers, manifest: Manifest | None) -> tuple[SchemeSummary, ...]:
    found: dict[tuple[str, str, str | None], list[tuple[int, int]]] = {}
    for layer in stored.layers:
        method = None if manifest is None else manifest.method(layer.module)
        key = (str(layer.weight), layer.layer.layout, method)
        found.setdefault(key, []).append((layer.values, layer.nbytes))
    return tuple(
        SchemeSummary(
            scheme=scheme,
            layout=layout,
            method=method,
            layers=len(group),
            values=sum(v for v, _ in group),
            nbytes=sum(n for _, n in group),
        )
        for (scheme, layout, method), group in found.items()
    )


_LAYERS, _BYTES = 16, 1 << 26
"""Limits of an inspection: layers, and bytes of their scales. Layers that share a scale are neighbors."""
_ROOM = FOUR_OVER_SIX.factor
_USUAL = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 2.0 ** math.floor(math.log2(_USUAL / _ROOM))


def room_left(stored: StoredLayers) -> str | None:
    """Return a sentence for NVFP4 scales by four over six, or None.

    Below a scale for the tensor that is fitted to the largest magnitude, the block of that magnitude has the
    largest scale of the format. Four over six (arXiv:2512.02010) leaves room for scales that are half as
    large again, so that it is 256 there, and no scale is above 384.
    """
    scales = list(itertools.islice(filter(None, map(_block_scales, stored.layers)), _LAYERS))
    if not scales or sum(entry.nbytes for entry in scales) > _BYTES:
        return None
    with OpenFiles() as files:
        largest = max(_largest(entry, files) for entry in scales)
    if not _LEAST <= largest <= _LEAST * _ROOM:
        return None
    return (
        f"scales of NVFP4 blocks are at most {largest:g} of {_USUAL:g}, which leaves the room of four over "
        "six (scale=four_over_six)"
    )


def _block_scales(layer: StoredLayer) -> TensorEntry | None:
    """Return a layer's block scales under a tensor scale, or None."""
    if len(layer.weight.scales) < 2:
        return None
    found = (e for e in layer.tensors.values() if e.dtype == "F8_E4M3" and e is not layer.codes)
    return next((entry for entry in found if entry.nbytes), None)


def _largest(entry: TensorEntry, files: OpenFiles) -> float:
    raw = read_bytes(files[entry.file], entry.begin, entry.nbytes)
    return float(torch.frombuffer(raw, dtype=torch.float8_e4m3fn).float().max())
