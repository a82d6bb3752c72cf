"""Batch normalization folded into the product before it, in graphs.

    y = (W x + b - mean) g / sqrt(var + eps) + beta  =  W' x + b'
    W' = W g / sqrt(var + eps),     b' = (b - mean) g / sqrt(var + eps) + beta

g and beta are the normalization's weight and bias, mean and var its running statistics; all are numbers a
channel of the output. The arithmetic follows :mod:`torch.nn.utils.fusion`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from .layer_nodes import Layer
from .program import args_of, attribute, put, tensor_at

aten = torch.ops.aten

_NORMALIZATIONS: dict[object, int] = {
    aten.batch_norm.default: 7,
    aten._native_batch_norm_legit_no_training.default: 6,
}
"""Operator to the position of its epsilon."""
_BIAS = 2


def fold(module: fx.GraphModule, layers: Iterable[Layer]) -> None:
    """Fold batch normalizations into the weight and bias of ``layers``.

    A normalization stays when its product is used elsewhere, is called more than once or shares its weight.
    The weights become new parameters; the caller's module keeps its own.
    """
    for layer in layers:
        if len(layer.nodes) == 1 and layer.weight is not None:
            (node,) = layer.nodes
            norm = _following(node)
            if norm is not None and _is_alone(module, node, layer.weight):
                _fold(module, layer, norm)


def _following(node: fx.Node) -> fx.Node | None:
    """Return the foldable normalization that alone uses ``node``, if any."""
    users = list(node.users)
    if len(users) != 1 or users[0].target not in _NORMALIZATIONS or users[0].args[0] is not node:
        return None
    statistics = [arg for arg in users[0].args[1:5] if arg is not None]
    channels_are_second = node.target is not aten.linear.default or len(node.meta["val"].shape) == 2
    read = all(isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in statistics)
    return users[0] if read and None not in users[0].args[3:5] and channels_are_second else None


def _is_alone(module: fx.GraphModule, node: fx.Node, weight: fx.Node) -> bool:
    """Whether nothing else reads the weight, under any name."""
    if node.args[1] is not weight:
        return False
    tensor = tensor_at(module, str(weight.target))
    readers = [
        user
        for read in module.graph.nodes
        if read.op == "get_attr" and attribute(module, str(read.target)) is tensor
        for user in read.users
    ]
    return readers == [node]


def _fold(module: fx.GraphModule, layer: Layer, norm: fx.Node) -> None:
    (node,) = layer.nodes
    assert layer.weight is not None
    given = [None if arg is None else tensor_at(module, str(arg.target)) for arg in args_of(norm)[1:5]]
    weight, bias, mean, variance = given
    eps: float = args_of(norm)[_NORMALIZATIONS[norm.target]]
    assert mean is not None
    assert variance is not None
    product = tensor_at(module, str(layer.weight.target))
    added = node.args[_BIAS] if len(node.args) > _BIAS else None
    start = tensor_at(module, str(added.target)) if isinstance(added, fx.Node) else torch.zeros_like(mean)
    if layer.nodes[0].target is aten.linear.default:
        scale = torch.ones_like(mean) if weight is None else weight
        shift = torch.zeros_like(mean) if bias is None else bias
        made = fuse_linear_bn_weights(product, start, mean, variance, eps, scale, shift)
    else:
        made = fuse_conv_bn_weights(
            product, start, mean, variance, eps, weight, bias, transpose=_is_transposed(node)
        )
    _replace(module, node, str(layer.weight.target), made)
    _drop(module, norm, node)


def _is_transposed(node: fx.Node) -> bool:
    if node.target is aten.convolution.default:
        return bool(node.args[6])
    return "conv_transpose" in str(node.target)


def _replace(
    module: fx.GraphModule, node: fx.Node, path: str, made: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Replace a node's weight and bias; the weight keeps its path."""
    owner, _, leaf = path.rpartition(".")
    holder = module.get_submodule(owner)
    delattr(holder, leaf)
    weight, bias = (torch.nn.Parameter(tensor.detach()) for tensor in made)
    put(module, path, weight)
    with module.graph.inserting_before(node):
        bias_path = put(module, f"{owner}.bias_folded".lstrip("."), bias)
        read = module.graph.get_attr(bias_path)
    node.update_arg(_BIAS, read) if len(node.args) > _BIAS else setattr(node, "args", (*node.args, read))


def _drop(module: fx.GraphModule, norm: fx.Node, node: fx.Node) -> None:
    """Remove the normalization from the graph; other results serve training alone."""
    if norm.target is aten.batch_norm.default:
        norm.replace_all_uses_with(node)
    else:
        for user in list(norm.users):
            assert user.target is operator.getitem
            if user.args[1] == 0:
                user.replace_all_uses_with(node)
            module.graph.erase_node(user)
    module.graph.erase_node(norm)
