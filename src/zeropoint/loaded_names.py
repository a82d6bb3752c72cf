"""Names that transformers, from 5.0 on, gives checkpoint weights while loading.

They follow from the mapping of the version that is installed (conversion_mapping.py). A mapping belongs to
classes of models, so the model is made without memory, on the device "meta", where a row may concern it.
Where transformers is not installed, or does not know the model, modules have the names of their files.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .architectures import Config, classes_of, is_expert, model_type
from .declared_models import few_modules, model_config, offline, transformers_package
from .errors import ZeropointError
from .libraries import reading

T = TypeVar("T")
_WEIGHT = ".weight"
_LEGACY = "legacy"
"""Rows of transformers that hold for every model."""
_STEM = re.compile(r"(For[A-Z]|Model$|LMHead|PreTrained)")
"""What ends the part of a class's name that all classes of a family have."""


def is_installed() -> bool:
    """Return whether names can be asked of transformers."""
    return importlib.util.find_spec("transformers") is not None


_IN_VLLM = ((re.compile(r"\battention\.self\.(query|key|value)$"), r"attention.output.\1"),)
"""Names that vLLM's BERT asks its configuration for, instead of the file's (models/bert.py of 0.32)."""


def loaded_names(module: str, config: Config) -> tuple[str, ...]:
    """Return the names under which loaders find a module, file's first.

    >>> loaded_names("encoder.layer.0.attention.self.key", {})
    ('encoder.layer.0.attention.self.key', 'encoder.layer.0.attention.output.key')
    """
    others = (row.sub(new, module) for row, new in _IN_VLLM)
    return tuple(dict.fromkeys((module, *others, *transformers_names(module, config))))


def transformers_names(module: str, config: Config) -> tuple[str, ...]:
    """Return a module's file name, and its transformers names.

    A matrix that transformers cuts into several layers has the names of all of them.
    """
    rows = mapping_rows(config)
    names = [module]
    if rows:
        names += [key.removesuffix(_WEIGHT) for key in _renamed(module + _WEIGHT, rows)]
    return tuple(dict.fromkeys(names))


def loaded_parameters(name: str, config: Config) -> tuple[str, ...]:
    """Return the parameters that a file's tensor becomes or joins."""
    return tuple(_renamed(name, mapping_rows(config), joined=True))


MERGE = "MergeModulelist"
"""The operation of transformers that stacks the weights of single experts."""


def conversion(name: str, config: Config) -> tuple[str, ...]:
    """Return transformers' conversion operations on a tensor, by class name."""
    rows = mapping_rows(config)
    name = renamed(name, rows)
    for row in (row for row in rows if hasattr(row, "operations")):
        if row.rename_source_key(name)[1] is not None:
            return tuple(type(operation).__name__ for operation in row.operations)
    return ()


def renamed(name: str, rows: Sequence[Any]) -> str:
    """Return a tensor's name after all renamings, before converters."""
    for row in rows:
        if not hasattr(row, "operations"):
            name, _ = row.rename_source_key(name)
    return name


def is_stable(name: str, config: Config) -> bool:
    """Return whether transformers loads a tensor as it is, under its name."""
    return list(_renamed(name, mapping_rows(config))) == [name] and not conversion(name, config)


def _renamed(name: str, rows: Sequence[Any], *, joined: bool = False) -> Iterator[str]:
    """Yield a tensor's new names: all renamings, then one converter.

    joined: whether tensors that become a part of another one get its name; their modules are none then.
    """
    name = renamed(name, rows)
    for row in rows:
        if not hasattr(row, "operations"):
            continue
        made, pattern = row.rename_source_key(name)
        if pattern is not None:
            first, *_ = row.target_patterns
            found = [made.replace(first, target, 1) for target in row.target_patterns]
            own = [key for key in found if joined or key.endswith(_WEIGHT)]
            yield from own or [name]
            return
    yield name


def of_model(unknown: T) -> Callable[[Callable[[Any], T]], Callable[[Config], T]]:
    """Return the decorator of facts of transformers' model, cached by configuration.

    unknown: the result where transformers makes no model of the configuration.
    """

    def decorated(read: Callable[[Any], T]) -> Callable[[Config], T]:
        @functools.lru_cache(maxsize=16)
        def kept(text: str) -> T:
            try:
                model = made_model(text)
            except ZeropointError:
                return unknown
            return read(model)

        def of(config: Config) -> T:
            return kept(text_of(config))

        of.__doc__ = read.__doc__
        return of

    return decorated


def lacks_single_experts(config: Config) -> bool:
    """Return whether transformers' model has no single-expert modules."""
    return bool(mapping_rows(config)) and not _has_single_experts(config)


@of_model(True)
def _has_single_experts(model: Any) -> bool:
    return any(is_expert(f"{name}.") for name, _ in model.named_modules())


