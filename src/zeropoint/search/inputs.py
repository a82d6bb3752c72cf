"""Mean squares of weights' inputs, as importance of columns in search.

An importance matrix of llama.cpp or a file of statistics has them, or the model runs on data. They are taken
once, weigh the errors of all candidates, and go to the methods that take importance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.model.tokens import Given, Windows
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.learned_data import static_inputs, unlearned_cache, without_keys
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.output_tensors import Output
from ..checkpoint.plan.selection import Selection
from ..errors import OptionError, all_of, count, option, printable
from ..methods.method import MEAN_SQUARE as NEED
from ..stats import MeanSquare, Statistics, statistic_named
from . import deferred
from .measuring import Importance, Weights
from .offers import Choices

if TYPE_CHECKING:  # it loads models
    from ..checkpoint.model.calibration import StatisticsOfModules


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Input statistics of weights, and their origin.

    name: where it is from. statistics: of modules. columns: their mean squares. mark: identifies these
        numbers.
    without: modules without statistics.
    """

    name: str
    statistics: StatisticsOfModules
    columns: Importance
    mark: str
    without: tuple[str, ...]

    @staticmethod
    def of(name: str, statistics: StatisticsOfModules, modules: Iterable[str]) -> Inputs:
        """Return the inputs of modules from statistics."""
        columns = {module: _means(needs) for module, needs in statistics.items()}
        digest = hashlib.sha256(b"".join(columns[module].tobytes() for module in sorted(columns))).hexdigest()
        mark, without = f"imatrix {digest[:16]}", tuple(each for each in modules if each not in columns)
        return Inputs(name=name, statistics=statistics, columns=columns, mark=mark, without=without)

    def to_plan(self, plan: CheckpointPlan) -> CheckpointPlan:
        """Return a plan with the statistics where its method takes any."""
        wanted = {weight.module for weight in plan.weights if deferred.takes_importance(weight.method)}
        found = {module: needs for module, needs in self.statistics.items() if module in wanted}
        return replace(plan, statistics=found) if found else plan

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about modules without statistics, if there are any."""
        if not self.without:
            return ()
        return (
            f"{count(len(self.without), 'weight')} without importance, such as {printable(self.without[0])}",
        )


def _means(needs: Mapping[str, Statistics]) -> Weights:
    accumulator = needs[NEED].accumulator
    assert isinstance(accumulator, MeanSquare)
    means: Weights = accumulator.mean(needs[NEED].state).numpy()
    return means


TakeInputs = Callable[[Choices], Inputs]
"""What finds out about the inputs of all weights that are decided about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSource:
    """Source of the inputs of weights: one of three, or none.

    calibration: data that the model runs on. imatrix: a file of llama.cpp. statistics: files of a run.
    input_range: the statistic that gives static inputs their range, or None. Raises OptionError for more than
    one source and for a range without data, CalibrationError for an unknown statistic.
    """

    calibration: Windows | None = None
    imatrix: Path | str | None = None
    statistics: Sequence[Path] = ()
    input_range: str | None = None

    def __post_init__(self) -> None:
        if self.input_range is not None:
            statistic_named(self.input_range)
            if self.calibration is None:
                data = option("calibration", metavar="FILE")
                raise OptionError(
                    f"{option('input_range', self.input_range)} is learned from data; pass {data}"
                )
        if len(self.given) > 1:
            many = "both" if len(self.given) == 2 else "all"
            raise OptionError(f"{all_of(self.given)} {many} say what inputs are; give one of them")

    @property
    def given(self) -> list[str]:
        """The options that say what inputs are."""
        given = {
            "calibration": self.calibration is not None,
            "imatrix": self.imatrix is not None,
            "statistics": bool(self.statistics),
        }
        return [option(name) for name, there in given.items() if there]

    def require_static(self, plan: CheckpointPlan) -> None:
        """Raise OptionError for a range of inputs where none is static."""
        if self.input_range is not None and not static_inputs(plan):
            raise OptionError(
                f"{option('input_range', self.input_range)} is for static inputs, and this plan has none; "
                "leave it out"
            )

    def require_keys(self, selection: Selection) -> None:
        """Raise CalibrationError for scales of a cache without text."""
        if selection.kv_scales:
            if self.calibration is None:
                raise without_keys()
            deferred.require_keys(self.calibration)

    def reader(self, limits: Limits, *, progress: bool) -> TakeInputs | None:
        """Return the reader of these inputs, or None; progress: shows a bar."""
        if self.imatrix is not None:
            return partial(of_imatrix, self.imatrix)
        if self.statistics:
            return partial(of_statistics, self.statistics)
        data = self.calibration
        return None if data is None else partial(of_calibration, data, limits, progress=progress)


def of_imatrix(path: Path | str, found: Choices) -> Inputs:
    """Return the inputs in llama.cpp's importance matrix.

    Raises CheckpointError for another file, CalibrationError where it names no weight.
    """
    weights = list(_weights(found))
    statistics, _ = deferred.mean_squares_of_file(path, weights)
    return Inputs.of("imatrix", statistics, (weight.module for _, weight in weights))


def of_statistics(files: Sequence[Path], found: Choices) -> Inputs:
    """Return the inputs in statistics files; raises like :class:`.SavedStatistics`."""
    modules = [weight.module for _, weight in _weights(found)]
    with deferred.SavedStatistics(files, found.source) as saved:
        known = {module: own for module in modules if (own := saved.mean_square(module)) is not None}
    return Inputs.of("statistics", {module: {NEED: own} for module, own in known.items()}, modules)


def of_calibration(given: Given, limits: Limits, found: Choices, *, progress: bool = False) -> Inputs:
    """Return the inputs in a run on data; raises like :func:`~..calibration.calibrated`."""
    for plan in found.plans:
        deferred.require_text(plan, given)
    weights = [weight for _, weight in _weights(found)]
    statistics = deferred.mean_squares(found.source, weights, given, limits, progress=progress)
    return Inputs.of("calibration", statistics, (weight.module for weight in weights))


def _weights(found: Choices) -> Iterator[tuple[CheckpointPlan, Output]]:
    """Yield all searched weights, with their first candidate's plan."""
    for layer in found.layers:
        for weight in layer.weights:
            text = next(iter(weight.numbers))
            plan = found.candidates[text].plan
            assert plan is not None
            yield plan, found.output(weight, text)


def with_ranges(
    plan: CheckpointPlan, given: Given | None, *, ranges: str | None = None, progress: bool = False
) -> CheckpointPlan:
    """Return the plan with calibrated scales of static inputs, if any.

    Where there are none, a note says that ``ranges`` is not used.
    """
    if given is not None and (static_inputs(plan) or unlearned_cache(plan) is not None):
        return deferred.calibrated(plan, given, ranges=ranges, progress=progress)
    unused = f"{option('input_range', ranges)} is not used: no layer has static inputs"
    return plan if ranges is None else replace(plan, notes=(*plan.notes, unused))
