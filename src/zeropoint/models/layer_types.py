"""Quantizable layer types: weights as matrices, and forward functions.

One row of :data:`LAYER_TYPES` a type. A weight is quantized as the matrix whose rows make one output channel
each, so that a scheme means the same for every layer: ``channel`` is one scale for each output channel,
``g128`` one for 128 numbers that are multiplied into the same output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import _VF, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

Weights = Mapping[str, torch.Tensor]
"""Values of a layer's weights, by the names that they have in the layer."""
Shape = tuple[int, ...]


def _same(layer: Any, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 (other kinds need the layer)
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """How layers of one type are quantized.

    names: of the weights, given the layer.
    run: from layer, values of its weights and the arguments of the call to the layer's output.
    shapes: one sample of input and output, axes along which there are no channels having length 1.
    matrix, restore: from a weight to its matrix, and back.
    """

    names: Callable[[Any], tuple[str, ...]]
    run: Callable[..., Any]
    shapes: Callable[[Any], tuple[Shape, Shape]]
    matrix: Callable[[Any, torch.Tensor], torch.Tensor] = _same
    restore: Callable[[Any, torch.Tensor], torch.Tensor] = _same


def _linear(layer: nn.Linear, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights["weight"], layer.bias)


def _embedding(layer: nn.Embedding, weights: Weights, index: torch.Tensor) -> torch.Tensor:
    # A sparse gradient could not pass the quantizer, whose mask is dense.
    return functional.embedding(
        index, weights["weight"], layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq
    )


def _embedding_bag(
    layer: nn.EmbeddingBag,
    weights: Weights,
    index: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    return functional.embedding_bag(
        index, weights["weight"], offsets, mode=layer.mode, per_sample_weights=per_sample_weights,
        scale_grad_by_freq=layer.scale_grad_by_freq, include_last_offset=layer.include_last_offset,
        padding_idx=layer.padding_idx,
    )  # fmt: skip


def _convolution(layer: Any, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer._conv_forward(x, weights["weight"], layer.bias)
    return result


def _flat(layer: Any, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 (as the others)
    return weight.flatten(1)


def _kernels(layer: Any, matrix: torch.Tensor) -> torch.Tensor:
    return matrix.reshape(layer.out_channels, -1, *layer.kernel_size)


_TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def _transposed(
    layer: Any, weights: Weights, x: torch.Tensor, output_size: list[int] | None = None
) -> torch.Tensor:
    rank = len(layer.kernel_size)
    extra = layer._output_padding(
        x, output_size, layer.stride, layer.padding, layer.kernel_size, rank, layer.dilation
    )
    return _TRANSPOSED[rank](
        x, weights["weight"], layer.bias, layer.stride, layer.padding, extra, layer.groups, layer.dilation
    )


def _transpose_matrix(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a transposed convolution weight as a matrix.

    (in, out / groups, *kernel) becomes (groups * out / groups, in / groups * kernel).
    """
    share = layer.in_channels // layer.groups
    grouped = weight.reshape(layer.groups, share, *weight.shape[1:]).transpose(1, 2)
    return grouped.flatten(0, 1).flatten(1)


def _untranspose_matrix(layer: Any, matrix: torch.Tensor) -> torch.Tensor:
    share = layer.in_channels // layer.groups
    grouped = matrix.reshape(layer.groups, -1, share, *layer.kernel_size)
    return grouped.transpose(1, 2).flatten(0, 1)


_RECURRENT: dict[str, Callable[..., Any]] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}


def _recurrent(layer: Any, weights: Weights, x: Any, hx: Any = None) -> Any:
    """Return a recurrent layer's (output, h), with (h, c) in an LSTM."""
    data, sizes, order, back = x if isinstance(x, PackedSequence) else (x, None, None, None)
    unbatched = sizes is None and data.dim() == 2
    axis = 0 if layer.batch_first else 1
    data = data.unsqueeze(axis) if unbatched else data
    count = data.size(axis) if sizes is None else int(sizes[0])
    if hx is None:
        states = _first_states(layer, data, count)
    else:
        given = hx if layer.mode == "LSTM" else (hx,)
        states = [_ordered(state.unsqueeze(1) if unbatched else state, order) for state in given]
    start = states if layer.mode == "LSTM" else states[0]
    flat = [weights[n] if n in weights else getattr(layer, n) for n in layer._flat_weights_names]
    facts = (layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional)
    if sizes is not None:
        output, *last = _RECURRENT[layer.mode](data, sizes, start, flat, *facts)
        output = PackedSequence(output, sizes, order, back)
    else:
        output, *last = _RECURRENT[layer.mode](data, start, flat, *facts, layer.batch_first)
        output = output.squeeze(axis) if unbatched else output
    last = [_ordered(state, back).squeeze(1) if unbatched else _ordered(state, back) for state in last]
    return output, tuple(last) if layer.mode == "LSTM" else last[0]


def _first_states(layer: Any, x: torch.Tensor, count: int) -> list[torch.Tensor]:
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [x.new_zeros(rows, count, width) for width in widths[: 2 if layer.mode == "LSTM" else 1]]


def _ordered(state: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return state if order is None else state.index_select(1, order)


def _cell(layer: Any, weights: Weights, x: torch.Tensor, hx: Any = None) -> Any:
    """Return a recurrent cell's h, or (h, c) of an LSTM."""
    unbatched, is_lstm = x.dim() == 1, isinstance(layer, nn.LSTMCell)
    rows = x.unsqueeze(0) if unbatched else x
    if hx is None:
        states = [rows.new_zeros(rows.size(0), layer.hidden_size)] * (1 + is_lstm)
    else:
        states = [state.unsqueeze(0) if unbatched else state for state in (hx if is_lstm else (hx,))]
    function = _cell_function(layer)
    found = function(
        rows, states if is_lstm else states[0], weights["weight_ih"], weights["weight_hh"],
        layer.bias_ih, layer.bias_hh,
    )  # fmt: skip
    if not is_lstm:
        return found.squeeze(0) if unbatched else found
    return tuple(state.squeeze(0) for state in found) if unbatched else found


def _cell_function(layer: Any) -> Any:
    if isinstance(layer, nn.LSTMCell):
        return _VF.lstm_cell
    if isinstance(layer, nn.GRUCell):
        return _VF.gru_cell
    return _VF.rnn_tanh_cell if layer.nonlinearity == "tanh" else _VF.rnn_relu_cell


def _weight(layer: Any) -> tuple[str, ...]:  # noqa: ARG001 (recurrent layers have several)
    return ("weight",)


def _channels(layer: Any) -> tuple[Shape, Shape]:
    ones = (1,) * len(layer.kernel_size)
    return (1, layer.in_channels, *ones), (1, layer.out_channels, *ones)


def _recurrent_shapes(layer: Any) -> tuple[Shape, Shape]:
    wide = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    return (1, 1, layer.input_size), (1, 1, wide)


_LINEAR = LayerType(
    names=_weight, run=_linear, shapes=lambda layer: ((1, layer.in_features), (1, layer.out_features))
)
_TABLE = LayerType(names=_weight, run=_embedding, shapes=lambda layer: ((1,), (1, layer.embedding_dim)))
_BAG = LayerType(names=_weight, run=_embedding_bag, shapes=lambda layer: ((1,), (1, layer.embedding_dim)))
_CONVOLUTION = LayerType(names=_weight, run=_convolution, shapes=_channels, matrix=_flat, restore=_kernels)
_TRANSPOSE = LayerType(
    names=_weight, run=_transposed, shapes=_channels, matrix=_transpose_matrix, restore=_untranspose_matrix
)
_SEQUENCE = LayerType(
    names=lambda layer: tuple(name for name in layer._flat_weights_names if name.startswith("weight")),
    run=_recurrent,
    shapes=_recurrent_shapes,
)
_STEP = LayerType(
    names=lambda _: ("weight_ih", "weight_hh"),
    run=_cell,
    shapes=lambda layer: ((1, layer.input_size), (1, layer.hidden_size)),
)

LAYER_TYPES: dict[type[nn.Module], LayerType] = {
    nn.Linear: _LINEAR,
    nn.Embedding: _TABLE,
    nn.EmbeddingBag: _BAG,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONVOLUTION),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSE),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _SEQUENCE),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _STEP),
}
"""By exact type: a subclass may compute something else."""


def _any_shapes(layer: Any) -> tuple[Shape, Shape]:
    shape = (1, *layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else (1,)
    return shape, shape


def _as_it_is(layer: nn.Module, weights: Weights, *args: Any, **named: Any) -> Any:  # noqa: ARG001 (none)
    return layer(*args, **named)


WEIGHTLESS = LayerType(names=lambda _: (), run=_as_it_is, shapes=_any_shapes)
"""Of every other module: only what goes in and what comes out can be quantized."""


def layer_type(layer: nn.Module) -> LayerType:
    """Return the kind of ``layer``; :data:`WEIGHTLESS` where its type has no row.

    >>> layer_type(nn.GRUCell(2, 3)).names(None)
    ('weight_ih', 'weight_hh')
    """
    return LAYER_TYPES.get(type(layer), WEIGHTLESS)


def weights_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the layer's quantizable weights by name, in own shapes."""
    return {name: layer.get_parameter(name) for name in layer_type(layer).names(layer)}


def features(layer: nn.Module, side: str) -> int:
    """Return the channels of a sample on one side of a layer.

    >>> features(nn.Conv2d(3, 8, 5), "output")
    8
    """
    return math.prod(layer_type(layer).shapes(layer)[side == "output"])
