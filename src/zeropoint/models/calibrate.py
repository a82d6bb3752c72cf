"""Calibration: ranges and statistics that a recipe needs from data.

The ranges are of static inputs and outputs, and the statistics of inputs that methods need for weights.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import CalibrationError, UnsupportedError
from ..methods import LayerData, LayerResult, Loss
from ..methods.channels import ChannelFold
from ..methods.rotate import needs_checkpoint, rotation_of
from ..ops.devices import device_of, exact_products
from ..params import QuantizationParams
from ..progress import counted
from ..recipes import Activation, Assignment, Recipe
from ..schemes import Scheme
from ..stats import Accumulator, Observer, Statistic, StatisticFor, Statistics, statistic_named
from ..stats.processes import shares_work
from .layer import OnTensor, quantized_inputs, quantized_output
from .layer_types import layer_type
from .recipe_layers import as_recipe, decisions_of, require_model
from .small_tensors import LatestTensor, WaitingTensors
from .unfuse import unfused

SIDES = ("input", "output")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration:
    """Learned parameters and statistics of a model's layers.

    Args:
        params: by layer and side (``encoder.0.input``).
        statistics: of the inputs of layers whose method needs them, by layer and by the names in
            :attr:`~zeropoint.methods.Method.needs`.
        batches: how many batches there were.
        solved, losses: codes of weights that were solved in the order in which they run, by layer, and their
            output errors.
        folds: channel folds of the model's parameters, by name.
        without_inputs: layers that no batch reached; codes of ``solved`` ones are by a method without data.
        borrowed: layers of experts that no token reached, whose inputs have the largest parameters among
            the other experts of their layer, and the statistics of all of these.
    """

    params: Mapping[str, QuantizationParams] = field(default_factory=dict)
    statistics: Mapping[str, Mapping[str, Statistics]] = field(default_factory=dict)
    batches: int = 0
    solved: Mapping[str, LayerResult] = field(default_factory=dict)
    losses: Mapping[str, Loss] = field(default_factory=dict)
    folds: Mapping[str, ChannelFold] = field(default_factory=dict)
    without_inputs: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{place}: {params}" for place, params in self.params.items()]
        lines += [f"{layer}: {', '.join(found)} of its inputs" for layer, found in self.statistics.items()]
        return "\n".join([*lines, f"learned from {self.batches} batches"])

    def __repr__(self) -> str:
        return str(self)


_EXPERT = re.compile(r"(\bexperts\.(?:\w+_proj\.)?)\d+(?=\.)")
"""The number of an expert in the name of a layer."""


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch: keywords, arguments, or one value."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def calibrate(
    model: nn.Module,
    recipe: Recipe | str,
    data: Iterable[Any],
    *,
    statistic: StatisticFor | str = "minmax",
    run: Callable[[nn.Module, Any], Any] = run_model,
    progress: bool = False,
) -> Calibration:
    """Return input and output parameters, and statistics, learned from data.

    ``recipe`` says which inputs and outputs are static. Statistics are of the inputs of layers whose weight
    has a method that needs them. Values that are not finite are left out.

    Args:
        model: runs in evaluation mode without gradients, and is unchanged afterwards.
        recipe: rules, or the name of a preset for all Linear layers.
        data: batches, each as ``run`` takes it.
        statistic: what is learned of each tensor, by a name of :func:`~zeropoint.stats.statistic_named` or as
            a function of a scheme and the shape of a batch of one row.
        run: calls the model with a batch.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: when there is nothing static or no batch, when ``data`` is one batch instead of
            several, or when some layer saw no finite number, with its name.

    Example:
        >>> layer = nn.Sequential(nn.Linear(8, 4))
        >>> print(calibrate(layer, "w8a8_static", [torch.ones(2, 8)]).params["0.input"].scheme)
        uint8:tensor:asym
    """
    require_model(model)
    require_batches(data)
    with unfused(model) as root, evaluating(root):
        watch = Watch(root, recipe, statistic)
        with watch.hooked():
            count = run_batches(root, data, run, progress=progress)
    return watch.calibration(count)


def run_batches(
    model: nn.Module, data: Iterable[Any], run: Callable[[nn.Module, Any], Any], *, progress: bool
) -> int:
    """Run a model on all batches; return their number.

    progress: whether to show a bar. Raises CalibrationError when there was none.
    """
    count = 0
    for batch in counted(data, "Calibrating", shown=progress):
        run(model, batch)
        count += 1
    if not count:
        raise CalibrationError("calibration data are empty; pass at least one batch")
    return count


def require_places(places: Sized, kind: str, others: str) -> None:
    """Raise CalibrationError where no input or output is to be observed.

    kind: what was to be calibrated, a model or a graph. others: the functions that need no calibration of it.
    """
    if not places:
        raise CalibrationError(
            f"recipe gives no layer of this {kind} a static input or output, nor a method that takes data, "
            f"so there is nothing to learn; pass it to {others} without calibration"
        )


def require_batches(data: object) -> None:
    """Raise CalibrationError for a number, tensor or mapping as data."""
    if isinstance(data, (torch.Tensor, Mapping)):
        kind, parts = type(data).__name__, "rows" if isinstance(data, torch.Tensor) else "keys"
        raise CalibrationError(
            f"data (a {kind}) must be an iterable of batches, and this one would give its {parts}; "
            "pass a list of batches, such as [data]"
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise CalibrationError(
            f"data (a {type(data).__name__}) must be an iterable of batches; pass a list of batches"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients and TF32.

    Its modes are put back whatever happens.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), exact_products(device_of(model)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An observed input or output, static or needed by a method.

    layer: name of the layer. need: what the method calls the statistics of its inputs, or empty.
    """

    name: str
    layer: str
    module: nn.Module
    side: str
    observer: Observer
    scheme: Scheme | None = None
    need: str = ""


