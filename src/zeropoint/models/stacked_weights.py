"""Modules that multiply with a stack of matrices themselves, as linear layers.

A weight of three axes has a matrix for each expert. Its module multiplies with these by torch functions, so
that there is no layer to quantize or to watch. In its place the same ``forward`` runs on objects that
multiply through linear layers. Which functions take a weight is read from the source of ``forward``: it says
whether matrices are (out, in), as for ``linear``, or (in, out), as for ``bmm``, and that nothing else is done
with them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from .layer import without_weights
from .shared_linear import linear_on
from .state_dict_hooks import State, add_state_hooks

_PRODUCTS = {"linear": False, "bmm": True, "matmul": True}
"""Whether the weight of a product, its second argument, is (in, out), by function name."""
_MULTIPLY = (nn.functional.linear, torch.bmm, torch.matmul, torch.Tensor.matmul)
_AXES = 3


class SplitStacks(nn.Module):
    """A module with linear layers in place of stacked matrices.

    They are ``NAME.0``, ``NAME.1``, ... for each parameter ``NAME``. It takes and returns what the original
    does, whose memory the layers share.

    Args:
        whole: the module to unfuse.
        stacks: whether matrices are (in, out), by the name of the parameter that holds them.
        biases: names of parameters with a bias for each layer, by the name of the stack.
    """

    rest: Any

    def __init__(
        self, whole: Any, stacks: Mapping[str, bool], biases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.stacks, biases = dict(stacks), biases or {}
        # The module without its weights. It is no submodule, but reads the submodules' values.
        self.__dict__["rest"] = rest = without_weights(whole, (*stacks, *biases.values()))
        rest.__dict__["_modules"] = self._modules
        for name, in_out in self.stacks.items():
            layers = _layers(whole, name, biases.get(name), in_out=in_out)
            self.add_module(name, layers)
            vars(rest)[name] = _Stack(layers, [*layers], in_out=in_out)
        self.train(whole.training)
        names = _Names(self.stacks)
        add_state_hooks(self, names.out, names.back)

    def fused_parameters(self) -> dict[str, nn.Parameter]:
        """Return the fused parameters with the current weights of layers."""
        own = {n: p.detach() for n, p in self.named_parameters() if n.startswith(tuple(self.stacks))}
        return {name: nn.Parameter(value, False) for name, value in _Names(self.stacks).out(own).items()}

    def fused(self) -> nn.Module:
        """Return the original module with the current weights."""
        whole: nn.Module = copy.copy(self.rest)
        for name in self.stacks:
            del vars(whole)[name]
        whole.__dict__["_parameters"] = {**self.rest._parameters, **self.fused_parameters()}
        own = self._modules.items()
        whole.__dict__["_modules"] = {name: m for name, m in own if name not in self.stacks}
        return whole

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the outputs of the original ``forward``.

        Args:
            args: its positional arguments.
            named: its keyword arguments.
        """
        self.rest.training = self.training
        return self.rest(*args, **named)


def stacked_products(module: nn.Module) -> dict[str, bool]:
    """Return the orientation of stacked matrices, by parameter name.

    True is (in, out). Empty unless ``forward`` multiplies with each parameter of three axes, takes its shape,
    and does nothing else with it, and unless the module has an attribute with their number as a number of
    experts. What a decorated ``forward`` runs is not in its source.
    """
    stacks = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == _AXES}
    counts = [n for name, n in vars(module).items() if "expert" in name and type(n) is int and n > 1]
    forward = type(module).forward
    decorated = hasattr(forward, "__wrapped__") or "forward" in vars(module)
    if decorated or not stacks or any(p.shape[0] not in counts for p in stacks.values()):
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return {}
    above = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found: dict[str, set[bool | None]] = {name: set() for name in stacks}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in stacks and _called(node.value) == "self":
            found[node.attr].update(_in_out(node, above))
    if any(len(uses) != 1 or None in uses for uses in found.values()):
        return {}
    return {name: True in uses for name, uses in found.items()}


