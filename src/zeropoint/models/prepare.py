"""Layers wrapped by a recipe, so that training computes the deployed model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..errors import UnsupportedError, ZeropointError
from ..methods import NEAREST
from ..recipes import Activation, Assignment, Decision, Recipe
from ..schemes import Scheme
from ..signatures import by_signature
from .calibrate import Calibration, static_params
from .conversion import Converted, kept_layer
from .dynamic_quantize import DynamicQuantize, LocalQuantize
from .layer import PreparedLayer
from .layer_types import LAYER_TYPES, features, layer_type, weights_of
from .qat_config import QATConfig, qat_config
from .recipe_layers import QUANTIZED_MODULES, as_recipe, decisions_of, require_model
from .unfuse import replace_modules, unfused

ENTRIES = "_zeropoint_layers"
"""Attribute of a prepared model: in order, names of its prepared layers, and records of the others."""


@partial(by_signature, but=("model", "recipe", "qat"))
def prepare(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    qat: str | QATConfig = "minmax",
    ignore: Iterable[str] | str = (),
    calibration: Calibration | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return ``model`` with fake-quantized layers of ``recipe``, ready to train.

    In training and evaluation alike a prepared layer computes with weights, inputs and outputs that were
    quantized and dequantized, and :func:`~zeropoint.models.convert` gives the layer with packed weights that
    computes the same. Parameters keep their identity; learned scales join them.

    Weights of several layers that are one tensor have one quantizer. ``nn.MultiheadAttention`` of which a
    projection is named becomes :class:`~zeropoint.models.SplitAttention`, fused experts of transformers
    :class:`~zeropoint.models.SplitExperts`, with weights of their own; its ``Conv1D`` becomes a Linear layer.

    A model that is changed in place is as it was after an error.

    Args:
        model: the float model.
        recipe: rules, or the name of a preset for all Linear layers.
        qat: which quantizers there are, by a name of :data:`~zeropoint.models.QAT_CONFIGS` (``minmax``,
            ``average``, ``fixed``, ``lsq``, ``tqt``, ``pact``) or as a :class:`~zeropoint.models.QATConfig`.
        ignore: patterns of layers to keep, before any rule decides: globs, or ``re:`` and a regular
            expression.
        calibration: parameters of static inputs and outputs, of :func:`~zeropoint.models.calibrate`, where
            they start.
        inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises:
        RecipeError: when a rule matches nothing or tied layers would differ.
        CalibrationError: when parameters are missing.
        UnsupportedError: when a layer cannot hold its scheme or is prepared already, or when nothing would be
            quantized.
        SchemeError: when the QAT configuration cannot train it; each names the layer.

    Example:
        >>> model = prepare(nn.Sequential(nn.Linear(64, 8)), "w4a16", qat="lsq")
        >>> sorted(name for name, _ in model.named_parameters())
        ['0.layer.bias', '0.layer.weight', '0.weight_quantizers.weight.scale']
    """
    rules = as_recipe(recipe).ignoring(ignore)
    require_nearest(rules)
    target = model if inplace else copy.deepcopy(model)
    with preparing(target, rules, qat=qat, calibration=calibration) as made:
        result = made.installed(made.prepared)
    vars(result)[ENTRIES] = made.entries
    return result


