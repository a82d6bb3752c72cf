"""Prepared graphs to graphs of packed codes and registered operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...errors import UnsupportedError, ZeropointError
from ...methods.nearest import with_params
from ...params import QuantizationParams
from ...params.module_buffers import bytes_of
from ...params.tensors import granularities, parameter_names
from ...recipes import Decision, Recipe
from ...schemes import Scheme
from ...tensor import QuantizedTensor
from ...training.quantizer import Quantizer
from .. import Calibration, Conversion, Converted
from ..calibrate import method_data
from ..convert import squares_of
from ..dynamic_quantize import DynamicQuantize
from ..packed_weight import PackedWeight
from ..qat_config import QAT_CONFIGS
from .matrices import moved_to_user
from .prepare import PLAN, Planned, insert, unprepared
from .program import args_of, cleaned, copied, evaluate, operator_of, put, tensor_at

ops = torch.ops.zeropoint
aten = torch.ops.aten


def quantize_graph(
    program: ExportedProgram | fx.GraphModule, recipe: Recipe | str, *, calibration: Calibration | None = None
) -> Conversion:
    """Return ``program`` with packed weights in the layers of ``recipe``.

    It computes what ``quantize_model`` gives for the model that was exported, where that dequantizes. The
    result is a graph module with a record of each layer; :func:`to_program` exports it again. Arguments and
    errors are as for :func:`prepare_graph`.

    Args:
        program: an exported program, or its module.
        recipe: rules, or the name of a preset for all Linear layers.
        calibration: ranges of static inputs and outputs.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(1, 64),))
        >>> print(quantize_graph(program, "w8a16").layers[0].nbytes)
        (2048, 544)
    """
    return _converted(insert(unprepared(program), recipe, calibration, QAT_CONFIGS["minmax"]))


def convert_graph(prepared: fx.GraphModule) -> Conversion:
    """Return a prepared graph on packed weights, in evaluation mode.

    Each weight becomes packed codes and ``zeropoint.dequantize``; each input or output
    ``zeropoint.fake_quantize`` with fixed parameters, or ``zeropoint.quantize_dynamic`` and
    ``zeropoint.dequantize``. The results equal ``prepared`` in evaluation, bit for bit; it is not changed.

    Args:
        prepared: a module of :func:`prepare_graph`.

    Raises:
        UnsupportedError: for a graph that was not prepared.
        NonFiniteError: for a weight with NaN or Inf.
    """
    if PLAN not in getattr(prepared, "meta", {}):
        raise UnsupportedError(
            f"prepared (a {type(prepared).__name__} without quantizers) must be a result of prepare_graph"
        )
    module = fx.GraphModule(prepared, copied(prepared.graph))
    module.meta.update(prepared.meta)
    return _converted(module)


def _converted(module: fx.GraphModule) -> Conversion:
    plan: tuple[Planned, ...] = module.meta.pop(PLAN)
    weights = {path for planned in plan for path in planned.quantizers}
    packed: dict[str, _Packed] = {}
    decisions = {path: p.decision for p in reversed(plan) for path in p.quantizers}
    writer = _Writer(module)
    for node in [node for node in module.graph.nodes if node.op == "call_module"]:
        path, quantizer = str(node.target), module.get_submodule(str(node.target))
        if path not in weights:
            writer.activation(node, quantizer)
            continue
        if path not in packed:
            try:
                packed[path] = _pack(module, node, quantizer, decisions[path])
            except ZeropointError as error:
                raise type(error)(f"layer {decisions[path].subject.name}: {error}") from error
        writer.weight(node, path, packed[path].q)
    layers = tuple(_layer_record(planned, packed) for planned in plan)
    evaluate(module)
    return Conversion(model=cleaned(module), layers=layers)


@dataclass(slots=True)
class _Packed:
    """A packed weight, and the layer that is charged with its bytes.

    nbytes: of the float weight. off, size: sums of squares of its error and of itself.
    """

    q: QuantizedTensor
    nbytes: int
    off: float
    size: float
    owner: str = ""


def _pack(module: fx.GraphModule, node: fx.Node, quantizer: torch.nn.Module, decision: Decision) -> _Packed:
    weight, gives = _matrix(module, node.all_input_nodes[0]), decision.gives
    if isinstance(quantizer, Quantizer):
        q = with_params(weight, quantizer.params)
    else:
        assert gives is not None
        data = method_data(None, decision.subject.name, gives)
        result = gives.weight_method.quantize(weight, _scheme(quantizer), data)
        if result.rotation is not None:
            raise UnsupportedError(
                f"method {gives.weight_method.name} rotates inputs, for which graphs have no place; use "
                "quantize_model, or method mse"
            )
        q = result.q
    off, size = squares_of(weight, PackedWeight(q))
    return _Packed(q, weight.nbytes, off, size)


def _matrix(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Return the weight that ``node`` reads, as the quantized matrix."""
    if node.op == "get_attr":
        return tensor_at(module, str(node.target)).detach()
    source, *rest = args_of(node)
    result: torch.Tensor = operator_of(node)(_matrix(module, source), *rest)
    return result.contiguous()


def _scheme(quantizer: torch.nn.Module) -> Scheme:
    assert isinstance(quantizer, DynamicQuantize)
    return quantizer.activation.scheme


