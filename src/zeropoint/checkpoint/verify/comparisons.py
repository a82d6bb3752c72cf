"""Comparison of a quantized checkpoint with its original, tensor by tensor."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...codecs.containers.safetensors import DTYPE_BITS
from ...codecs.known import CONFIG_KEYS
from ...codecs.stored_forms import MODEL_FORM
from ...errors import printable
from ..measure.tiles import Scratch
from ..plan.config_and_index import MANIFEST
from ..plan.row_changes import decoded_to, in_form
from ..plan.row_reader import Literal, RowReader, StoredFloats
from ..plan.selection import WEIGHT_DTYPES, is_fused_experts, module_of
from ..plan.tensor_matrices import matrices
from ..plan.tied import tied_copies
from ..read.config_text import WEIGHTS_ONLY_CONFIG
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayers
from ..read.safetensors_file import pieces
from ..read.source import CONFIG, SINGLE_FILE, Source
from ..read.storage import OpenFile, OpenFiles, read_bytes
from ..read.tensor_entries import TensorEntry
from .integrity import is_loaded
from .proofs import Check
from .source_weights import Original

_WRITTEN = frozenset((CONFIG, MANIFEST, WEIGHTS_ONLY_CONFIG, SINGLE_FILE + ".index.json"))
"""Files that an output has of its own, whatever the original has."""
# What a tool writes anew when it saves a configuration; all else describes the model.
_REWRITTEN = frozenset(
    (
        *CONFIG_KEYS,
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "dtype",
        "torch_dtype",
        "use_cache",
    )
)


class _Compare(Check):
    """Compare some bytes of a kept tensor with the original's."""

    def __init__(
        self, pair: tuple[TensorEntry, TensorEntry], start: int, size: int, files: OpenFiles
    ) -> None:
        super().__init__(pair[0].name, size)
        self.pair = pair
        self.start = start
        self.files = [files[entry.file] for entry in pair]

    def run(self, scratch: Scratch) -> None:
        buffer = scratch.buffer
        views = [memoryview(buffer)[: self.nbytes], memoryview(buffer)[self.nbytes : 2 * self.nbytes]]
        for view, entry, file in zip(views, self.pair, self.files, strict=True):
            file.read_into(view, entry.begin + self.start)
        if views[0] != views[1]:
            self.report("its bytes are not those of the original")


class _CompareNumber(Check):
    """Compare an input or cache scale with the original's conversion."""

    def __init__(self, entry: TensorEntry, data: bytes, files: OpenFiles) -> None:
        super().__init__(entry.name, entry.nbytes)
        self.entry, self.data, self.file = entry, data, files[entry.file]

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (it is a few bytes)
        if read_bytes(self.file, self.entry.begin, self.nbytes) != self.data:
            self.report("it is not what the original's becomes")


class _CompareFloats(Check):
    """Compare rows of floats with the original's dequantized values."""

    def __init__(self, entry: TensorEntry, reader: RowReader, cut: tuple[int, int], files: OpenFiles) -> None:
        self.start, self.rows = cut
        self.row_bytes = reader.width * DTYPE_BITS[entry.dtype] // 8
        super().__init__(entry.name, self.rows * self.row_bytes)
        self.entry = entry
        self.reader = reader
        self.files = {file: files[file] for file in (entry.file, *reader.files)}

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (rows of codes may be larger)
        theirs, begin = bytearray(self.nbytes), self.entry.begin + self.start * self.row_bytes
        ours = read_bytes(self.files[self.entry.file], begin, self.nbytes)
        self.reader.read_as_written(self.files, self.start, self.rows, theirs)
        if ours != theirs:
            self.report(f"differs from the dequantized original from row {self.start} on")


