"""Names of model parameters in files, and the places of their rows.

In memory transformers, from 5.0 on, calls and joins weights otherwise than its files do. How it gets from one
to the other when it saves is asked of transformers itself: for each quantized weight the numbers of its rows,
in two columns, go through the same conversion as the other tensors, and say where each has come to lie. One
column would not do: releases up to 5.19 squeeze what they take apart.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...architectures import expert_layout
from ...errors import UnsupportedError, printable
from ...libraries import reading
from ...methods.channels import ChannelFold
from ...models import QuantizedLinear, SplitStacks
from ..plan.selection import module_of
from ..plan.tensor_matrices import holder_of, parts_named

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRows:
    """Rows of a model layer in a file: ``module`` holds rows ``index``.

    tensor: in which files of floats have them, with others where they stack experts.
    """

    module: str
    tensor: str
    layer: str
    index: torch.Tensor

    @property
    def joins_others(self) -> bool:
        """Whether files of floats have other layers in the same matrix."""
        return self.module == self.layer and self.tensor != f"{self.module}{WEIGHT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelWeight:
    """A quantized weight of a model: its layers and shape.

    layers: name and rows of each, in order. shape: with one number for each row. columns: the axis of them.
    """

    layers: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    columns: int = -1


def _weights(model: nn.Module, layers: Iterable[str]) -> dict[str, _ModelWeight]:
    """Return the weights of layers and all stacks, by model name."""
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, SplitStacks)}
    inside, found = tuple(f"{name}." for name in stacks), dict[str, _ModelWeight]()
    for name in layers:
        if not name.startswith(inside):
            rows = _rows(model.get_submodule(name))
            found[f"{name}{WEIGHT}".lstrip(".")] = _ModelWeight(layers=((name, rows),), shape=(rows, 1))
    for name, split in stacks.items():
        for own, in_out in split.stacks.items():
            children = split.get_submodule(own).named_children()
            members = tuple((f"{name}.{own}.{key}", _rows(layer)) for key, layer in children)
            rows, columns = members[0][1], -2 if in_out else -1
            shape = (len(members), 1, rows) if in_out else (len(members), rows, 1)
            found[f"{name}.{own}"] = _ModelWeight(layers=members, shape=shape, columns=columns)
    return found


def _rows(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear | QuantizedLinear)
    return int(layer.out_features)  # a tensor in some models


def file_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors in file layout; tied ones once.

    Models that are not of transformers keep their names.
    """
    if not is_pretrained(model):
        return dict(tensors)
    modeling = importlib.import_module("transformers.modeling_utils")
    untied = getattr(modeling, "remove_tied_weights_from_state_dict", None)
    return _reverted(model, dict(tensors) if untied is None else untied(dict(tensors), model))