def saved_shapes(config: Config) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of tensors that transformers saves, none if unknown."""
    return _saved_shapes(text_of(config)) if mapping_rows(config) else {}


@functools.lru_cache(maxsize=4)
def _saved_shapes(text: str) -> Mapping[str, tuple[int, ...]]:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    try:
        model = made_model(text)
        with reading(_FAILED, "correct it"):
            saved = loading.revert_weight_conversion(model, model.state_dict())
    except ZeropointError:
        return {}
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


def is_table(module: str, config: Config) -> bool:
    """Return whether transformers' model has a module as embedding."""
    return bool(mapping_rows(config)) and transformers_names(module, config)[-1] in _tables(config)


@of_model(frozenset[str]())
def _tables(model: Any) -> frozenset[str]:
    return frozenset(name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))


def tied_layers(config: Config) -> tuple[str, ...]:
    """Return the tied layers of a model of several models."""
    return _tied_layers(config) if joins_models(config) else ()


def joins_models(config: Config) -> bool:
    """Return whether transformers makes a model of several models."""
    return is_installed() and len(set(_kinds(config))) > 1


@of_model(tuple[str, ...]())
def _tied_layers(model: Any) -> tuple[str, ...]:
    tied = [name.removesuffix(_WEIGHT) for name in getattr(model, "all_tied_weights_keys", ())]
    modules = dict(model.named_modules())
    return tuple(name for name in tied if isinstance(modules.get(name), torch.nn.Linear))


def unknown_names(config: Config) -> str | None:
    """Return the reason why transformers' names are unknown, or None."""
    if not model_type(config):
        return None
    return _asked(config)[1] if is_installed() else "transformers is not installed"


def mapping_rows(config: Config) -> Sequence[Any]:
    """Return the mapping rows of a model, none if unknown."""
    return _asked(config)[0] if model_type(config) and is_installed() else ()


def _asked(config: Config) -> tuple[Sequence[Any], str | None]:
    return _found(text_of(config))


def text_of(config: Config) -> str:
    """Return a configuration as a key, without what it says of quantization."""
    known = {key: value for key, value in config.items() if not key.endswith("quantization_config")}
    return json.dumps(known, sort_keys=True, default=str)


@functools.lru_cache(maxsize=16)
def _found(text: str) -> tuple[Sequence[Any], str | None]:
    """Return the rows, and why there are none that should be."""
    try:
        # Before 5.0 a model has the names of its files.
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return (), None
    config = json.loads(text)
    try:
        with reading(_FAILED, "correct it"):
            keys = mapping._build_checkpoint_conversion_mapping().keys()
            legacy = tuple(mapping.get_checkpoint_conversion_mapping(_LEGACY) or ())
            if not _concerns(keys, config):
                return legacy, None
            kind = _only_kind(keys, config)
            if kind is not None:
                return (*mapping.get_checkpoint_conversion_mapping(kind), *legacy), None
            return tuple(mapping.get_model_conversion_mapping(_model(config))), None
    except ZeropointError as error:
        return (), str(error)


_FAILED = "transformers makes no model of config.json"


def _concerns(keys: Collection[str], config: Config) -> bool:
    """Return whether a mapping row may concern a model or part."""
    return any(kind in keys for kind in _kinds(config)) or _has_own_rows(keys, config)


@reading(_FAILED, "correct it")
def _has_own_rows(keys: Collection[str], config: Config) -> bool:
    """Return whether a row may belong to a model's own classes."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    classes = [*classes_of(config)]
    for kind in _kinds(config):
        found = auto.MODEL_MAPPING_NAMES.get(kind, ())
        classes += [found] if isinstance(found, str) else found
    stems = {_STEM.split(each)[0] for each in classes}
    return any(key.startswith(stem) for key in keys for stem in stems if stem)


@reading(_FAILED, "correct it")
def _only_kind(keys: Collection[str], config: Config) -> str | None:
    """Return the only model_type with rows for a model, or None.

    It has no parts, and its class need not be imported, which takes 150 MiB.
    """
    kind, known = model_type(config), transformers_package().CONFIG_MAPPING
    if set(_kinds(config)) != {kind} or kind not in keys or kind not in known:
        return None
    made = known[kind]
    alone = made.model_type == kind and not getattr(made, "sub_configs", None)
    return kind if alone and not _has_own_rows(keys, config) else None


def _kinds(part: Any) -> Iterator[str]:
    """Yield the model types of a model and all its parts."""
    if isinstance(part, dict):
        if model_type(part):
            yield model_type(part)
        for inner in part.values():
            yield from _kinds(inner)


def made_model(text: str) -> Any:
    """Return transformers' model of :func:`text_of`, without memory; raises ZeropointError."""
    return _model(json.loads(text))


@reading(_FAILED, "correct it")
def _model(config: Config) -> Any:
    """Return a model of transformers without memory."""
    transformers, named = transformers_package(), next(iter(classes_of(config)), "")
    with offline(), torch.device("meta"), few_modules(_MODULES):
        made = model_config(config, _FAILED, "correct it")
        own = getattr(transformers, named, None)
        return transformers.AutoModel.from_config(made) if own is None else own._from_config(made)


_MODULES = 1 << 16
"""More than any model has."""
