"""Read a quantized checkpoint back and prove it: decode everything, and compare it with the original.

For each element, ``|x - decode(code)|`` must not exceed the bound that format and scale rule imply
(params/bounds.py); the bound is computed from the stored scales alone. Scales must be finite and positive,
kept tensors byte for byte those of the original, and index, configuration and files must agree. Problems are
collected, so that one run names them all.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs.compressed_tensors import SCALE, Layout, decode, row_alignment
from ..codecs.compressed_tensors_config import matches
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError, ZeropointError, printable
from ..layout.blocks import spread_blocks
from ..tensor import QuantizedTensor
from .decoding import read_lines
from .experts import matrices
from .limits import Limits, value_bytes
from .measure import ErrorSum, TensorError
from .quantize import Scratch
from .safetensors_file import TensorEntry
from .selection import Selection, Why, choose, is_fused_experts, module_of
from .source import MAX_JSON_BYTES, SINGLE_FILE, Source, open_source
from .storage import OpenFile, Place, exists, open_file, read_small, shown
from .stored import Known, Stored, StoredLayer, find_layers
from .workers import Progress, Task, run_tasks

_CHECK_BYTES = 64
"""Temporaries for each number of a tile: values, errors and bounds in float64."""
_LISTED = 50
_COMPARED = 1 << 24
"""Bytes of a kept tensor that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """What was found of one layer: its error, and the largest error of an element in parts of its bound.

    Both are None when there was no original to compare with.
    """

    layer: StoredLayer
    error: TensorError | None
    of_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of :func:`verify`; empty problems mean that everything holds."""

    layers: tuple[LayerProof, ...]
    kept: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def values(self) -> int:
        """Quantized numbers that were decoded."""
        return sum(proof.layer.values for proof in self.layers)

    @property
    def error(self) -> TensorError | None:
        """The error of all layers taken as one, or None without an original."""
        errors = [proof.error for proof in self.layers if proof.error is not None]
        return TensorError.merge(errors) if errors else None

    def require(self) -> None:
        """Raise CheckpointError, with every problem, unless all is well."""
        if self.problems:
            listed = "; ".join(self.problems[:_LISTED])
            rest = len(self.problems) - _LISTED
            more = f"; and {rest} more" if rest > 0 else ""
            raise CheckpointError(
                f"{len(self.problems)} problems: {listed}{more}; quantize the original again"
            )


def verify(
    path: Place | str, against: Place | str | None = None, *, limits: Limits | None = None,
    on_progress: Progress | None = None,
) -> Verification:  # fmt: skip
    """Return what is wrong with the quantized checkpoint at ``path``, compared with the original when given.

    Raises CheckpointError when files are damaged or the checkpoint is not quantized; everything else is in
    the result.
    """
    limits = limits or Limits.default()
    source = open_source(path)
    original = None if against is None else open_source(against)
    weights = {} if original is None else _originals(original)
    known = {
        name: Known(shape=m.shape, dtype=TORCH_DTYPES[entry.dtype]) for name, (entry, m) in weights.items()
    }
    stored = find_layers(source, known)
    problems = [*stored.problems, *_index_problems(source), *_unlisted(source, stored)]
    with contextlib.ExitStack() as stack:
        files = _OpenFiles(stack)
        checks = [_LayerCheck(layer, weights.get(layer.module), files) for layer in stored.layers]
        tasks: list[Task] = [task for check in checks for task in check.tasks(limits)]
        if original is not None:
            absent, comparisons = _kept_tasks(stored, original, weights, files)
            problems += absent
            tasks += comparisons
        longest = max((check.row_bytes * check.rows(limits) for check in checks), default=0)
        run_tasks(
            tasks, workers=limits.workers, buffer_bytes=max(longest, 2 * _COMPARED), on_progress=on_progress
        )
    source.check_unchanged()
    for task in tasks:
        if isinstance(task, _Compare) and task.problem is not None:
            problems.append(task.problem)
    return Verification(
        layers=tuple(check.proof() for check in checks),
        kept=len(stored.others),
        problems=tuple(dict.fromkeys([*problems, *(p for check in checks for p in check.problems())])),
        notes=source.notes,
    )


def _originals(original: Source) -> dict[str, tuple[TensorEntry, Any]]:
    """Return, by module, the source tensor and matrix of everything that may have been quantized."""
    found = {}
    for entry in original.entries.values():
        if entry.dtype in TORCH_DTYPES and (len(entry.shape) == 2 or is_fused_experts(entry)):
            for m in matrices(entry):
                found[m.module] = (entry, m)
    return found


class _OpenFiles:
    """Files opened once for reading."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._open: dict[Place, OpenFile] = {}

    def __getitem__(self, path: Place) -> OpenFile:
        if path not in self._open:
            self._open[path] = open_file(path)
            self._stack.callback(self._open[path].close)
        return self._open[path]


