"""Distillation: train the scales of a checkpoint against the float model.

Codes, names, dtypes, shapes and the configuration stay as they are: the plan copies the checkpoint with other
bytes for some tensors of scales. Scales of blocks that are done are kept in a folder next to the output, so
that an interrupted command resumes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...codecs.act_order import group_index
from ...codecs.registry import claiming
from ...errors import CheckpointError, UnsupportedError, count, printable
from ...layout.packing import flat_bytes
from ...libraries import reading
from ...models.block_distillation import ModelOfBlocks, TrainedScales, distill, scales_stay
from ...models.block_training import TrainingResult, TrainingSteps
from ...ops.devices import CPU
from ...tensor import QuantizedTensor
from ..plan.additions import plan_with, with_trained
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.identity import shard_fields
from ..plan.limits import Limits
from ..plan.rotated import rotated_floats, saved_rotation
from ..plan.row_reader import NewTensor
from ..read.decoding import read_rows
from ..read.quantized_layers import StoredLayer, configuration
from ..read.source import Source
from ..read.storage import OpenFiles, shown
from .forward_pass import rounded_inputs
from .running_model import RunningModel, running
from .samples import digest_of
from .solved_weights import SolvedFolder, windows_at_once
from .tokens import Given

_REMEDY = "keep the quantized checkpoint as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Models, data and training options of a distillation.

    source: the float model. quantized: what was made from it. given: see :class:`~.tokens.Windows`. rate: the
    size of the first step, as a share of a scale. steps: of a block.
    """

    source: Source
    quantized: Source
    given: Given
    rate: float
    steps: TrainingSteps


def copying(asked: Distillation, limits: Limits) -> CheckpointPlan:
    """Return the plan that copies a quantized checkpoint, before scales are trained.

    Raises CheckpointError unless it is quantized, and made from floats; UnsupportedError for files whose
    scales are not tensors of their own.
    """
    quantized, config = asked.quantized, configuration(asked.quantized)
    if config is None or configuration(asked.source) is not None:
        which, what = (quantized, "is not quantized")
        if config is not None:
            which, what = (asked.source, "is quantized itself")
        raise CheckpointError(
            f"{shown(which.given)} {what}; pass the float checkpoint, then the one that was quantized from it"
        )
    codec = claiming(config)
    if codec is None or codec.container != _SAFETENSORS:
        title = f"{shown(quantized.given)} is in a layout that" if codec is None else f"{codec.title}"
        why = "is not read here" if codec is None else "hold codes and scales in one tensor"
        raise UnsupportedError(f"{title} {why}, so that its scales cannot be trained; {_REMEDY}")
    return plan_with(quantized, codec, [], {}, limits)


def distilled(
    asked: Distillation, plan: CheckpointPlan, folder: Path, *, progress: bool = False
) -> CheckpointPlan:
    """Return the plan that writes a checkpoint with trained scales.

    plan: what :func:`copying` gives. folder: keeps scales. progress: whether to show a bar, on a terminal.
    Raises CheckpointError for models that differ, and too little memory; UnsupportedError for schemes without
    scales that can be trained, and models that are not run here; CalibrationError for bad data.
    """
    source, quantized, limits = asked.source, asked.quantized, plan.limits
    rotation = saved_rotation(quantized) if saved_rotation(source) is None else None
    seen = None if rotation is None else functools.partial(rotated_floats, rotation=rotation)
    with running(source, asked.given, limits, remedy=_REMEDY, seen=seen) as teacher, OpenFiles() as files:
        # What is free on a GPU is asked of the GPU, where the first model lies already.
        left = (
            limits
            if limits.on_gpu
            else replace(limits, base_memory=limits.max_memory - max(1, teacher.spare))
        )
        with (
            running(quantized, teacher.batches, left, remedy=_REMEDY) as student,
            rounded_inputs(student, quantized, files) as notes,
        ):
            _require_same(teacher, student, source, quantized)
            scales = _Scales(student, files, asked, folder)
            scales.begin(teacher)
            at_once = functools.partial(windows_at_once, student.spare, limits, _REMEDY)
            steps = replace(student.steps, folder=folder, workers=limits.batches_at_once, at_once=at_once)
            distill(
                ModelOfBlocks(root=teacher.root, steps=teacher.steps),
                ModelOfBlocks(root=student.root, steps=steps),
                teacher.batches,
                asked.steps,
                scales,
                progress=progress,
            )
            made = list(scales.tensors())
            said = (*scales.notes(), *notes)
    plan = plan_with(quantized, plan.codec, made, {}, limits, notes=said)
    return with_trained(plan, frozenset(scales.modules))


_SAFETENSORS = "safetensors"


def _require_same(teacher: RunningModel, student: RunningModel, source: Source, quantized: Source) -> None:
    """Raise CheckpointError unless two models have the same parameters."""
    shapes = [{n: tuple(p.shape) for n, p in each.root.named_parameters()} for each in (teacher, student)]
    if shapes[0] != shapes[1]:
        differ = shapes[0].items() ^ shapes[1].items()
        raise CheckpointError(
            f"{shown(quantized.given)} was not quantized from {shown(source.given)}: "
            f"{len({name for name, _ in differ})} parameters differ, such as {min(differ)[0]}; pass the "
            "checkpoint that it was made from"
        )


@dataclass(slots=True)
class _Layer:
    """A quantized weight in files, its model rows, and its trained scales."""

    stored: StoredLayer
    layer: str
    index: torch.Tensor
    state: torch.Tensor | None = None


