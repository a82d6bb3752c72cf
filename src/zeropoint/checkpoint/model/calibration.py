"""Calibration: run a checkpoint's model and observe its layer inputs.

What was learned is part of a plan: its digest is in the identity of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from ...codecs.data_scales import CacheScales
from ...codecs.protocol import LayerScheme
from ...errors import CalibrationError, count, option, printable
from ...methods import method_named
from ...methods.channels import in_order
from ...methods.rotate import unrotated
from ...models import Calibration, LocalQuantize
from ...models.calibrate import Watch
from ...models.sequential import observe_blocks
from ...params import QuantizationParams
from ...recipes import Assignment, Recipe, Rule
from ...stats import Statistics
from ...training import FakeQuantize
from ..plan.additions import with_added
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.learned_data import replanned, require_inputs, static_inputs, unlearned_cache
from ..plan.limits import Limits
from ..plan.output_tensors import Output
from ..plan.row_reader import NewTensor
from ..read.source import Source
from .cache_scales import LearnedCache, require_keys, without_scales
from .graph_ranges import EXTREMES, as_weight, input_params
from .importance import weighted
from .parameter_names import WeightRows
from .parts import input_tensors
from .running_model import WITHOUT_DATA, RunningModel, running
from .tokens import Given, Windows


def calibrated(
    plan: CheckpointPlan, given: Given, *, ranges: str | None = None, progress: bool = False
) -> CheckpointPlan:
    """Return ``plan`` with the statistics that its methods and static inputs need.

    given: token ids, a file of these or of text, ``"random"`` or ``"self"``; see :class:`~.tokens.Windows`.
    ranges: the statistic of static inputs, a name of :func:`~zeropoint.stats.statistic_named`.
    progress: whether to show a bar, on a terminal. Raises CalibrationError for bad data, a plan without need
    of any, a layer that no token reached, and static inputs under random tokens; UnsupportedError for a
    checkpoint that is not run here; CheckpointError where its tensors do not fit its model, or
    --max-memory is too little.
    """
    plan = weighted(plan)
    static = static_inputs(plan)
    wanted = {w.module: w for w in plan.weights if _takes(w.method) or w.layer in static}
    place = unlearned_cache(plan)
    if not wanted and place is None and plan.recipe.quality is not None:
        return replace(plan, notes=(*plan.notes, "no method takes calibration data, which are not read"))
    if not wanted and place is None:
        raise CalibrationError(
            "no method of this plan takes calibration data, and no inputs take scales from them; leave them "
            f"out, or pass {option('method', 'mse_weighted')}, or ggml for types of GGUF"
        )
    require_text(plan, given)
    if plan.source.graph:
        data = Windows.of(given)
        found = input_params(
            plan.source, wanted.values(), data, plan.limits, ranges=ranges, progress=progress
        )
        return with_added(plan, map(as_weight, _scales_of_inputs((wanted[n], found[n]) for n in found)))
    # Ranges of inputs are observed before biases are corrected.
    rescaled = replace(plan, folds={name: fold.rescaling for name, fold in plan.folds.items()})
    run = running(plan.source, given, plan.limits, remedy=WITHOUT_DATA, seen=rescaled.seen)
    seen = _observed(wanted, run, static=static, ranges=ranges, place=place, progress=progress)
    plan = replanned(replace(plan, statistics=seen.statistics), seen.alone, plan.folds)
    if seen.missing:
        without = f"{len(seen.missing)} of {len(plan.weights)} weights have no importance"
        note = f"{without}, {printable(seen.missing[0])} the first: they are no Linear layers of the model"
        plan = replace(plan, notes=(*plan.notes, note))
    if seen.borrowed:
        what = f"{count(len(seen.borrowed), 'layer')} of experts, such as {printable(seen.borrowed[0])}"
        note = f"no token reached {what}: it learns from inputs of the other experts of the layer"
        plan = replace(plan, notes=(*plan.notes, note))
    if static:
        inputs = ((weight, seen.inputs.get(weight.module)) for weight in plan.weights)
        plan = with_added(plan, _scales_of_inputs(inputs))
    return plan if seen.cache is None else seen.cache.added_to(plan)


def require_text(plan: CheckpointPlan, given: Given) -> None:
    """Raise CalibrationError where static scales would learn from random tokens."""
    if plan.selection.kv_scales:
        require_keys(given)
    if Windows.of(given).is_random and static_inputs(plan):
        raise CalibrationError(
            "static inputs take their scales from calibration, and random tokens are not what the model will "
            "see; give text, or make inputs dynamic"
        )


def mean_squares(
    source: Source, weights: Iterable[Output], given: Given, limits: Limits, *, progress: bool = False
) -> StatisticsOfModules:
    """Return the mean squares of the inputs of weights, by module.

    The other arguments are as for :func:`calibrated`, which says what is raised. Weights that are no Linear
    layers of the model have none.
    """
    wanted = {weight.module: replace(weight, method=_TAKES_SQUARES) for weight in weights}
    run = running(source, given, limits, remedy=WITHOUT_DATA)
    return _observed(wanted, run, progress=progress).statistics


_TAKES_SQUARES = "ggml"
"""A method that uses mean squares of inputs where they are there, and does without them elsewhere."""
StatisticsOfModules = Mapping[str, Mapping[str, Statistics]]
"""By module, and by the name under which methods ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """Statistics of the inputs of weights, by module.

    inputs: parameters of static ones. missing: weights that are no Linear layers of the model. alone: tensors
    without inputs, which they or their methods need. borrowed: weights of experts that no token reached, with
    the parameters of another expert. cache: scales of keys and values, or None.
    """

    statistics: StatisticsOfModules
    inputs: Mapping[str, QuantizationParams | None]
    missing: tuple[str, ...]
    alone: frozenset[str]
    borrowed: tuple[str, ...]
    cache: LearnedCache | None