def _called(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _in_out(node: ast.AST, above: Mapping[ast.AST, ast.AST]) -> Iterator[bool | None]:
    """Yield a weight's orientation in a use; None for an unknown use."""
    flipped = False
    while True:
        user = above[node]
        match user:
            case ast.Subscript(value=value) if value is node:
                pass
            case ast.Attribute(attr="T" | "mT"):
                flipped = not flipped
            case ast.Attribute(attr="t" | "transpose"):
                flipped, user = not flipped, above[user]
            case ast.Attribute(attr="shape" | "dtype" | "device") | ast.Compare():
                return
            case ast.Call(func=func, args=[_, weight, *_]) if weight is node and _called(func) in _PRODUCTS:
                yield _PRODUCTS[_called(func)] != flipped
                return
            case ast.BinOp(op=ast.MatMult(), right=right) if right is node:
                yield not flipped
                return
            case _:
                yield None
                return
        node = user


class _Stack:
    """Matrices of a stack, which multiply through layers.

    layers: of the whole stack. keys: its own among them. one: whether it is a matrix, and no stack of them.
    """

    def __init__(self, layers: nn.ModuleDict, keys: list[str], *, in_out: bool, one: bool = False) -> None:
        self._layers, self._keys, self._in_out, self._one = layers, keys, in_out, one

    @property
    def shape(self) -> torch.Size:
        layer: Any = self._layers[self._keys[0]]
        matrix = (layer.out_features, layer.in_features)
        return torch.Size((len(self._keys), *matrix[:: -1 if self._in_out else 1])[self._one :])

    def __getitem__(self, number: Any) -> _Stack:
        keys = self._keys[number]
        one = isinstance(keys, str)
        return _Stack(self._layers, [keys] if one else keys, in_out=self._in_out, one=one)

    def transpose(self, *axes: int) -> _Stack:  # noqa: ARG002
        return _Stack(self._layers, self._keys, in_out=not self._in_out, one=self._one)

    t = transpose
    T = property(transpose)
    mT = property(transpose)  # noqa: N815

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        del types
        x, weight, *bias = args
        if not isinstance(weight, cls) or kwargs or function not in _MULTIPLY:
            raise UnsupportedError(f"{function.__name__} takes no weight that was unfused into layers")
        y = weight._product(x)
        return y + bias[0] if bias and bias[0] is not None else y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, along axis -3 with one matrix for each part."""
        if self._one:
            y: torch.Tensor = self._layers[self._keys[0]](x)
            return y
        parts = x.expand(*x.shape[:-3], len(self._keys), *x.shape[-2:]).unbind(-3)
        found = [self._of_rows(key, part) for key, part in zip(self._keys, parts, strict=True)]
        return torch.stack(found, -3)

    def _of_rows(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """Return products of rows; rows of zeros belong to other experts."""
        if torch.compiler.is_compiling():
            return self._layers[key](x)  # type: ignore[no-any-return]
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.any(-1).nonzero().squeeze(-1)
        y: torch.Tensor = self._layers[key](flat[rows])
        return y.new_zeros(len(flat), y.shape[-1]).index_copy(0, rows, y).reshape(*x.shape[:-1], -1)


class _Names:
    """Conversion between states of layers and stacked tensors."""

    def __init__(self, stacks: Mapping[str, bool]) -> None:
        self.stacks = stacks

    def out(self, state: State) -> State:
        """Stack what all layers have in floats."""
        found = dict(state)
        for name, kind, whole, flipped in self._kinds():
            layers = {key.split(".")[1] for key in state if key.startswith(f"{name}.")}
            own = [f"{name}.{number}.{kind}" for number in range(len(layers))]
            if own and all(key in state for key in own):
                parts = [found.pop(key) for key in own]
                found[whole] = torch.stack([part.t() if flipped else part for part in parts])
        return found

    def back(self, state: State) -> State:
        """Give each layer its own."""
        found = dict(state)
        for name, kind, whole, flipped in self._kinds():
            for number, part in enumerate(found.pop(whole, ())):
                found[f"{name}.{number}.{kind}"] = part.t() if flipped else part
        return found

    def _kinds(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yield stack, kind of parameter, stacked name, and whether it is transposed."""
        for name, in_out in self.stacks.items():
            yield name, "weight", name, in_out
            yield name, "bias", f"{name}_bias", False


def _layers(whole: Any, name: str, bias: str | None, *, in_out: bool) -> nn.ModuleDict:
    """Return layers for a stack, in a dictionary unlike block lists."""
    biases = None if bias is None else whole.get_parameter(bias)
    layers = nn.ModuleDict()
    for number, weight in enumerate(whole.get_parameter(name)):
        matrix = weight.t() if in_out else weight
        layers[str(number)] = linear_on(matrix, None if biases is None else biases[number])
    return layers