class _Scales:
    """Trained scales of each block, and the result folder, by block."""

    def __init__(self, model: RunningModel, files: OpenFiles, asked: Distillation, folder: Path) -> None:
        self._model, self._files, self._asked, self._folder = model, files, asked, folder
        # Sums of a GPU are rounded in another order, so that scales of both are not mixed.
        self._mark = "" if model.device == CPU else f", on {model.device.type}"
        self._layers: dict[str, list[_Layer]] = {name: [] for name in model.steps.blocks}
        self._left: dict[str, list[str]] = {}
        self._errors: list[tuple[float, float]] = []
        for rows in model.rows:
            found = model.floats.quantized(f"{rows.module}.weight")
            block = next((name for name in self._layers if rows.layer.startswith(f"{name}.")), None)
            if found is None:
                continue
            reason = "it lies outside of blocks" if block is None else _stays(found[0])
            if reason is not None:
                self._left.setdefault(reason, []).append(rows.module)
                continue
            assert block is not None
            self._layers[block].append(_Layer(found[0], rows.layer, rows.index))
        if not any(self._layers.values()):
            reason, modules = next(iter(self._left.items()), ("no layer is quantized", [""]))
            raise UnsupportedError(f"no scale can be trained: {printable(modules[0])}: {reason}; {_REMEDY}")

    def begin(self, teacher: RunningModel) -> None:
        """Write the identity of the run, or compare an existing one."""
        asked, steps = self._asked, self._asked.steps
        SolvedFolder(self._folder).begin(
            {
                "steps": f"{steps.count} {steps.windows} {steps.seed} {asked.rate}{self._mark}",
                "tokens": digest_of(teacher.given),
                **{f"source {name}": text for name, text in shard_fields(asked.source)},
                **{f"quantized {name}": text for name, text in shard_fields(asked.quantized)},
            }
        )

    def of(self, block: str) -> Sequence[TrainedScales]:
        """Return the scales of a block that is loaded."""
        found = []
        for each in self._layers[block]:
            stored, weight = each.stored, self._model.root.get_parameter(f"{each.layer}.weight")
            whole = torch.equal(each.index, torch.arange(len(weight)))
            index = None if whole else each.index.to(weight.device)
            codes = self._codes(stored).to(weight.device)
            found.append(TrainedScales(weight, index, codes, self._asked.rate))
        return found

    def known(self, block: str) -> TrainingResult | None:
        """Return an earlier run's result for a block, or None if damaged."""
        try:
            with (
                reading("scales of an earlier run are damaged", "train them again"),
                safe_open(self._path(block), framework="pt") as file,
            ):
                errors = json.loads((file.metadata() or {})["errors"])
                states = [file.get_tensor(str(n)) for n in range(len(self._layers[block]))]
                found = TrainingResult(states=states, first=errors[0], least=errors[1])
        except CheckpointError:
            return None
        self._take(block, found)
        return found

    def add(self, block: str, found: TrainingResult) -> None:
        """Keep the scales of a block, in the host's memory."""
        found = replace(found, states=[state.cpu() for state in found.states])
        self._take(block, found)
        tensors = {str(n): state.contiguous() for n, state in enumerate(found.states)}
        about = {"errors": json.dumps([found.first, found.least])}

        def write(draft: Path) -> None:
            with reading("scales cannot be kept", "make room", system=True):
                save_file(tensors, draft, about)

        SolvedFolder(self._folder).write(self._path(block), write)

    def _take(self, block: str, found: TrainingResult) -> None:
        self._errors.append((found.first, found.least))
        for each, state in zip(self._layers[block], found.states, strict=True):
            each.state = state

    def _path(self, block: str) -> Path:
        return self._folder / f"{list(self._layers).index(block)}.safetensors"

    @property
    def modules(self) -> list[str]:
        """The layers whose scales were trained."""
        return [each.stored.module for layers in self._layers.values() for each in layers]

    def tensors(self) -> Iterator[NewTensor]:
        """Yield the file tensors that trained scales change."""
        for layers in self._layers.values():
            for each in layers:
                if each.state is not None:
                    yield from self._changed(each.stored, each.state)

    def _changed(self, stored: StoredLayer, state: torch.Tensor) -> Iterator[NewTensor]:
        before = self._codes(stored)
        after = replace(before, params=replace(before.params, scales=(state, *before.scales[1:])))
        old, new = (
            stored.codec.encode(stored.layer, q) | stored.codec.constants(stored.layer, q.params, q.shape)
            for q in (before, after)
        )
        for part, value in new.items():
            if not torch.equal(flat_bytes(value), flat_bytes(old[part])):
                entry = stored.tensors[part]
                assert entry is not stored.codes
                assert value.nbytes == entry.nbytes
                yield NewTensor(entry.name, entry, value.reshape(entry.shape))

    def _codes(self, stored: StoredLayer) -> QuantizedTensor:
        for entry in stored.tensors.values():
            self._files[entry.file]  # which opens it
        return read_rows(stored, self._files, 0, stored.shape[0])

    def notes(self) -> Iterator[str]:
        """Yield sentences about errors of blocks, and about weights whose scales stay."""
        blocks = len(self._errors)
        before, after = (math.fsum(pair[at] for pair in self._errors) / blocks for at in (0, 1))
        better = sum(least < first for first, least in self._errors)
        yield (
            f"outputs of {count(blocks, 'block')} are off by {after:.3%} of their squares on held-out "
            f"windows, and by {before:.3%} before their scales were trained, which changed {better}"
        )
        for reason, modules in self._left.items():
            yield (
                f"scales of {count(len(modules), 'weight')} stay, such as those of {printable(modules[0])}: "
                f"{reason}"
            )


def _stays(stored: StoredLayer) -> str | None:
    """Return why a stored weight's scales cannot be trained, or None."""
    if stored.experts is not None:
        return "fused experts are one tensor"
    if group_index(stored.layer) is not None:
        return "its columns are in another order"
    return scales_stay(stored.weight)
