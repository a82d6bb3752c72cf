"""Errors of each weight under every candidate, in one tiled pass.

A tile is read once and quantized by all candidates while it is in memory. Errors are sums without rounding
(checkpoint/measure/tensor_error.py), so that neither tiles nor threads change a digit, and a weight in memory
gives the same. Where a scale is one for the whole tensor, its extremes are found in a pass before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ..checkpoint.measure.tensor_error import TensorError, exact_sum, measure
from ..checkpoint.measure.tiles import Scratch, extremes_of, needs_extremes, widest
from ..checkpoint.measure.workers import Task, done_tasks
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.learned_data import layer_data
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.output_tensors import Output
from ..checkpoint.read.storage import OpenFiles
from ..codecs.block_extents import blocks
from ..errors import NonFiniteError, ZeropointError, option, printable
from ..methods import LayerData, Scope, method_named
from ..progress import Progress
from ..tensor import QuantizedTensor
from .offers import Choices, SearchedWeight
from .search_state import SearchState

Weights = npt.NDArray[np.float64]
"""How much the squared error of each column counts, (columns,)."""
Importance = Mapping[str, Weights]
"""By module."""
_BATCH = 16
"""Weights whose errors are written together; a search that is killed measures so many again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measurement of a weight: key, output, plan and statistics."""

    key: str
    to: Output
    plan: CheckpointPlan


def measure_all(
    found: Choices, state: SearchState, limits: Limits, *, importance: Importance | None = None,
    mark: str = "", on_progress: Progress | None = None,
) -> None:  # fmt: skip
    """Measure missing errors of all layers' weights, and store them.

    importance: of the columns of weights, whose squared errors are weighted by it. mark: names it in keys.
    Raises NonFiniteError, naming the tensor; RangeError when a scale fits no format; CheckpointError where a
    file cannot be read.
    """
    todo = [
        (weight, ways)
        for layer in found.layers
        for weight in layer.weights
        if (ways := _missing(found, state, weight, mark))
    ]
    if not todo:
        return
    extremes = _Extremes.of((way for _, ways in todo for way in ways), found)
    scans = [_Scan(to, limits) for to in extremes.weights]
    tasks = [
        _Measure(weight.module, ways, extremes, limits, (importance or {}).get(weight.module))
        for weight, ways in todo
    ]
    every: list[_Reading] = [*scans, *tasks]
    total, done = sum(task.nbytes for task in every), 0
    buffer = max(task.buffer_bytes for task in every)
    for part in (scans, tasks):
        kept: list[_Measure] = []
        with closing(done_tasks(part, workers=limits.workers, buffer_bytes=buffer)) as finished:
            try:
                for task in finished:
                    done += task.nbytes
                    if isinstance(task, _Scan):
                        extremes.add(task)
                    elif isinstance(task, _Measure):
                        kept.append(task)
                    if len(kept) >= _BATCH:
                        _keep(state, kept)
                    if on_progress is not None:
                        on_progress(done, total, task.name)
            finally:
                _keep(state, kept)


def _keep(state: SearchState, tasks: list[_Measure]) -> None:
    state.add_errors((task.name, task.errors) for task in tasks)
    tasks.clear()


def _missing(found: Choices, state: SearchState, weight: SearchedWeight, mark: str) -> list[Measured]:
    known, ways = state.errors(weight.module), []
    for text in weight.numbers:
        candidate = found.candidates[text]
        assert candidate.plan is not None
        to = found.output(weight, text)
        key = candidate.key(to, mark)
        if key not in known:
            ways.append(Measured(key=key, to=to, plan=candidate.plan))
    return ways


class _Reading(Task):
    """Read a weight, some rows at a time."""

    def __init__(self, to: Output, limits: Limits, *, value_bytes: int, alignment: int) -> None:
        super().__init__(to.module, to.shape[0] * to.shape[1] * to.dtype.itemsize)
        self.of = to
        columns = to.shape[1]
        rows = min(alignment, max(1, to.shape[0]))
        self._rows = min(limits.rows(columns, rows, value_bytes), to.shape[0])
        self.buffer_bytes = max(1, self._rows) * columns * to.dtype.itemsize

    def tiles(self, buffer: bytearray) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first row of each tile, and the tile in ``buffer``."""
        with OpenFiles() as files:
            for start in range(0, self.of.shape[0], self._rows):
                count = min(self._rows, self.of.shape[0] - start)
                yield start, self.of.reader.read(files, start, count, buffer)


class _Scan(_Reading):
    """Find the extremes of a weight."""

    def __init__(self, to: Output, limits: Limits) -> None:
        super().__init__(to, limits, value_bytes=2 * to.value_bytes, alignment=to.reader.alignment)
        self.found = (math.nan, math.nan)

    def run(self, scratch: Scratch) -> None:
        self.found = widest(extremes_of(x) for _, x in self.tiles(scratch.buffer))


