"""Fused transformers experts as two linear layers each.

Each can then be quantized: transformers, from 5.0 on, keeps the weights of all experts of a layer in tensors
of three axes and multiplies with parts of these itself. The function of such a module follows from attributes
that all of them have, documented at ``use_experts_implementation`` in its ``integrations/moe.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .layer import without_weights
from .shared_linear import linear_on
from .state_dict_hooks import State, add_state_hooks

_FACTS = ("num_experts", "has_gate", "has_bias", "is_transposed")


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether a module is transformers' fused experts, and nothing else."""
    facts = vars(module)
    if not all(name in facts for name in _FACTS) or facts.get("_is_expert_parallel"):
        return False
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    return own == set(_names(module)) and all(
        module.get_parameter(name).dim() == 3 for name in _weights(module)
    )


def _weights(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _names(module: Any) -> tuple[str, ...]:
    weights = _weights(module)
    return (*weights, *(f"{name}_bias" for name in weights)) if module.has_bias else weights


class SplitExperts(nn.Module):
    """What the fused experts ``whole`` compute, with linear layers ``gate_up_proj.N`` and ``down_proj.N``.

    Each token's output is the sum over its experts of ``weight * down(gate(up(x)))``; ``gate`` is what the
    original applies, and ``up`` is called ``up_proj`` where it gates nothing. Arguments and results are those
    of the original, whose memory the layers share.

    Args:
        whole: the module to unfuse.
    """

    rest: Any

    def __init__(self, whole: Any) -> None:
        super().__init__()
        for name, child in whole.named_children():
            self.add_module(name, child)
        # The fused module without its weights, for its gate. It is no submodule, but reads the submodules'
        # values.
        self.__dict__["rest"] = rest = without_weights(whole, _names(whole))
        rest.__dict__["_modules"] = self._modules
        self.up, self.down = _weights(whole)
        for name in (self.up, self.down):
            self.add_module(name, _layers(whole, name))
        self._arguments = tuple(inspect.signature(type(whole).forward).parameters)[1:4]
        self.train(whole.training)
        names = _Names(self.up, self.down, transposed=whole.is_transposed)
        add_state_hooks(self, names.out, names.back)

    def fused_parameters(self) -> dict[str, nn.Parameter]:
        """Return the fused parameters that hold the current weights of the layers."""
        own = {n: p.detach() for n, p in self.named_parameters() if n.startswith((self.up, self.down))}
        joined = _Names(self.up, self.down, transposed=self.rest.is_transposed).out(own)
        return {name: nn.Parameter(value, False) for name, value in joined.items()}

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        """Return (tokens, hidden) for hidden states, experts and weights (tokens, k).

        Args:
            args: positional arguments of the fused experts.
            named: keyword arguments of the fused experts.
        """
        given = {**dict(zip(self._arguments, args, strict=False)), **named}
        x, chosen, weights = (given[name] for name in self._arguments)
        ups, downs = self._modules[self.up], self._modules[self.down]
        assert isinstance(ups, nn.ModuleDict)
        assert isinstance(downs, nn.ModuleDict)
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            expert = str(number)
            if expert in ups:  # the number after the last one says that there is none
                token, place = torch.where(chosen == number)
                y = self._normed(downs[expert](self._gated(ups[expert](x[token]))))
                result.index_add_(0, token, (y * weights[token, place, None]).to(x.dtype))
        return result

    def _gated(self, y: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.rest._apply_gate(y) if self.rest.has_gate else self.rest.act_fn(y)
        return gated

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = y
        if vars(self.rest).get("has_post_expert_norm"):
            normed = self.rest.post_expert_norm(y)
        return normed


class _Names:
    """Conversion between states of expert layers and fused tensors."""

    def __init__(self, *projections: str, transposed: bool) -> None:
        self.projections, self.transposed = projections, transposed

    def out(self, state: State) -> State:
        """Stack what all experts have in floats."""
        found = dict(state)
        for name in self.projections:
            for kind, ending in (("weight", ""), ("bias", "_bias")):
                experts = {key.split(".")[1] for key in state if key.startswith(f"{name}.")}
                own = [f"{name}.{number}.{kind}" for number in range(len(experts))]
                if own and all(key in state for key in own):
                    parts = [found.pop(key) for key in own]
                    turn = self.transposed and kind == "weight"
                    found[name + ending] = torch.stack([part.t() if turn else part for part in parts])
        return found

    def back(self, state: State) -> State:
        """Give each expert its own."""
        found = dict(state)
        for name in self.projections:
            for kind, ending in (("weight", ""), ("bias", "_bias")):
                whole = found.pop(name + ending, None)
                turn = self.transposed and kind == "weight"
                for number, part in enumerate(() if whole is None else whole):
                    found[f"{name}.{number}.{kind}"] = part.t() if turn else part
        return found


def _layers(whole: Any, name: str) -> nn.ModuleDict:
    """Return all experts' layers, in a dictionary unlike block lists."""
    weights, biases = whole.get_parameter(name), whole._parameters.get(f"{name}_bias")
    layers = nn.ModuleDict()
    for number, weight in enumerate(weights):
        matrix = weight.t() if whole.is_transposed else weight
        layers[str(number)] = linear_on(matrix, None if biases is None else biases[number])
    return layers
