"""A model's layers replaced by quantized ones, as a recipe says, with a word about every layer."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UnsupportedError, ZeropointError
from ..functional import quantize
from ..recipes import Assignment, Decision, Recipe, Rule, model_preset
from ..training import FakeQuantize
from .calibrate import Calibration, static_params
from .decisions import decisions_of, weight_of
from .embedding import QuantizedEmbedding
from .linear import QuantizedLinear
from .packed_weight import PackedWeight


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


def quantize_model(
    model: nn.Module, recipe: Recipe | str, *, calibration: Calibration | None = None, inplace: bool = False
) -> Conversion:
    """Return ``model`` with the layers that ``recipe`` names replaced by quantized ones.

    recipe: rules, or the name of a preset for all Linear layers. The default of a recipe is for Linear
    layers; embeddings are converted when a rule names them. Weights of several layers that are one tensor
    stay one. calibration: parameters of static inputs and outputs, of :func:`calibrate`.
    inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises RecipeError when a rule is about nothing or tied layers would differ, CalibrationError when
    parameters are missing, UnsupportedError when a layer cannot hold its scheme, and NonFiniteError; each
    names the layer. A model that
    is changed in place is as it was after an error.

    >>> conversion = quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16")
    >>> conversion.layers[0].nbytes
    (2048, 544)
    """
    rules = Recipe(default=Rule(gives=model_preset(recipe))) if isinstance(recipe, str) else recipe
    target = model if inplace else copy.deepcopy(model)
    made: dict[int, PackedWeight] = {}
    layers, replaced = [], {}
    for name, module, decision in decisions_of(target, rules):
        layer, new = _converted(name, module, decision, (made, calibration))
        layers.append(layer)
        if new is not None:
            replaced[module] = new
    for parent in list(target.modules()):
        for key, child in parent._modules.items():  # named_children leaves out a layer's second name
            if child in replaced:
                setattr(parent, key, replaced[child])
    return Conversion(model=replaced.get(target, target), layers=tuple(layers))


def _converted(
    name: str,
    module: nn.Module,
    decision: Decision,
    known: tuple[dict[int, PackedWeight], Calibration | None],
) -> tuple[Converted, nn.Module | None]:
    """Return what became of a layer, and the layer in its place, if any.

    known: weights packed so far, by the identity of the original; and what calibration learned.
    """
    made, calibration = known
    weight, gives = weight_of(module), decision.gives
    make = functools.partial(
        Converted, name=name, type=decision.subject.type, shape=decision.subject.shape, gives=gives
    )
    if gives is None:
        return make(reason=decision.rule.reason, nbytes=(weight.nbytes, weight.nbytes), error=0.0), None
    tied = id(weight) in made
    try:
        if gives.weight is None:
            raise UnsupportedError(f"{gives} names no weight, which is what a converted layer holds")
        if not tied:
            made[id(weight)] = PackedWeight(quantize(weight.detach(), gives.weight))
        packed = made[id(weight)]
        new = _layer(name, module, packed, gives, calibration)
    except ZeropointError as error:
        raise type(error)(f"layer {name}: {error}") from error
    original = weight.detach().float()
    off, size = packed.quantized().dequantize(torch.float32) - original, float(original.norm())
    nbytes = (0, 0) if tied else (weight.nbytes, packed.quantized().nbytes)
    layer = make(reason="", nbytes=nbytes, error=float(off.norm()) / size if size else 0.0)
    return layer, new.train(module.training)


def _layer(
    name: str,
    module: nn.Module,
    packed: PackedWeight,
    gives: Assignment,
    calibration: Calibration | None,
) -> nn.Module:
    if isinstance(module, nn.Linear):
        params = (
            static_params(calibration, name, "input", gives.input),
            static_params(calibration, name, "output", gives.output),
        )
        inner, outer = (None if p is None else FakeQuantize(p) for p in params)
        return QuantizedLinear(
            packed, module.bias, inner or gives.input, output_quantizer=outer or gives.output
        )
    assert isinstance(module, nn.Embedding)
    if gives.input is not None or gives.output is not None:
        raise UnsupportedError("an embedding's input is whole numbers, and its output rows of its weight")
    if module.max_norm is not None:
        raise UnsupportedError(f"max_norm (={module.max_norm}) changes the table; convert without it")
    return QuantizedEmbedding(packed)
