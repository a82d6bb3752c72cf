"""Weights that transformers cuts or joins, and layers that it reads.

transformers converts weights of floats only: of packed codes it makes no other layers, and next to them it
drops floats that it joins. Which rows a layer has follows from the operations themselves, which get the
numbers of rows in place of the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .architectures import Config, is_expert
from .errors import ZeropointError
from .loaded_names import is_stable, made_model, mapping_rows, of_model, renamed, text_of

WEIGHT = ".weight"
_CODES = "_scale"
"""What the names of codes have behind the name of their weight; all codes have scales."""


class RowConversion(NamedTuple):
    """Tensors of a file that become others, row by row.

    sources: their names. made: of each tensor of the model, the numbers of its rows, counted over all
    sources: its own shape, with 1 in place of columns.
    """

    sources: tuple[str, ...]
    made: Mapping[str, torch.Tensor]


def conversions(shapes: Mapping[str, tuple[int, ...]], config: Config) -> Iterator[RowConversion]:
    """Yield conversions that move rows of weights, except of experts.

    shapes: of the tensors of the files, by name.
    """
    rows, converters = mapping_rows(config), _converters(config)
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for name in shapes if converters else ():
        if not name.endswith(WEIGHT) or is_expert(name):
            continue
        found = renamed(name, rows)
        for number, row in enumerate(converters):
            made, pattern = row.rename_source_key(found)
            if pattern is not None:
                groups.setdefault((number, made), {})[pattern] = name
                break
    complete = {
        key: found for key, found in groups.items() if len(found) == len(converters[key[0]].source_patterns)
    }
    try:
        model = made_model(text_of(config)) if complete else None
    except ZeropointError:
        return
    for (number, made), sources in complete.items():
        row = converters[number]
        names = [sources[pattern] for pattern in row.source_patterns]
        moved = _moved(row, made, [shapes[name] for name in names], model)
        if moved and all(is_stable(name, config) for name in moved):
            yield RowConversion(tuple(names), moved)


def renamings(shapes: Mapping[str, tuple[int, ...]], config: Config) -> Iterator[RowConversion]:
    """Yield the new names of weights that transformers renames without codes.

    shapes: of the tensors of the files, by name.
    """
    rows = mapping_rows(config)
    for name, shape in shapes.items() if rows else ():
        if not name.endswith(WEIGHT) or len(shape) != 2 or is_expert(name):
            continue
        found, codes = renamed(name, rows), renamed(name + _CODES, rows)
        if codes != found + _CODES and {found, found + _CODES} == {
            renamed(found, rows),
            renamed(found + _CODES, rows),
        }:
            yield RowConversion((name,), {found: torch.arange(shape[0])[:, None]})


def _moved(row: Any, made: str, shapes: list[tuple[int, ...]], model: Any) -> dict[str, torch.Tensor] | None:
    """Return the rows of a converter's tensors, None if it moves others."""
    given = {"source_patterns": row.source_patterns, "target_patterns": row.target_patterns}
    given |= {"full_layer_name": made, "model": model, "config": model.config, "missing_keys": None}
    tensors: dict[str, Any] = {}
    count = 0
    for pattern, shape in zip(row.source_patterns, shapes, strict=True):
        height = math.prod(shape[:-1])
        tensors[pattern] = [torch.arange(count, count + height).reshape(*shape[:-1], 1)]
        count += height
    try:
        for operation in row.operations:
            tensors = operation.convert(tensors, **given)
    except (ValueError, RuntimeError, AttributeError, LookupError, TypeError):
        return None  # it needs the weights themselves
    first, *_ = row.target_patterns
    found = {made.replace(first, target, 1): x for target, x in tensors.items()}
    alike = len(shapes[0]), 1
    if any(not isinstance(x, torch.Tensor) or (x.ndim, x.shape[-1]) != alike for x in found.values()):
        return None
    return found


_MEAN, _COUNT = ".running_mean", ".num_batches_tracked"


