"""Sequential quantization of a model in memory, for :func:`quantize_model`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import CalibrationError, UnsupportedError
from ..methods import Method
from ..methods.chain import without_corrections
from ..methods.channels import ChannelFold
from ..methods.rotate import needs_checkpoint, rotation_of
from ..ops.devices import CPU, device_of
from ..recipes import Assignment, Recipe
from .block_chain import Steps
from .calibrate import Calibration, calibrate, require_batches
from .dynamic_quantize import DynamicQuantize
from .recipe_layers import as_recipe, decisions_of
from .rescale import rescaled_channels
from .solutions import Solved, WeightTask, require_corrected
from .solving import solve
from .unfuse import unfused


def solved(
    model: nn.Module, recipe: Recipe | str, data: Iterable[Any], *, steps: Steps | None = None,
    progress: bool = False,
) -> Calibration:  # fmt: skip
    """Return the weights' codes, each solved behind quantized layers.

    Args:
        model: a model with a list of blocks that run one after the other; unchanged afterwards.
        recipe: rules, or the name of a preset for all Linear layers.
        data: batches, each as the model takes it; of eight and more, every eighth is held out.
        steps: blocks, and how they run.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Returns:
        The codes and their losses, and the parameters of static inputs and outputs.

    Raises:
        ZeropointError: what :func:`~zeropoint.models.calibrate_sequential` raises.
    """
    require_batches(data)
    batches = data if isinstance(data, (list, tuple)) else list(data)
    if not batches:
        raise CalibrationError("calibration data are empty; pass at least one batch")
    rules, found = as_recipe(recipe), Solved()
    with unfused(model) as root:
        tasks, asked, static = list[WeightTask](), list[Method](), False
        for name, module, decision in decisions_of(root, rules):
            gives = decision.gives
            if gives is None:
                continue
            static |= any(each is not None and not each.dynamic for each in (gives.input, gives.output))
            if gives.weight is not None and type(module) is nn.Linear:
                asked.append(gives.weight_method)
                tasks.append(_task(name, gives, module))
        if tasks:
            require_corrected(asked, tasks)
            how = steps or Steps()
            how = how if device_of(model) == CPU else replace(how, workers=1)
            solve(root, batches, tasks, how, found, progress=progress)
    folds = {name: fold for block in found.rescaled.values() for name, fold in block.folds.items()}
    ranges = Calibration()
    if static:
        with rescaled_channels(model, folds):
            ranges = calibrate(model, _without_methods(rules), batches, progress=progress)
    for layer, result in found.items():
        for parameter, added in result.changes.items():
            name = f"{layer}.{parameter}".lstrip(".")
            folds[name] = folds.get(name, ChannelFold()).then(ChannelFold(added=added))
    alone = tuple(task.name for task in tasks if found.methods[task.name] != task.method)
    return replace(
        ranges, solved=found, losses=found.losses, batches=len(batches), folds=folds, without_inputs=alone
    )


def _task(name: str, gives: Assignment, layer: nn.Linear) -> WeightTask:
    assert gives.weight is not None
    method = gives.weight_method
    if rotation_of(method) is not None:
        raise UnsupportedError(needs_checkpoint(method))
    dynamic = gives.input is not None and gives.input.dynamic
    return WeightTask(
        name=name,
        layer=name,
        scheme=gives.weight,
        method=method if "bias" in dict(layer.named_parameters()) else without_corrections(method),
        without_data=gives.without_inputs().weight_method,
        source=DynamicQuantize(gives.input) if dynamic and gives.input is not None else None,
    )


def _without_methods(recipe: Recipe) -> Recipe:
    """Return a recipe whose weights need no data."""
    *rules, default = (
        rule if rule.gives is None else replace(rule, gives=replace(rule.gives, method=None))
        for rule in (*recipe.rules, recipe.default)
    )
    return replace(recipe, rules=tuple(rules), default=default)
