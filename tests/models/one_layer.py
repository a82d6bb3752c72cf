"""Recipes for one kind of layers, and arguments with which converted layers multiply floats."""

from typing import Any

import torch
from torch import nn

from zeropoint.recipes import Assignment, Recipe, Rule


def recipe_for(layer: nn.Module, **gives: str) -> Recipe:
    return Recipe(rules=(Rule(types=(type(layer).__name__,), gives=Assignment.of(**gives)),))


def grads(*args: Any) -> tuple[Any, ...]:
    """Return the arguments with gradients asked of the first, for which linear layers multiply floats."""
    first = args[0]
    floats = isinstance(first, torch.Tensor) and first.is_floating_point()
    return (first.clone().requires_grad_(), *args[1:]) if floats else args