class _Measure(_Reading):
    """Measure a weight in all ways."""

    def __init__(
        self,
        module: str,
        ways: Sequence[Measured],
        extremes: _Extremes,
        limits: Limits,
        importance: Weights | None,
    ) -> None:
        alignments = [ways[0].to.reader.alignment, *(_alignment(way.to) for way in ways)]
        # Each candidate's codes and temporaries are gone before the next; the errors in float64 are not.
        value_bytes = max(way.to.value_bytes for way in ways) + 16
        super().__init__(ways[0].to, limits, value_bytes=value_bytes, alignment=math.lcm(*alignments))
        self.name = module
        self._ways, self._extremes, self._importance = ways, extremes, importance
        self.errors: dict[str, TensorError] = {}

    def run(self, scratch: Scratch) -> None:
        parts: dict[str, list[TensorError]] = {way.key: [] for way in self._ways}
        data = {way.key: layer_data(way.plan, way.to, self._extremes.found(way)) for way in self._ways}
        for start, x in self.tiles(scratch.buffer):
            for way in self._ways:
                parts[way.key].append(self._tile(x, start, way.to, data[way.key]))
        self.errors = {key: TensorError.merge(found) for key, found in parts.items()}

    def _tile(self, x: torch.Tensor, start: int, to: Output, data: LayerData) -> TensorError:
        try:
            q = method_named(to.method).quantize(x, to.layer.weight, data).q
        except ZeropointError as error:
            bad = torch.nonzero(~torch.isfinite(x))
            name = printable(to.source.name)
            if len(bad):
                row, column = bad[0].tolist()
                raise NonFiniteError(
                    f"tensor {name} holds {float(x[row, column])}, first at row {start + row}, column "
                    f"{column}; replace it, or name the tensor in {option('ignore')}"
                ) from error
            raise type(error)(f"tensor {name}: {error}") from error
        plain = measure(x, q)
        return plain if self._importance is None else weighted(plain, x, q, self._importance)


def weighted(error: TensorError, x: torch.Tensor, q: QuantizedTensor, importance: Weights) -> TensorError:
    """Return the error with squares weighted by column importance."""
    wide = x.double().numpy()
    off = wide - q.dequantize(torch.float64).numpy()
    # Sums along rows, each by itself, so that they are the same in any tile.
    squares, errors = ((values * values * importance).sum(axis=1).tolist() for values in (wide, off))
    return replace(error, squares=exact_sum(squares), errors=exact_sum(errors))


def _alignment(to: Output) -> int:
    """Return the row multiple of parts that are quantized alone."""
    scope = method_named(to.method).scope(to.layer.weight)
    rows = blocks(to.layer.weight)[0]
    return max(1, to.shape[0]) if not rows or scope not in (Scope.BLOCKS, Scope.ROWS) else rows


def decoded(found: Choices, weight: SearchedWeight, text: str, limits: Limits) -> torch.Tensor:
    """Return a weight decoded from a candidate, (rows, columns) float32, in memory."""
    to, plan = found.output(weight, text), found.candidates[text].plan
    assert plan is not None
    way = Measured(key="", to=to, plan=plan)
    extremes = _Extremes.of([way], found)
    for member in extremes.weights:
        scan = _Scan(member, limits)
        scan.run(Scratch(bytearray(scan.buffer_bytes)))
        extremes.add(scan)
    task = _Measure(weight.module, [way], extremes, limits, None)
    data = layer_data(plan, to, extremes.found(way))
    out = torch.empty(to.shape)
    for start, x in task.tiles(bytearray(task.buffer_bytes)):
        q = method_named(to.method).quantize(x, to.layer.weight, data).q
        out[start : start + len(x)] = q.dequantize(torch.float32)
    return out


class _Extremes:
    """Extremes of weights with a tensor scale, and of sharing sets.

    sets: members by plan and name. weights: what is scanned.
    """

    def __init__(self, sets: Mapping[tuple[int, str], Sequence[Output]]) -> None:
        self._sets = {at: [member.module for member in members] for at, members in sets.items()}
        self.weights = list({m.module: m for members in sets.values() for m in members}.values())
        self._found: dict[str, tuple[float, float]] = {}

    @staticmethod
    def of(todo: Iterable[Measured], found: Choices) -> _Extremes:
        """Return the extremes that ``todo`` needs, of whole sets."""
        needed = {_set(way.plan, way.to) for way in todo if needs_extremes(way.to.layer.weight)}
        sets: dict[tuple[int, str], list[Output]] = {}
        for weight in (weight for layer in found.layers for weight in layer.weights) if needed else ():
            for text in weight.numbers:
                to, plan = found.output(weight, text), found.candidates[text].plan
                if plan is not None and (at := _set(plan, to)) in needed:
                    sets.setdefault(at, []).append(to)
        return _Extremes(sets)

    def add(self, scan: _Scan) -> None:
        """Take in what was found of a weight."""
        self._found[scan.name] = scan.found

    def found(self, way: Measured) -> tuple[float, float] | None:
        """Return a weight's extremes, or None where its scheme needs none."""
        if not needs_extremes(way.to.layer.weight):
            return None
        return widest(self._found[module] for module in self._sets[_set(way.plan, way.to)])


def _set(plan: CheckpointPlan, to: Output) -> tuple[int, str]:
    return id(plan), to.share or to.module
