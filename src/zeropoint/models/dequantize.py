"""Conversion of a quantized model back to float layers.

Weights are dequantized, under the names and in the shapes that they had. Quantizers of inputs and outputs are
removed: the products use the same weights, and inputs that are not rounded.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection
from functools import partial

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
    weights = _Weights()
    replaced: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, QUANTIZED):
            replaced[layer] = _float_layer(layer, weights).train(layer.training)
    replace_modules(model, replaced)
    fused: dict[nn.Module, nn.Module] = {
        layer: _fuse(layer).train(layer.training) for layer in layers if isinstance(layer, _UNFUSED)
    }
    replace_modules(model, fused)
    return fused.get(model, replaced.get(model, model))


_UNFUSED = (SplitAttention, SplitStacks)


class _Weights:
    """Float parameters of packed weights, shared where weights are."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PackedWeight, nn.Parameter]] = {}

    def of(self, packed: PackedWeight) -> nn.Parameter:
        """Return the values of a matrix, in its own dtype."""
        known = self._known.get(id(packed))
        if known is None:
            known = packed, nn.Parameter(packed.values(), requires_grad=False)
            self._known[id(packed)] = known
        return known[1]


def _float_layer(layer: nn.Module, weights: _Weights) -> nn.Module:
    if isinstance(layer, QuantizedLinear):
        return _linear(layer, weights.of(layer.weight))
    if isinstance(layer, QuantizedEmbedding):
        rows, columns = layer.weight.shape
        with torch.device("meta"):
            table = nn.Embedding(rows, columns, padding_idx=layer.padding_idx)
        table.weight = weights.of(layer.weight)
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
        bag.weight = weights.of(layer.weight)
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


def _fuse(module: nn.Module) -> nn.Module:
    """Return the fused module with its layers' current weights."""
    if isinstance(module, SplitAttention):
        return _attention(module)
    assert isinstance(module, SplitStacks)
    return module.fused()


def _attention(split: SplitAttention) -> nn.Module:
    layers = [split.q_proj, split.k_proj, split.v_proj]
    with torch.device("meta"):
        whole = nn.MultiheadAttention(
            split.embed_dim, split.num_heads, dropout=split.dropout, bias=split.out_proj.bias is not None,
            add_zero_attn=split.add_zero_attn, kdim=layers[1].in_features, vdim=layers[2].in_features,
            batch_first=split.batch_first,
        )  # fmt: skip
    for name, parameter in split.fused_parameters().items():
        setattr(whole, name, parameter)
    whole.out_proj.weight, whole.out_proj.bias = split.out_proj.weight, split.out_proj.bias
    return whole
