"""Conversion of a quantized model back to float layers.

Weights are dequantized, under the names and in the shapes that they had. Quantizers of inputs and outputs are
removed: the products use the same weights, and inputs that are not rounded.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection
from functools import cache, partial

import torch
from torch import nn

from ..errors import UnsupportedError
from ..signatures import by_signature
from .attention import SplitAttention
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .layer import PreparedLayer, QuantizedLayer
from .layer_types import layer_type
from .linear import QuantizedLinear
from .packed_weight import PackedWeight
from .recipe_layers import require_model
from .saving_guard import unguarded
from .shared_linear import linear_on
from .stacked_weights import SplitStacks
from .unfuse import replace_modules

QUANTIZED = (QuantizedLinear, QuantizedLayer, QuantizedEmbedding, QuantizedEmbeddingBag)
"""Layers with packed weights, or with quantizers around one."""


@partial(by_signature, but=("model",))
def dequantize_model(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Return ``model`` with float layers in place of quantized ones.

    ``SplitAttention``, ``SplitStacks`` and unfused ``Conv1D`` become what they were. Weights that several
    layers share stay one.

    Args:
        model: a model with quantized layers.
        inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises:
        UnsupportedError: for a model without quantized layers, and for a prepared one.

    Example:
        >>> from zeropoint.models import quantize_model
        >>> converted = quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16").model
        >>> dequantize_model(converted)
        Sequential(
          (0): Linear(in_features=64, out_features=8, bias=True)
        )
    """
    require_model(model)
    if not any(isinstance(m, QUANTIZED) for m in model.modules()):
        prepared = any(isinstance(m, PreparedLayer) for m in model.modules())
        raise UnsupportedError(
            f"model (a {type(model).__name__}) has no quantized layers; "
            + ("convert it first" if prepared else "pass the model of a conversion")
        )
    target = model if inplace else copy.deepcopy(model)
    restored = restore(target, [m for m in target.modules() if isinstance(m, (*QUANTIZED, *_UNFUSED))])
    return unguarded(restored)


def restore(model: nn.Module, layers: Collection[nn.Module]) -> nn.Module:
    """Replace quantized or unfused layers by float and fused modules."""

    @cache
    def weight(packed: PackedWeight) -> nn.Parameter:
        """Return the values of a matrix, which layers may share."""
        return nn.Parameter(packed.values(), requires_grad=False)

    replaced: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, QUANTIZED):
            replaced[layer] = _float_layer(layer, weight).train(layer.training)
    replace_modules(model, replaced)
    fused: dict[nn.Module, nn.Module] = {
        layer: layer.fused().train(layer.training) for layer in layers if isinstance(layer, _UNFUSED)
    }
    replace_modules(model, fused)
    return fused.get(model, replaced.get(model, model))


_UNFUSED = (SplitAttention, SplitStacks)


def _float_layer(layer: nn.Module, weight: Callable[[PackedWeight], nn.Parameter]) -> nn.Module:
    if isinstance(layer, QuantizedLinear):
        return _linear(layer, weight(layer.weight))
    if isinstance(layer, QuantizedEmbedding):
        rows, columns = layer.weight.shape
        with torch.device("meta"):
            table = nn.Embedding(rows, columns, padding_idx=layer.padding_idx)
        table.weight = weight(layer.weight)
        return table
    if isinstance(layer, QuantizedEmbeddingBag):
        rows, columns = layer.weight.shape
        with torch.device("meta"):
            bag = nn.EmbeddingBag(
                rows,
                columns,
                mode=layer.mode,
                padding_idx=layer.padding_idx,
                include_last_offset=layer.include_last_offset,
            )
        bag.weight = weight(layer.weight)
        return bag
    assert isinstance(layer, QuantizedLayer)
    return _whole(layer)


def _linear(layer: QuantizedLinear, weight: nn.Parameter) -> nn.Module:
    if layer.transposed:
        pytorch_utils = importlib.import_module("transformers.pytorch_utils")
        with torch.device("meta"):
            conv: nn.Module = pytorch_utils.Conv1D(layer.out_features, layer.in_features)
        conv.register_parameter("weight", nn.Parameter(weight.detach().t().contiguous(), False))
        conv.register_parameter("bias", layer.bias)
        return conv
    linear = linear_on(weight, layer.bias)
    linear.weight = weight  # the same object, so that ties stay
    return linear


def _whole(layer: QuantizedLayer) -> nn.Module:
    """Return the inner layer with float weights, if it has any."""
    if not len(layer.weights):
        return layer.layer
    shell = copy.copy(layer.layer)
    shell.__dict__["_parameters"] = dict(layer.layer._parameters)
    kind = layer_type(shell)
    for name, packed in layer.weights.items():
        assert isinstance(packed, PackedWeight)
        values = kind.restore(shell, packed.values()).contiguous()
        shell._parameters[name] = nn.Parameter(values, requires_grad=False)
    if isinstance(shell, nn.RNNBase):
        shell._flat_weights = [shell._parameters[name] for name in shell._flat_weights_names]
    return shell
