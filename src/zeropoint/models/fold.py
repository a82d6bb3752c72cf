"""Batch normalization folded into the convolution or linear layer before it.

    y = (W x + b - mean) g / sqrt(var + eps) + beta  =  W' x + b'
    W' = W g / sqrt(var + eps),     b' = (b - mean) g / sqrt(var + eps) + beta

g and beta are the weight and bias of the normalization, mean and var its running statistics: one number a
channel of the output, a row of the weight's matrix. The arithmetic follows ``torch.nn.utils.fusion``.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from ..errors import ShapeError
from ..signatures import by_signature
from .layer_types import layer_type
from .recipe_layers import has_hooks, require_model
from .unfuse import replace_modules

NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PRODUCTS: frozenset[type[nn.Module]] = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
)
"""By exact type: a subclass may compute something else."""


UNTRACED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What a model's own code raises when it is run with stand-ins for tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Folding:
    """A model with normalizations folded, and a record of each.

    Args:
        model: the folded model.
        folded: the layer that took each normalization in, by name.
        kept: why each of the other normalizations was kept, by name.
    """

    model: nn.Module
    folded: Mapping[str, str]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{norm}: folded into {layer}" for norm, layer in self.folded.items()]
        return "\n".join([*lines, *(f"{norm}: kept, {reason}" for norm, reason in self.kept.items())])

    def __repr__(self) -> str:
        return str(self) or "no batch normalizations"


@partial(by_signature, but=("model",))
def fold(model: nn.Module, *, inplace: bool = False) -> Folding:
    """Return ``model`` with batch normalizations folded into preceding layers.

    A normalization is folded where it alone reads a layer's output. Its source is found by tracing the model
    with torch.fx; in one that cannot be traced, only neighbors inside an ``nn.Sequential`` are folded. A
    normalization stays, with the reason in the result, where it trains, has no running statistics, follows
    something else, where its layer is used otherwise or shares its weight, and where either has hooks. Folded
    ones become ``nn.Identity``; after a Linear layer, a module that refuses more than two axes, of which a
    normalization takes the second.

    Args:
        model: in evaluation mode.
        inplace: whether ``model`` itself is changed; otherwise a copy is.

    Example:
        >>> folding = fold(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval())
        >>> print(folding)
        1: folded into 0
    """
    require_model(model)
    target = model if inplace else copy.deepcopy(model)
    names = {module: name for name, module in target.named_modules()}
    norms = [module for module in names if type(module) in NORMALIZATIONS]
    sources, untraced = _sources(target)
    shared = Counter(id(p) for m in names for p in m._parameters.values() if p is not None and p.ndim > 1)
    folded, kept, replaced = {}, {}, {}
    for norm in norms:
        source, reason = sources.get(norm, (None, untraced or "it is not called once"))
        reason = reason or _refusal(norm, source, shared)
        if reason or source is None:
            kept[names[norm]] = reason
            continue
        _fold(source, norm)
        folded[names[norm]] = names[source]
        replaced[norm] = FlatRows() if isinstance(source, nn.Linear) else nn.Identity()
    replace_modules(target, replaced)
    return Folding(model=target, folded=folded, kept=kept)


class FlatRows(nn.Module):
    """Identity of matrices in place of a folded normalization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``; raises ShapeError unless it has two axes."""
        if x.ndim != 2:
            raise ShapeError(
                f"x (shape {tuple(x.shape)}) must have two axes where a normalization was folded into a "
                "Linear layer; flatten it, or do not fold this model"
            )
        return x


Sources = dict[nn.Module, tuple[nn.Module | None, str]]
"""Normalization to the layer before it, or why there is none."""


def _sources(model: nn.Module) -> tuple[Sources, str]:
    """Return the source of each normalization, and a reason for gaps."""
    try:
        graph = fx.Tracer().trace(model)
    except UNTRACED as error:
        brief = str(error).split("\n", 1)[0][:100]
        return dict(_neighbors(model)), (
            f"the model cannot be traced ({brief}) and it is not next to a layer in an nn.Sequential; export "
            "it, and quantize_graph folds it"
        )
    calls = Counter(model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module")
    sources: Sources = {}
    for node in graph.nodes:
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if type(module) in NORMALIZATIONS and calls[module] == 1:
                sources[module] = _before(model, node, calls)
    return sources, ""


def _before(model: nn.Module, node: fx.Node, calls: Counter[nn.Module]) -> tuple[nn.Module | None, str]:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return None, "it does not follow a layer"
    layer = model.get_submodule(str(source.target))
    if len(source.users) > 1 or calls[layer] > 1:
        return None, f"what {source.target} gives is used elsewhere too"
    return layer, ""


def _neighbors(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[nn.Module, str]]]:
    """Yield each normalization after a module in an ``nn.Sequential``."""
    places = Counter(child for module in model.modules() for child in module._modules.values())
    for module in model.modules():
        if type(module) is nn.Sequential:
            for layer, norm in itertools.pairwise(module):
                if type(norm) in NORMALIZATIONS and places[layer] == places[norm] == places[module] == 1:
                    yield norm, (layer, "")


def _refusal(norm: nn.Module, source: nn.Module | None, shared: Counter[int]) -> str:
    """Return why ``norm`` cannot be folded into ``source``, empty when it can."""
    if source is None or type(source) not in PRODUCTS:
        return f"it follows a {type(source).__name__}, not a convolution or linear layer"
    if has_hooks(norm) or has_hooks(source):
        return "it or its layer has hooks, which would see other numbers; remove them first"
    if norm.training:
        return "it is in training mode; call eval() first"
    if norm._buffers["running_mean"] is None:
        return "it has no running statistics"
    weight = source.get_parameter("weight")
    return "its layer shares its weight with another" if shared[id(weight)] > 1 else ""


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    """Fold a normalization into a layer's weight and bias."""
    kind, weight, start = layer_type(layer), layer.get_parameter("weight"), layer._parameters["bias"]
    assert isinstance(norm, NORMALIZATIONS)
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    own = norm._parameters["weight"], norm._parameters["bias"]
    scale = torch.ones_like(mean) if own[0] is None else own[0]
    shift, begin = (torch.zeros_like(mean) if t is None else t for t in (own[1], start))
    fuse = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    matrix, bias = fuse(kind.matrix(layer, weight), begin, mean, variance, norm.eps, scale, shift)
    with torch.no_grad():
        values = kind.restore(layer, matrix).contiguous()
    layer.register_parameter("weight", nn.Parameter(values, weight.requires_grad))
    layer.register_parameter("bias", nn.Parameter(bias.detach(), weight.requires_grad))