class _LayerCheck:
    """The check of one layer, in parts of some rows."""

    def __init__(self, layer: StoredLayer, weight: tuple[TensorEntry, Any] | None, files: _OpenFiles) -> None:
        self.layer = layer
        self.weight = weight
        self.row_bytes = layer.shape[1] * layer.dtype.itemsize
        self.files = {entry.file: files[entry.file] for entry in layer.tensors.values()}
        if weight is not None:
            self.files[weight[0].file] = files[weight[0].file]
        self.error = ErrorSum(*layer.shape)
        self.parts: list[tuple[float, list[str]]] = []

    def rows(self, limits: Limits) -> int:
        """Return the rows of a part."""
        quantizing = value_bytes(self.layer.weight, self.layer.dtype)
        return limits.rows(self.layer.shape[1], row_alignment(self.layer.weight), quantizing + _CHECK_BYTES)

    def tasks(self, limits: Limits) -> list[Task]:
        """Return the work, whose results come back in ``parts``."""
        rows = self.rows(limits)
        starts = range(0, self.layer.shape[0], rows)
        self.parts = [(0.0, []) for _ in starts]
        return [_Part(self, start, rows, number) for number, start in enumerate(starts)]

    def original(self, start: int, rows: int, buffer: bytearray) -> torch.Tensor | None:
        """Return some rows of the original, or None where there is none."""
        if self.weight is None:
            return None
        entry, matrix = self.weight
        size = rows * self.row_bytes
        offset = matrix.begin + start * self.row_bytes
        self.files[entry.file].read_into(memoryview(buffer)[:size], offset)
        columns = self.layer.shape[1]
        return torch.frombuffer(buffer, dtype=self.layer.dtype, count=rows * columns).view(rows, columns)

    def proof(self) -> LayerProof:
        """Return what was found."""
        error = self.error.total
        worst = None if error is None else max(ratio for ratio, _ in self.parts)
        return LayerProof(layer=self.layer, error=error, of_bound=worst)

    def problems(self) -> list[str]:
        """Return what is wrong, one sentence each, of all parts."""
        return [f"{printable(self.layer.module)}: {text}" for _, found in self.parts for text in found]


class _Part(Task):
    """Decode some rows, and compare them with the original."""

    def __init__(self, check: _LayerCheck, start: int, rows: int, number: int) -> None:
        self.rows = min(rows, check.layer.shape[0] - start)
        super().__init__(check.layer.module, self.rows * check.row_bytes)
        self.check = check
        self.start = start
        self.number = number

    def run(self, scratch: Scratch, stop: threading.Event) -> None:  # noqa: ARG002
        """See :class:`Task`."""
        layer = self.check.layer
        shape = (self.rows, layer.shape[1])
        problems: list[str] = []
        lines = read_lines(layer, self.check.files, self.start, self.rows)
        q = decode(layer.layout, lines, layer.weight, shape=shape, dtype=layer.dtype)
        negative = layer.layout is Layout.NVFP4 and bool(torch.signbit(lines[SCALE].float()).any())
        if negative:
            # Their format has no sign, so the bit would be ignored here but not by every engine.
            problems.append(f"rows from {self.start} on: a scale is negative")
        try:
            q.params.validate()
        except ZeropointError as error:
            problems.append(f"rows from {self.start} on: {error}")
        x = self.check.original(self.start, self.rows, scratch.buffer)
        ratio = 0.0
        if not problems:
            decoded = q.dequantize(torch.float32)
            if not bool(torch.isfinite(decoded).all()):
                problems.append(f"rows from {self.start} on decode to values that are not finite")
            elif x is not None:
                ratio = _of_bound(x, decoded, q)
                self.check.error.add(x, q, self.start)
                if ratio > 1:
                    problems.append(
                        f"rows from {self.start} on are off by up to {ratio:.3g} times the proven bound"
                    )
        self.check.parts[self.number] = (ratio, problems)


def _of_bound(x: torch.Tensor, decoded: torch.Tensor, q: QuantizedTensor) -> float:
    """Return the largest error of an element in parts of its block's bound."""
    bound = q.params.error_bound(torch.float32)
    spread = spread_blocks(bound, q.scheme.granularity, tuple(x.shape))
    off = (x.double() - decoded.double()).abs_()
    ratio = torch.where(off == 0, 0.0, off / spread)
    return float(ratio.max()) if ratio.numel() else 0.0


class _Compare(Task):
    """Compare some bytes of a kept tensor with the original's."""

    def __init__(
        self, pair: tuple[TensorEntry, TensorEntry], start: int, size: int, files: _OpenFiles
    ) -> None:
        super().__init__(pair[0].name, size)
        self.pair = pair
        self.start = start
        self.files = [files[entry.file] for entry in pair]
        self.problem: str | None = None

    def run(self, scratch: Scratch, stop: threading.Event) -> None:  # noqa: ARG002
        """See :class:`Task`."""
        buffer = scratch.buffer
        views = [memoryview(buffer)[: self.nbytes], memoryview(buffer)[self.nbytes : 2 * self.nbytes]]
        for view, entry, file in zip(views, self.pair, self.files, strict=True):
            file.read_into(view, entry.begin + self.start)
        if views[0] != views[1]:
            self.problem = f"{printable(self.name)}: its bytes are not those of the original"


def _kept_tasks(
    stored: Stored, original: Source, weights: Mapping[str, tuple[TensorEntry, Any]], files: _OpenFiles
) -> tuple[list[str], list[Task]]:
    """Return what is missing or surplus, and the comparisons of the tensors that are on both sides."""
    problems: list[str] = []
    tasks: list[Task] = []
    accounted = {weights[layer.module][0].name for layer in stored.layers if layer.module in weights}
    problems += [
        f"{printable(layer.module)}: the original has no such weight"
        for layer in stored.layers
        if layer.module not in weights
    ]
    present = {layer.module for layer in stored.layers}
    problems += [
        f"{printable(module)}: this expert is missing"
        for module, (entry, _) in weights.items()
        if entry.name in accounted and module not in present
    ]
    for entry in stored.others:
        first = original.entries.get(entry.name)
        if first is None:
            problems.append(f"{printable(entry.name)}: the original has no such tensor")
            continue
        accounted.add(entry.name)
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            problems.append(
                f"{printable(entry.name)}: {entry.dtype} of shape {list(entry.shape)}, but the original has "
                f"{first.dtype} of shape {list(first.shape)}"
            )
            continue
        tasks += [
            _Compare((entry, first), start, min(_COMPARED, entry.nbytes - start), files)
            for start in range(0, entry.nbytes, _COMPARED)
        ]
    broken = {text.partition(":")[0] for text in stored.problems}
    problems += [
        f"{printable(name)}: it is missing"
        for name in original.entries.keys() - accounted
        if printable(module_of(name)) not in broken
    ]
    return sorted(problems), tasks


def _unlisted(source: Source, stored: Stored) -> list[str]:
    """Return linear weights that are neither quantized nor ignored, which loaders leave uninitialized."""
    found = []
    for entry in stored.others:
        module = module_of(entry.name)
        choice = choose(entry, source.entries, Selection(), source.config or {})
        if choice.why is Why.LINEAR and entry.name.endswith(".weight") and not matches(module, stored.ignore):
            named = any(matches(module, group.targets, linear=True) for group in stored.groups)
            if named:
                found.append(f"{printable(module)}: neither quantized nor ignored by the configuration")
    return found


def _index_problems(source: Source) -> Sequence[str]:
    """Return contradictions of an index beside a single file, which reading the file does not look at."""
    path = source.root / (SINGLE_FILE + ".index.json")
    if source.index is not None or source.shards != (SINGLE_FILE,) or not exists(path):
        return []
    try:
        index = json.loads(read_small(path, limit=MAX_JSON_BYTES)[0])
        weight_map, size = index["weight_map"], index.get("metadata", {}).get("total_size")
        wrong = {name for name, shard in weight_map.items() if shard != SINGLE_FILE}
        wrong |= weight_map.keys() ^ source.entries.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{shown(path)} is no index: {error!r}"]
    problems = [f"{shown(path)}: {printable(str(name))} is not where it says" for name in sorted(wrong)]
    found = sum(entry.nbytes for entry in source.entries.values())
    if size is not None and size != found:
        problems.append(f"{shown(path)} says total_size {size!r}, but the tensors have {found} bytes")
    return problems