def file_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the file names of parameters stored unchanged, by model name.

    Raises UnsupportedError for a parameter that files have otherwise.
    """
    numbers = {name: torch.tensor([[float(number)]]) for number, name in enumerate(names)}
    every, found = list(numbers), dict[str, str]()
    for name, value in (_reverted(model, numbers) if is_pretrained(model) else numbers).items():
        if value.shape != (1, 1) or not 0 <= int(value) < len(every):
            raise UnsupportedError(f"{printable(name)} is stored together with others; leave the step out")
        found[every[int(value)]] = name
    return found


def file_rows(model: nn.Module, layers: Iterable[str]) -> list[WeightRows]:
    """Return the places of layers' rows in the model's files.

    layers: names of linear layers; layers of stacks are taken in any case. Layers that a file joins have
    their own names; layers of which it has no rows, as of a transposed weight, are left out.
    """
    columns, starts = {}, dict[int, tuple[str, int]]()
    count = 0
    for name, weight in _weights(model, layers).items():
        begin = count
        for layer, rows in weight.layers:
            starts[count] = layer, rows
            count += rows
        own = torch.arange(begin, count).reshape(weight.shape)
        columns[name] = torch.cat([own, own], weight.columns)
    begins = torch.tensor(sorted(starts))
    config: Any = model.config if is_pretrained(model) else None
    interleaved = config is not None and expert_layout(config.to_dict()).interleaved
    found: list[WeightRows] = []
    for name, numbers in (_reverted(model, columns) if is_pretrained(model) else columns).items():
        if not numbers.numel():
            raise UnsupportedError(f"the weight {printable(name)} is empty; give it some rows and columns")
        owners = sorted(set((torch.searchsorted(begins, numbers.flatten(), right=True) - 1).tolist()))
        owned, first = [starts[int(begins[owner])] for owner in owners], int(begins[owners[0]])
        if numbers.ndim == len(_STACKED) and len(owned) == len(numbers):
            first_rows = begins[torch.tensor(owners)]
            of_columns = numbers[..., 0] if numbers.shape[-1] == 2 else numbers[:, 0]
            found += _rows_of_experts(name, owned, of_columns - first_rows[:, None], interleaved)
            continue
        layer, in_columns = owned[0][0], numbers.ndim == 2 == numbers.shape[1] and torch.equal(*numbers.T)
        if len(owned) > 1 or not in_columns or not name.endswith(WEIGHT):
            if len(owned) > 1 and in_columns:
                found += [
                    WeightRows(module=own, tensor=name, layer=own, index=torch.arange(rows))
                    for own, rows in owned
                ]
            continue
        own_rows = numbers[:, 0] - first
        found.append(WeightRows(module=module_of(name), tensor=name, layer=layer, index=own_rows))
    return found


def _rows_of_experts(
    name: str, layers: Sequence[tuple[str, int]], rows: torch.Tensor, interleaved: bool
) -> Iterator[WeightRows]:
    """Yield the rows of each matrix in a tensor of all experts.

    layers: of the experts in order. rows: numbers of a layer's rows in the order of the file, for each.
    """
    holder = holder_of(module_of(name).rpartition(".")[0])
    parts = parts_named(module_of(name), module_of(layers[0][0].rpartition(".")[0]))
    for expert, ((layer, _), index) in enumerate(zip(layers, rows, strict=True)):
        own = [index[n :: len(parts)] for n in range(len(parts))] if interleaved else index.chunk(len(parts))
        for part, numbers in zip(parts, own, strict=True):
            yield WeightRows(module=f"{holder}.{expert}.{part}", tensor=name, layer=layer, index=numbers)


_STACKED = ("experts", "rows", "one")
"""The axes of the numbers of all experts of a layer."""


def is_pretrained(model: nn.Module) -> bool:
    """Return whether ``model`` is a model of transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == _PRETRAINED for kind in type(model).__mro__)


_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"


def _reverted(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # before 5.0 a model has the names of its files
        return tensors
    what = f"transformers does not say how the files of {type(model).__name__} name its weights"
    with reading(what, "save the model with save_pretrained to see why", UnsupportedError):
        # Conversions ask for the shapes of parameters, which are others here.
        model.__dict__["get_parameter"] = tensors.__getitem__
        try:
            reverted: dict[str, torch.Tensor] = loading.revert_weight_conversion(model, tensors)
        finally:
            del model.__dict__["get_parameter"]
    return reverted


def folds_in_files(
    root: nn.Module, places: Iterable[WeightRows], folds: Mapping[str, ChannelFold]
) -> dict[str, ChannelFold]:
    """Return the channel folds of file tensors, from model parameters'."""
    found, left = dict[str, ChannelFold](), dict(folds)
    for own in places:
        bias = folds.get(f"{own.layer}{BIAS}")
        if bias is not None and bias.added is not None:
            left.pop(f"{own.layer}{BIAS}", None)
            rows = None if bias.rows is None else bias.rows[own.index]
            found[f"{own.module}{BIAS}"] = replace(bias, rows=rows, added=bias.added[own.index])
        fold = folds.get(f"{own.layer}{WEIGHT}")
        left.pop(f"{own.layer}{WEIGHT}", None)
        if fold is not None:
            rows = None if fold.rows is None else fold.rows[own.index]
            found[f"{own.module}{WEIGHT}"] = replace(fold, rows=rows)
    names = file_names(root, left)
    return found | {names[name]: fold for name, fold in left.items()}
