"""From a budget to a recipe: measure, weigh, solve, and plan."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from ..checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from ..checkpoint.plan.decisions import describe
from ..checkpoint.plan.learned_data import require_statistics_of_methods
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.recipe import RecipeText
from ..checkpoint.plan.selection import Selection
from ..checkpoint.read.source import Source
from ..codecs.protocol import Codec
from ..errors import CheckpointError, RangeError, UnsupportedError, ZeropointError, count, option, size_of
from ..methods import method_named
from ..methods.channels import in_order
from ..methods.rotate import rotation_of
from ..own_files import FileKind, OwnFile
from ..progress import Bar, silent
from .budgets import Budget
from .inputs import Inputs, TakeInputs
from .knapsack import Allocation, Groups, frontier, solve
from .measuring import measure_all
from .offers import EXPERT, KEEP, Choices, SearchedLayer, choices, require_choice
from .recipe_rules import recipe_of
from .search_result import CurvePoint, LayerChoice, SearchResult
from .search_state import STATE, SearchState, source_fields

RECIPE = FileKind("recipe", b"# zeropoint search: ")
"""What the recipe of a search is written as."""
EQUAL = "equal"
"""Layers matter equally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What is searched for.

    candidates: presets, schemes and ``keep``. method: which quantizes all of them. inputs: finds the mean
    squares by which errors of columns count, and which methods take.
    """

    budget: Budget
    candidates: tuple[str, ...]
    codec: Codec
    selection: Selection
    method: str | None = None
    limits: Limits | None = None
    inputs: TakeInputs | None = None


def search_request(
    budget: Budget | str,
    candidates: str | Iterable[str] | None,
    codec: Codec,
    *,
    method: str | None = None,
    selection: Selection | None = None,
    limits: Limits | None = None,
) -> SearchRequest:
    """Return a search request, with the codec's usual candidates by default.

    candidates: texts, or one with commas between them. Raises RangeError for a budget that is none,
    UnsupportedError where a codec has no usual candidates.
    """
    if isinstance(candidates, str):
        candidates = split_candidates(candidates)
    if candidates is None:
        candidates = codec.candidates
        if not candidates:
            raise UnsupportedError(
                f"format {codec.name} has no usual candidates; name some of its presets, "
                f"{', '.join(codec.presets)}"
            )
    return SearchRequest(
        budget=budget if isinstance(budget, Budget) else Budget.parse(budget),
        candidates=tuple(candidates),
        codec=codec,
        method=method,
        selection=selection or Selection(),
        limits=limits,
    )


def split_candidates(text: str) -> tuple[str, ...]:
    """Return comma-separated candidates; commas in brackets belong to schemes.

    >>> split_candidates("w4a16, codebook[-1.0,1.0]:g32")
    ('w4a16', 'codebook[-1.0,1.0]:g32')
    """
    return tuple(part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip())


WeighingRule = Callable[[Choices, "Inputs | None", SearchState, Bar], "Weighing"]
"""How much layers matter whose errors count by these inputs, if any; may ask the state, and add to it."""
Losses = Callable[[SearchedLayer, Mapping[str, float]], Mapping[str, float]]
"""Losses of a layer under candidates, from their mean errors."""
Refiner = Callable[["Table", Sequence[str], int, SearchState, Bar], "Refinement"]
"""Takes options, the text of each layer, the size that is allowed, and what is known."""


def by_matrices(layer: SearchedLayer, errors: Mapping[str, float]) -> dict[str, float]:
    """Return losses by equal matrices, experts as one; see :data:`Losses`."""
    matrices = len({EXPERT.sub("*", weight.module) for weight in layer.weights})
    return {text: matrices * error for text, error in errors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How much layers matter.

    name: how it was found. losses: of layers under candidates. inputs: what is known of these, by which
    errors of columns count.
    """

    name: str = EQUAL
    losses: Losses = by_matrices
    inputs: Inputs | None = None

    def by(self, inputs: Inputs) -> Weighing:
        """Return the weighing with columns that count by their inputs."""
        name = inputs.name if self.name == EQUAL else f"{self.name}, {inputs.name}"
        return replace(self, name=name, inputs=inputs)

    @property
    def mark(self) -> str:
        """What names the importance of columns in the keys of errors."""
        return "" if self.inputs is None else self.inputs.mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """Another choice: the text of each layer, and a sentence about it."""

    chosen: tuple[str, ...]
    note: str


