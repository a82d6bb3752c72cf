"""Layers with quantizers around them, in training and on packed weights.

:mod:`zeropoint.models.layer_types` computes a layer; here it gets its weights, and its inputs and outputs
pass their quantizers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import NonFiniteError, ShapeError, UnsupportedError
from ..recipes import Decision
from .layer_types import WEIGHTLESS, layer_type, weights_of
from .packed_weight import PackedWeight
from .state_dict_hooks import Inside, add_state_hooks

OnTensor = Callable[[torch.Tensor], torch.Tensor]
"""A quantizer, or what stands where one would."""


class PreparedLayer(nn.Module):
    """A layer that trains with fake-quantized weights at each step.

        y = quantize_output(run(layer, quantize_weight(weights), quantize_input(x)))

    Its state has the names of the layer's own, and of its quantizers; other attributes are the layer's. A
    layer with weights has its first argument quantized; another module every tensor of floats that it is
    called with, all by one quantizer. Of several results the first is quantized: of an LSTM the outputs.

    Args:
        layer: the float layer, whose parameters train.
        weight_quantizers: by the names of its weights; each takes the weight as a matrix whose rows make one
            output channel. Any quantizer may be None or absent.
        input_quantizer: quantizes the input, or None.
        output_quantizer: quantizes the output, or None.
        decision: what a recipe said of the layer.
    """

    def __init__(
        self,
        layer: nn.Module,
        weight_quantizers: Mapping[str, nn.Module],
        *,
        input_quantizer: nn.Module | None = None,
        output_quantizer: nn.Module | None = None,
        decision: Decision,
    ) -> None:
        super().__init__()
        self.decision = decision
        self.layer = layer
        self.weight_quantizers = nn.ModuleDict(dict(weight_quantizers))
        self.input_quantizer = input_quantizer
        self.output_quantizer = output_quantizer
        self.train(layer.training)
        add_state_hooks(self, _IN_LAYER.out, _IN_LAYER.back)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, such as weight or stride."""
        return _of_layer(self, name)

    def quantized_weights(self) -> dict[str, torch.Tensor]:
        """Return quantized weights by name, in their own shapes."""
        kind, layer = layer_type(self.layer), self.layer
        return {
            name: kind.restore(layer, self.weight_quantizers[name](kind.matrix(layer, weight)))
            if name in self.weight_quantizers
            else weight
            for name, weight in weights_of(layer).items()
        }

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the layer's result.

        Args:
            args: positional arguments of the layer.
            named: keyword arguments of the layer.
        """
        try:
            args, named = quantized_inputs(self.layer, self.input_quantizer, args, named)
            result = layer_type(self.layer).run(self.layer, self.quantized_weights(), *args, **named)
            return quantized_output(self.output_quantizer, result)
        except NonFiniteError as error:
            raise placed(error, self.decision.subject.name) from error


class QuantizedLayer(nn.Module):
    """A layer with packed weights, dequantized as a whole per call.

    While it computes, a call therefore holds its weights in floats too, 4 bytes a number of float32; between
    calls there are codes alone. A recurrent layer dequantizes once for a sequence, its cell for each step.

    Args:
        layer: the float layer without its weights: sizes, strides, biases.
        weights: by name, as matrices. Quantizers act as in :class:`PreparedLayer`, with fixed parameters or
            with parameters of each tensor. place: its name in the model, for messages.
        input_quantizer: quantizes the input, or None.
        output_quantizer: quantizes the output, or None.

    Raises:
        UnsupportedError: for a weight that such a layer does not have.
        ShapeError: for one of another size.
    """

    place: str = ""

    def __init__(
        self,
        layer: nn.Module,
        weights: Mapping[str, PackedWeight],
        *,
        input_quantizer: nn.Module | None = None,
        output_quantizer: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check_weights(layer, weights)
        self.layer = without_weights(layer, tuple(weights))
        self.weights = nn.ModuleDict(dict(weights))
        self.input_quantizer = input_quantizer
        self.output_quantizer = output_quantizer
        self.train(layer.training)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, such as bias or stride."""
        if name != "layer" and name in self.__dict__.get("_modules", {}).get("weights", ()):
            return self.weights[name]  # which says what to do when the model computes with it
        return _of_layer(self, name)

    def explain(self) -> str:
        """Return in words how the layer computes.

        Example:
            >>> from zeropoint.functional import quantize
            >>> matrix = quantize(torch.ones(2, 9), "int8:channel")
            >>> QuantizedLayer(nn.Conv2d(1, 2, 3), {"weight": PackedWeight(matrix)}).explain()
            'Conv2d in floats, with weight dequantized as a whole for each call'
        """
        kind, names = type(self.layer).__name__, " and ".join(self.weights)
        return f"{kind} in floats" + (f", with {names} dequantized as a whole for each call" if names else "")

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the layer's result.

        Args:
            args: positional arguments of the layer.
            named: keyword arguments of the layer.
        """
        try:
            return self._computed(*args, **named)
        except NonFiniteError as error:
            raise placed(error, self.place) from error

    def _computed(self, *args: Any, **named: Any) -> Any:
        args, named = quantized_inputs(self.layer, self.input_quantizer, args, named)
        kind, values = layer_type(self.layer), {}
        for name in kind.names(self.layer):
            if name in self.weights:
                matrix = self._matrix(name, _dtype_of(args[0]))
                values[name] = kind.restore(self.layer, matrix)
            else:
                values[name] = self.layer.get_parameter(name)
        return quantized_output(self.output_quantizer, kind.run(self.layer, values, *args, **named))

    def _matrix(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        packed = self.weights[name]
        assert isinstance(packed, PackedWeight)
        return packed.tile(0, packed.shape[0], dtype)


def placed(error: NonFiniteError, place: str) -> NonFiniteError:
    """Return the error with the layer's name, if known."""
    return NonFiniteError(f"layer {place}: {error}") if place else error