def _float_comparisons(entry: TensorEntry, reader: RowReader, files: OpenFiles, chunk: int) -> list[Check]:
    """Return the comparisons of a float tensor with a quantized original."""
    size = DTYPE_BITS[entry.dtype] // 8
    reader = reader if reader.layer is None else decoded_to(reader, entry.dtype)
    height = math.prod(entry.shape) // max(1, reader.width)
    step = reader.written_alignment
    rows = max(1, chunk // max(1, reader.width * size) // step) * step
    return [
        _CompareFloats(entry, reader, (start, min(rows, height - start)), files)
        for start in range(0, height, rows)
    ]


class Accounts:
    """Accounted tensors of an original, by their numbers."""

    def __init__(self, original: Original) -> None:
        self._entries = original.floats.source.entries
        self._found = bytearray(len(self._entries))
        self._split = bytearray(len(self._entries))

    def add(self, name: str, *, split: bool = False) -> None:
        """Record a found tensor, or one found expert of it (``split``)."""
        number = self._entries.number(name)
        if number is not None:
            self._found[number] = True
            self._split[number] |= split

    def missing(self) -> Iterator[str]:
        """Yield the names of the tensors that were not found."""
        return (name for name, found in zip(self._entries, self._found, strict=True) if not found)

    def split(self) -> Iterator[TensorEntry]:
        """Yield the fused experts of which some were found one by one."""
        return (self._entries.at(number) for number, split in enumerate(self._split) if split)


def layer_problems(stored: StoredLayers, accounts: Accounts) -> list[Problem]:
    """Return the experts that are missing of those that were split."""
    broken = {problem.where for problem in stored.problems}
    return [
        Problem(where=matrix.module, what="this expert is missing")
        for entry in accounts.split()
        if is_fused_experts(entry)
        for matrix in matrices(entry)
        if stored.modules.number(matrix.module) is None and matrix.module not in broken
    ]


def kept_problems(
    stored: StoredLayers, original: Original, accounts: Accounts, *, needless: Callable[[str], bool]
) -> list[Problem]:
    """Return problems of missing, surplus or reshaped tensors.

    needless: says of a name that its tensor belongs to a quantized layer and needs no original.
    """
    problems = []
    left = dict(original.carried)
    for entry in stored.others:
        if _reader_of(entry, original) is not None:
            accounts.add(entry.name)
            continue
        made = left.pop(entry.name, None)
        first = original.source.entries.get(entry.name) if made is None else made.entry
        if first is None:
            if not needless(entry.name):
                problems.append(Problem(where=entry.name, what="the original has no such tensor"))
            continue
        accounts.add(entry.name)
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            theirs = f"but the original has {first.dtype} of shape {list(first.shape)}"
            problems.append(
                Problem(where=entry.name, what=f"{entry.dtype} of shape {list(entry.shape)}, {theirs}")
            )
    broken = {problem.where for problem in stored.problems}
    copies = tied_copies(original.source).keys()
    return problems + [
        Problem(where=name, what="it is missing")
        for name in sorted({*accounts.missing(), *left})
        if name not in copies and module_of(name) not in broken and name not in broken
    ]


def comparisons(stored: StoredLayers, original: Original, files: OpenFiles, *, chunk: int) -> Iterator[Check]:
    """Yield the comparisons of all kept tensors with the original's.

    chunk: bytes of each side that a comparison reads; its buffer holds both.
    """
    for entry in stored.others:
        reader = _reader_of(entry, original)
        made = original.carried.get(entry.name)
        first = original.source.entries.get(entry.name) if made is None else made.entry
        same = first is not None and (first.dtype, first.shape) == (entry.dtype, entry.shape)
        if isinstance(made, Literal):
            if same:
                yield _CompareNumber(entry, made.data, files)
        elif made is not None:
            yield from _float_comparisons(entry, made, files, chunk) if same else ()
        elif reader is not None:
            yield from _float_comparisons(entry, reader, files, chunk)
        elif first is not None and same:
            for start in range(0, entry.nbytes, chunk):
                yield _Compare((entry, first), start, min(chunk, entry.nbytes - start), files)


def _reader_of(entry: TensorEntry, original: Original) -> RowReader | None:
    """Return the original's codes of a float tensor, or None.

    The same holds for floats whose values or dtype the file has otherwise than the original.
    """
    reader = original.floats.readers.get(entry.name)
    first = original.source.entries.get(entry.name)
    if reader is None and first is not None and first.dtype in WEIGHT_DTYPES and (entry.form or first.form):
        formed = in_form(StoredFloats(entry=first), entry.form or MODEL_FORM)
        reader = None if formed.copied else formed
    if reader is None or entry.dtype not in WEIGHT_DTYPES or entry.shape != reader.entry.shape:
        return None
    return reader if entry.form is None else in_form(reader, entry.form)


class _CompareFiles(Check):
    """Compare a file next to the weights with the original's."""

    def __init__(self, name: str, pair: Sequence[OpenFile]) -> None:
        super().__init__(name, pair[0].stamp.size)
        self.pair = pair

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (files are read by pieces)
        sizes = [file.stamp.size for file in self.pair]
        ours, theirs = (pieces(file, 0, sizes[0]) for file in self.pair)
        if sizes[0] != sizes[1] or any(a != b for a, b in zip(ours, theirs, strict=True)):
            self.report("its bytes are not those of the original")


def companions(source: Source, original: Original, files: OpenFiles) -> tuple[list[Problem], list[Check]]:
    """Return problems of companion files, and their byte comparisons.

    A file that was given alone has no other files.
    """
    if source.given != source.root or original.source.given != original.source.root:
        return [], []
    theirs = {str(path) for path in original.floats.source.companions} - _WRITTEN
    ours = {str(path) for path in source.companions}
    problems = [Problem(where=name, what="it is missing") for name in sorted(theirs - ours)]
    surplus = {name for name in ours | {str(path) for path in source.left_out} if is_loaded(name)}
    surplus -= theirs | _WRITTEN
    problems += [
        Problem(where=name, what="the original has no such file, and loaders may read or run it")
        for name in sorted(surplus)
    ]
    pairs = {name: (files[source.root / name], files[original.source.root / name]) for name in theirs & ours}
    return problems, [_CompareFiles(name, pair) for name, pair in sorted(pairs.items())]


def configuration_differences(source: Source, original: Source) -> list[Difference]:
    """Return the differences of config.json, written sections excluded."""
    if source.config is None or original.config is None:
        return []
    return _differences(source.config, original.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key of a configuration with both values; None if absent.

    code: whether it names code that loaders run.
    """

    key: str
    ours: str | None
    theirs: str | None
    code: bool = False

    @property
    def is_default(self) -> bool:
        """Whether it may be a default that transformers added or omitted."""
        return not self.code and (self.ours is None or self.theirs is None)

    def __str__(self) -> str:
        ours, theirs = (value or "absent" for value in (self.ours, self.theirs))
        return f"{self.key} is {ours}, but {theirs} in the original"


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    found: list[Difference] = []
    for key in sorted((ours.keys() | theirs.keys()) - _REWRITTEN):
        a, b = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b and not (a != a and b != b):  # NaN equals NaN here
            found.append(
                Difference(
                    key=printable(prefix + key),
                    ours=None if a is _ABSENT else reprlib.repr(a),
                    theirs=None if b is _ABSENT else reprlib.repr(b),
                    code=key == "auto_map",
                )
            )
    return found


_ABSENT: Any = object()
