"""What a quantized checkpoint and its original have in common: the same tensors, kept ones to the byte."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from ..errors import printable
from .entries import TensorEntry
from .origin import Origin
from .originals import Original
from .problems import Problem
from .proofs import Check, OpenFiles
from .quantize import Scratch
from .safetensors_file import DTYPE_BITS
from .selection import WEIGHT_DTYPES, module_of
from .source import CONFIG, Source
from .stored import Stored
from .tied import tied_copies

# What a tool writes anew when it saves a configuration; all else describes the model.
_REWRITTEN = frozenset(
    (
        "quantization_config", "compression_config", "transformers_version", "_name_or_path", "_commit_hash",
        "dtype", "torch_dtype", "use_cache",
    )
)  # fmt: skip


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
        """See :class:`Task`."""
        buffer = scratch.buffer
        views = [memoryview(buffer)[: self.nbytes], memoryview(buffer)[self.nbytes : 2 * self.nbytes]]
        for view, entry, file in zip(views, self.pair, self.files, strict=True):
            file.read_into(view, entry.begin + self.start)
        if views[0] != views[1]:
            self.report("its bytes are not those of the original")


class _CompareFloats(Check):
    """Compare some rows of a tensor of floats with what the codes of the original stand for."""

    def __init__(self, entry: TensorEntry, origin: Origin, cut: tuple[int, int], files: OpenFiles) -> None:
        self.start, self.rows = cut
        self.row_bytes = entry.nbytes // (math.prod(entry.shape[:-1]) or 1)
        super().__init__(entry.name, self.rows * self.row_bytes)
        self.entry = entry
        self.origin = origin
        self.files = {file: files[file] for file in (entry.file, *origin.files)}

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (rows of codes may be larger)
        """See :class:`Task`."""
        ours, theirs = bytearray(self.nbytes), bytearray(self.nbytes)
        begin = self.entry.begin + self.start * self.row_bytes
        self.files[self.entry.file].read_into(memoryview(ours), begin)
        self.origin.read(self.files, self.start, self.rows, theirs)
        if ours != theirs:
            self.report(f"differs from the dequantized original from row {self.start} on")


def _float_comparisons(entry: TensorEntry, origin: Origin, files: OpenFiles, chunk: int) -> list[Check]:
    """Return the comparisons of a tensor whose original is quantized; it may have any float dtype."""
    size = DTYPE_BITS[entry.dtype] // 8
    origin = replace(origin, entry=replace(origin.entry, dtype=entry.dtype, nbytes=entry.nbytes))
    height = math.prod(entry.shape[:-1])
    rows = max(1, chunk // max(1, entry.shape[-1] * size) // origin.alignment) * origin.alignment
    return [
        _CompareFloats(entry, origin, (start, min(rows, height - start)), files)
        for start in range(0, height, rows)
    ]


def kept_tensors(
    stored: Stored, original: Original, attendants: Container[str], files: OpenFiles, *, chunk: int
) -> tuple[list[Problem], list[Check]]:
    """Return what is missing, surplus or of another shape, and the comparisons of all kept tensors.

    attendants: names of tensors that belong to quantized layers and need no original. chunk: bytes of each
    side that a comparison reads; its buffer holds both.
    """
    problems, accounted = _layers(stored, original)
    tasks: list[Check] = []
    for entry in stored.others:
        origin = original.floats.origins.get(entry.name)
        if origin is not None and entry.dtype in WEIGHT_DTYPES and entry.shape == origin.entry.shape:
            accounted.add(entry.name)
            tasks += _float_comparisons(entry, origin, files, chunk)
            continue
        first = original.source.entries.get(entry.name)
        if first is None:
            if entry.name not in attendants:
                problems.append(Problem(where=entry.name, what="the original has no such tensor"))
            continue
        accounted.add(entry.name)
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            theirs = f"but the original has {first.dtype} of shape {list(first.shape)}"
            problems.append(
                Problem(where=entry.name, what=f"{entry.dtype} of shape {list(entry.shape)}, {theirs}")
            )
            continue
        tasks += [
            _Compare((entry, first), start, min(chunk, entry.nbytes - start), files)
            for start in range(0, entry.nbytes, chunk)
        ]
    broken = {problem.where for problem in stored.problems}
    copies = tied_copies(original.source).keys()
    problems += [
        Problem(where=name, what="it is missing")
        for name in sorted(original.floats.source.entries.keys() - accounted - copies)
        if module_of(name) not in broken and name not in broken
    ]
    return problems, tasks


def _layers(stored: Stored, original: Original) -> tuple[list[Problem], set[str]]:
    """Return layers and experts that only one side has, and the names of the originals of the others."""
    problems: list[Problem] = []
    accounted: set[str] = set()
    split: set[str] = set()
    for layer in stored.layers:
        weight = original.weight_of(layer)
        if weight is None:
            problems.append(Problem(where=layer.module, what="the original has no such weight of its shape"))
            continue
        accounted.add(weight.origin.entry.name)
        if layer.experts is None:
            split.add(weight.origin.entry.name)
    present = {layer.module for layer in stored.layers} | {problem.where for problem in stored.problems}
    problems += [
        Problem(where=module, what="this expert is missing")
        for module, weight in original.matrices.items()
        if weight.origin.entry.name in split and module not in present
    ]
    return problems, accounted


def configuration_problems(source: Source, original: Source) -> list[Problem]:
    """Return where config.json describes another model than the original's does.

    Only what both say is compared, since tools add and leave out defaults, and not what they write anew.
    """
    if source.config is None or original.config is None:
        return []
    return [
        Problem(where=CONFIG, what=f"{key} is {ours}, but {theirs} in the original")
        for key, ours, theirs in _differences(source.config, original.config)
    ]


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, str, str]]:
    found = []
    for key in ours.keys() & theirs.keys() - _REWRITTEN:
        a, b = ours[key], theirs[key]
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b and not (a != a and b != b):  # NaN equals NaN here
            found.append((printable(prefix + key), reprlib.repr(a), reprlib.repr(b)))
    return sorted(found)
