"""Calibration: run data through a model and learn the ranges that a recipe fixes for inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CalibrationError
from ..params import QuantizationParams
from ..recipes import Activation, Recipe, Rule, model_preset
from ..schemes import Scheme
from ..stats import MinMax, Observer, Statistic
from .decisions import decisions_of

StatisticFor = Callable[[Scheme, tuple[int, ...]], Statistic]
"""What to learn for a scheme, given the shape of a batch of one row."""


def extremes(scheme: Scheme, shape: tuple[int, ...]) -> Statistic:
    """Return the statistic of the extremes, block by block."""
    return MinMax(granularity=scheme.granularity, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was learned: parameters by layer and side (``encoder.0.input``), and how many batches it took."""

    params: Mapping[str, QuantizationParams] = field(default_factory=dict)
    batches: int = 0


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` on one batch: a mapping as keywords, a tuple or list as arguments, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def calibrate(
    model: nn.Module,
    recipe: Recipe | str,
    data: Iterable[Any],
    *,
    statistic: StatisticFor = extremes,
    run: Callable[[nn.Module, Any], Any] = run_model,
    on_batch: Callable[[int], None] | None = None,
) -> Calibration:
    """Return parameters for every static input and output of ``recipe``, learned from ``data``.

    The model runs in evaluation mode without gradients, and is afterwards as it was. on_batch: called with
    the number of batches done. Values that are not finite are left out.
    Raises CalibrationError when there is no batch, or when some layer saw no finite number, with its name.

    >>> layer = nn.Sequential(nn.Linear(8, 4))
    >>> print(calibrate(layer, "w8a8_static", [torch.ones(2, 8)]).params["0.input"].scheme)
    uint8:tensor:asym
    """
    rules = Recipe(default=Rule(gives=model_preset(recipe))) if isinstance(recipe, str) else recipe
    observers: dict[str, tuple[Observer, Scheme, torch.dtype]] = {}
    handles = []
    for name, module, decision in decisions_of(model, rules):
        gives = decision.gives
        if gives is None or not isinstance(module, nn.Linear):
            continue
        sides = (("input", gives.input, module.in_features), ("output", gives.output, module.out_features))
        for side, activation, width in sides:
            if activation is None or activation.dynamic:
                continue
            place = f"{name}.{side}".lstrip(".")
            observer = Observer(statistic(activation.scheme, (1, width)), name=place)
            observers[place] = (observer, activation.scheme, module.weight.dtype)
            handles.append(_watch(module, side, observer))
    batches = _run_all(model, data, run, on_batch, handles)
    if not batches:
        raise CalibrationError("calibration data are empty; pass at least one batch")
    learned = {
        place: observer.params(scheme, dtype=dtype) for place, (observer, scheme, dtype) in observers.items()
    }
    return Calibration(params=learned, batches=batches)


def _watch(module: nn.Module, side: str, observer: Observer) -> Any:
    """Let ``observer`` see what goes into or comes out of a layer; return the handle that ends it."""
    if side == "input":
        return module.register_forward_pre_hook(functools.partial(_see_input, observer))
    return module.register_forward_hook(functools.partial(_see_output, observer))


def _see_input(observer: Observer, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
    observer.update(args[0])


def _see_output(observer: Observer, module: nn.Module, args: Any, result: torch.Tensor) -> None:  # noqa: ARG001
    observer.update(result)


def _run_all(
    model: nn.Module,
    data: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    on_batch: Callable[[int], None] | None,
    handles: list[Any],
) -> int:
    """Run every batch and return their number; modes and hooks are put back whatever happens."""
    modes = {module: module.training for module in model.modules()}
    count = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in data:
                run(model, batch)
                count += 1
                if on_batch is not None:
                    on_batch(count)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return count


def static_params(
    calibration: Calibration | None, name: str, side: str, activation: Activation | None
) -> QuantizationParams | None:
    """Return the learned parameters of one side of a layer, or None when it has no static scheme.

    Raises CalibrationError when they are missing or were learned for another scheme.
    """
    if activation is None or activation.dynamic:
        return None
    place = f"{name}.{side}".lstrip(".")
    found = None if calibration is None else calibration.params.get(place)
    if found is None:
        raise CalibrationError(
            f"its {side} needs parameters from data for {activation}; pass those of calibrate"
        )
    if found.scheme != activation.scheme:
        raise CalibrationError(f"its {side} was calibrated for {found.scheme}, not for {activation.scheme}")
    return found
