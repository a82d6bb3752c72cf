"""Calibration of graphs: observers of static inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ...recipes import Recipe
from ...schemes import Scheme
from ...stats import Observer, StatisticFor, statistic_named
from .. import Calibration
from ..calibrate import require_batches, require_places, run_batches, run_model
from .layer_nodes import Layer, inputs_of, output_of
from .prepare import annotated, insert_call, row_of, unprepared
from .program import cleaned, evaluate, put


def calibrate_graph(
    program: ExportedProgram | fx.GraphModule,
    recipe: Recipe | str,
    data: Iterable[Any],
    *,
    statistic: StatisticFor | str = "minmax",
    run: Callable[[nn.Module, Any], Any] = run_model,
    progress: bool = False,
) -> Calibration:
    """Return parameters of static inputs and outputs, learned from data.

    The counterpart of ``calibrate`` for a graph in evaluation mode, with the same result and arguments. Where
    one layer takes several tensors (``Add``, ``Concatenate``), they share their parameters.

    Args:
        program: an exported program, or its module.
        recipe: as for :func:`~zeropoint.models.calibrate`.
        data: batches, each as ``run`` takes it.
        statistic: as for :func:`~zeropoint.models.calibrate`.
        run: calls the module with a batch.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: when there is nothing static or no batch, when ``data`` is one batch instead of
            several, or when some layer saw no finite number, with its name.

    Example:
        >>> program = torch.export.export(nn.Linear(8, 4), (torch.ones(2, 8),))
        >>> print(calibrate_graph(program, "w8a8_static", [torch.ones(2, 8)]).params["input"].scheme)
        uint8:tensor:asym
    """
    require_batches(data)
    make = statistic_named(statistic)
    module = unprepared(program)
    observers: dict[str, tuple[Observer, Scheme, torch.dtype]] = {}
    for layer, decision in annotated(module, recipe):
        gives = decision.gives
        for side, activation in () if gives is None else (("input", gives.input), ("output", gives.output)):
            if activation is not None and not activation.dynamic:
                place = f"{layer.name}.{side}".lstrip(".")
                observer = Observer(make(activation.calibrated, row_of(layer, side)), name=place)
                _insert(module, layer, side, observer)
                dtype = output_of(layer.nodes[0]).meta["val"].dtype
                observers[place] = (observer, activation.calibrated, dtype)
    require_places(observers, "graph", "quantize_graph or prepare_graph")
    evaluate(module)
    with torch.no_grad():
        count = run_batches(cleaned(module), data, run, progress=progress)
    learned = {
        place: observer.params(scheme, dtype=dtype) for place, (observer, scheme, dtype) in observers.items()
    }
    return Calibration(params=learned, batches=count)


def _insert(module: fx.GraphModule, layer: Layer, side: str, observer: Observer) -> None:
    path = put(module, f"{layer.name}.{side}_observer".lstrip("."), observer)
    for node in layer.nodes:
        for source in inputs_of(node) if side == "input" else [output_of(node)]:
            insert_call(source, path, node if side == "input" else None)
