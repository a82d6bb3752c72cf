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

from .stacked_weights import SplitStacks

_FACTS = ("num_experts", "has_gate", "has_bias", "is_transposed")


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether a module is transformers' fused experts, and nothing else."""
    facts = vars(module)
    if not all(name in facts for name in _FACTS) or facts.get("_is_expert_parallel"):
        return False
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    return own == {*_weights(module), *_biases(module).values()} and all(
        module.get_parameter(name).dim() == 3 for name in _weights(module)
    )


def _weights(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _biases(module: Any) -> dict[str, str]:
    return {name: f"{name}_bias" for name in _weights(module)} if module.has_bias else {}


class SplitExperts(SplitStacks):
    """What the fused experts ``whole`` compute, with linear layers ``gate_up_proj.N`` and ``down_proj.N``.

    Each token's output is the sum over its experts of ``weight * down(gate(up(x)))``; ``gate`` is what the
    original applies, and ``up`` is called ``up_proj`` where it gates nothing. Arguments and results are those
    of the original, whose memory the layers share.

    Args:
        whole: the module to unfuse.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__(whole, dict.fromkeys(_weights(whole), whole.is_transposed), _biases(whole))
        self._arguments = tuple(inspect.signature(type(whole).forward).parameters)[1:4]

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        """Return (tokens, hidden) for hidden states, experts and weights (tokens, k).

        Args:
            args: positional arguments of the fused experts.
            named: keyword arguments of the fused experts.
        """
        given = {**dict(zip(self._arguments, args, strict=False)), **named}
        x, chosen, weights = (given[name] for name in self._arguments)
        ups, downs = (self.get_submodule(name) for name in self.stacks)
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
