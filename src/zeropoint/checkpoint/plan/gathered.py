"""Tensors assembled from rows of other tensors: cut pieces and joined wholes."""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...codecs.divided_tensors import RowRun, TensorPiece, Whole, places_in_pieces, rows_of_piece
from ...codecs.protocol import Codec
from ...codecs.registry import codec_of
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import UnsupportedError, printable
from ...methods import method_named
from ...methods.method import MEAN_SQUARE
from ..choose.selection import WEIGHT_DTYPES
from ..read.storage import OpenFile, Place
from ..read.tensor_entries import Entries, Stack, TensorEntry

if TYPE_CHECKING:  # which has what is gathered
    from .float_view import Floats
    from .origin import Origin
    from .placement import Placement

_FEW_RUNS = 8
"""Rows of a run from which on runs are read alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Source rows of an assembled tensor.

    sources: the tensors that are read. rows: of a piece, its rows in the one source; of a whole tensor, the
    rows that each source has. whole: whether it is a whole tensor.
    """

    sources: tuple[Origin, ...]
    rows: tuple[tuple[RowRun, ...], ...] = ()
    whole: bool = False

    def fill(self, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows from ``start`` on: (rows, columns) in its dtype."""
        columns = self.sources[0].columns
        flat = out.view(-1, columns)
        at = torch.arange(start, start + len(out)) if columns == out.shape[1] else _numbers(start, flat, out)
        if not self.whole:
            rows = rows_of_piece(self.rows[0])[at] if self.rows else at
            flat.copy_(read_rows_of(self.sources[0], files, rows))
            return
        piece, row = (table[at] for table in places_in_pieces(self.rows))
        for number in sorted(set(piece.tolist())):
            mine = piece == number
            flat[mine] = read_rows_of(self.sources[number], files, row[mine]).to(out.dtype)


def _numbers(start: int, flat: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the indices of single values, from row ``start`` on."""
    return torch.arange(start * out.shape[1], start * out.shape[1] + len(flat))


def read_rows_of(origin: Origin, files: Mapping[Place, OpenFile], rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of an origin in any order, (len(rows), columns).

    Few runs are read alone, and many with all that lies between.
    """
    begin, end = int(rows.min()), int(rows.max()) + 1
    ends = torch.nonzero(rows.diff() != 1).flatten().add(1).tolist()
    many = len(ends) * _FEW_RUNS > len(rows)
    bounds = itertools.pairwise([0, *ends, len(rows)])
    runs = [(begin, end)] if many else [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in bounds]
    row = origin.columns * origin.dtype.itemsize
    found = [origin.read(files, left, right - left, bytearray((right - left) * row)) for left, right in runs]
    return found[0][rows - begin] if many else torch.cat(found)


class _Shapes(Mapping[str, tuple[int, ...]]):
    """The shapes of tensors, by name."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def in_pieces(floats: Floats, codec: Codec, dtype: str | None = None) -> Floats:
    """Return a checkpoint with tensors cut or joined for a codec.

    dtype: of the floats of safetensors files that become others.
    """
    own = codec_of(floats.source.container.name)
    if own.container == codec.container:
        return floats
    config = floats.source.config or {}
    shapes = _Shapes(floats.source.entries)
    wholes = {whole.pieces[0].name: whole for whole in own.model_format.wholes(shapes, config)}
    made = {name: [_joined(whole, floats)] for name, whole in wholes.items()}
    gone = {piece.name for whole in wholes.values() for piece in whole.pieces}
    for entry in floats.source.entries.values():
        if pieces := codec.model_format.pieces(entry.name, entry.shape, config):
            made[entry.name] = [_cut(piece, floats.origin(entry)) for piece in pieces]
    floats = _replaced(floats, made, gone | set(made)) if made else floats
    return floats if dtype is None or not floats.source.container.indexed else _in_dtype(floats, dtype)


def _in_dtype(floats: Floats, dtype: str) -> Floats:
    """Return a checkpoint whose floats have a dtype; codes keep theirs."""
    size = TORCH_DTYPES[dtype].itemsize
    made: dict[str, list[Origin]] = {}
    for entry in floats.source.entries.values():
        origin = floats.origin(entry)
        if entry.dtype in WEIGHT_DTYPES and entry.dtype != dtype and origin.layer is None:
            new = replace(origin.entry, dtype=dtype, nbytes=math.prod(entry.shape) * size)
            made[entry.name] = [replace(origin, entry=new, raw=origin.entry)]
    return _replaced(floats, made, set(made)) if made else floats


def _replaced(floats: Floats, made: Mapping[str, list[Origin]], gone: set[str]) -> Floats:
    """Return a checkpoint with some tensors replaced by others.

    made: new tensors, by the name of the first one that they replace. gone: names of replaced tensors.
    """

    def entries() -> Iterator[TensorEntry]:
        for entry in floats.source.entries.values():
            if entry.name in made:
                yield from (origin.entry for origin in made[entry.name])
            elif entry.name not in gone:
                yield entry

    new = {origin.entry.name: origin for origins in made.values() for origin in origins}
    left = {name: origin for name, origin in floats.origins.items() if name not in gone}
    return replace(
        floats, source=replace(floats.source, entries=Entries(entries())), origins=ChainMap(new, left)
    )


def _entry(name: str, shape: tuple[int, ...], of: TensorEntry, origin: Origin) -> TensorEntry:
    """Return the entry of an assembled tensor, based on the entry ``of``."""
    experts = of.stack is not None and len(shape) == len(of.shape)
    holder, _, last = name.removesuffix(".weight").rpartition(".")
    return TensorEntry(
        name=name, dtype=of.dtype, shape=shape, begin=0, file=of.file,
        nbytes=math.prod(shape) * origin.dtype.itemsize, stack=Stack(holder, (last,),
        stays=True) if experts else None,
    )  # fmt: skip


def _transposed(entry: TensorEntry, gathered: Gathered, origin: type[Origin]) -> Origin:
    """Return a tensor of the transposed matrices of what is gathered."""
    *count, rows, columns = entry.shape
    inner = replace(entry, shape=(*count, columns, rows), stack=None)
    return origin(
        entry=entry, gathered=Gathered(sources=(origin(entry=inner, gathered=gathered, transposed=True),))
    )


def _cut(piece: TensorPiece, origin: Origin) -> Origin:
    """Return a piece of a tensor."""
    base = _numbers_of(origin) if piece.single else origin
    entry = _entry(piece.name, piece.shape, origin.entry, origin)
    gathered = Gathered(sources=(base,), rows=(piece.rows,))
    return (
        _transposed(entry, gathered, type(origin))
        if piece.transposed
        else type(origin)(entry=entry, gathered=gathered)
    )


def _numbers_of(origin: Origin) -> Origin:
    """Return a tensor as a vector of its values."""
    return replace(origin, entry=replace(origin.entry, shape=(math.prod(origin.entry.shape),)))


def _joined(whole: Whole, floats: Floats) -> Origin:
    """Return a tensor made of all its pieces."""
    sources = [floats.origin(floats.source.entries[piece.name]) for piece in whole.pieces]
    make, first = type(sources[0]), sources[0]
    for at, (piece, origin) in enumerate(zip(whole.pieces, sources, strict=True)):
        if piece.transposed:
            transposed = replace(origin.entry, stack=None)
            sources[at] = make(entry=transposed, gathered=Gathered(sources=(origin,)), transposed=True)
        elif piece.single:
            sources[at] = _numbers_of(origin)
    entry = replace(_entry(whole.name, whole.shape, first.entry, first), stack=None)
    rows = tuple(piece.rows for piece in whole.pieces)
    gathered = Gathered(sources=tuple(sources), rows=rows, whole=True)
    return _transposed(entry, gathered, make) if whole.transposed else make(entry=entry, gathered=gathered)


def require_order(weight: Placement) -> None:
    """Raise UnsupportedError for Gram matrix methods on reordered inputs."""
    form = weight.origin.form
    if weight.to is None or form is None or form.columns is None:
        return
    if method_named(weight.method).needs.keys() - {MEAN_SQUARE}:
        raise UnsupportedError(
            f"method {weight.method} learns of the inputs of {printable(weight.module)} together, which "
            f"files of {weight.layer.codec.title} have in another order; give it method ggml by a rule"
        )
