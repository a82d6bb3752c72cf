"""Layers of a model that a recipe concerns, and its decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..errors import RecipeError, UnsupportedError
from ..recipes import Assignment, Decision, Recipe, Rule, Subject, model_preset
from ..schemes import Scheme
from ..schemes.smaller_groups import SmallerGroups, group_of, smaller_groups
from ..training import Quantizer
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .layer import PreparedLayer, QuantizedLayer
from .layer_types import LAYER_TYPES, layer_type
from .linear import QuantizedLinear
from .packed_weight import PackedWeight

QUANTIZED_MODULES = (
    QuantizedLayer,
    QuantizedLinear,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    PackedWeight,
    Quantizer,
)
"""What is quantized already: nothing inside is looked at."""


def require_model(model: object) -> None:
    """Raise UnsupportedError for results and exported programs, not modules."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"model (a {type(model).__name__}) must be a torch.nn.Module; pass the model of a conversion or "
            "folding, and an exported program to zeropoint.models.graph"
        )


def as_recipe(recipe: Recipe | str) -> Recipe:
    """Return the recipe of a preset for all Linear layers; recipes unchanged.

    Raises RecipeError for anything else, and for an unknown name.

    >>> print(as_recipe("w8a16").default.gives)
    weight int8:g128:scale=input:dialect=compressed-tensors
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise RecipeError(
            f"recipe (={recipe!r}) must be a Recipe, the name of a preset such as 'w8a8', or a scheme for "
            "weights such as 'int4:g32'"
        )
    return Recipe(default=Rule(gives=model_preset(recipe)))


def layers_of(model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Module]]:
    """Return quantizable layers and layers with parameters, by first name.

    Modules to whose type a rule gives schemes are layers too.
    """
    named = {kind for rule in recipe.rules if rule.gives is not None for kind in rule.types}
    return [
        (name, module)
        for name, module in _float_modules(model, "", set())
        if type(module) in LAYER_TYPES
        or type(module).__name__ in named
        or is_parametrized(module)
        or next(module.parameters(recurse=False), None) is not None
    ]


def _float_modules(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or isinstance(module, QUANTIZED_MODULES):
        return
    seen.add(module)
    yield name, module
    if is_parametrized(module):
        return
    for key, child in module.named_children():
        yield from _float_modules(child, f"{name}.{key}".lstrip("."), seen)


def decisions_of(model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Module, Decision]]:
    """Return name, layer and decision per layer; tied layers agree.

    Raises RecipeError when a rule matches nothing or tied layers would differ, UnsupportedError for a model
    with prepared layers.
    """
    for name, module in model.named_modules():
        if isinstance(module, PreparedLayer):
            raise UnsupportedError(
                f"layer {name or 'model'} is prepared already; convert the model or pass the model before "
                "prepare"
            )
    modules = layers_of(model, recipe)
    subjects = [_subject(name, module) for name, module in modules]
    decisions = recipe.decide(subjects)
    found = []
    for (_, module), decision in zip(modules, decisions, strict=True):
        reason = None if decision.gives is None else _refusal(module, decision, recipe)
        kept = Decision(subject=decision.subject, rule=Rule(gives=None, reason=reason or ""))
        found.append(decision if reason is None else kept)
    return _agreed(modules, _without_inputs(modules, found) if recipe.quality else found)


def with_smaller_groups(model: nn.Module, recipe: Recipe) -> Recipe:
    """Return a recipe with groups that divide the inputs of matrices.

    A weight whose inputs the group does not divide gets half of it, or less, down to
    :data:`~zeropoint.schemes.smaller_groups.SMALLEST`; layers that engines run as one have the same. Others
    keep their scheme, under which the last group is a part. Raises what :func:`decisions_of` raises.
    """
    decisions = decisions_of(model, recipe)
    asked = [(name, d.gives, d.subject.shape) for name, _, d in decisions if d.gives is not None]
    groups = SmallerGroups[Assignment](lambda gives: cast(Scheme, gives.weight))
    for name, gives, shape in asked:
        weight = gives.weight
        if weight is not None and len(shape) == 2 and shape[1] % (group_of(weight) or 1):
            fitting = (each for each in smaller_groups(weight) if shape[1] % group_of(each) == 0)
            groups.add(name, gives, next((replace(gives, weight=each) for each in fitting), None))
    fitted = {name: found for name, gives, _ in asked if (found := groups.of(name, gives)) != gives}
    rules = (Rule(name=f"re:{re.escape(name)}$", gives=gives) for name, gives in fitted.items())
    # A rule all of whose layers have smaller groups decides about none.
    left = {id(recipe.first(d.subject)) for name, _, d in decisions if name not in fitted}
    return replace(recipe, rules=(*rules, *(rule for rule in recipe.rules if id(rule) in left)))


def _type(module: nn.Module) -> str:
    """Return a module's class name, without torch's parametrization prefix."""
    return type(module).__name__.removeprefix("Parametrized" if is_parametrized(module) else "")


def _subject(name: str, module: nn.Module) -> Subject:
    # A weight that a hook computes is no parameter.
    found = (getattr(module, parameter) for parameter in layer_type(module).names(module))
    weight = next(found, None)
    if weight is None:
        return Subject(name=name, type=_type(module), shape=())
    dtype = str(weight.dtype).removeprefix("torch.")
    return Subject(name=name, type=_type(module), shape=tuple(weight.shape), dtype=dtype)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module's forward pass has hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _refusal(module: nn.Module, decision: Decision, recipe: Recipe) -> str | None:
    """Return the reason why a layer with schemes is kept, or None."""
    kind = _type(module)
    if is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "its parameters are not initialized; run the model once first"
    if has_hooks(module):
        return "it has hooks, which would be lost; remove them first"
    if type(module) in LAYER_TYPES:
        by_default = decision.rule is recipe.default and kind != "Linear"
        return "the default is for Linear layers" if by_default else None
    base = next((base for base in LAYER_TYPES if isinstance(module, base)), None)
    if base is not None:
        return f"{kind} is a subclass of {base.__name__} and may compute something else"
    return None if kind in decision.rule.types else f"{kind} has no quantized form"


def _without_inputs(modules: list[tuple[str, nn.Module]], decisions: list[Decision]) -> list[Decision]:
    """Give layers without observed inputs the methods that need none.

    These are all that are not Linear, and layers tied to them.
    """
    others = {
        id(weight) for _, module in modules if type(module) is not nn.Linear for weight in module.parameters()
    }
    return [
        decision
        if decision.gives is None or others.isdisjoint(map(id, module.parameters(recurse=False)))
        else replace(decision, rule=replace(decision.rule, gives=decision.gives.without_inputs()))
        for (_, module), decision in zip(modules, decisions, strict=True)
    ]


def _agreed(
    modules: list[tuple[str, nn.Module]], decisions: list[Decision]
) -> list[tuple[str, nn.Module, Decision]]:
    """Keep layers tied to a kept one; different schemes are an error."""
    groups: dict[int, list[int]] = {}
    for position, (_, module) in enumerate(modules):
        for weight in module.parameters(recurse=False):
            if weight.ndim > 1:
                groups.setdefault(id(weight), []).append(position)
    result = list(decisions)
    for positions in groups.values():
        given = [decisions[p].gives for p in positions]
        schemes = {(gives.weight, gives.method) for gives in given if gives is not None}
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
