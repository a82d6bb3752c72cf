"""Graphs with quantizers in a recipe's layers, for training or conversion."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...errors import UnsupportedError, ZeropointError
from ...params import QuantizationParams
from ...recipes import Activation, Assignment, Decision, Recipe
from ...schemes import Scheme
from .. import Calibration
from ..calibrate import static_params
from ..dynamic_quantize import DynamicQuantize
from ..prepare import require_nearest
from ..qat_config import QATConfig, qat_config
from ..recipe_layers import as_recipe
from .fold import fold
from .layer_nodes import CONVOLUTIONS, Layer, decided, inputs_of, layers_of, output_of
from .matrices import Form, written
from .program import attribute, cleaned, graph_of, put, tensor_at

PLAN = "zeropoint"
"""Where a prepared graph keeps what was decided, in its ``meta``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A layer's decision, by names alone, which survives graph copies.

    quantizers: paths of the modules that quantize its weights. nbytes: bytes of these weights.
    """

    decision: Decision
    quantizers: tuple[str, ...] = ()
    nbytes: int = 0


def prepare_graph(
    program: ExportedProgram | fx.GraphModule,
    recipe: Recipe | str,
    *,
    calibration: Calibration | None = None,
    qat: str | QATConfig = "minmax",
) -> fx.GraphModule:
    """Return a copy of ``program`` with trainable quantized layers.

    Args:
        program: an exported program, or its module.
        recipe: rules, or the name of a preset for all Linear layers. Batch normalization is folded into the
            products that get a scheme.
        calibration: parameters of static inputs and outputs, of :func:`calibrate_graph` or of ``calibrate``
            for the model that was exported.
        qat: how quantizers are made, by a name of :data:`~zeropoint.models.QAT_CONFIGS` or as a
            configuration. Gradients pass straight through.

    Raises:
        RecipeError: when a rule matches nothing or tied layers would differ.
        CalibrationError: when parameters are missing.
        UnsupportedError: when a layer cannot hold its scheme; each names the layer.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(1, 64),))
        >>> prepared = prepare_graph(program, "w8a8")
        >>> [str(node.target) for node in prepared.graph.nodes if node.op == "call_module"]
        ['weight_quantizer', 'input_quantizer']
    """
    require_nearest(as_recipe(recipe))
    module = unprepared(program)
    _own_parameters(module)
    return insert(module, recipe, calibration, qat_config(qat))


def unprepared(program: ExportedProgram | fx.GraphModule) -> fx.GraphModule:
    """Return the graph of a program, as :func:`~.program.graph_of` does.

    Raises UnsupportedError for one that has quantizers already.
    """
    if isinstance(program, fx.GraphModule) and PLAN in program.meta:
        raise UnsupportedError(
            "program is prepared already; convert it or pass the program before prepare_graph"
        )
    return graph_of(program)


def _own_parameters(module: fx.GraphModule) -> None:
    """Give the graph its own tensors, apart from the exported model's."""
    known: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for held in stores:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = known.setdefault(id(tensor), copy.deepcopy(tensor))


def annotated(module: fx.GraphModule, recipe: Recipe | str) -> list[tuple[Layer, Decision]]:
    """Return layers and decisions, after folding normalizations behind them.

    Raises RecipeError when a rule matches nothing or tied layers would differ.
    """
    rules = as_recipe(recipe)
    found = list(decided(module, layers_of(module, rules), rules))
    fold(module, [layer for layer, decision in found if decision.gives is not None])
    left = set(module.graph.nodes)
    return [(layer, decision) for layer, decision in found if left.issuperset(layer.nodes)]


def insert(
    module: fx.GraphModule, recipe: Recipe | str, calibration: Calibration | None, qat: QATConfig
) -> fx.GraphModule:
    """Insert quantizers into ``module`` itself; see :func:`prepare_graph`."""
    plan, weights, sides = [], _Weights(module, qat), _Sides(module, qat)
    for layer, decision in annotated(module, recipe):
        plan.append(_planned(module, layer, decision))
        if decision.gives is None:
            continue
        try:
            _check(layer, decision.gives)
            scheme = decision.gives.weight
            made = () if scheme is None else weights.insert(layer, scheme)
            for side, activation in (("input", decision.gives.input), ("output", decision.gives.output)):
                if activation is not None and activation.local:
                    raise UnsupportedError(
                        f"its {side} is {activation}; graphs have no scale over all blocks: make it dynamic, "
                        "or quantize the model with quantize_model"
                    )
                params = static_params(calibration, layer.name, side, activation)
                if activation is not None:
                    sides.insert(layer, side, activation, params)
        except ZeropointError as error:
            raise type(error)(f"layer {layer.name}: {error}") from error
        plan[-1] = _planned(module, layer, decision, made)
    result = cleaned(module)
    result.meta[PLAN] = tuple(plan)
    return result