def equal(*_: object) -> Weighing:
    """Let every matrix count the same, see :func:`by_matrices`; a :data:`WeighingRule`."""
    return Weighing()


def search(
    source: Source, request: SearchRequest, *, state: Path | None = None, weigh: WeighingRule = equal,
    improve: Refiner | None = None, bar: Bar = silent,
) -> SearchResult:  # fmt: skip
    """Return the recipe of least loss within a budget.

    The loss is the sum over layers of what each matters, times the mean over its weights of the squared error
    over the squared values. state: file in which errors are kept, and looked for first. improve: may change
    the choice. bar: shows progress.

    Raises RangeError for a budget that no choice meets, RecipeError for candidates that make no sense,
    CheckpointError for a state of another source, CalibrationError for a method that needs inputs of a weight
    without statistics, and the errors of ``weigh``, :func:`make_plan` and the reader of inputs.
    """
    selection, limits = request.selection, request.limits
    found = choices(
        source, request.candidates, request.codec, method=request.method, selection=selection, limits=limits
    )
    require_choice(found)
    method = None if request.method is None else method_named(request.method)
    if method is not None and (in_order(method) or rotation_of(method) is not None):
        how = "solves weights in the order in which they run" if in_order(method) else "rotates the model"
        raise UnsupportedError(
            f"method {request.method} {how}, and a search tries weights alone; search by mse_weighted, and "
            f"quantize by its recipe with {option('method', request.method)}"
        )
    kept = None if state is None else OwnFile(state, STATE, source.places)
    with SearchState(kept, source_fields(found.plans[0])) as known:
        seen = None if request.inputs is None else request.inputs(found)
        found = found if seen is None else _with_inputs(found, seen)
        for plan in found.plans:
            require_statistics_of_methods(plan)
        weighing = weigh(found, seen, known, bar)
        weighing = weighing if seen is None else weighing.by(seen)
        with bar("measuring", size_of) as on_progress:
            columns = None if seen is None else seen.columns
            limits, mark = found.plans[0].limits, weighing.mark
            measure_all(found, known, limits, importance=columns, mark=mark, on_progress=on_progress)
        table = Table.of(found, known, weighing)
        decision = decide(request, table, weighing)
        if improve is not None:
            better = improve(table, decision.chosen, decision.allowed, known, bar)
            decision = decision.changed(request, table, weighing, better)
        return _result(request, table, weighing, decision)


