"""Matrices in one tensor: itself, or one per projection and expert.

    X.experts.gate_up_proj (E, 2 I, H)  ->  X.experts.{e}.gate_proj (I, H), X.experts.{e}.up_proj (I, H)
    X.experts.down_proj    (E, H, I)    ->  X.experts.{e}.down_proj (H, I)

The names are those that llm-compressor 0.14 gives (entrypoints/model_free/converter.py,
split_fused_moe_experts). Each matrix is a run of rows of the source, or every second one where gate and up
alternate; of transposed experts, outputs count as rows. In layouts that keep experts fused, the rows of all
experts are one matrix.

Names of stacked experts differ from family to family (gate_up_proj, input_linear, w1, fc1), so that shapes
decide. Tensors of three axes next to each other, with one number of experts, hold experts where some take the
width of the model and others give it back: of H and I, (E, I, H) or (E, 2 I, H) next to (E, H, I), or each of
them transposed. Kernels of convolutions have no such counterpart. The weight of GPT-2's Conv1D is (in, out).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...architectures import (
    DOWN,
    GATE_UP,
    MOST_EXPERTS,
    ExpertLayout,
    expert_layout,
    expert_parts,
    is_expert,
    is_transposed,
)
from ...codecs.divided_tensors import RowRun, TensorPiece, Whole
from ...loaded_names import lacks_single_experts, saved_shapes, transformers_names
from ...schemes import ZeroPoint
from ..read.source import Source
from ..read.tensor_entries import Entries, Stack, TensorEntry
from .selection import WEIGHT, module_of

if TYPE_CHECKING:
    from ..read.quantized_layers import StoredLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """A matrix inside a source tensor.

    module: name of its module. shape: rows and columns. first, step: the rows of the tensor that are its own,
    from ``first`` on each ``step``-th. experts: how many experts it holds, or None.
    """

    module: str
    shape: tuple[int, int]
    first: int = 0
    step: int = 1
    experts: int | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Its shape, with a first axis of experts where it holds several."""
        rows, columns = self.shape
        return self.shape if self.experts is None else (self.experts, rows // self.experts, columns)


def matrices(entry: TensorEntry, *, fused: bool = False) -> list[WeightMatrix]:
    """Return the matrices of a weight or of known fused experts.

    fused: whether experts stay in one.

    >>> from pathlib import Path
    >>> from zeropoint.checkpoint.read.tensor_entries import Stack
    >>> experts = TensorEntry(
    ...     name="m.down_proj",
    ...     dtype="F32",
    ...     shape=(2, 3, 4),
    ...     begin=8,
    ...     nbytes=96,
    ...     file=Path("f"),
    ...     stack=Stack("m", ("down_proj",)),
    ... )
    >>> [(m.module, m.first) for m in matrices(experts)]
    [('m.0.down_proj', 0), ('m.1.down_proj', 3)]
    """
    module, stack = module_of(entry.name), entry.stack
    if stack is None:
        rows, columns = reversed(entry.shape) if entry.inputs_first else entry.shape
        return [WeightMatrix(module=module, shape=(rows, columns))]
    experts, *matrix = entry.shape
    columns, rows = matrix if stack.transposed else reversed(matrix)
    if not experts:
        return []
    if fused:
        return [WeightMatrix(module=module, shape=(experts * rows, columns), experts=experts)]
    prefix = f"{stack.holder}." if stack.holder else ""
    part = rows // len(stack.parts)
    step = len(stack.parts) if stack.interleaved else 1
    return [
        WeightMatrix(
            module=f"{prefix}{expert}.{name}",
            shape=(part, columns),
            first=expert * rows + n * (1 if stack.interleaved else part),
            step=step,
        )
        for expert in range(experts)
        for n, name in enumerate(stack.parts)
    ]


def has_one_scale_each(layer: StoredLayer, layout: ExpertLayout) -> bool:
    """Return whether each fused matrix has exactly one scale."""
    weight = layer.weight
    plain = len(weight.scales) == 1 and weight.zero_point is ZeroPoint.NONE and not weight.offsets
    if layer.experts is None or not plain:
        return False
    rows, columns = weight.granularity.block_shape(layer.shape)
    halves = len(expert_parts(layer.module))
    apart = not layout.interleaved and rows * halves == layer.shape[0]
    return columns == layer.shape[1] and (rows == layer.shape[0] or apart)


_EXPERTS, _AXES = "experts", 3
_SAYS_SO = re.compile(r"experts?\b|moe\b", re.IGNORECASE)
_WIDTHS = ("hidden_size", "d_model", "n_embd")


class _Reading(NamedTuple):
    """An interpretation of tensors as experts: up, down, and orientation."""

    up: tuple[TensorEntry, ...]
    down: tuple[TensorEntry, ...]
    transposed: bool
    width: int


def with_axes(source: Source) -> Source:
    """Return a checkpoint whose tensors say which axes their matrices have."""
    config = source.config or {}
    entries = stacked(source.entries, config)
    if source.container.indexed and any(is_transposed(module_of(name), config) for name in entries):
        entries = Entries(
            replace(e, inputs_first=len(e.shape) == 2 and is_transposed(module_of(e.name), config))
            for e in entries.values()
        )
    return source if entries is source.entries else replace(source, entries=entries)


def stacked(entries: Entries, config: Mapping[str, Any]) -> Entries:
    """Return tensors annotated with their experts, or the same table."""
    found = dict(_stacks(entries, config)) if _AXES in entries.ranks else {}
    if not found:
        return entries
    return Entries(replace(e, stack=found[e.name]) if e.name in found else e for e in entries.values())


def _stacks(entries: Entries, config: Mapping[str, Any]) -> Iterator[tuple[str, Stack]]:
    """Yield the tensors that hold experts, by name."""
    layout, groups = expert_layout(config), dict[tuple[str, int], list[TensorEntry]]()
    for entry in entries.values():
        if _may_be_experts(entry, entries):
            parent = module_of(entry.name).rpartition(".")[0]
            groups.setdefault((parent, entry.shape[0]), []).append(entry)
    evidence = _Evidence(entries, config, {number for _, number in groups})
    for (parent, number), members in groups.items():
        called = _are_called_experts(parent, members)
        read = (
            evidence.best(members, layout) if called or evidence.of_experts(parent, number, members) else None
        )
        for entry in members:
            # What fits no layout is reported where its name says what it is.
            if called or (read is not None and entry in (*read.up, *read.down)):
                yield entry.name, _stack(entry, parent, read, layout, config)


def _are_called_experts(parent: str, members: Sequence[TensorEntry]) -> bool:
    last = {module_of(entry.name).rpartition(".")[2] for entry in members}
    return any(map(_SAYS_SO.search, parent.split(".")[-2:])) or not last.isdisjoint((GATE_UP, DOWN))


def divided_stacks(entries: Entries, config: Mapping[str, Any]) -> Iterator[Whole]:
    """Yield the stacks of transformers' files of which tensors are matrices.

    Only of families whose single experts transformers does not load.
    """
    if not any(map(is_expert, entries)) or not lacks_single_experts(config):
        return
    file = next(iter(entries.values())).file
    saved = Entries(
        TensorEntry(name=name, dtype="F32", shape=shape, begin=0, nbytes=4 * math.prod(shape), file=file)
        for name, shape in saved_shapes(config).items()
    )
    for entry in stacked(saved, config).values():
        if entry.stack is None or entry.stack.problem:
            continue
        pieces = [
            TensorPiece(f"{m.module}{WEIGHT}", m.shape, (RowRun(m.first, m.shape[:1], (m.step,)),))
            for m in matrices(entry)
        ]
        if all(p.name in entries and entries[p.name].shape == p.shape for p in pieces):
            yield Whole(entry.name, entry.shape, pieces, entry.stack.transposed)


def holder_of(parent: str) -> str:
    """Return the module that numbers the experts inside of ``parent``.

    >>> holder_of("layers.0.mlp.experts"), holder_of("layers.0.block_sparse_moe")
    ('layers.0.mlp.experts', 'layers.0.block_sparse_moe.experts')
    """
    return parent if parent.rpartition(".")[2] == _EXPERTS else f"{parent}.{_EXPERTS}".lstrip(".")


def parts_named(module: str, loaded: str) -> tuple[str, ...]:
    """Return the projections of fused experts by their widely known names.

    These are of its name in transformers where it only renames ``module``.

    >>> parts_named("mlp.input_linear", "mlp.experts.gate_up_proj")
    ('gate_proj', 'up_proj')
    """
    return expert_parts(loaded if loaded.split(".")[-2:-1] == [_EXPERTS] else module)


def _stack(
    entry: TensorEntry, parent: str, read: _Reading | None, layout: ExpertLayout, config: Mapping[str, Any]
) -> Stack:
    own = module_of(entry.name)
    named = parts_named(own, transformers_names(own, config)[-1])
    holder = holder_of(parent)
    if read is None or entry not in (*read.up, *read.down):
        axes = "in, out" if layout.transposed else "out, in"
        return Stack(holder, expert_parts(own), problem=_problem(entry, read, axes))
    out = entry.shape[1 + read.transposed]
    halves = entry in read.up and out == 2 * read.down[0].shape[2 - read.transposed]
    return Stack(
        holder,
        named if halves or len(named) == 1 else (own.rpartition(".")[2],),
        transposed=read.transposed,
        interleaved=layout.interleaved and halves,
    )


def _problem(entry: TensorEntry, read: _Reading | None, axes: str) -> str:
    stem, _, last = module_of(entry.name).rpartition(".")
    if read is None and last in (GATE_UP, DOWN):
        other = DOWN if last == GATE_UP else GATE_UP
        return f"fused experts without {stem}.{other}, which would show their layout"
    return f"experts in one tensor that are not laid out as (experts, {axes}) next to others"


def _may_be_experts(entry: TensorEntry, entries: Entries) -> bool:
    """Return whether a tensor has three axes and no convolution's bias."""
    count = entry.shape[0] if len(entry.shape) == _AXES else 0
    if entry.use is not None or 0 in entry.shape or not 0 < count <= MOST_EXPERTS:
        return False
    bias = entries.get(f"{module_of(entry.name)}.bias")
    return bias is None or bias.shape != entry.shape[:1]


class _Evidence:
    """Evidence for experts: routers, configured numbers, and widths."""

    def __init__(self, entries: Entries, config: Mapping[str, Any], numbers: set[int]) -> None:
        self._columns, self._entries = entries.columns_but(_SAYS_SO), entries
        self._counts = set(_expert_counts(config))
        self._widths = set(_widths(config))
        self._routers: set[tuple[str, int, int]] = set()
        for entry in entries.values():
            if len(entry.shape) == 2 and entry.name.endswith(WEIGHT) and entry.shape[0] in numbers:
                parts = module_of(entry.name).split(".")
                self._routers |= {(".".join(parts[:-n]), *entry.shape) for n in (1, 2)}

    def of_experts(self, parent: str, number: int, members: Sequence[TensorEntry]) -> bool:
        """Return whether the configuration or a router has the number of experts."""
        above = parent.rpartition(".")[0]
        sizes = {size for entry in members for size in entry.shape[1:]}
        if number == 1:  # as a kernel of one channel has
            return False
        return number in self._counts or any(
            (place, number, size) in self._routers for place in (parent, above) for size in sizes
        )

    def best(self, members: Sequence[TensorEntry], layout: ExpertLayout) -> _Reading | None:
        """Return the likeliest interpretation of tensors as experts, or None."""

        def likelihood(read: _Reading) -> tuple[int | bool, ...]:
            wide = any(
                e.shape[1 + read.transposed] != read.down[0].shape[2 - read.transposed] for e in read.up
            )
            return (
                len(read.up) + len(read.down),
                len(read.up) >= len(read.down),
                self._biases_agree(read),
                read.width in self._widths,
                wide,
                self._columns[read.width],
                read.transposed == layout.transposed,
            )

        return max(_readings(members), key=likelihood, default=None)

    def _biases_agree(self, read: _Reading) -> bool:
        for entry in (*read.up, *read.down):
            bias = self._entries.get(f"{module_of(entry.name)}_bias")
            if bias is not None and bias.shape != (entry.shape[0], entry.shape[1 + read.transposed]):
                return False
        return True


def _readings(members: Sequence[TensorEntry]) -> Iterator[_Reading]:
    """Yield the up and down interpretations of tensors by width."""
    sizes = sorted({size for entry in members for size in entry.shape[1:]})
    for transposed in (False, True):
        shapes = [(e, e.shape[1:][::-1] if transposed else e.shape[1:]) for e in members]
        for width in sizes:
            for inner in sizes:
                down = tuple(e for e, (out, into) in shapes if (out, into) == (width, inner))
                up = tuple(
                    e
                    for e, (out, into) in shapes
                    if into == width and out in (inner, 2 * inner) and e not in down
                )
                if width == inner:  # the last goes down
                    up, down = (*up, *down[:-1]), down[-1:]
                if up and down:
                    yield _Reading(up, down, transposed, width)


def _expert_counts(part: Any) -> Iterator[int]:
    """Yield the numbers that a configuration gives under names of experts."""
    for name, value in part.items() if isinstance(part, dict) else ():
        if type(value) is int and "expert" in name and value > 1:
            yield value
        yield from _expert_counts(value)


def _widths(config: Mapping[str, Any]) -> Iterable[int]:
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return (part[name] for part in parts for name in _WIDTHS if type(part.get(name)) is int)
