"""A checkpoint's model without parameter memory, bounded by its files.

The class of the model must be the one that belongs to the configuration. The model is first
built on the meta device, where it costs nothing, and must not have more modules, numbers and buffers than its
files and the limit of memory allow.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...architectures import classes_of
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...declared_models import few_modules, model_config, offline, transformers_package
from ...errors import CheckpointError, UnsupportedError, option, printable, size_of
from ...libraries import reading
from ...models.model_blocks import token_embeddings
from ..plan.limits import Limits
from ..read.source import Source
from ..read.storage import shown

_MODULES, _FEW_MODULES = 16, 1024
"""Most modules of a model: for each tensor in its files, and beyond these."""
_SLACK = 1 << 20


def empty_model(
    source: Source, limits: Limits, remedy: str, dtype: torch.dtype | None, *, of_tokens: bool = True
) -> Any:
    """Return the model of a checkpoint in evaluation mode, parameters untouched.

    dtype: of its parameters, or None for the configuration's. of_tokens: whether it must run on token ids
    alone. Raises UnsupportedError where transformers does not build it, CheckpointError where it is larger
    than its files.
    """
    assert source.config is not None
    name, transformers = _architecture(source, remedy), transformers_package()
    what = (
        f"transformers {transformers.__version__} does not build {printable(name)} from {shown(source.root)}"
    )
    with reading(what, remedy, UnsupportedError), offline():
        kind: Any = getattr(transformers, name)
        if not _is_model(kind):
            raise UnsupportedError(f"{what}: it is no class of models; {remedy}")
        config = model_config(source.config, what, remedy)
        # Models of some configurations are classes of others: InternLM3 is a Llama.
        others = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        own = kind.config_class is type(config) or others.get(type(config), None) is kind
        model_kind = "model of tokens" if of_tokens else "model"
        of_others = f"{what}: it is no {model_kind} of model_type {printable(config.model_type)}; {remedy}"
        if not own or (of_tokens and kind.main_input_name != "input_ids"):
            raise UnsupportedError(of_others)
        # Files of BERT may hold numbers of positions, too, which are no floats.
        kinds = (TORCH_DTYPES.get(entry.dtype) for entry in source.entries.values())
        dtype = dtype or config.dtype or next(kind for kind in kinds if kind and kind.is_floating_point)
        with torch.device("meta"), few_modules(_MODULES * len(source.entries) + _FEW_MODULES):
            # Some models change their configuration while they are built.
            _require_small(kind._from_config(copy.deepcopy(config), dtype=dtype), source, limits)
        with _parameters_on_meta():
            model = kind._from_config(config, dtype=dtype)
        if of_tokens and token_embeddings(model) is None:
            raise UnsupportedError(of_others)
        pooled = any(entry.startswith("pooler.") for entry in source.entries)
        if "pooler" in dict(model.named_children()) and not pooled:
            model.pooler = None  # as in files of llama.cpp; transformers then leaves out what it would give
        return _with_memory(model).eval()


def _is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, transformers_package().PreTrainedModel)


def _architecture(source: Source, remedy: str) -> str:
    assert source.config is not None
    named = classes_of(source.config)
    if not named:
        raise UnsupportedError(f"{shown(source.root)} has no config.json with architectures; {remedy}")
    return named[0]


def _require_small(model: nn.Module, source: Source, limits: Limits) -> None:
    """Raise CheckpointError for a model larger than its files or memory."""
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
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device, but real buffers, inside the block.

    Buffers that are in no file, such as the frequencies of rotary embeddings, would be lost on meta.
    """

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> Any:  # noqa: ARG001 (torch's types say None)
        return param if param.is_meta else nn.Parameter(param.to("meta"), requires_grad=False)

    with register_module_parameter_registration_hook(on_meta):
        yield


def _with_memory(model: nn.Module) -> nn.Module:
    """Return a model with allocated, untouched parameters; shared ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                own = made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
                module._parameters[key] = own
    return model
