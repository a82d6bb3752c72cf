"""Quantized tensors of an exported graph: constants, and their layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...models.graph.program import args_of, operator_of, tensor_at
from ...params import QuantizationParams
from ...params.tensors import parameter_tensors
from ...schemes import Scheme
from ...tensor import QuantizedTensor

ops = torch.ops.zeropoint
aten = torch.ops.aten
QUANTIZING = (ops.quantize.default, ops.quantize_dynamic.default)
PICKING = (aten.index_select.default, aten.index.Tensor)


def is_constant(node: object) -> bool:
    """Whether ``node`` reads module tensors, or depends on them alone."""
    if not isinstance(node, fx.Node) or node.op == "get_attr":
        return isinstance(node, fx.Node)
    known = node.op == "call_function" and node.all_input_nodes and node.target not in QUANTIZING
    return bool(known) and all(is_constant(source) for source in node.all_input_nodes)


def constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Return the tensor that a constant node represents."""
    if node.op == "get_attr":
        return tensor_at(module, str(node.target)).detach()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: constant(module, each))
    with torch.no_grad():
        result: torch.Tensor = operator_of(node)(*args, **kwargs)
    return result


def params_at(
    module: fx.GraphModule,
    scheme: Scheme,
    given: Sequence[fx.Node],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> QuantizationParams:
    """Return constant parameters; bytes are viewed as their dtype."""
    stored = [
        constant(module, node).view(kind).reshape(grid)
        for node, (grid, kind) in zip(given, parameter_tensors(scheme, shape, dtype), strict=True)
    ]
    return QuantizationParams.of(scheme, shape, dtype, stored)


def quantized_at(module: fx.GraphModule, node: fx.Node) -> QuantizedTensor:
    """Return the tensor that a ``zeropoint.dequantize`` of constants dequantizes."""
    data, given, text, sides, _, own_dtype = args_of(node)
    shape = tuple(int(side) for side in sides)
    params = params_at(module, Scheme.parse(text), given, shape, own_dtype)
    return QuantizedTensor(data=constant(module, data), params=params, shape=shape, dtype=own_dtype)


def maker_of(data: fx.Node) -> fx.Node | None:
    """Return the node that computes codes from values, or None."""
    if data.target is operator.getitem:
        source = data.args[0]
        return source if isinstance(source, fx.Node) and source.target in QUANTIZING else None
    return data if data.target in QUANTIZING else None


def picked_rows(node: object) -> tuple[Any, fx.Node | None]:
    """Return a picked table and row numbers, or the node and None."""
    if not isinstance(node, fx.Node) or node.target not in PICKING:
        return node, None
    if node.target is aten.index_select.default:
        table, axis, index = args_of(node)
    else:
        table, indices = args_of(node)
        axis, index = len(indices) - 1, indices[0]
    return (table, index) if axis == 0 and isinstance(index, fx.Node) else (node, None)


def layer_name(node: fx.Node) -> str:
    """Return the dotted path of a node's layer, empty for the model.

    It is the module that called the node; in graphs without modules, the place of its constants, or of the
    first layer that uses it.
    """
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    if stack:
        return str(stack[-1]).partition("@")[0]
    pending, seen = [node], set()
    while pending:
        current = pending.pop(0)
        held = [source for source in current.all_input_nodes if source.op == "get_attr"]
        if held:
            return str(held[0].target).rpartition(".")[0]
        seen.add(current)
        pending += [user for user in current.users if user not in seen]
    return node.name
