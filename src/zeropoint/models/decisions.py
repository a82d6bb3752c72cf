"""Which layers of a model a recipe is about, and what it decides for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..errors import RecipeError
from ..recipes import Decision, Recipe, Rule, Subject

CONVERTIBLE = (nn.Linear, nn.Embedding)
"""Layers that have a quantized form; subclasses may compute something else and are left alone."""


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have a quantized form, each once, under its first name."""
    for name, module in model.named_modules():
        if type(module) in CONVERTIBLE:
            yield name, module


def decisions_of(model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Module, Decision]]:
    """Return name, layer and decision for each layer that has a quantized form; tied layers must agree.

    Raises RecipeError when a rule is about nothing or tied layers would differ.
    """
    modules = list(_layers(model))
    subjects = [Subject(name=n, type=type(m).__name__, shape=tuple(weight_of(m).shape)) for n, m in modules]
    decisions = recipe.decide(subjects)
    kept = Rule(gives=None, reason="the default is for Linear layers")
    found = [
        Decision(subject=d.subject, rule=kept)
        if d.rule is recipe.default and d.gives is not None and d.subject.type != "Linear"
        else d
        for d in decisions
    ]
    return _agreed(modules, found)


def _agreed(
    modules: list[tuple[str, nn.Module]], decisions: list[Decision]
) -> list[tuple[str, nn.Module, Decision]]:
    """Keep layers whose weight is tied to one that is kept; two schemes for one weight are an error."""
    groups: dict[int, list[int]] = {}
    for position, (_, module) in enumerate(modules):
        groups.setdefault(id(weight_of(module)), []).append(position)
    result = list(decisions)
    for positions in groups.values():
        given = [decisions[p].gives for p in positions]
        schemes = {gives.weight for gives in given if gives is not None}
        if len(schemes) > 1:
            names = " and ".join(modules[p][0] for p in positions)
            raise RecipeError(f"{names} share one weight but get {len(schemes)} schemes; give them the same")
        if None in given:
            owner = modules[positions[given.index(None)]][0]
            for p in positions:
                if decisions[p].gives is not None:
                    rule = Rule(gives=None, reason=f"its weight is that of {owner}, which is kept")
                    result[p] = Decision(subject=decisions[p].subject, rule=rule)
    return [(name, layer, decision) for (name, layer), decision in zip(modules, result, strict=True)]


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return a layer's weight."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight
