"""Matching of two checkpoints' tensors that hold the same weights.

Each side is seen as floats, whatever its layout: a quantized layer is one tensor of the name that its weight
had. Tensors of one name and shape are a pair, and so are each matrix of fused experts and the tensor that the
other side has for it. This module reads headers, and the bytes of heads that may be copies of an embedding.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...columns import MadeSequence
from ...errors import count, printable
from ..plan.as_loaded import as_loaded
from ..plan.float_view import DecodedLayers, Floats
from ..plan.row_changes import Strided, matrix_rows
from ..plan.row_reader import RowReader
from ..plan.selection import is_fused_experts, module_of, not_a_weight
from ..plan.tensor_matrices import WeightMatrix, matrices, with_axes
from ..plan.tied import tied_copies
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayers, configuration, find_layers
from ..read.source import Source
from ..read.tensor_entries import Entries, TensorEntry
from .consistency import is_extra_scale, require_readable
from .source_weights import OF_EXPERT, Original

A, B = 0, 1
_BIAS = ".bias"
LABELS = ("A", "B")
"""Names of the two sides in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two checkpoints that are compared.

    seen: its quantized layers as tensors of float32, then its other tensors.
    """

    stored: StoredLayers
    seen: Original

    @property
    def source(self) -> Source:
        """The checkpoint as it lies in its files."""
        return self.seen.source

    @property
    def entries(self) -> Entries:
        """Its tensors, quantized layers as floats."""
        return self.seen.floats.source.entries

    def weight(self, entry: TensorEntry) -> RowReader:
        """Return a whole tensor as rows of inputs; biases have one column."""
        shape = (*entry.shape, 1) if _is_of_rows(entry) else entry.shape or (1,)
        return self.seen.floats.reader(replace(entry, shape=shape))

    def biased(self, entry: TensorEntry) -> TensorEntry | None:
        """Return the fused experts whose row biases a tensor holds, or None."""
        weight = self.entries.get(entry.name.removesuffix(_OF_ROWS)) if _is_of_rows(entry) else None
        return weight if weight is not None and is_fused_experts(weight) else None

    def part(self, module: str) -> RowReader | None:
        """Return the matrix, or the bias ``X.bias``, of a module."""
        if not module.endswith(_BIAS):
            return self.seen.matrix(module)
        entry = self.entries.get(module)
        if entry is not None:
            return self.weight(entry)
        found = OF_EXPERT.fullmatch(module.removesuffix(_BIAS))
        whole = None if found is None else self.seen.stack(found["holder"], found["part"])
        entry = None if whole is None else self.entries.get(f"{module_of(whole.name)}_bias")
        if whole is None or entry is None:
            return None
        rows = _bias_rows(entry, whole).get(module)
        if rows is None:
            return None
        return matrix_rows(self.weight(entry), rows)


_OF_ROWS = "_bias"


def _is_of_rows(entry: TensorEntry) -> bool:
    """Return whether a tensor may hold all experts' biases, row by row."""
    return entry.name.endswith(_OF_ROWS) and len(entry.shape) == 2 and entry.use is None


@functools.lru_cache(maxsize=8)
def _bias_rows(entry: TensorEntry, weight: TensorEntry) -> dict[str, WeightMatrix]:
    """Return each matrix's rows in a tensor of biases, by name."""
    assert weight.stack is not None
    rows = replace(weight, shape=(*entry.shape, 1), stack=weight.stack._replace(transposed=False))
    return {f"{m.module}{_BIAS}": m for m in matrices(rows)}


def side_of(source: Source, other: Source) -> Side:
    """Return one side of a comparison.

    Where ``source`` has no config.json, the config.json of ``other`` says how fused experts lie. Raises
    CheckpointError, UnsupportedError for layouts that are not read here.
    """
    require_readable(source)
    config = configuration(source)
    stored = StoredLayers.none(source.entries) if config is None else find_layers(source)
    described = replace(source, config=other.config if source.config is None else source.config)
    readers = DecodedLayers(described, stored, torch.float32)
    entries = Entries(reader.entry for reader in readers.values())
    for entry in stored.others:
        entries.add(entry)
    seen = with_axes(replace(described, entries=entries))
    floats = as_loaded(Floats(source=seen, readers=readers, config=config), other.entries)
    return Side(stored=stored, seen=Original(source=source, floats=floats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two tensors, or rows of them, that hold the same weight."""

    a: RowReader
    b: RowReader

    @property
    def name(self) -> str:
        """The name of the tensor, or of one expert."""
        entries = (self.a.entry, self.b.entry)
        return min(entries, key=lambda entry: len(entry.shape)).name

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; all axes but the last count as rows."""
        return self.a.shape

    @property
    def held_by(self) -> tuple[str, str]:
        """The storage of each side: a dtype, or scheme and layout."""
        return _held(self.a), _held(self.b)

    def __str__(self) -> str:
        shapes = (list(weight.entry.shape) for weight in (self.a, self.b))
        a, b = (f"{held} of shape {shape}" for held, shape in zip(self.held_by, shapes, strict=True))
        return f"{a} in A, but {b} in B"

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype for comparing values, float64 where stored, or None."""
        kinds = [TORCH_DTYPES.get(weight.entry.dtype) for weight in (self.a, self.b)]
        if None in kinds or torch.complex64 in kinds:
            return None
        floats = [kind is not None and kind.is_floating_point for kind in kinds]
        if not any(floats):
            return torch.int64
        return (torch.float64 if torch.float64 in kinds else torch.float32) if all(floats) else None


def _held(weight: RowReader) -> str:
    layer = weight.layer
    return weight.entry.dtype if layer is None else f"{layer.weight} ({layer.layer.layout})"


class Pairs(MadeSequence[Pair]):
    """Pairs of two checkpoints' tensors, and tensors without a counterpart.

    problems: what cannot be compared. notes: what one side alone has and need not have. Pairs lie in columns:
    the number of each tensor, its first row and the distance of rows, then how many rows.
    """

    def __init__(self, a: Side, b: Side) -> None:
        self.sides = (a, b)
        self.problems = [
            Problem(where=problem.where, what=f"it cannot be read in {label}: {problem.what}")
            for label, side in zip(LABELS, self.sides, strict=True)
            for problem in side.stored.problems
        ]
        self.notes: list[str] = []
        self._columns = tuple(array("q") for _ in range(7))
        self._rows = tuple(array("q", [0]) * len(side.entries) for side in self.sides)
        for entry in a.entries.values():
            self._match(entry)
        self._account(A)
        self._account(B)

    def __len__(self) -> int:
        return len(self._columns[0])

    def made(self, number: int) -> Pair:
        """Return the two sides of a pair."""
        *places, rows = (column[number] for column in self._columns)
        return Pair(a=self._rows_of(A, places[:3], rows), b=self._rows_of(B, places[3:], rows))

    def _rows_of(self, at: int, place: Sequence[int], rows: int) -> RowReader:
        number, first, step = place
        whole = self.sides[at].weight(self.sides[at].entries.at(number))
        return Strided(entry=whole.entry, of=whole, first=first, step=step, count=rows)

    def _match(self, entry: TensorEntry) -> None:
        """Pair a tensor of A, or its experts, with B's counterparts."""
        a, b = self.sides
        twin = b.entries.get(entry.name)
        if twin is not None:
            self._pair(a.weight(entry), b.weight(twin), same=entry.shape == twin.shape)
            return
        for module in _modules(entry, a):
            mine, theirs = a.part(module), b.part(module)
            if mine is not None and theirs is not None:
                self._pair(mine, theirs, same=mine.shape == theirs.shape)

    def _pair(self, a: RowReader, b: RowReader, *, same: bool) -> None:
        """Add a pair, or the problem that prevents its comparison."""
        numbers = []
        for side, rows, weight in zip(self.sides, self._rows, (a, b), strict=True):
            numbers.append(side.entries.numbered(weight.entry.name))
            rows[numbers[-1]] += max(1, weight.shape[0])
        pair = Pair(a=a, b=b)
        if not same or pair.dtype is None:
            rule = ", whose values are not compared" if same else ""
            self.problems.append(Problem(where=pair.name, what=f"{pair}{rule}"))
        else:
            runs = ((w.first, w.step) if isinstance(w, Strided) else (0, 1) for w in (a, b))
            places = [(number, *run) for number, run in zip(numbers, runs, strict=True)]
            for column, value in zip(self._columns, (*places[A], *places[B], a.shape[0]), strict=True):
                column.append(value)

    def _account(self, at: int) -> None:
        """Report whole tensors and experts that only one side has."""
        side, other, only = self.sides[at], self.sides[1 - at], f"only {LABELS[at]} has it"
        broken = {problem.where for problem in other.stored.problems}
        alone = []
        for entry, rows in zip(side.entries.values(), self._rows[at], strict=True):
            if not rows:
                alone.append(entry.name)
            elif rows < side.weight(entry).shape[0]:
                modules = (m for m in _modules(entry, side) if other.part(m) is None)
                self.problems += [Problem(where=m, what=only) for m in modules if m not in broken]
        needless = [name for name in alone if is_extra_scale(name, side.stored)]
        if needless:
            scales = count(
                len(needless), "scale of inputs, outputs or caches", "scales of inputs, outputs or caches"
            )
            self.notes.append(f"only {LABELS[at]} has {scales}, such as {printable(needless[0])}")
        rest = [n for n in alone if n not in set(needless) and not {n, module_of(n)} & broken]
        copies = tied_copies(side.source) if rest else {}
        self.notes += [
            f"only {LABELS[at]} has {printable(n)}, a copy of {printable(copies[n])}"
            for n in rest
            if n in copies
        ]
        self.problems += [Problem(where=n, what=only) for n in rest if n not in copies]


def _modules(entry: TensorEntry, side: Side) -> Iterator[str]:
    """Yield the modules of a tensor's matrices, or of experts' biases."""
    biased = side.biased(entry)
    if biased is not None:
        yield from _bias_rows(entry, biased)
    elif not is_fused_experts(entry):
        yield module_of(entry.name)
    elif not_a_weight(entry) is None:
        yield from (matrix.module for matrix in matrices(entry))
