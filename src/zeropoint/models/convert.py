"""A model's layers replaced by quantized ones, as a recipe says, with a word about every layer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import RecipeError, UnsupportedError, ZeropointError
from ..functional import quantize
from ..recipes import Assignment, Decision, Recipe, Rule, Subject, model_preset
from .modules import PackedWeight, QuantizedEmbedding, QuantizedLinear

CONVERTIBLE = (nn.Linear, nn.Embedding)
"""Layers that have a quantized form; subclasses may compute something else and are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one layer.

    gives: its schemes, or None with the reason why it was left alone. nbytes: of its weight before and now.
    error: root of the squared error over the squared weight.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    gives: Assignment | None
    reason: str
    nbytes: tuple[int, int]
    error: float

    def __str__(self) -> str:
        facts = f"{self.name} ({self.type} {'x'.join(map(str, self.shape))})"
        if self.gives is None:
            return f"{facts}: kept, {self.reason}"
        share = self.nbytes[1] / self.nbytes[0] if self.nbytes[0] else 0.0
        return f"{facts}: {self.gives}; {share:.1%} of its bytes, error {self.error:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted model, and what became of each layer that has weights, in the model's order."""

    model: nn.Module
    layers: tuple[Converted, ...]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all these weights before and now; tied ones count once."""
        return sum(layer.nbytes[0] for layer in self.layers), sum(layer.nbytes[1] for layer in self.layers)

    def __str__(self) -> str:
        before, now = self.nbytes
        lines = [
            *map(str, self.layers),
            f"weights: {before} bytes before, {now} now ({now / max(1, before):.1%})",
        ]
        return "\n".join(lines)


def quantize_model(model: nn.Module, recipe: Recipe | str, *, inplace: bool = False) -> Conversion:
    """Return ``model`` with the layers that ``recipe`` names replaced by quantized ones.

    recipe: rules, or the name of a preset for all Linear layers. The default of a recipe is for Linear
    layers; embeddings are converted when a rule names them. Weights of several layers that are one tensor
    stay one. inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises RecipeError when a rule is about nothing or tied layers would differ, UnsupportedError when a
    scheme needs calibration or a layer cannot hold it, and NonFiniteError; each names the layer. A model that
    is changed in place is as it was after an error.

    >>> conversion = quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16")
    >>> conversion.layers[0].nbytes
    (2048, 544)
    """
    rules = Recipe(default=Rule(gives=model_preset(recipe))) if isinstance(recipe, str) else recipe
    decisions = _decisions(model, rules)
    target = model if inplace else copy.deepcopy(model)
    parts = dict(_layers(target))
    made: dict[int, PackedWeight] = {}
    layers, replaced = [], {}
    for name, decision in decisions:
        module = parts[name]
        layer, new = _converted(name, module, decision, made)
        layers.append(layer)
        if new is not None:
            replaced[module] = new
    for parent in list(target.modules()):
        for key, child in parent._modules.items():  # named_children leaves out a layer's second name
            if child in replaced:
                setattr(parent, key, replaced[child])
    return Conversion(model=replaced.get(target, target), layers=tuple(layers))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have a quantized form, each once, under its first name."""
    for name, module in model.named_modules():
        if type(module) in CONVERTIBLE:
            yield name, module


def _decisions(model: nn.Module, recipe: Recipe) -> list[tuple[str, Decision]]:
    """Return a decision for each layer; tied layers must agree."""
    modules = list(_layers(model))
    subjects = [Subject(name=n, type=type(m).__name__, shape=tuple(_weight(m).shape)) for n, m in modules]
    decisions = recipe.decide(subjects)
    kept = Rule(gives=None, reason="the default is for Linear layers")
    found = [
        Decision(subject=d.subject, rule=kept)
        if d.rule is recipe.default and d.gives is not None and d.subject.type != "Linear"
        else d
        for d in decisions
    ]
    return _agreed(modules, found)


def _agreed(modules: list[tuple[str, nn.Module]], decisions: list[Decision]) -> list[tuple[str, Decision]]:
    """Keep layers whose weight is tied to one that is kept; two schemes for one weight are an error."""
    groups: dict[int, list[int]] = {}
    for position, (_, module) in enumerate(modules):
        groups.setdefault(id(_weight(module)), []).append(position)
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
    return [(name, decision) for (name, _), decision in zip(modules, result, strict=True)]


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _converted(
    name: str, module: nn.Module, decision: Decision, made: dict[int, PackedWeight]
) -> tuple[Converted, nn.Module | None]:
    """Return what became of a layer, and the layer in its place, if any."""
    weight, gives = _weight(module), decision.gives
    make = functools.partial(
        Converted, name=name, type=decision.subject.type, shape=decision.subject.shape, gives=gives
    )
    if gives is None:
        return make(reason=decision.rule.reason, nbytes=(weight.nbytes, weight.nbytes), error=0.0), None
    tied = id(weight) in made
    try:
        if gives.weight is None or gives.output is not None:
            raise UnsupportedError(f"{gives} is no assignment of a weight and at most an input")
        if not tied:
            made[id(weight)] = PackedWeight(quantize(weight.detach(), gives.weight))
        packed = made[id(weight)]
        new = _layer(module, packed, gives)
    except ZeropointError as error:
        raise type(error)(f"layer {name}: {error}") from error
    original = weight.detach().float()
    off, size = packed.quantized().dequantize(torch.float32) - original, float(original.norm())
    nbytes = (0, 0) if tied else (weight.nbytes, packed.quantized().nbytes)
    layer = make(reason="", nbytes=nbytes, error=float(off.norm()) / size if size else 0.0)
    return layer, new.train(module.training)


def _layer(module: nn.Module, packed: PackedWeight, gives: Assignment) -> nn.Module:
    if isinstance(module, nn.Linear):
        return QuantizedLinear(packed, module.bias, gives.input)
    assert isinstance(module, nn.Embedding)
    if gives.input is not None:
        raise UnsupportedError("an embedding's input is whole numbers, which have no scheme")
    if module.max_norm is not None:
        raise UnsupportedError(f"max_norm (={module.max_norm}) changes the table; convert without it")
    return QuantizedEmbedding(packed)
