"""Unfuse modules with inner linear weights, so that each can be quantized.

torch's MultiheadAttention and transformers' experts and Conv1D multiply with their weights themselves:
there is no layer to replace. In an unfused model they are replaced by modules that contain linear layers or
are one; afterwards the fused modules are put back unless one of these layers was replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .attention import SplitAttention
from .experts import SplitExperts, is_fused_experts
from .recipe_layers import has_hooks
from .shared_linear import TRANSPOSED, linear_on, own_memory
from .stacked_weights import SplitStacks, stacked_products
from .state_dict_hooks import add_state_hooks, transposed_weight

CONV1D = "transformers.pytorch_utils.Conv1D"
"""A linear layer whose weight is (in, out); by name, since transformers may not be installed."""


SAME_AS_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Subclasses of ``nn.Linear`` that are known to compute what it does, by name."""


def _split(module: Any) -> nn.Module | None:
    """Return a module's unfused form, or None."""
    if type(module) is nn.MultiheadAttention:
        return SplitAttention(module)
    if has_hooks(module) or is_parametrized(module):
        return None
    if is_fused_experts(module):
        return SplitExperts(module)
    if stacks := stacked_products(module):
        return SplitStacks(module, stacks)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if kind in SAME_AS_LINEAR:
        return linear_on(module.weight, module.bias).train(module.training)
    if kind == CONV1D:
        linear = linear_on(module.weight.t(), module.bias).train(module.training)
        vars(linear)[TRANSPOSED] = True
        add_state_hooks(linear, transposed_weight, transposed_weight)
        return linear
    return None


@contextmanager
def unfused(model: nn.Module) -> Iterator[nn.Module]:
    """Unfuse modules of ``model`` within a ``with`` block.

    Yields the model, or the module that it is unfused to. At the end the fused modules are put back, unless
    one of their layers was replaced. The fast path of ``nn.TransformerEncoder`` in evaluation, which
    bypasses its modules, is off meanwhile, and stays off where something inside was replaced.
    """
    splits = {whole: split for whole in model.modules() if (split := _split(whole)) is not None}
    layers = {
        split: {name: module for name, module in split.named_modules() if type(module) is nn.Linear}
        for split in splits.values()
    }
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()  # named_children leaves out a second name
        if child in splits
    ]
    shortcuts = {
        (module, name): getattr(module, name)
        for module in model.modules()
        for kind, name in _SHORTCUTS
        if isinstance(module, kind)
    }
    before = {module: list(module.modules()) for module, _ in shortcuts}
    for module, name in shortcuts:
        setattr(module, name, False)
    for parent, key, whole in places:
        setattr(parent, key, splits[whole])
    try:
        yield splits.get(model, model)
    finally:
        for parent, key, whole in places:
            split, now = splits[whole], parent._modules[key]
            same = all(split.get_submodule(name) is layer for name, layer in layers[split].items())
            if same and now is split:
                setattr(parent, key, whole)
            elif now is not None:
                for layer in set(layers[split].values()).intersection(now.modules()):
                    own_memory(layer)
        for (module, name), value in shortcuts.items():
            if list(module.modules()) == before[module]:
                setattr(module, name, value)


_SHORTCUTS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),
    (nn.TransformerEncoder, "use_nested_tensor"),
)
"""Attributes without which these compute module by module (torch 2.6 to 2.13)."""


def replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules inside ``model``, under each of their names."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and child in replaced:
                setattr(parent, key, replaced[child])
