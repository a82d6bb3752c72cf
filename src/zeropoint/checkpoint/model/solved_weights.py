"""Solve weights on calibration data, and keep their codes on disk.

A folder has a file of codes for each weight, complete or absent, so that an interrupted command resumes.
The digests of these files are part of the identity of the run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, UnsupportedError, option, size_of
from ...methods import LayerResult, Loss, method_named
from ...methods.chain import without_corrections
from ...methods.channels import ChannelFold
from ...methods.channels import in_order as is_in_order
from ...methods.method import OutputError
from ...methods.rotate import unrotated
from ...models import DynamicQuantize
from ...models.rescale import RescaledBlock
from ...models.site_inputs import EVERY, kin_of
from ...models.solutions import WeightTask, require_corrected
from ...models.solving import solve
from ...ops.devices import CPU
from ...tensor import QuantizedTensor
from ..plan.checkpoint_plan import CheckpointPlan, SolvedWeight
from ..plan.identity import ASKED, identity, require_same, stamps
from ..plan.learned_data import replanned, require_inputs, solving_scheme, unlearned_cache, without_data
from ..plan.limits import Limits, give_back
from ..plan.output_tensors import Output
from ..plan.rescaled import (
    folds_text,
    packed_numbers,
    parsed_folds,
    rescaled_floats,
    unpacked_numbers,
)
from ..read.storage import Place, shown
from .cache_scales import LearnedCache, without_scales
from .notes_of_solving import of_corrections, of_losses, of_rescaling, outside_of_blocks
from .parameter_names import BIAS, WeightRows, folds_in_files
from .running_model import RunningModel, running
from .samples import digest_of
from .tokens import Given

_RECORD = "zeropoint_solved.json"
_OWN = re.compile(rf"{re.escape(_RECORD)}|\d+\.(safetensors|json)|rescaled-\w+\.json|\..+\.\d+|zeropoint-\w+")
"""Names in the folder: the record, files of weights, drafts of either, and folders of what waits on disk."""
_REMEDY = "quantize it by method mse, which needs no data"


def in_order(plan: CheckpointPlan) -> bool:
    """Return whether a method of ``plan`` solves layers in running order."""
    return any(is_in_order(method_named(weight.method)) for weight in plan.weights)


@contextmanager
def folder_for(
    out: Place, spool: Path | str | None, *, restart: bool, kind: str = "solved"
) -> Iterator[Path]:
    """Return a context with an output's folder of solved weights.

    The folder is removed at the end. out: the output directory, next to which it lies, or a URL, for which it
    is in ``spool`` or in the system's directory for temporary files. restart: whether what an earlier run
    left there is discarded. kind: ``"solved"``, or ``"exported"`` for a model that is exported. Raises
    CheckpointError where it cannot be made.
    """
    if isinstance(out, Path):
        folder = out.with_name(f".{out.name}.{kind}")
    else:
        name = hashlib.sha256(str(out).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir() if spool is None else spool) / f".{name}.{kind}"
    try:
        if os.path.lexists(folder):
            _require_own(folder, kind)
            # Codes without the record, which power loss leaves, are of no known run.
            _remove(folder, finished=restart or not (folder / _RECORD).is_file())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{shown(folder)} cannot be made: {error.strerror}; name another output"
        ) from error
    try:
        yield folder
    except BaseException:
        _remove(folder, finished=not any(folder.glob("*.safetensors")))
        raise
    _remove(folder, finished=True)


def _require_own(folder: Path, kind: str) -> None:
    """Raise CheckpointError unless the folder is ours, with solved weights alone."""
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not ours or not all(map(_OWN.fullmatch, (path.name for path in folder.iterdir()))):
        raise CheckpointError(
            f"{shown(folder)} is no folder of {kind} weights, which would lie there; move it away, or name "
            "another output"
        )


def _remove(folder: Path, *, finished: bool) -> None:
    """Remove temporary files of a model's runs, killed ones included.

    finished: whether solved weights are removed with it, and then the folder.
    """
    for kept in folder.glob("zeropoint-*"):
        shutil.rmtree(kept, ignore_errors=True)
    if finished:
        try:
            for path in folder.iterdir():
                if _OWN.fullmatch(path.name) and not path.is_dir():
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{shown(folder)} cannot be removed: {error.strerror}; remove it by hand"
            ) from error
        with suppress(OSError):
            folder.rmdir()


def solved(
    plan: CheckpointPlan, given: Given, folder: Path, *, progress: bool = False
) -> tuple[CheckpointPlan, Mapping[str, torch.Tensor]]:
    """Return ``plan`` with codes solved block by block, and held-out inputs.

    With it come the inputs of one window or sample, which is held out where some are.

    given, progress: as for :func:`~.calibration.calibrated`, which says what is raised. folder: keeps the
    codes; what an earlier run of the same plan on the same data left there is used.
    """
    kept = SolvedFolder(folder)
    with running(plan.source, given, plan.limits, remedy=_REMEDY, seen=plan.seen) as model:
        kept.begin({**identity(plan), **stamps(plan), "tokens": digest_of(model.given)})
        (tasks, missing), limits = _tasks(plan, model.rows), plan.limits
        require_inputs(tasks, missing)
        memo = model.spare - _memory_of(tasks, model, limits)
        if memo < 0:
            raise CheckpointError(
                f"solving weights takes about {size_of(-memo)} {limits.short_of(-memo, _SOLVING)}"
            )
        passing = _passing(tasks, model) if limits.on_gpu else 0
        in_files = not limits.on_gpu or passing > memo
        memo -= 0 if in_files else passing
        steps = replace(
            model.steps,
            folder=folder if in_files else None,
            spill=folder,
            workers=limits.batches_at_once,
            memo=max(0, memo - _OVERHEAD) // 2,
            at_once=functools.partial(windows_at_once, model.spare, limits, _BLOCKS_REMEDY),
            storable=functools.partial(_have_places, model),
        )
        place = unlearned_cache(plan)
        cache = None if place is None else LearnedCache(model, place, without_scales())
        if cache is not None:
            steps = replace(steps, deployed=cache.hooked)
        require_corrected((method_named(weight.method) for weight in plan.weights), tasks)
        solve(model.root, model.batches, tasks, steps, kept, progress=progress)
        held_out = model.given[: len(model.given) // EVERY * EVERY or None][-1]
        folds = folds_in_files(model.root, model.rows, kept.folds(tasks, model.root))
    alone = kept.without_data(tasks) | {weight.module for weight in missing}
    names = frozenset[str]().union(*(w.reader.names for w in plan.weights if w.module in alone))
    plan = replanned(plan, names, folds)
    if cache is not None:
        plan = cache.added_to(plan)
    notes = (
        *plan.notes,
        *of_rescaling(kept.rescalings),
        *of_corrections(plan, kept.corrected),
        *kept.notes(),
        *outside_of_blocks(tasks, kept.losses),
    )
    return replace(plan, solved=kept.weights(tasks), notes=notes), held_out


def _have_places(model: RunningModel, folds: Mapping[str, ChannelFold]) -> bool:
    """Return whether the files of the model can hold channel folds."""
    with suppress(CheckpointError, UnsupportedError):
        rescaled_floats(model.floats, folds_in_files(model.root, model.rows, folds))
        return True
    return False


_OVERHEAD = 768 << 20
"""Bytes for threads of torch, transformers and fragmented memory, as measured; none of it keeps results."""
_SOLVING = ": Gram matrices of the widest layers that run together, and a weight of each worker in float64"


_BLOCKS_REMEDY = "use method shift+descent, which trains nothing"


def windows_at_once(spare: int, limits: Limits, remedy: str, fixed: int, window: int) -> int:
    """Return the number of concurrent training windows, see :class:`Steps`.

    spare: bytes that the process may take beyond a model that runs. remedy: what to do instead, for messages.
    Raises CheckpointError where not even one window fits.
    """
    left = spare - _OVERHEAD
    missing = fixed + window - left
    if missing > 0:
        raise CheckpointError(
            f"training a block takes about {size_of(fixed + window)} for one window at a time, "
            f"{size_of(missing)} {limits.short_of(missing)}, or {remedy}"
        )
    most = limits.batches_at_once
    return min(most, (left - fixed) // window) if window else most


def _memory_of(tasks: Iterable[WeightTask], model: RunningModel, limits: Limits) -> int:
    """Return the bytes that solving takes, without a block and what runs.

    These are Gram matrices, of experts for as many as there are workers and of all together, factors and
    weights in float64 of as many layers as there are workers, and the vectors of a few batches.
    """
    shapes = {task.layer: model.root.get_parameter(f"{task.layer}.weight").shape for task in tasks}
    kin: Counter[tuple[str, str, int]] = Counter()
    for name, (_, columns) in shapes.items():
        block = next((each for each in model.steps.blocks if name.startswith(f"{each}.")), "")
        kin[block, kin_of(name), columns] += 1
    matrices = [
        (2 if count == 1 else 4 * min(count, limits.batches_at_once) + 4) * columns**2
        for (_, _, columns), count in kin.items()
    ]
    widest = max((columns for _, columns in shapes.values()), default=0)
    values = max((rows * columns for rows, columns in shapes.values()), default=0)
    tokens = EVERY * max(model.vectors)
    at_once = limits.batches_at_once * (4 * widest**2 + 5 * values)
    numbers = max(matrices, default=0) + at_once
    return 8 * numbers + 4 * 3 * tokens * widest


def _passing(tasks: Iterable[WeightTask], model: RunningModel) -> int:
    """Return the most bytes kept of all tokens while weights are solved.

    That is what passes between blocks in the float and in the deployed model, of which one is counted as
    what running takes, and the inputs of the layers of a block in the float model.
    """
    features: Counter[str] = Counter()
    for layer in {task.layer for task in tasks}:
        block = next((each for each in model.steps.blocks if layer.startswith(f"{each}.")), "")
        features[block] += model.root.get_parameter(f"{layer}.weight").shape[1]
    item = next(model.root.parameters()).dtype.itemsize
    return sum(model.vectors) * item * (model.width + max(features.values(), default=0))


def _tasks(plan: CheckpointPlan, rows: Iterable[WeightRows]) -> tuple[list[WeightTask], list[Output]]:
    """Return tasks for weights of Linear layers, and weights without inputs."""
    places = {found.module: found for found in rows}
    tasks, missing = list[WeightTask](), list[Output]()
    for number, weight in enumerate(plan.weights):
        own, layer = places.get(weight.module), weight.layer
        method = unrotated(method_named(weight.method))
        if own is None:
            missing += [weight] if method.needs else []
            continue
        source = layer.input
        if f"{weight.module}{BIAS}" not in plan.source.entries:
            method = without_corrections(method)
        tasks.append(
            WeightTask(
                name=weight.module,
                number=number,
                layer=own.layer,
                scheme=solving_scheme(layer),
                method=method,
                without_data=without_data(weight),
                rows=_in_file(weight, own.index),
                dtype=weight.dtype,
                share=weight.share,
                exact=not layer.codec.needs_mean(layer),
                source=DynamicQuantize(source) if source is not None and source.dynamic else None,
            )
        )
    return tasks, missing


def _in_file(weight: Output, index: torch.Tensor) -> torch.Tensor:
    """Return row numbers in the order of the output's layout."""
    order = weight.reader.form.rows
    return index if order is None else index[order.model_rows(torch.arange(len(index)))]