class Watch:
    """Observers of static inputs and outputs, and of methods' inputs.

    recipe, statistic: as for :func:`calibrate`. enabled: whether they observe tensors. examine: called with
    tensors that may not be finite, with their place. decided: name, layer and decision for each layer.
    """

    def __init__(self, root: nn.Module, recipe: Recipe | str, statistic: StatisticFor | str) -> None:
        self.enabled = True
        self.examine: Callable[[str, torch.Tensor], None] | None = None
        self._latest: LatestTensor | None = None
        make = statistic_named(statistic)
        self.decided = decisions_of(root, as_recipe(recipe))
        self._places: dict[str, _Place] = {}
        self._accumulators: dict[Accumulator, Accumulator] = {}
        self._seen: dict[str, torch.dtype] = {}
        self.borrowed: dict[str, None] = {}
        self._waiting = WaitingTensors()
        self._waits = True
        statistics: list[Statistic] = []
        for name, module, decision in self.decided:
            gives = decision.gives
            self._add_statistics(name, module, gives)
            shapes = layer_type(module).shapes(module)
            activations = (None, None) if gives is None else (gives.input, gives.output)
            for side, activation, shape in zip(SIDES, activations, shapes, strict=True):
                if activation is not None and not activation.dynamic:
                    place = f"{name}.{side}".lstrip(".")
                    made = make(activation.calibrated, shape)
                    # Equal statistics share one observer, by which each tensor that passes is identified.
                    made = next((s for s in statistics if s == made), made)
                    statistics.append(made)
                    observer = Observer(made, name=place)
                    self._places[place] = _Place(
                        name=place,
                        layer=name,
                        module=module,
                        side=side,
                        observer=observer,
                        scheme=activation.calibrated,
                    )
        require_places(self._places, "model", "quantize_model or prepare")

    def _add_statistics(self, name: str, module: nn.Module, gives: Assignment | None) -> None:
        """Observe the inputs of a layer for the method of its weight."""
        if gives is None or gives.weight is None:
            return
        method = gives.weight_method
        if rotation_of(method) is not None:
            raise UnsupportedError(needs_checkpoint(method))
        if not isinstance(module, nn.Linear):
            if not method.needs:
                return
            kind = type(module).__name__
            raise UnsupportedError(
                f"layer {name or 'model'} (a {kind}): method {gives.method} needs statistics of inputs, "
                "which are taken of Linear layers; give it method nearest by a rule"
            )
        place = f"{name}.input".lstrip(".")
        for need, accumulator in method.takes.items():
            made = accumulator(module.in_features)
            # Deduplicated, so that an input shared by several layers is measured once.
            made = self._accumulators.setdefault(made, made)
            self._places[f"{place} {need}"] = _Place(
                name=f"{place} {need}", layer=name, module=module, side="input", need=need,
                observer=Observer(made, name=place),
            )  # fmt: skip

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Attach the observers to their layers inside the context."""
        self._waits = not shares_work()
        with ExitStack() as hooks:
            hooks.callback(setattr, self, "_latest", None)
            for place in self._places.values():
                see, module = functools.partial(self._see, place), place.module
                if place.side == "input":
                    hook = functools.partial(_see_input, see)
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    hooks.enter_context(module.register_forward_hook(functools.partial(_see_output, see)))
            yield

    def params(self, inside: nn.Module | None = None) -> dict[str, QuantizationParams]:
        """Return learned parameters by place, optionally inside one module."""
        self._waiting.take()
        wanted = None if inside is None else set(inside.modules())
        return {
            name: self._params_of(place, place.scheme)
            for name, place in self._places.items()
            if place.scheme is not None and (wanted is None or place.module in wanted)
        }

    def statistics(self, inside: nn.Module | None = None) -> dict[str, dict[str, Statistics]]:
        """Return needed statistics by layer, optionally inside one module."""
        self._waiting.take()
        wanted = None if inside is None else set(inside.modules())
        found: dict[str, dict[str, Statistics]] = {}
        for place in self._places.values():
            if place.need and (wanted is None or place.module in wanted):
                found.setdefault(place.layer, {})[place.need] = self._statistics_of(place)
        return found

    def _statistics_of(self, place: _Place) -> Statistics:
        reached = self._reached(place) or [place]
        with self._naming(place):
            seen, *others = (each.observer.statistics() for each in reached)
            for other in others:
                seen = replace(seen, state=seen.accumulator.merge(seen.state, other.state))
            seen.require_data()
        if place not in reached:
            self.borrowed[place.layer] = None
        return seen

    def calibration(self, batches: int, *, every: bool = True) -> Calibration:
        """Return the calibration of all layers.

        every: whether a layer that no batch reached is an error, or left out.
        """
        unreached = [] if every else [p for p in self._places.values() if not self._reached(p)]
        for place in unreached:
            del self._places[place.name]
        alone = tuple(dict.fromkeys(place.layer for place in unreached))
        found = Calibration(params=self.params(), statistics=self.statistics(), batches=batches)
        return replace(found, borrowed=tuple(self.borrowed), without_inputs=alone)

    def _params_of(self, place: _Place, scheme: Scheme) -> QuantizationParams:
        reached = self._reached(place)
        if reached and place not in reached:
            self.borrowed[place.layer] = None
            params = [self._params_of(other, scheme) for other in reached]
            return max(params, key=lambda found: float(found.scales[-1].abs().max()))
        with self._naming(place):
            return place.observer.params(scheme, dtype=self._dtype_of(place.name, place.module))

    def _reached(self, place: _Place) -> list[_Place]:
        """Return a place where tensors passed, or other experts' in its stead."""
        if place.name in self._seen:
            return [place]
        # A router may send no token to an expert, however much text there is.
        key = _EXPERT.sub(r"\1*", place.name)
        others = () if key == place.name else self._places.values()
        return [o for o in others if o.name in self._seen and _EXPERT.sub(r"\1*", o.name) == key]

    @contextmanager
    def _naming(self, place: _Place) -> Iterator[None]:
        """Name the unreached layer in the error about missing data."""
        try:
            yield
        except CalibrationError as error:
            if place.name in self._seen:
                raise
            raise CalibrationError(
                f"{place.name} received no calibration data: no batch reached its layer, or the model uses "
                "its weight past it; calibrate with batches that reach it, or keep the layer by a rule, "
                f"{{name: '{place.layer}', keep: true}}"
            ) from error

    def outside(self, blocks: Iterable[nn.Module]) -> bool:
        """Return whether an observer lies outside of all ``blocks``."""
        inside = {module for block in blocks for module in block.modules()}
        return any(place.module not in inside for place in self._places.values())

    def _dtype_of(self, name: str, module: nn.Module) -> torch.dtype:
        """Return a layer's parameter dtype, or its first input's."""
        own = (p.dtype for p in module.parameters() if p.is_floating_point())
        return next(own, self._seen.get(name, torch.float32))

    def _see(self, place: _Place, x: torch.Tensor) -> torch.Tensor:
        """Observe ``x``; a tensor that several layers read counts once."""
        if not (self.enabled and x.numel()):
            return x
        observer, latest = place.observer, self._latest
        self._seen.setdefault(place.name, x.dtype)
        if latest is None or not latest.is_of(x, observer.statistic):
            latest = LatestTensor(x, observer, waits=self._waits)
            self._latest = None if x.is_inference() else latest
        if latest.copy is None:
            self._waiting.make_way(observer)
            observer.take(latest.state)
        else:
            self._waiting.add(observer, latest.copy)
        if self.examine is not None and latest.suspicious:
            self.examine(place.name, x)
        return x


