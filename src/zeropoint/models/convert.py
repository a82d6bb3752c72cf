"""Conversion of prepared models to packed weights, with a report."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..errors import UnsupportedError, ZeropointError
from ..functional import row_errors
from ..methods import LayerData, LayerResult
from ..methods.nearest import with_params
from ..params import QuantizationParams
from ..recipes import Activation, Assignment, Recipe, one_name
from ..signatures import by_signature
from ..training import FakeQuantize, Quantizer
from .calibrate import Calibration, method_data
from .conversion import Conversion, Converted, weight_bytes
from .dynamic_quantize import DynamicQuantize, LocalQuantize, as_module
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .layer import PreparedLayer, QuantizedLayer
from .layer_types import layer_type
from .linear import QuantizedLinear
from .packed_weight import PackedWeight
from .prepare import ENTRIES, preparing
from .recipe_layers import as_recipe, require_model, with_smaller_groups
from .rescale import rescaled_channels
from .saving_guard import guarded
from .shared_linear import TRANSPOSED
from .solved_model import solved
from .unfuse import replace_modules, unfused

_TILE_VALUES = 1 << 22
"""Weights that are measured at a time: kernels need no further memory, plain torch some bytes for each."""


@partial(by_signature, but=("prepared",))
def convert(prepared: nn.Module, *, inplace: bool = False) -> Conversion:
    """Return a model on packed weights that computes as ``prepared`` does.

    In evaluation mode the outputs are the same bit for bit, but where a Linear layer multiplies codes, as its
    ``explain()`` says: sums are then rounded otherwise, or not at all, the outputs of that layer differ by at
    most 2 n eps sum |w x| over the n products of each, and where a later layer quantizes them, one may fall
    to the neighboring code. Asking for gradients of the input makes each layer multiply floats. Quantizers of
    inputs and outputs keep the parameters they have now.

    Args:
        prepared: a result of :func:`~zeropoint.models.prepare`, trained or not; not wrapped for processes
            or compiled.
        inplace: whether it is changed itself; otherwise a copy is.

    Raises:
        UnsupportedError: for a model without prepared layers, a quantizer that is not enabled, or a layer
            that cannot hold its scheme.
        NonFiniteError: for weights that are not finite; each names the layer.

    Example:
        >>> from zeropoint.models import prepare
        >>> prepared = prepare(nn.Sequential(nn.Linear(64, 8)), "w4a16").eval()
        >>> x = torch.randn(3, 64)
        >>> torch.allclose(convert(prepared).model(x), prepared(x), atol=1e-6)
        True
    """
    require_model(prepared)
    target = prepared if inplace else copy.deepcopy(prepared)
    layers = {n: m for n, m in target.named_modules() if isinstance(m, PreparedLayer)}
    if not layers:
        raise UnsupportedError(
            f"model (a {type(prepared).__name__}) has no prepared layers; prepare it first"
        )
    planned_order: tuple[str | Converted, ...] = vars(target).pop(ENTRIES, ())
    known = {entry for entry in planned_order if isinstance(entry, str)}
    replaced, records = _converted([*planned_order, *(name for name in layers if name not in known)], layers)
    replace_modules(target, replaced)
    return Conversion(model=guarded(replaced.get(target, target)), layers=records)


@partial(by_signature, but=("model", "recipe", "calibration"))
def quantize_model(  # noqa: PLR0913 (a model, a recipe, and the options of it)
    model: nn.Module, recipe: Recipe | str, *, method: str | None = None, quality: str | None = None,
    ignore: Iterable[str] | str = (), fit: bool = False,
    calibration: Calibration | Iterable[Any] | None = None, inplace: bool = False,
) -> Conversion:  # fmt: skip
    """Return ``model`` with packed weights in the layers of ``recipe``.

    It is :func:`~zeropoint.models.prepare` and :func:`convert` in one: codes and scales of weights come from
    their method, scales of static inputs and outputs from ``calibration``, of
    :func:`~zeropoint.models.calibrate`, and so do the statistics that a method needs.

    A model that is changed in place is as it was after an error.

    Args:
        model: the float model.
        recipe: rules, or the name of a preset for all Linear layers. The default of a recipe is for Linear
            layers; others are converted when a rule names them. Weights of several layers that are one tensor
            stay one.
        method: method of all weights whose rule names none, such as ``"mse"``; ``nearest`` unless given.
        quality: in its place, ``"fast"``, ``"good"`` or ``"best"``: picks the method for each scheme, the
            last two with batches as ``calibration`` (:data:`zeropoint.recipes.quality.LADDER`).
        ignore: patterns of layers to keep, before any rule decides: globs, or ``re:`` and a regular
            expression.
        fit: give matrices whose inputs the group does not divide a smaller one, half or a quarter of it, as
            most file layouts need; the record of a layer has its scheme. Otherwise a last group is short.
        calibration: ranges of static inputs and outputs, and statistics that methods need; or batches, each
            as the model takes it, on which weights are solved in the order in which they run, each on inputs
            from the quantized layers before it.
        inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises:
        ZeropointError: what these two raise.

    Example:
        >>> conversion = quantize_model(nn.Sequential(nn.Linear(64, 8)), "w8a16")
        >>> conversion.layers[0].nbytes
        (2048, 544)
    """
    target = model if inplace else copy.deepcopy(model)
    chosen = one_name(method, quality, has_data=calibration is not None)
    rules = as_recipe(recipe).with_method(chosen).ignoring(ignore)
    if fit:
        require_model(target)
        with unfused(target) as root:
            rules = with_smaller_groups(root, rules)
    # What is no calibration and gives no batches is refused with the first layer that needs one.
    if calibration is None or isinstance(calibration, Calibration | Mapping):
        learned = cast(Calibration | None, calibration)
    else:
        learned = solved(target, rules, calibration)
    folds = learned.folds if isinstance(learned, Calibration) else {}
    with (
        rescaled_channels(target, folds, kept=True),
        preparing(target, rules, qat="minmax", calibration=learned) as made,
    ):
        layers = {prepared.decision.subject.name: prepared for prepared in made.prepared.values()}
        packed, records = _converted(made.entries, layers, learned)
        result = made.installed({layer: packed[prepared] for layer, prepared in made.prepared.items()})
    return Conversion(model=guarded(result) if packed else result, layers=records)


def _converted(
    entries: Sequence[str | Converted],
    layers: Mapping[str, PreparedLayer],
    calibration: Calibration | None = None,
) -> tuple[dict[nn.Module, nn.Module], tuple[Converted, ...]]:
    """Return the converted layers, and the record of each entry.

    entries: in the model's order, names of prepared layers, and records of other layers. calibration: the
    statistics that methods need.
    """
    packer = _Packer(calibration)
    replaced: dict[nn.Module, nn.Module] = {}
    records: list[Converted] = []
    for entry in entries:
        if isinstance(entry, Converted):
            records.append(entry)
        elif entry in layers:
            layer = layers[entry]
            try:
                replaced[layer], line = packer.layer(layer)
            except ZeropointError as error:
                raise type(error)(f"layer {entry or 'model'}: {error}") from error
            records.append(line)
    return replaced, tuple(records)


class _Packer:
    """Makes layers with packed weights, and remembers these, which tied layers share."""

    def __init__(self, calibration: Calibration | None) -> None:
        self._calibration = calibration
        self._known: dict[int, tuple[str, PackedWeight]] = {}
        self._counted: set[int] = set()

    def layer(self, prepared: PreparedLayer) -> tuple[nn.Module, Converted]:
        """Return the layer that replaces ``prepared``, and its record."""
        layer, name, gives = prepared.layer, prepared.decision.subject.name, prepared.decision.gives
        assert gives is not None
        if self._calibration is not None and name in self._calibration.without_inputs:
            gives = gives.without_inputs()
        packed, off, size, tied_to = {}, 0.0, 0.0, ""
        before = weight_bytes(layer, self._counted)
        after = before
        for key, quantizer in prepared.weight_quantizers.items():
            weight = layer.get_parameter(key)
            matrix = layer_type(layer).matrix(layer, weight.detach())
            if id(weight) in self._known:
                tied_to, packed[key] = self._known[id(weight)]
            else:
                data = method_data(self._calibration, name, gives)
                result = _quantized(matrix, quantizer, gives, data)
                packed[key] = PackedWeight(result.q, result.rotation, result.low_rank)
                self._known[id(weight)] = (name, packed[key])
                after += packed[key].nbytes - weight.nbytes
            errors, squares = squares_of(matrix, packed[key])
            off, size = off + errors, size + squares
        new = _layer(prepared, packed).train(prepared.training)
        if isinstance(new, (QuantizedLinear, QuantizedLayer)):
            new.place = name
        return new, Converted(
            name=name,
            type=prepared.decision.subject.type,
            shape=prepared.decision.subject.shape,
            gives=gives,
            reason="",
            nbytes=(before, after),
            error=math.sqrt(off / size) if size else 0.0,
            tied_to=tied_to,
        )


def squares_of(matrix: torch.Tensor, packed: PackedWeight) -> tuple[float, float]:
    """Return the sums of squared errors and squared weights, by tiles."""
    rows, columns = packed.shape
    step = max(1, _TILE_VALUES // max(1, columns) // packed.block_rows) * packed.block_rows
    found = [
        row_errors(
            packed.coded(matrix[start : start + step], start), packed.codes(start, min(rows, start + step))
        )
        for start in range(0, rows, step)
        if columns
    ]
    return math.fsum(e for r in found for e in r.errors), math.fsum(s for r in found for s in r.squares)


def _quantized(matrix: torch.Tensor, quantizer: nn.Module, gives: Assignment, data: LayerData) -> LayerResult:
    """Return a weight's codes, by its method or its quantizer's parameters."""
    if data.solved is not None:
        return LayerResult(q=data.solved, low_rank=data.low_rank)
    if isinstance(quantizer, DynamicQuantize):
        return gives.weight_method.quantize(matrix, quantizer.activation.scheme, data)
    return LayerResult(q=with_params(matrix, _params(quantizer)))


def _params(quantizer: nn.Module) -> QuantizationParams:
    if not isinstance(quantizer, Quantizer):
        kind = type(quantizer).__name__
        raise UnsupportedError(f"quantizer (a {kind}) must be a Quantizer or a DynamicQuantize to convert")
    if not quantizer.enabled:
        raise UnsupportedError("a quantizer is not enabled; set enabled to True before converting")
    return quantizer.params


def _fixed(quantizer: nn.Module | None) -> FakeQuantize | LocalQuantize | Activation | None:
    """Return the quantizer of an input or output as it is deployed."""
    if quantizer is None or isinstance(quantizer, LocalQuantize):
        return quantizer
    if isinstance(quantizer, DynamicQuantize):
        return quantizer.activation
    return FakeQuantize(_params(quantizer))


def _layer(prepared: PreparedLayer, packed: Mapping[str, PackedWeight]) -> nn.Module:
    layer = prepared.layer
    inner, outer = _fixed(prepared.input_quantizer), _fixed(prepared.output_quantizer)
    if packed and isinstance(layer, nn.Linear):
        if packed["weight"].rotation is not None and isinstance(inner, FakeQuantize | LocalQuantize):
            raise UnsupportedError(
                f"its input is rotated by {packed['weight'].rotation} before it is quantized, and "
                "calibration saw it as it is; use a dynamic input, or a method without a rotation"
            )
        transposed = bool(vars(layer).get(TRANSPOSED, False))
        return QuantizedLinear(
            packed["weight"], layer.bias, inner, output_quantizer=outer, transposed=transposed
        )
    behind = as_module(outer)
    if packed and isinstance(layer, nn.Embedding):
        return QuantizedEmbedding(packed["weight"], behind, padding_idx=layer.padding_idx)
    if packed and isinstance(layer, nn.EmbeddingBag):
        return QuantizedEmbeddingBag(layer, packed["weight"], behind)
    return QuantizedLayer(layer, packed, input_quantizer=as_module(inner), output_quantizer=behind)
