"""Exported programs as mutable graphs, and back, sharing tensors.

This module knows nothing of quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from ...errors import UnsupportedError

_EVALUATION = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments of operators that tell training from evaluation, and what they are in evaluation."""


def graph_of(program: ExportedProgram | fx.GraphModule) -> fx.GraphModule:
    """Return a mutable graph of ``program``, sharing its tensors.

    program: a result of ``torch.export.export``, or the module of one.
    Raises UnsupportedError for anything else, such as a graph of ``torch.fx.symbolic_trace``: it calls
    modules and says no shapes, both of which exporting it mends.

    >>> program = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),))
    >>> [node.name for node in graph_of(program).graph.nodes]
    ['weight', 'bias', 'input_1', 'linear', 'output']
    """
    module = program.module(check_guards=False) if isinstance(program, ExportedProgram) else program
    if not isinstance(module, fx.GraphModule):
        raise UnsupportedError(
            f"program (a {type(program).__name__}) must be exported; pass torch.export.export(model, args)"
        )
    graph = copied(module.graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)  # exporting again brings the checks of shapes back
        elif node.op in ("call_module", "call_method") or _lacks_shape(node):
            raise UnsupportedError(
                f"program has a node {node.name} ({node.op}) without an operator or a shape; "
                "pass torch.export.export(graph, args)"
            )
    return fx.GraphModule(module, graph)


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a graph with nodes of its own, called like ``graph``."""
    result = fx.Graph()
    returned = result.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(returned, tuple)
    result.output(returned[0]).meta.update(returned[1].meta)
    result.set_codegen(graph._codegen)
    return result


def _lacks_shape(node: fx.Node) -> bool:
    return node.op == "placeholder" and "val" not in node.meta


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments, typed as Any."""
    return node.args


def operator_of(node: fx.Node) -> Callable[..., Any]:
    """Return a node's callable."""
    assert callable(node.target)
    return node.target


def tensor_at(module: torch.nn.Module, path: str) -> torch.Tensor:
    """Return the parameter or buffer at a dotted path."""
    found = attribute(module, path)
    assert isinstance(found, torch.Tensor)
    return found


def attribute(module: torch.nn.Module, path: str) -> object:
    """Return the attribute at a dotted path."""
    owner, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def put(module: fx.GraphModule, path: str, value: torch.Tensor | torch.nn.Module) -> str:
    """Store a tensor or module at a free dotted path; return it."""
    owner_path, _, leaf = path.rpartition(".")
    owner, name, number = _owner(module, owner_path), leaf, 0
    while hasattr(owner, name):
        number += 1
        name = f"{leaf}_{number}"
    if isinstance(value, torch.nn.Parameter):
        owner.register_parameter(name, value)
    elif isinstance(value, torch.Tensor):
        owner.register_buffer(name, value)
    else:
        owner.add_module(name, value)
    return f"{owner_path}.{name}" if owner_path else name


def _owner(module: torch.nn.Module, path: str) -> torch.nn.Module:
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    return module


def cleaned(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without dead code and unread tensors."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    result = fx.GraphModule(module, module.graph)
    result.meta.update(module.meta)
    return result


def evaluate(module: fx.GraphModule) -> None:
    """Switch operators to evaluation mode: dropout, batch normalization.

    Counters of batches, which training alone reads, are no longer written.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.name in _EVALUATION and position < len(node.args):
                node.update_arg(position, _EVALUATION[argument.name])
            elif argument.name in node.kwargs and argument.name in _EVALUATION:
                node.update_kwarg(argument.name, _EVALUATION[argument.name])
        counter = node.args[0] if node.args else None
        if node.target is torch.ops.aten.add_.Tensor and _is_counter(counter):
            assert isinstance(counter, fx.Node)
            node.replace_all_uses_with(counter)
            module.graph.erase_node(node)


def _is_counter(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    return str(node.target).rpartition(".")[2] == "num_batches_tracked"


def to_program(module: fx.GraphModule, like: ExportedProgram) -> ExportedProgram:
    """Return ``module`` as a program with ``like``'s inputs and dynamic axes.

    Args:
        module: a prepared or converted graph.
        like: the source program, which knows example inputs and which axes may vary.

    Raises:
        UnsupportedError: for anything else, and for a program that was saved without its inputs.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> like = torch.export.export(layer, (torch.ones(3, 4),), dynamic_shapes=({0: Dim.AUTO},))
        >>> to_program(graph_of(like), like).module()(torch.ones(7, 4)).shape
        torch.Size([7, 2])
    """
    if not isinstance(like, ExportedProgram):
        raise UnsupportedError(
            f"like (a {type(like).__name__}) must be the exported program that module was made of"
        )
    if like.example_inputs is None:
        raise UnsupportedError("like was saved without example inputs; export the module with your own")
    args, kwargs = like.example_inputs
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    known = {node.name: node.meta["val"] for node in like.graph.nodes if node.op == "placeholder"}
    specs = [spec.arg for spec in like.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    axes = [_open_axes(known.get(spec.name)) for spec in specs]
    assert len(axes) == len(leaves)
    shapes, named = torch.utils._pytree.tree_unflatten(axes, spec)
    return torch.export.export(module, args, kwargs, dynamic_shapes=(*shapes, *named.values()))


def _open_axes(value: Any) -> dict[int, Any] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return {axis: Dim.AUTO for axis, size in enumerate(value.shape) if type(size) is not int}
