"""Tensors assembled from rows of other tensors: cut pieces and joined wholes."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...codecs.divided_tensors import RowRun, TensorPiece, Whole, places_in_pieces, rows_of_piece
from ...codecs.protocol import Codec
from ...codecs.registry import codec_of
from ..read.storage import Files, Place
from ..read.tensor_entries import Entries, Stack, TensorEntry
from .decoded import Decoded
from .row_changes import Reordered, Transposed
from .row_reader import Buffer, RowReader, read_rows_of, with_dtype
from .selection import WEIGHT_DTYPES

if TYPE_CHECKING:  # which has what is gathered
    from .float_view import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(RowReader):
    """Rows of other tensors.

    sources: the tensors that are read. pieces: of a piece, its rows in the one source, all unless given; of a
    whole tensor, the rows that each source has. whole: whether it is a whole tensor.
    """

    sources: tuple[RowReader, ...]
    pieces: tuple[tuple[RowRun, ...], ...] = ()
    whole: bool = False

    @property
    def names(self) -> frozenset[str]:
        """See :class:`RowReader`."""
        return frozenset((self.entry.name,)).union(*(each.names for each in self.sources))

    @property
    def files(self) -> tuple[Place, ...]:
        return tuple(dict.fromkeys(file for each in self.sources for file in each.files))

    @property
    def place(self) -> tuple[str, int, int]:
        return self.sources[0].place

    @property
    def copies(self) -> tuple[int, int]:
        return 1, max(each.value_bytes + each.dtype.itemsize for each in self.sources)

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out, columns = self.view(buffer, rows), self.sources[0].columns
        flat = out.view(-1, columns)
        # Where sources are vectors, single values are numbered.
        first = start if columns == out.shape[1] else start * out.shape[1]
        at = torch.arange(first, first + len(flat))
        if not self.whole:
            taken = rows_of_piece(self.pieces[0])[at] if self.pieces else at
            flat.copy_(read_rows_of(self.sources[0], files, taken))
            return out
        piece, row = (table[at] for table in places_in_pieces(self.pieces))
        for number in sorted(set(piece.tolist())):
            mine = piece == number
            flat[mine] = read_rows_of(self.sources[number], files, row[mine]).to(out.dtype)
        return out


class Shapes(Mapping[str, tuple[int, ...]]):
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
    source, config = floats.source, floats.source.config or {}
    own = codec_of(source.container.name, source.metadata[source.shards[0]])
    floats = joined(floats, own.model_format.wholes(Shapes(floats.source.entries), config))
    made: dict[str, list[RowReader]] = {}
    for entry in floats.source.entries.values():
        if pieces := codec.model_format.pieces(entry.name, entry.shape, config):
            made[entry.name] = [_cut(piece, floats.reader(entry)) for piece in pieces]
    floats = replaced(floats, made, set(made))
    return floats if dtype is None or not floats.source.container.indexed else _in_dtype(floats, dtype)


def joined(floats: Floats, wholes: Iterable[Whole]) -> Floats:
    """Return a checkpoint with whole tensors in place of their pieces."""
    found = {whole.pieces[0].name: whole for whole in wholes}
    made: dict[str, list[RowReader]] = {name: [_joined(whole, floats)] for name, whole in found.items()}
    gone = {piece.name for whole in found.values() for piece in whole.pieces}
    return replaced(floats, made, gone)


def _in_dtype(floats: Floats, dtype: str) -> Floats:
    """Return a checkpoint whose floats have a dtype; codes keep theirs."""
    made: dict[str, list[RowReader]] = {}
    for entry in floats.source.entries.values():
        reader = floats.reader(entry)
        if entry.dtype in WEIGHT_DTYPES and entry.dtype != dtype and reader.layer is None:
            made[entry.name] = [Reordered(entry=with_dtype(reader.entry, dtype), of=reader)]
    return replaced(floats, made, set(made))


def replaced(floats: Floats, made: Mapping[str, list[RowReader]], gone: set[str]) -> Floats:
    """Return a checkpoint with some tensors replaced by others.

    made: new tensors, by the name of the first one that they replace. gone: names of replaced tensors.
    """
    if not made:
        return floats

    def entries() -> Iterator[TensorEntry]:
        for entry in floats.source.entries.values():
            if entry.name in made:
                yield from (reader.entry for reader in made[entry.name])
            elif entry.name not in gone:
                yield entry

    new = {reader.entry.name: reader for readers in made.values() for reader in readers}
    left = {name: reader for name, reader in floats.readers.items() if name not in gone}
    return replace(
        floats, source=replace(floats.source, entries=Entries(entries())), readers=ChainMap(new, left)
    )


def gathered_entry(name: str, shape: tuple[int, ...], of: RowReader) -> TensorEntry:
    """Return the entry of a tensor gathered from ``of``."""
    experts = of.entry.stack is not None and len(shape) == len(of.entry.shape)
    holder, _, last = name.removesuffix(".weight").rpartition(".")
    return TensorEntry(
        name=name,
        dtype=of.entry.dtype,
        shape=shape,
        begin=0,
        file=of.entry.file,
        nbytes=math.prod(shape) * of.dtype.itemsize,
        stack=Stack(holder, (last,), stays=True) if experts else None,
    )


def _transposed(made: Gathered) -> Gathered:
    """Return a tensor of the transposed matrices of what is gathered."""
    *count, rows, columns = made.entry.shape
    inner = replace(made.entry, shape=(*count, columns, rows), stack=None)
    return Gathered(entry=made.entry, sources=(Transposed(entry=inner, of=replace(made, entry=inner)),))


def _conv1d(entry: TensorEntry, matrix: RowReader) -> RowReader:
    """Return a tensor that files of floats have as (in, out)."""
    entry = replace(entry, inputs_first=True)
    if isinstance(matrix, Decoded):
        return replace(matrix, entry=entry, inputs_first=True)
    return Transposed(entry=entry, of=_transposed(Gathered(entry=entry, sources=(matrix,))))


def _cut(piece: TensorPiece, reader: RowReader) -> RowReader:
    """Return a piece of a tensor."""
    entry = gathered_entry(piece.name, piece.shape, reader)
    made = Gathered(
        entry=entry, sources=(_numbers_of(reader) if piece.single else reader,), pieces=(piece.rows,)
    )
    return _transposed(made) if piece.transposed else made


def _numbers_of(reader: RowReader) -> RowReader:
    """Return a tensor as a vector of its values."""
    entry = replace(reader.entry, shape=(math.prod(reader.entry.shape),))
    return replace(reader, entry=entry, of=None if reader.of is None else _numbers_of(reader.of))


def _joined(whole: Whole, floats: Floats) -> RowReader:
    """Return a tensor made of all its pieces."""
    sources = [floats.reader(floats.source.entries[piece.name]) for piece in whole.pieces]
    widest = max(sources, key=lambda each: each.dtype.itemsize)
    entry = with_dtype(gathered_entry(whole.name, whole.shape, sources[0]), widest.entry.dtype)
    entry = replace(entry, stack=None)
    if whole.transposed and len(whole.shape) == 2:
        return _conv1d(entry, sources[0])
    for at, (piece, reader) in enumerate(zip(whole.pieces, sources, strict=True)):
        if piece.transposed:
            inner = replace(reader.entry, stack=None)
            sources[at] = Transposed(entry=inner, of=Gathered(entry=inner, sources=(reader,)))
        elif piece.single:
            sources[at] = _numbers_of(reader)
    rows = tuple(piece.rows for piece in whole.pieces)
    made = Gathered(entry=entry, sources=tuple(sources), pieces=rows, whole=True)
    return _transposed(made) if whole.transposed else made