def _with_inputs(found: Choices, seen: Inputs) -> Choices:
    """Return choices whose methods know the inputs that they take."""
    candidates = {
        text: c if c.plan is None else replace(c, plan=seen.to_plan(c.plan))
        for text, c in found.candidates.items()
    }
    return replace(found, candidates=candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Options of all layers: each candidate's size, error and loss.

    mark: the further inputs of errors, see :class:`Weighing`.
    """

    choices: Choices
    options: tuple[tuple[tuple[str, int, float, float], ...], ...]
    mark: str = ""

    @staticmethod
    def of(found: Choices, state: SearchState, weighing: Weighing) -> Table:
        """Return the options of layers whose errors ``state`` knows."""
        every = []
        for layer in found.layers:
            errors = {text: _mean_error(found, state, layer, text, weighing.mark) for text in layer.sizes}
            losses = weighing.losses(layer, errors)
            options = [
                (text, layer.sizes[text], error, losses[text])
                for text, error in errors.items()
                if math.isfinite(error) and math.isfinite(losses[text])
            ]
            if not options:
                raise CheckpointError(
                    f"no candidate of {', '.join(layer.sizes)} leaves anything of {layer.name}; name "
                    f"it in {option('ignore')}"
                )
            every.append(tuple(options))
        return Table(choices=found, options=tuple(every), mark=weighing.mark)

    @property
    def groups(self) -> Groups:
        """What the solver takes."""
        return [[(size, loss) for _, size, _, loss in options] for options in self.options]

    @property
    def least(self) -> int:
        """Bytes of the smallest choice."""
        return sum(min(size for _, size, _, _ in own) for own in self.options)

    def chosen(self, texts: Sequence[str]) -> list[tuple[str, int, float, float]]:
        """Return the option of each layer that is called so."""
        return [next(o for o in own if o[0] == text) for own, text in zip(self.options, texts, strict=True)]

    def only(self, texts: Iterable[str]) -> Table | None:
        """Return the table of some candidates, None where a layer has none."""
        wanted = set(texts)
        options = tuple(tuple(o for o in own if o[0] in wanted) for own in self.options)
        return replace(self, options=options) if all(options) else None

    def uniform(self) -> list[CurvePoint]:
        """Return candidates that all layers can have."""
        found = []
        for text in self.choices.candidates:
            only = self.only([text])
            if only is not None:
                sizes, losses = zip(*((size, loss) for ((_, size, _, loss),) in only.options), strict=True)
                found.append(CurvePoint(nbytes=sum(sizes), loss=math.fsum(losses), name=text))
        return found


def _mean_error(found: Choices, state: SearchState, layer: SearchedLayer, text: str, mark: str) -> float:
    """Return a layer's mean relative squared error over its weights."""
    if text == KEEP:
        return 0.0
    errors = []
    for weight in layer.weights:
        key = found.candidates[text].key(found.output(weight, text), mark)
        errors.append(state.errors(weight.module)[key].relative ** 2)
    return math.fsum(errors) / len(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choice for a budget: layers' texts, loss, recipe and plan.

    allowed: bytes that weights may take.
    """

    chosen: tuple[str, ...]
    allocation: Allocation
    allowed: int
    recipe: RecipeText
    plan: CheckpointPlan
    notes: tuple[str, ...] = ()

    def changed(self, request: SearchRequest, table: Table, weighing: Weighing, new: Refinement) -> Solution:
        """Return the solution for another choice, or itself with a note."""
        plan, recipe = _planned(request, table.choices, new.chosen, weighing)
        if request.budget.nbytes is not None and plan.output_bytes > request.budget.nbytes:
            return replace(self, notes=(*self.notes, "a refined choice exceeds the budget and is not taken"))
        options = table.chosen(new.chosen)
        allocation = Allocation(
            choice=tuple(
                [text for text, *_ in own].index(one)
                for own, one in zip(table.options, new.chosen, strict=True)
            ),
            size=sum(size for _, size, _, _ in options),
            loss=math.fsum(loss for *_, loss in options),
            bound=self.allocation.bound,
        )
        notes = (*self.notes, new.note)
        return replace(self, chosen=new.chosen, allocation=allocation, plan=plan, recipe=recipe, notes=notes)


def decide(request: SearchRequest, table: Table, weighing: Weighing) -> Solution:
    """Return the choice of least loss within budget, or RangeError."""
    found, budget = table.choices, request.budget
    if budget.bits is not None:
        allowed = math.floor(budget.bits * found.values / 8)
    else:
        assert budget.nbytes is not None
        allowed = budget.nbytes - found.other_bytes
    decision = _solved(request, table, allowed, weighing)
    while budget.nbytes is not None and decision.plan.output_bytes > budget.nbytes:
        # Headers and the configuration of a mixture take more than a single scheme's.
        allowed -= decision.plan.output_bytes - budget.nbytes
        decision = _solved(request, table, allowed, weighing)
    return decision


def _result(request: SearchRequest, table: Table, weighing: Weighing, decision: Solution) -> SearchResult:
    found, notes = table.choices, [*(weighing.inputs.notes if weighing.inputs else ())]
    inputs = [text for text, c in found.candidates.items() if c.plan and any(x.input for x in c.plan.layers)]
    if inputs:
        notes.append(f"errors are those of weights; what {', '.join(inputs)} lose of inputs is not counted")
    if found.without:
        notes.append(
            f"{count(len(found.without), 'tensor')} kept: no candidate fits all layers that engines run as "
            f"one with it, such as {found.without[0]}"
        )
    chosen = zip(found.layers, table.chosen(decision.chosen), strict=True)
    fitted = [d for d in decision.plan.decisions if d.fitted] if request.selection.fit else []
    if fitted:
        notes.append(
            f"{count(len(fitted), 'tensor')} in smaller groups than their candidate's, such as "
            f"{describe(fitted[0])}; quantize by the recipe with {option('fit', True)}"
        )
    return SearchResult(
        choices=found,
        budget=request.budget,
        importance=weighing.name,
        allocation=decision.allocation,
        recipe=decision.recipe,
        plan=decision.plan,
        chosen=tuple(
            LayerChoice(layer=layer, candidate=text, nbytes=size, relative=math.sqrt(error), loss=loss)
            for layer, (text, size, error, loss) in chosen
        ),
        curve=tuple(CurvePoint(nbytes=size, loss=loss) for size, loss in frontier(table.groups)),
        uniform=tuple(table.uniform()),
        notes=(*notes, *decision.notes),
    )


def _require_feasible(table: Table, budget: Budget, allowed: int) -> None:
    least = table.least
    if least <= allowed:
        return
    found = table.choices
    if budget.bits is not None:
        low = math.ceil(Fraction(8 * least * 1000, found.values)) / 1000
        said = f"{low:g}bpw"
    else:
        said = f"{-(-(least + found.other_bytes) >> 10)}K"
    raise RangeError(
        f"budget {budget} is less than the smallest choice of these candidates takes, {said}; raise it, or "
        "name candidates of fewer bits"
    )


def _solved(request: SearchRequest, table: Table, allowed: int, weighing: Weighing) -> Solution:
    """Return the best choice that the layout holds, uniform if needed."""
    _require_feasible(table, request.budget, allowed)
    whole = _best(table, allowed)
    try:
        return _decision(request, table, whole, allowed, weighing)
    except CheckpointError as error:
        if len(set(whole[0]) - {KEEP}) < 2:
            raise
        problem: ZeropointError = error
    tries = []
    for text in table.choices.candidates:
        only = table.only([text, KEEP]) if text != KEEP else None
        if only is not None and only.least <= allowed:
            tries.append(_best(only, allowed))
    for one in sorted(tries, key=lambda found: found[1].loss):
        try:
            decision = _decision(request, table, one, allowed, weighing)
        except ZeropointError as error:
            problem = error
            continue
        note = f"{request.codec.title} has one scheme in a checkpoint: the best for all layers"
        return replace(decision, notes=(note,))
    raise problem


_Best = tuple[tuple[str, ...], Allocation]


def _best(table: Table, allowed: int) -> _Best:
    allocation = solve(table.groups, allowed)
    chosen = (own[at][0] for own, at in zip(table.options, allocation.choice, strict=True))
    return tuple(chosen), allocation


def _decision(request: SearchRequest, table: Table, one: _Best, allowed: int, weighing: Weighing) -> Solution:
    plan, recipe = _planned(request, table.choices, one[0], weighing)
    return Solution(chosen=one[0], allocation=one[1], allowed=allowed, recipe=recipe, plan=plan)


def _planned(
    request: SearchRequest, found: Choices, chosen: Sequence[str], weighing: Weighing
) -> tuple[CheckpointPlan, RecipeText]:
    if set(chosen) == {KEEP}:
        raise CheckpointError(
            f"budget {request.budget} holds all weights as they are; nothing needs to be quantized"
        )
    names = {}
    for layer, text in zip(found.layers, chosen, strict=True):
        for weight in layer.weights:
            names[weight.tensor] = text
    comment: tuple[str, ...] = (
        f"zeropoint search: budget {request.budget}, importance {weighing.name}",
        f"candidates {', '.join(found.candidates)}",
    )
    if request.selection.fit:
        comment += (f"quantize with {option('fit', True)}, by which it was searched",)
    text = recipe_of(names, method=request.method, without=found.without, comment=comment)
    recipe, limits = RecipeText(text=text, name="search"), request.limits
    plan = make_plan(found.source, recipe, selection=request.selection, limits=limits, codec=request.codec)
    return plan if weighing.inputs is None else weighing.inputs.to_plan(plan), recipe
