"""Solve weights one by one from saved statistics, without the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import CalibrationError, ZeropointError, option, printable
from ...methods import LayerData, LayerResult, Loss, method_named
from ...methods.channels import needs_model
from ...methods.method import GRAM, MEAN_SQUARE
from ...methods.rotate import of_rotated
from ...models.block_chain import in_threads
from ...models.site_inputs import drawn
from ...models.solutions import Solutions, WeightTask
from ...progress import counted
from ...stats import State, Statistics
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.identity import identity, stamps
from ..plan.learned_data import replanned, solving_scheme, static_inputs
from ..plan.output_tensors import Output
from ..read.storage import OpenFiles
from .importance import weighted
from .solved_weights import SolvedFolder
from .statistics_file import SavedStatistics

_HELD = frozenset((GRAM, MEAN_SQUARE))


def with_mean_squares(plan: CheckpointPlan, saved: SavedStatistics) -> CheckpointPlan:
    """Return ``plan`` with mean squares of inputs, where methods take them.

    A mixture is planned anew, as it is with importance. Raises CalibrationError where no method takes any, or
    one needs more.
    """
    plan = weighted(plan)
    wanted = [weight for weight in plan.weights if MEAN_SQUARE in method_named(weight.method).takes]
    if not wanted and not any(GRAM in method_named(weight.method).takes for weight in plan.weights):
        raise CalibrationError(
            f"no method of this plan takes statistics of inputs; leave {option('statistics')} out, or pass "
            f"{option('method', 'gptq')} or mse_weighted"
        )
    _require_held(plan)
    found = {weight.module: saved.mean_square(weight.module) for weight in wanted}
    known = {module: {MEAN_SQUARE: own} for module, own in found.items() if own is not None}
    plan = replace(plan, statistics=known)
    missing = [module for module, own in found.items() if own is None]
    if not missing:
        return plan
    without = f"{len(missing)} of {len(plan.weights)} weights have no statistics"
    note = f"{without}, {printable(missing[0])} the first"
    return replace(plan, notes=(*plan.notes, note))


def _require_held(plan: CheckpointPlan) -> None:
    """Raise CalibrationError for methods and inputs that saved statistics cannot serve."""
    if static_inputs(plan):
        raise CalibrationError(
            f"static inputs take their scales from a run of the model, which {option('statistics')} does not "
            f"hold; pass {option('calibration', metavar='FILE')} in its place, or make inputs dynamic"
        )
    if plan.rotation is not None:
        raise CalibrationError(of_rotated(plan.rotation, "statistics"))
    for weight in plan.weights:
        reason = needs_model(method_named(weight.method), weight.layer.weight)
        if reason is not None:
            raise CalibrationError(reason)
        more = sorted(method_named(weight.method).needs.keys() - _HELD)
        if more:
            raise CalibrationError(
                f"method {weight.method} needs the {' and '.join(more)} of inputs of the quantized model, "
                f"and {option('statistics')} has those of the float model alone; pass "
                f"{option('calibration', metavar='FILE')} in its place, or use method gptq"
            )


def solved_from(
    plan: CheckpointPlan, saved: SavedStatistics, folder: Path, *, progress: bool = False
) -> CheckpointPlan:
    """Return ``plan`` with codes solved from saved Gram matrices.

    folder: keeps the codes; what an earlier run left there is used. Raises CalibrationError for statistics
    that have no such matrices; CheckpointError where memory is too little.
    """
    require_gram(saved)
    kept = SolvedFolder(folder)
    kept.begin({**identity(plan), **stamps(plan), "statistics": saved.digest})
    numbered = [
        (number, weight)
        for number, weight in enumerate(plan.weights)
        if GRAM in method_named(weight.method).takes
    ]
    for _, weight in numbered:
        plan.limits.require_gram((weight.shape[0], weight.shape[1]), workers=plan.limits.workers)
    groups, alone = defaultdict[str, list[tuple[WeightTask, Output]]](list), set[str]()
    pool = PooledGrams(saved)
    for number, weight in numbered:
        site = saved.owners.get(weight.module)
        if site is None or saved.sites[site].features != weight.shape[-1] or not pool.learned(site):
            alone.update(weight.reader.names)
            continue
        task = WeightTask(
            name=weight.module,
            number=number,
            layer=weight.module,
            scheme=solving_scheme(weight.layer),
            method=method_named(weight.method),
            dtype=weight.dtype,
            share=weight.share,
            exact=not weight.layer.codec.needs_mean(weight.layer),
        )
        groups[site].append((task, weight))
    extremes = _extremes(weight for _, weight in numbered)
    with OpenFiles() as files:
        for site in counted(list(groups), "Solving weights", shown=progress):
            todo = [(task, weight) for task, weight in groups[site] if kept.known(task) is None]
            if todo:
                gram = saved.gram_of(pool.state(site), site)
                data = LayerData(statistics={GRAM: gram}, own=saved.sites[site].vectors)
                _solve(todo, data, extremes, kept, files, workers=plan.limits.workers)
    tasks = [task for group in groups.values() for task, _ in group]
    plan = replanned(plan, alone, plan.folds)
    return replace(plan, solved=kept.weights(tasks), notes=(*plan.notes, *kept.notes()))


def require_gram(saved: SavedStatistics) -> None:
    """Raise CalibrationError for statistics without Gram matrices."""
    if not saved.has_gram:
        raise CalibrationError(
            f"{str(saved.paths[0])!r} has no Gram matrices, on which weights are solved; make it with "
            f"{option('gram', True)}"
        )


def _solve(
    todo: list[tuple[WeightTask, Output]],
    data: LayerData,
    extremes: Mapping[str, tuple[float, float]],
    kept: Solutions,
    files: OpenFiles,
    *,
    workers: int,
) -> None:
    """Solve weights with one input, under extremes by ``share``."""
    found: dict[str, tuple[LayerResult, Loss]] = {}
    gram = data.statistics[GRAM]
    # OpenFiles are opened in this thread.
    matrices = {task.name: _matrix(weight, files) for task, weight in todo}

    def solve_one(item: tuple[WeightTask, Output]) -> None:
        task, matrix = item[0], matrices[item[0].name]
        shared = replace(data, extremes=extremes.get(task.share or ""))
        try:
            result = task.method.quantize(matrix, task.scheme, shared)
        except ZeropointError as error:
            raise type(error)(f"{task.name}: {error}") from error
        found[task.name] = result, Loss(
            vectors=int(gram["vectors"]), own=data.own, seen=_loss_by(gram, matrix, result),
            notes=result.notes, outputs=result.outputs,
        )  # fmt: skip

    in_threads(solve_one, todo, min(len(todo), workers))
    for task, _ in todo:
        kept.add(task, *found[task.name])


def _loss_by(gram: Statistics, weight: torch.Tensor, result: LayerResult) -> float:
    """Return the relative squared error of outputs over all vectors."""
    matrix, own = gram["gram"], weight.double()
    error = result.dequantize(torch.float32).double() - own
    lost, whole = (float(((x @ matrix) * x).sum()) for x in (error, own))
    return max(0.0, lost) / max(whole, 1e-30)


def _matrix(weight: Output, files: OpenFiles) -> torch.Tensor:
    rows, columns = weight.shape
    buffer = bytearray(rows * columns * weight.value_bytes)
    return weight.read(files, range(rows), range(columns), buffer).clone()


def _extremes(weights: Iterable[Output]) -> dict[str, tuple[float, float]]:
    """Return the extremes of weights with a shared tensor scale, by ``share``."""
    found: dict[str, tuple[float, float]] = {}
    with OpenFiles() as files:
        for weight in weights:
            if weight.share is not None:
                low, high = (float(end) for end in torch.aminmax(_matrix(weight, files)))
                before = found.get(weight.share, (low, high))
                found[weight.share] = min(low, before[0]), max(high, before[1])
    return found


class PooledGrams:
    """Gram matrices of sites; experts' are shrunk toward their layer's sum.

    saved: where they are from. The sum of one layer, and the last matrix, are kept.
    """

    def __init__(self, saved: SavedStatistics) -> None:
        self._saved = saved
        self._kin = defaultdict[tuple[str, int], list[str]](list)
        for name, site in saved.sites.items():
            self._kin[_place_of(name), site.features].append(name)
        self._last: tuple[tuple[str, int], State] | None = None
        self._known: Statistics | None = None

    def of(self, module: str) -> Statistics | None:
        """Return the Gram matrix of a module's inputs, or None."""
        site = self.site(module)
        if site is None:
            return None
        if self._known is None or self._known.name != site:
            self._known = self._saved.gram_of(self.state(site), site)
        return self._known

    def site(self, module: str) -> str | None:
        """Return the site of a module's Gram matrix, or None."""
        return self._saved.owners.get(module) if self._saved.has_gram else None

    def learned(self, name: str) -> bool:
        """Return whether a site, or the others of its experts, saw vectors."""
        sites = self._saved.sites
        return any(sites[each].vectors for each in self._kin[_place_of(name), sites[name].features])

    def state(self, name: str) -> State:
        """Return the state of a site."""
        saved, own = self._saved, self._saved.gram(name)
        key = _place_of(name), saved.sites[name].features
        kin = self._kin[key]
        if len({saved.sites[each].vectors for each in kin}) < 2:
            return own
        if self._last is None or self._last[0] != key:
            total: State | None = None
            for each in kin:
                state = saved.gram(each)
                total = state if total is None else {n: t + state[n] for n, t in total.items()}
            assert total is not None
            self._last = key, total
        return drawn(own, self._last[1])


def _place_of(name: str) -> str:
    """Return a module's name with ``*`` for its expert's number.

    >>> _place_of("model.layers.3.mlp.experts.7.up_proj"), _place_of("model.layers.3.mlp.up_proj")
    ('model.layers.3.mlp.experts.*.up_proj', 'model.layers.3.mlp.up_proj')
    """
    numbers = list(re.finditer(r"(?<=\.)\d+(?=\.|$)", name))
    if len(numbers) < 2:
        return name
    return f"{name[: numbers[-1].start()]}*{name[numbers[-1].end() :]}"
