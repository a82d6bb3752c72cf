"""Transformers models from untrusted config.json files, limited to declared keys.

Of the keys of a configuration, transformers gets numbers, and the keys that the installed class of
configurations declares; a text under any other key could name code to load, as ``attn_implementation`` and
``auto_map`` do. This module opens no file.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.nn.modules.module import register_module_module_registration_hook

from .errors import CheckpointError, UnsupportedError, printable

_OF_CODE = ("implementation", "auto_map", "quantization_config")
"""Ends of the keys that choose code, also where a class declares them."""
_OLDER = frozenset(("rope_scaling", "torch_dtype"))
"""Texts of transformers 4 that version 5 takes as keywords without a declaration."""
_FLOAT = "__float__"
"""Key under which a configuration has a number that JSON has not."""
_LARGEST, _LARGEST_OTHER = 1 << 24, 1 << 20
"""Whole numbers that a class declares, such as the length of texts, and others."""


def transformers_package() -> Any:
    """Return the package transformers; raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise UnsupportedError("calibration runs the model by transformers; install zeropoint[hf]") from error


def model_config(config: Mapping[str, Any], what: str, remedy: str) -> Any:
    """Return a transformers configuration of declared keys and numbers.

    Raises UnsupportedError for a model_type that transformers does not know.
    """
    known, name = transformers_package().CONFIG_MAPPING, config.get("model_type")
    if not isinstance(name, str) or name not in known:
        raise UnsupportedError(f"{what}: its model_type {printable(str(name))} is unknown; {remedy}")
    kind = known[name]
    return kind.from_dict(_declared(config, kind, known))


def _declared(config: Mapping[str, Any], kind: Any, known: Any) -> dict[str, Any]:
    """Return the declared keys of a configuration, and values without texts."""
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
    """Return the field and argument names of a configuration class."""
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
    """Return a value with huge integers as floats, and infinities read.

    Such a number may be the base of rotary embeddings. No float is a size: nothing is counted up to one.
    """
    if isinstance(value, dict) and value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if isinstance(value, dict):
        return {key: _bounded(each, limit) for key, each in value.items()}
    if isinstance(value, list):
        return [_bounded(each, limit) for each in value]
    return float(value) if isinstance(value, int) and abs(value) > limit else value


@contextmanager
def few_modules(most: int) -> Iterator[None]:
    """Raise CheckpointError in a context that makes too many modules."""
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
def offline() -> Iterator[None]:
    """Keep transformers off the hub inside the context."""
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        yield