def _planned(
    module: fx.GraphModule, layer: Layer, decision: Decision, quantizers: tuple[str, ...] = ()
) -> Planned:
    reads = layer.weights or layer.reads
    held = {id(tensor): tensor for tensor in (tensor_at(module, str(read.target)) for read in reads)}
    nbytes = sum(tensor.nbytes for tensor in held.values() if tensor.ndim > 1)
    return Planned(decision=decision, quantizers=quantizers, nbytes=nbytes)


def _check(layer: Layer, gives: Assignment) -> None:
    """Raise UnsupportedError where a layer has nothing that a scheme is for."""
    if layer.type == "Embedding" and (gives.input is not None or gives.output is not None):
        raise UnsupportedError("an embedding's input is whole numbers, and its output rows of its weight")
    if layer.left:
        raise UnsupportedError(f"{layer.left}; keep it")
    if layer.weight is None and gives.weight is not None:
        raise UnsupportedError(f"{gives} names a weight, which {layer.type} does not have")
    if layer.weight is not None and gives.weight is None:
        raise UnsupportedError(f"{gives} names no weight, which is what a converted layer holds")


@dataclass(slots=True)
class _Weights:
    """Quantizers of weights, one per tensor under any name."""

    module: fx.GraphModule
    qat: QATConfig
    made: dict[int, str] = field(default_factory=dict)

    def insert(self, layer: Layer, scheme: Scheme) -> tuple[str, ...]:
        """Quantize a layer's weights for all readers; return quantizer paths."""
        return tuple(self._quantized(read, layer.form, scheme) for read in layer.weights)

    def _quantized(self, weight: fx.Node, form: Form, scheme: Scheme) -> str:
        tensor = tensor_at(self.module, str(weight.target))
        if id(tensor) not in self.made:
            quantizer = self.qat.weight(form.matrix(tensor), scheme)
            self.made[id(tensor)] = put(self.module, f"{weight.target}_quantizer", quantizer)
            for read in [n for n in self.module.graph.nodes if n.op == "get_attr"]:
                if attribute(self.module, str(read.target)) is tensor:
                    _quantize_read(read, self.made[id(tensor)], form)
        return self.made[id(tensor)]


def _quantize_read(read: fx.Node, path: str, form: Form) -> None:
    """Put the quantizer at ``path`` between a parameter and all its users."""
    users = list(read.users)
    rows = written(read, form.there)
    with read.graph.inserting_after(rows):
        values = read.graph.call_module(path, (rows,))
    values.meta["val"] = rows.meta["val"]
    result = written(values, form.back)
    for user in users:
        user.replace_input_with(read, result)


@dataclass(slots=True)
class _Sides:
    """Quantizers of inputs and outputs; equal dynamic ones are shared."""

    module: fx.GraphModule
    qat: QATConfig
    made: dict[tuple[fx.Node, Activation], fx.Node] = field(default_factory=dict)

    def insert(
        self, layer: Layer, side: str, activation: Activation, params: QuantizationParams | None
    ) -> None:
        """Quantize one side of a layer in each call, by one module."""
        row = row_of(layer, side)
        made = DynamicQuantize(activation) if params is None else self.qat.activation(params, math.prod(row))
        path = put(self.module, f"{layer.name}.{side}_quantizer".lstrip("."), made)
        for node in layer.nodes:
            for source in inputs_of(node) if side == "input" else [output_of(node)]:
                known = self.made.get((source, activation)) if params is None else None
                result = insert_call(source, path, node if side == "input" else None, known)
                if params is None:
                    self.made[source, activation] = result


def row_of(layer: Layer, side: str) -> tuple[int, ...]:
    """Return a sample's shape on one side, as in eager mode.

    The axis of channels has its length: the second of a convolution, the last of any other layer.
    """
    source = inputs_of(layer.nodes[0])[0] if side == "input" else output_of(layer.nodes[0])
    shape = source.meta["val"].shape
    axis = 1 if layer.nodes[0].target in CONVOLUTIONS else len(shape) - 1
    rank = len(shape) if layer.nodes[0].target in CONVOLUTIONS else 2
    width = shape[axis] if shape else 1
    return (1, width if type(width) is int else 1, *[1] * (rank - 2))


def insert_call(source: fx.Node, path: str, user: fx.Node | None, known: fx.Node | None = None) -> fx.Node:
    """Insert a module call between ``source`` and its users; return it.

    path: of the module. user: the only one that reads the call; all if None. known: an earlier call on
    ``source`` that serves as well.
    """
    graph, users = source.graph, list(source.users) if user is None else [user]
    with graph.inserting_after(source):
        result = graph.call_module(path, (source,)) if known is None else known
    result.meta["val"] = source.meta["val"]
    for other in users:
        other.replace_input_with(source, result)
    return result