_IN_LAYER = Inside("layer", ("weight_quantizers", "input_quantizer", "output_quantizer"))


def _of_layer(module: nn.Module, name: str) -> Any:
    """Return an attribute of ``module``, or else of the layer inside it."""
    try:
        return nn.Module.__getattr__(module, name)
    except AttributeError:
        layer = module.__dict__.get("_modules", {}).get("layer")
        if layer is None or name.startswith("__"):
            raise
        return getattr(layer, name)


def _check_weights(layer: nn.Module, weights: Mapping[str, PackedWeight]) -> None:
    """Raise unless packed weights fit the layer's matrices."""
    kind, names = layer_type(layer), layer_type(layer).names(layer)
    for name, packed in weights.items():
        if name not in names:
            known = ", ".join(names) or "none"
            raise UnsupportedError(
                f"weights (with {name!r}) must be those of a {type(layer).__name__}: {known}"
            )
        shape = tuple(kind.matrix(layer, layer.get_parameter(name)).shape)
        if packed.shape != shape:
            raise ShapeError(
                f"weights[{name!r}] (shape {packed.shape}) must be a matrix of shape {shape} for this "
                f"{type(layer).__name__}, a row for each output channel"
            )


def without_weights(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Return a copy of ``layer`` without some parameters, others frozen."""
    shell = copy.copy(layer)
    for registry in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[registry] = dict(layer.__dict__[registry])
    for name, parameter in layer._parameters.items() if names else ():
        kept = None if name in names or parameter is None else parameter.detach()
        shell._parameters[name] = None if kept is None else nn.Parameter(kept, requires_grad=False)
    if isinstance(shell, nn.RNNBase):
        shell._flat_weights = [shell._parameters[name] for name in shell._flat_weights_names]
    return shell


def quantized_inputs(
    layer: nn.Module, quantizer: OnTensor | None, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return call arguments with quantized inputs, by layer type.

    The argument that torch's layers call ``input`` comes first.
    """
    if layer_type(layer) is WEIGHTLESS:
        if quantizer is None:
            return args, named
        return on_floats(quantizer, args), {key: on_floats(quantizer, value) for key, value in named.items()}
    if not args:
        args, named = (named["input"],), {key: value for key, value in named.items() if key != "input"}
    return args if quantizer is None else (on_floats(quantizer, args[0]), *args[1:]), named


@contextmanager
def on_inputs(layers: Iterable[tuple[nn.Module, OnTensor]], *, prepend: bool = False) -> Iterator[None]:
    """Pass the inputs of layers through functions inside the context.

    prepend: whether a function runs before other hooks of its layer.
    """
    with ExitStack() as hooks:
        for layer, function in layers:
            hook = functools.partial(_passed_through, function)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend))
        yield


def _passed_through(
    function: OnTensor, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return quantized_inputs(layer, function, args, named)


def quantized_output(quantizer: OnTensor | None, result: Any) -> Any:
    """Return a result with its first tensor or packed sequence quantized."""
    if quantizer is None:
        return result
    if type(result) is tuple:
        return (on_floats(quantizer, result[0]), *result[1:])
    return on_floats(quantizer, result)


def on_floats(function: OnTensor, value: Any) -> Any:
    """Apply a function to all float tensors in nested tuples and lists.

    >>> on_floats(torch.neg, (torch.ones(1), [torch.tensor([2])]))
    (tensor([-1.]), [tensor([2])])
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        found = [on_floats(function, item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def _dtype_of(x: Any) -> torch.dtype:
    dtype: torch.dtype = x.dtype if isinstance(x, torch.Tensor) else x.data.dtype
    return dtype