class SolvedFolder:
    """Solved weights in a folder: codes and a loss for each.

    losses: by the names of weights.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.losses: dict[str, Loss] = {}
        self._rescaled: dict[str, RescaledBlock] = {}
        self._changes: dict[str, Mapping[str, torch.Tensor]] = {}
        self._methods: dict[str, str] = {}

    def begin(self, fields: Mapping[str, str]) -> None:
        """Write the identity of the run, or compare an existing one.

        Raises CheckpointError where they differ.
        """
        record = self._folder / _RECORD
        fields = {name: text for name, text in fields.items() if name != ASKED}  # others say the same
        if record.exists():
            try:
                then = json.loads(record.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{shown(record)} is damaged; remove {shown(self._folder)}") from error
            require_same(
                fields,
                then,
                what=f"what is solved in {shown(self._folder)}",
                remedy=f"pass {option('restart', True)} to start over, or run the command that began it",
            )
            return
        self.write(record, lambda draft: draft.write_text(json.dumps(dict(fields)), encoding="utf-8"))

    def add(self, task: WeightTask, result: LayerResult, loss: Loss) -> None:
        """Keep the codes of a weight."""
        give_back()
        result = result.on(CPU)
        loss = loss if task.exact else replace(loss, outputs=None)
        self.losses[task.name], self._changes[task.name] = loss, result.changes
        self._methods[task.name] = task.method.name
        changes = {name: packed_numbers(added) for name, added in result.changes.items()}
        text = json.dumps({**asdict(loss), "changes": changes, "method": task.method.name})
        self.write(self._loss(task), lambda draft: draft.write_text(text, encoding="utf-8"))
        self.write(self._codes(task), result.q.save)

    def known(self, task: WeightTask) -> LayerResult | None:
        """Return an earlier run's codes of a weight, or None if damaged."""
        try:
            q = QuantizedTensor.load(self._codes(task))
            said = json.loads(self._loss(task).read_text(encoding="utf-8"))
            changes = {name: unpacked_numbers(text) for name, text in said.pop("changes").items()}
            method = str(said.pop("method"))
            loss = Loss(**said)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        known: Any = loss.outputs
        outputs = None if known is None else OutputError(**known)
        together = None if loss.together is None else (loss.together[0], loss.together[1])
        self.losses[task.name] = replace(loss, notes=tuple(loss.notes), outputs=outputs, together=together)
        self._changes[task.name], self._methods[task.name] = changes, method
        return LayerResult(q=q, changes=changes)

    def known_rescaling(self, block: str) -> RescaledBlock | None:
        """Return how an earlier run rescaled a block, or None."""
        try:
            found = parsed_folds(self._rescaling(block).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        folds, notes, refused = found
        self._rescaled[block] = RescaledBlock(folds=folds, notes=notes, refused=refused)
        return self._rescaled[block]

    def add_rescaling(self, block: str, found: RescaledBlock) -> None:
        """Keep how a block is rescaled."""
        found = replace(found, folds={name: fold.on(CPU) for name, fold in found.folds.items()})
        self._rescaled[block] = found
        text = folds_text(found.folds, found.notes, refused=found.refused)
        self.write(self._rescaling(block), lambda draft: draft.write_text(text, encoding="utf-8"))

    @property
    def rescalings(self) -> tuple[RescaledBlock, ...]:
        """Rescalings of blocks."""
        return tuple(self._rescaled.values())

    @property
    def corrected(self) -> Collection[str]:
        """The names of weights next to which another parameter is corrected."""
        return {name for name, changes in self._changes.items() if changes}

    def without_data(self, tasks: Iterable[WeightTask]) -> set[str]:
        """Return the names of weights that no input reached."""
        return {task.name for task in tasks if self._methods[task.name] != task.method.name}

    def folds(self, tasks: Iterable[WeightTask], root: nn.Module) -> dict[str, ChannelFold]:
        """Return the factors and corrections of model parameters, by name."""
        found = {name: fold for block in self.rescalings for name, fold in block.folds.items()}
        added = dict[str, torch.Tensor]()
        for task in tasks:
            for parameter, own in self._changes[task.name].items():
                name = f"{task.layer}.{parameter}"
                whole = added.setdefault(name, torch.zeros(len(root.get_parameter(name))))
                whole[slice(None) if task.rows is None else task.rows] = own
        for name, whole in added.items():
            found[name] = found.get(name, ChannelFold()).then(ChannelFold(added=whole))
        return found

    def weights(self, tasks: Iterable[WeightTask]) -> dict[str, SolvedWeight]:
        """Return file, digest and loss of each weight, by name."""
        found = {}
        for task in tasks:
            path = self._codes(task)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[task.name] = SolvedWeight(path, digest, self.losses[task.name])
        return found

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the losses of all weights."""
        return tuple(of_losses(self.losses))

    def _codes(self, task: WeightTask) -> Path:
        return self._folder / f"{task.number}.safetensors"

    def _rescaling(self, block: str) -> Path:
        return self._folder / f"rescaled-{hashlib.sha256(block.encode()).hexdigest()[:16]}.json"

    def _loss(self, task: WeightTask) -> Path:
        return self._folder / f"{task.number}.json"

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Let a file be complete, on disk, or absent."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write(draft)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            raise CheckpointError(f"{shown(path)} cannot be written: {error.strerror}; make room") from error