def cannot_decode(names: Collection[str], config: Config) -> bool:
    """Return whether transformers 5.23 cannot decode weights while it loads.

    It takes each ``weight`` for a parameter, and weights of batch norms without batch counts are buffers.
    Where it makes several layers of a weight by its full name, it takes scales for parts of that weight.

    names: of all tensors.
    """
    means = (name.removesuffix(_MEAN) for name in names if name.endswith(_MEAN))
    frozen = any(f"{norm}{WEIGHT}" in names and norm + _COUNT not in names for norm in means)
    return frozen or any(True for _ in _cutting(config))


def _converters(config: Config) -> list[Any]:
    return [row for row in mapping_rows(config) if hasattr(row, "operations")]


def cut_in_vain(modules: Collection[str], config: Config) -> str | None:
    """Return a layer for which transformers 5.23 makes no converter, or None.

    For a layer that it cuts from a larger one, it makes a converter of scales where the model has scales of
    that layer; where it has none, it adds scales to the weights that it cuts, which fails for every model.

    modules: names of the quantized layers, as transformers has them.
    """
    for row in _cutting(config):
        target: str = row._original_target_patterns[0]
        if not any(re.search(f"{target}$", module + WEIGHT) for module in modules):
            return target.replace("\\", "").removesuffix(WEIGHT).strip(".")
    return None


def _cutting(config: Config) -> Iterator[Any]:
    """Yield the converters that cut weights into several layers by name."""
    for row in _converters(config):
        weights = [name for name in row.source_patterns if name.endswith(WEIGHT) and "*" not in name]
        if weights == row.source_patterns and len(weights) == 1 < len(row.target_patterns):
            yield row


class _NoWeightError(AttributeError):
    """The error of a layer without a weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__("'Linear' object has no attribute 'weight'")
        self.layer = layer


class _Packed(nn.Module):
    """A layer that has packed codes in place of a weight."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise _NoWeightError(self)
        return super().__getattr__(name)


def _packed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Packed, kind), {})


@of_model(frozenset[str]())
def asked_layers(model: Any) -> frozenset[str]:
    """Return the linear layers whose weights transformers' initialization reads."""
    return _asked(model, _packed)


@of_model(frozenset[str]())
def asked_in_any_class(model: Any) -> frozenset[str]:
    """Return the layers whose weights it reads even in another class."""
    return _asked(model, lambda _: _Packed)


def _asked(model: Any, instead: Callable[[type[nn.Module]], type[nn.Module]]) -> frozenset[str]:
    """Return the layers whose weights are read of the class ``instead`` gives."""
    modules, asked = dict(model.named_modules()), set[nn.Module]()
    layers = [m for m in modules.values() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    weights = {layer: (type(layer), layer.get_parameter("weight")) for layer in layers}
    for layer, (kind, _) in weights.items():
        del layer.weight
        layer.__class__ = instead(kind)
    owners = {"": model}
    with torch.no_grad():
        for name, module in modules.items():
            owner = owners[name.rpartition(".")[0]] if name else model
            owners[name] = module if hasattr(module, "_init_weights") else owner
            while (found := _missing(owners[name], module)) is not None:
                asked.add(found)
                found.__class__, weight = weights[found]
                found.register_parameter("weight", weight)
    return frozenset(name for name, module in modules.items() if module in asked)


@of_model(frozenset[str]())
def shared_layers(model: Any) -> frozenset[str]:
    """Return the linear layers of transformers that share their weight."""
    modules, found = dict(model.named_modules()), set[str]()
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        layers = [name.removesuffix(WEIGHT) for name in pair]
        if all(isinstance(modules.get(layer), nn.Linear) for layer in layers):
            found |= {*layers}
    return frozenset(found)


@of_model(frozenset[str]())
def special_layers(model: Any) -> frozenset[str]:
    """Return the layers of classes below Linear in transformers' model."""
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear
    )


def _missing(owner: Any, module: nn.Module) -> nn.Module | None:
    """Return the packed layer whose weight ``module``'s initialization reads."""
    try:
        owner._init_weights(module)
    except _NoWeightError as error:
        return error.layer
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError):
        return None  # it fills weights, and there is no memory behind them here
    return None