def require_nearest(recipe: Recipe) -> None:
    """Raise UnsupportedError for a method that training does not compute."""
    for rule in (*recipe.rules, recipe.default):
        if rule.gives is not None and rule.gives.method not in (None, NEAREST):
            raise UnsupportedError(
                f"method {rule.gives.method} is for quantize_model; prepared layers round to nearest at each "
                "step: leave it out of the recipe"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is to become of the layers of a model.

    model: as it was passed. root: the same, unfused. prepared: the prepared layer of each layer
    of ``root``. entries: in order, the names of these, and the records of the others.
    """

    model: nn.Module
    root: nn.Module
    prepared: Mapping[nn.Module, PreparedLayer]
    entries: tuple[str | Converted, ...]

    def installed(self, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
        """Return the model with layers replaced, itself if none are."""
        replace_modules(self.root, replaced)
        return replaced.get(self.root, self.root) if replaced else self.model


@contextmanager
def preparing(
    model: nn.Module, recipe: Recipe | str, *, qat: str | QATConfig, calibration: Calibration | None
) -> Iterator[Preparation]:
    """Yield the prepared layers of ``model``, which is unfused meanwhile; see :func:`prepare`."""
    require_model(model)
    rules = as_recipe(recipe)
    with unfused(model) as root:
        maker = _Maker(qat_config(qat), calibration)
        prepared: dict[nn.Module, PreparedLayer] = {}
        entries: list[str | Converted] = []
        counted: set[int] = set()
        for name, module, decision in decisions_of(root, rules):
            if decision.gives is None:
                entries.append(kept_layer(module, decision, counted))
                continue
            entries.append(name)
            try:
                prepared[module] = maker.layer(name, module, decision, decision.gives)
            except ZeropointError as error:
                raise type(error)(f"layer {name or 'model'}: {error}") from error
        if not prepared:
            raise UnsupportedError(
                _nothing(model, [entry for entry in entries if isinstance(entry, Converted)])
            )
        yield Preparation(model=model, root=root, prepared=prepared, entries=tuple(entries))


def _nothing(model: nn.Module, kept: Sequence[Converted]) -> str:
    """Return the sentence for a model without quantized layers, with reasons."""
    kind = type(model).__name__
    if any(isinstance(module, QUANTIZED_MODULES) for module in model.modules()):
        return (
            f"model (a {kind}) is quantized already, and the recipe quantizes no other layer; pass the float "
            "model"
        )
    reasons = Counter(layer.reason for layer in kept).most_common(_REASONS)
    summary = "; ".join(f"{count} kept: {reason}" for reason, count in reasons) or "it has no layers"
    able = dict.fromkeys(type(m).__name__ for m in model.modules() if type(m) in LAYER_TYPES)
    remedy = f"quantized are layers of the types {', '.join(kind.__name__ for kind in LAYER_TYPES)}"
    if able:
        types = next(iter(able))
        remedy = f"name some by a rule: Rule(types=('{types}',), gives=Assignment.of(weight='int8:channel'))"
    return f"model (a {kind}) has no layer that the recipe would quantize ({summary}); {remedy}"


_REASONS = 3


class _Maker:
    """Maker of prepared layers that shares quantizers of tied weights."""

    def __init__(self, qat: QATConfig, calibration: Calibration | None) -> None:
        self.qat, self.calibration = qat, calibration
        self._known: dict[int, tuple[str, nn.Module, object]] = {}

    def layer(self, name: str, module: nn.Module, decision: Decision, gives: Assignment) -> PreparedLayer:
        """Return the layer in the place of ``module``."""
        _check(module, gives)
        quantizers = {}
        if gives.weight is not None:
            for key, weight in weights_of(module).items():
                quantizers[key] = self._weight(f"{name}.{key}".lstrip("."), module, weight, gives.weight)
        return PreparedLayer(
            module,
            quantizers,
            input_quantizer=self._activation(name, module, "input", gives.input),
            output_quantizer=self._activation(name, module, "output", gives.output),
            decision=decision,
        )

    def _weight(self, place: str, module: nn.Module, weight: torch.Tensor, scheme: Scheme) -> nn.Module:
        matrix = layer_type(module).matrix
        if id(weight) not in self._known:
            with torch.no_grad():
                quantizer = self.qat.weight(matrix(module, weight), scheme)
            self._known[id(weight)] = (place, quantizer, matrix)
        owner, quantizer, order = self._known[id(weight)]
        if order is not matrix:
            raise UnsupportedError(
                f"{place} is the tensor of {owner} with other channels as rows; untie them"
            )
        return quantizer

    def _activation(
        self, name: str, module: nn.Module, side: str, activation: Activation | None
    ) -> nn.Module | None:
        if activation is None or activation.dynamic:
            return None if activation is None else DynamicQuantize(activation)
        params = static_params(self.calibration, name, side, activation)
        assert params is not None
        if activation.local:
            return LocalQuantize.of(activation, params)
        return self.qat.activation(params, features(module, side))


def _check(module: nn.Module, gives: Assignment) -> None:
    """Raise UnsupportedError for schemes that a layer has no place for."""
    if type(module) not in LAYER_TYPES and gives.weight is not None:
        kind = type(module).__name__
        raise UnsupportedError(f"{kind} has no weight to quantize; give its rule an input or an output alone")
    if any(weight.is_meta for weight in weights_of(module).values()):
        raise UnsupportedError("its weights are on the meta device, without numbers; load them first")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if gives.input is not None:
            raise UnsupportedError("the input of an embedding is whole numbers; leave it out of the rule")
        if module.max_norm is not None:
            raise UnsupportedError(f"max_norm (={module.max_norm}) changes the table; set it to None first")