def _see_input(see: OnTensor, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    quantized_inputs(module, see, args, named)


def _see_output(see: OnTensor, module: nn.Module, args: Any, result: Any) -> None:  # noqa: ARG001 (as hooks)
    quantized_output(see, result)


def static_params(
    calibration: Calibration | None, name: str, side: str, activation: Activation | None
) -> QuantizationParams | None:
    """Return learned parameters of a layer's side, or None if not static.

    Raises CalibrationError when they are missing or were learned for another scheme.
    """
    if not isinstance(calibration, (Calibration, type(None))):
        raise CalibrationError(
            f"calibration (a {type(calibration).__name__}) must be the Calibration that calibrate returns"
        )
    if activation is None or activation.dynamic:
        return None
    place = f"{name}.{side}".lstrip(".")
    found = None if calibration is None else calibration.params.get(place)
    if found is None:
        raise CalibrationError(
            f"its {side} needs calibration for {activation}: pass "
            "calibration=zp.calibrate(model, recipe, data)"
        )
    if found.scheme != activation.calibrated:
        raise CalibrationError(
            f"its {side} was calibrated for {found.scheme}, not for {activation.calibrated}"
        )
    return found


def method_data(calibration: Calibration | None, name: str, gives: Assignment) -> LayerData:
    """Return the calibration's data for a layer's method.

    Raises CalibrationError where the method needs statistics that are missing, UnsupportedError for one that
    rotates the model.
    """
    method = gives.weight_method
    if rotation_of(method) is not None:
        raise UnsupportedError(needs_checkpoint(method))
    if calibration is not None and name in calibration.solved:
        known = calibration.solved[name]
        return LayerData(solved=known.q, low_rank=known.low_rank)
    found = {} if calibration is None else calibration.statistics.get(name, {})
    missing = [need for need in method.needs if need not in found]
    if missing:
        raise CalibrationError(
            f"method {method.name} needs the {' and '.join(missing)} of its inputs: pass "
            "calibration=zp.calibrate(model, recipe, data), with this method in the recipe"
        )
    return LayerData(statistics={name: found[name] for name in method.takes if name in found})