def _layer_record(planned: Planned, packed: dict[str, _Packed]) -> Converted:
    subject, rule = planned.decision.subject, planned.decision.rule
    nbytes, error, tied_to = (planned.nbytes, planned.nbytes), 0.0, ""
    if planned.quantizers:
        known = [packed[path] for path in planned.quantizers]
        own = [each for each in known if not each.owner]
        tied_to = next((each.owner for each in known if each.owner), "")
        nbytes = sum(each.nbytes for each in own), sum(each.q.nbytes for each in own)
        off, size = sum(each.off for each in known), sum(each.size for each in known)
        error = math.sqrt(off / size) if size else 0.0
        for each in own:
            each.owner = subject.name
    return Converted(
        name=subject.name,
        type=subject.type,
        shape=subject.shape,
        gives=planned.decision.gives,
        reason=rule.reason,
        nbytes=nbytes,
        error=error,
        tied_to=tied_to,
    )


@dataclass(slots=True)
class _Writer:
    """Writes operators in place of quantizers; what is equal is written once."""

    module: fx.GraphModule
    kept: dict[tuple[object, ...], str] = field(default_factory=dict)

    def weight(self, node: fx.Node, path: str, q: QuantizedTensor) -> None:
        """Write a weight's codes and parameters, dequantized before each user.

        Dequantizing earlier would hold all weights as floats at once. A table of rows dequantizes the rows
        that are asked for.
        """
        stem = path.removesuffix("_quantizer")
        for user in list(node.users):
            with self.module.graph.inserting_before(moved_to_user(user)):
                data = self._constant(f"{stem}_codes", q.data)
                params = self._params(stem, q.params)
                if user.target is aten.embedding.default and PackedWeight(q).rows_are_apart:
                    user.replace_all_uses_with(self._rows(user, data, params, q))
                    self.module.graph.erase_node(user)
                else:
                    written = (data, params, q.params.text, list(q.shape), q.dtype, q.dtype)
                    user.replace_input_with(node, self._call(ops.dequantize.default, written))
        self.module.graph.erase_node(node)

    def _rows(self, user: fx.Node, data: fx.Node, params: list[fx.Node], q: QuantizedTensor) -> fx.Node:
        """Write a table look-up: rows of codes and parameters, dequantized."""
        index = user.args[1]
        assert isinstance(index, fx.Node)
        numbers = self._call(aten.reshape.default, (index, [-1]))

        def own(t: fx.Node, height: int) -> fx.Node:
            return self._call(aten.index_select.default, (t, 0, numbers)) if height == q.shape[0] else t

        heights = [blocks.grid(q.shape)[0] for blocks in granularities(q.scheme)]
        picked = list(map(own, params, heights))
        rows = self._call(aten.index_select.default, (data, 0, numbers))
        shape = [self._call(aten.sym_size.int, (numbers, 0)), *q.shape[1:]]
        values = self._call(ops.dequantize.default, (rows, picked, q.params.text, shape, q.dtype, q.dtype))
        size = [self._size(index, axis) for axis in range(len(index.meta["val"].shape))]
        return self._call(aten.reshape.default, (values, [*size, *q.shape[1:]]))

    def activation(self, node: fx.Node, quantizer: torch.nn.Module) -> None:
        """Write the operators of a quantizer of inputs or outputs."""
        (source,) = node.all_input_nodes
        with self.module.graph.inserting_before(node):
            if isinstance(quantizer, Quantizer):
                stem = str(node.target).removesuffix("_quantizer")
                params = quantizer.params
                written = (source, self._params(stem, params), params.text)
                result = self._call(ops.fake_quantize.default, written) if quantizer.enabled else source
            else:
                result = self._dynamic(source, _scheme(quantizer))
        self._replace(node, result)

    def _dynamic(self, source: fx.Node, scheme: Scheme) -> fx.Node:
        value = source.meta["val"]
        parts = self._call(ops.quantize_dynamic.default, (source, str(scheme)))
        count = 1 + len(parameter_names(scheme))
        data, *params = (self._call(operator.getitem, (parts, index)) for index in range(count))
        shape = [self._size(source, axis) for axis in range(len(value.shape))]
        written = (data, params, str(scheme), shape, value.dtype, value.dtype)
        return self._call(ops.dequantize.default, written)

    def _size(self, source: fx.Node, axis: int) -> fx.Node | int:
        """Return an axis length: a number, or a node if dynamic."""
        size: int | torch.SymInt = source.meta["val"].shape[axis]
        return self._call(aten.sym_size.int, (source, axis)) if isinstance(size, torch.SymInt) else size

    def _params(self, stem: str, params: QuantizationParams) -> list[fx.Node]:
        named = zip(parameter_names(params.scheme), params.stored, strict=True)
        return [self._constant(f"{stem}_{name}", tensor) for name, tensor in named]

    def _constant(self, path: str, tensor: torch.Tensor) -> fx.Node:
        if (path, id(tensor)) not in self.kept:
            self.kept[path, id(tensor)] = put(self.module, path, bytes_of(tensor.detach()))
        return self.module.graph.get_attr(self.kept[path, id(tensor)])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self.module.graph.call_function(target, args)

    def _replace(self, node: fx.Node, result: fx.Node) -> None:
        if "val" in node.meta:
            result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        self.module.graph.erase_node(node)
