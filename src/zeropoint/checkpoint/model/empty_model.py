"""A checkpoint's model as transformers builds it, without memory for parameters, and bounded by its files.

config.json is a stranger's. Of its keys, transformers gets those that the installed class of configurations
declares, and numbers; a text under any other key could name code to load, as ``attn_implementation`` and
``auto_map`` do. The class of the model must be the one that belongs to the configuration. The model is first
built on the meta device, where it costs nothing, and must not have more modules, numbers and buffers than its
files and the limit of memory allow.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CheckpointError, UnsupportedError, option, printable, size_of
from ...libraries import reading
from ..plan.limits import Limits
from ..read.config_text import CONFIG_KEY
from ..read.source import Source
from ..read.storage import shown

_OF_CODE = ("implementation", "auto_map", CONFIG_KEY)
"""Ends of the keys that choose code, also where a class declares them."""
_OLDER = frozenset(("rope_scaling", "torch_dtype"))
"""Texts of transformers 4 that version 5 takes as keywords without a declaration."""
_LARGEST, _LARGEST_OTHER = 1 << 24, 1 << 20
"""Whole numbers that a class declares, such as the length of texts, and others."""
_MODULES, _FEW_MODULES = 16, 1024
"""Modules for each tensor in the files, most of which have a parameter or two, and those of any model."""
_SLACK = 1 << 20


def transformers_package() -> Any:
    """Return the package transformers; raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise UnsupportedError("calibration runs the model by transformers; install zeropoint[hf]") from error


def empty_model(source: Source, limits: Limits, remedy: str, dtype: torch.dtype | None) -> Any:
    """Return the model of a checkpoint in evaluation mode; nothing touches the memory of its parameters.

    dtype: of its parameters, or None for that of the configuration. Raises UnsupportedError where
    transformers does not build it, CheckpointError where it is larger than its files.
    """
    assert source.config is not None
    name, transformers = _architecture(source, remedy), transformers_package()
    what = (
        f"transformers {transformers.__version__} does not build {printable(name)} from {shown(source.root)}"
    )
    with reading(what, remedy, UnsupportedError), _offline():
        kind: Any = getattr(transformers, name)
        if not _is_model(kind):
            raise UnsupportedError(f"{what}: it is no class of models; {remedy}")
        config = model_config(source.config, what, remedy)
        if kind.config_class is not type(config) or kind.main_input_name != "input_ids":
            raise UnsupportedError(
                f"{what}: it is no model of tokens of model_type {printable(config.model_type)}; {remedy}"
            )
        # Files of BERT may hold numbers of positions, too, which are no floats.
        kinds = (TORCH_DTYPES.get(entry.dtype) for entry in source.entries.values())
        dtype = dtype or config.dtype or next(kind for kind in kinds if kind and kind.is_floating_point)
        with torch.device("meta"), _few_modules(_MODULES * len(source.entries) + _FEW_MODULES):
            _require_small(kind._from_config(config, dtype=dtype), source, limits)
        with _parameters_on_meta():
            model = kind._from_config(config, dtype=dtype)
        pooled = any(entry.startswith("pooler.") for entry in source.entries)
        if "pooler" in dict(model.named_children()) and not pooled:
            model.pooler = None  # as in files of llama.cpp; transformers then leaves out what it would give
        return _with_memory(model).eval()


def _is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, transformers_package().PreTrainedModel)


def _architecture(source: Source, remedy: str) -> str:
    assert source.config is not None
    named = source.config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise UnsupportedError(f"{shown(source.root)} has no config.json with architectures; {remedy}")
    return named[0]


def model_config(config: Mapping[str, Any], what: str, remedy: str) -> Any:
    """Return a configuration of transformers with what its class declares of config.json, and numbers.

    Raises UnsupportedError for a model_type that transformers does not know.
    """
    known, name = transformers_package().CONFIG_MAPPING, config.get("model_type")
    if not isinstance(name, str) or name not in known:
        raise UnsupportedError(f"{what}: its model_type {printable(str(name))} is unknown; {remedy}")
    kind = known[name]
    return kind.from_dict(_declared(config, kind, known))


def _declared(config: Mapping[str, Any], kind: Any, known: Any) -> dict[str, Any]:
    """Return the keys of a configuration that its class declares, or whose values have no text."""
    names, found = _fields(kind), {}
    inner = getattr(kind, "sub_configs", {})
    for key, value in config.items():
        if key.endswith(_OF_CODE):
            continue
        if key in inner and isinstance(value, dict):
            of = inner[key] if _fields(inner[key]) else known.get(value.get("model_type"))
            found[key] = _declared(value, of, known) if of is not None else _bounded(value, _LARGEST_OTHER)
        elif key in names | _OLDER or not _has_text(value):
            found[key] = _bounded(value, _LARGEST if key in names else _LARGEST_OTHER)
    return found


def _fields(kind: Any) -> set[str]:
    """Return the names that a class of configurations takes: of fields, and of arguments of older ones."""
    found = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for base in inspect.getmro(kind):
        made = vars(base).get("__init__")
        found |= set(inspect.signature(made).parameters) if inspect.isfunction(made) else set()
    return (found | set(getattr(kind, "attribute_map", {}))) - {"self", "args", "kwargs", "model_type"}


def _has_text(value: object) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_text, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str)


def _bounded(value: Any, limit: int) -> Any:
    """Return a value in which whole numbers beyond a limit are floats.

    Such a number may be the base of rotary embeddings. No float is a size: nothing is counted up to one.
    """
    if isinstance(value, dict):
        return {key: _bounded(each, limit) for key, each in value.items()}
    if isinstance(value, list):
        return [_bounded(each, limit) for each in value]
    return float(value) if isinstance(value, int) and abs(value) > limit else value


def _require_small(model: nn.Module, source: Source, limits: Limits) -> None:
    """Raise CheckpointError for a model that is larger than its files, or than memory allows."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    there = sum(math.prod(entry.shape) for entry in source.entries.values())
    if numbers > 2 * there + _SLACK:
        raise CheckpointError(
            f"config.json describes a model of {numbers:,} numbers, and the files hold {there:,}; download "
            "it again"
        )
    nbytes = sum(buffer.nbytes for buffer in model.buffers())
    if nbytes > limits.max_memory - limits.base_memory:
        raise CheckpointError(
            f"config.json describes a model with {size_of(nbytes)} besides its parameters, more than "
            f"{option('max_memory')} allows; correct its sizes, or raise it"
        )


@contextmanager
def _few_modules(most: int) -> Iterator[None]:
    """Raise CheckpointError inside of the block where it makes more modules than ``most``."""
    made = 0

    def counted(*registered: object) -> None:  # noqa: ARG001 (torch's signature)
        nonlocal made
        made += 1
        if made > most:
            raise CheckpointError(
                f"config.json describes a model of more than {most:,} modules, far more than the files have "
                "tensors; correct its sizes, or download it again"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _offline() -> Iterator[None]:
    """Let transformers take nothing from the hub inside of the block, whatever a configuration names."""
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        yield


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules that are made inside the block have parameters on the meta device, and real buffers.

    Buffers that are in no file, such as the frequencies of rotary embeddings, would be lost on meta.
    """

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> Any:  # noqa: ARG001 (torch's types say None)
        return param if param.is_meta else nn.Parameter(param.to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def _with_memory(model: nn.Module) -> nn.Module:
    """Return a model whose parameters have memory that is not touched; shared ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                own = made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
                module._parameters[key] = own
    return model