def _observed(
    wanted: Mapping[str, Output],
    run: AbstractContextManager[RunningModel],
    *,
    static: Collection[LayerScheme] = (),
    ranges: str | None = None,
    place: CacheScales | None = None,
    progress: bool = False,
) -> _Observed:
    """Run the model, and return what ``wanted`` and ``place`` need."""
    with run as model:
        rows = [each for each in model.rows if each.module in wanted]
        missing = sorted(wanted.keys() - {found.module for found in rows})
        require_inputs(rows, [wanted[module] for module in missing])
        cache = None if place is None else LearnedCache(model, place, without_scales())
        if cache is not None and not wanted:
            cache.observe(progress=progress)
            return _Observed(
                statistics={}, inputs={}, missing=(), alone=frozenset(), borrowed=(), cache=cache
            )
        with nullcontext() if cache is None else cache.hooked():
            found = _calibration(model, _recipe(rows, wanted, static), ranges, progress=progress)
    seen = {own.module: found.statistics.get(own.layer) for own in rows}
    needing = {m for m, w in wanted.items() if method_named(w.method).needs or w.layer in static}
    alone = needing.intersection(
        (*missing, *(own.module for own in rows if own.layer in found.without_inputs))
    )
    return _Observed(
        statistics={module: needs for module, needs in seen.items() if needs is not None},
        inputs={own.module: found.params.get(f"{own.layer}.input") for own in rows},
        missing=tuple(module for module in missing if module not in needing),
        alone=frozenset[str]().union(*(wanted[module].reader.names for module in alone)),
        borrowed=tuple(own.module for own in rows if own.layer in found.borrowed),
        cache=cache,
    )


def _calibration(model: RunningModel, recipe: Recipe, ranges: str | None, *, progress: bool) -> Calibration:
    """Return the calibration of the layers that a recipe asks for."""
    watch = Watch(model.root, recipe, ranges or EXTREMES)
    observe_blocks(model.root, model.batches, watch, model.steps, progress=progress)
    return watch.calibration(len(model.batches), every=False)


def _scales_of_inputs(weights: Iterable[tuple[Output, QuantizationParams | None]]) -> Iterator[NewTensor]:
    """Yield the tensors of static inputs from their learned parameters."""
    for weight, params in weights:
        given = weight.layer.input
        if params is not None and given is not None:
            quantizer = LocalQuantize.of(given, params) if given.local else FakeQuantize(params)
            for suffix, value in input_tensors(quantizer, weight.layer.codec).items():
                yield NewTensor(f"{weight.module}.{suffix}", weight.source, value)


def _recipe(
    rows: Iterable[WeightRows], wanted: Mapping[str, Output], static: Collection[LayerScheme]
) -> Recipe:
    """Return the recipe with each weight's method for the layers of ``rows``.

    It keeps all others. static: schemes whose inputs are observed.
    """
    gives = {own.layer: wanted[own.module] for own in rows}
    return Recipe(
        rules=tuple(
            Rule(name=name, gives=_assignment(weight, static=weight.layer in static))
            for name, weight in gives.items()
        ),
        default=Rule(gives=None),
    )


def _assignment(weight: Output, *, static: bool) -> Assignment:
    layer = weight.layer
    method = unrotated(method_named(weight.method)).name if _takes(weight.method) else None
    return Assignment(weight=layer.weight, input=layer.input if static else None, method=method)


def _takes(method: str) -> bool:
    """Return whether a method takes statistics of all weights at once."""
    takes = method_named(method).takes
    return bool(takes) and not in_order(method_named(method))
