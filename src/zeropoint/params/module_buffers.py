"""Parameters as module buffers that move and save, but keep their dtypes.

A cast of a model (``half()``, ``to(torch.bfloat16)``) is about its activations; a scale in another dtype
would be another number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import DtypeError, SchemeError, ZeropointError
from ..schemes import Rounding, Scheme
from .parameters import QuantizationParams
from .tensors import parameter_names, parameter_tensors

DESCRIPTION = "_extra_state"
"""Key under which torch keeps what ``get_extra_state`` returns."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as uint8, for gloo and pickle (torch 2.13)."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def register_params(module: torch.nn.Module, params: QuantizationParams) -> None:
    """Register copies of the parameter tensors as buffers."""
    for name, tensor in params.tensors().items():
        module.register_buffer(name, bytes_of(tensor.detach()).clone())


def buffered_params(
    module: torch.nn.Module, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> QuantizationParams:
    """Return parameters that share the memory of a module's buffers."""
    named = zip(parameter_names(scheme), parameter_tensors(scheme, shape, dtype), strict=True)
    stored = [module.get_buffer(name).view(kind) for name, (_, kind) in named]
    return QuantizationParams.of(scheme, shape, dtype, stored)


def described(scheme: Scheme) -> torch.Tensor:
    """Return the scheme's text as a uint8 tensor, for files of tensors.

    >>> scheme_described(described(Scheme.parse("int4:g32"))).bits
    4
    """
    return torch.tensor(list(str(scheme).encode()), dtype=torch.uint8)


def scheme_described(state: torch.Tensor) -> Scheme:
    """Return the scheme of :func:`described`."""
    return Scheme.parse(bytes(state.tolist()).decode())


def refusal_of_state(
    state: Mapping[str, Any], prefix: str, scheme: Scheme, check: Callable[[Mapping[str, Any]], None]
) -> str | None:
    """Return the reason why a state does not load, or None.

    state, prefix: the part of a state dict for one module. scheme: the module's, which a description must
    name but for a seed. check: raises a ZeropointError for tensors, by their names in the module, that do not
    fit.
    """
    mine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    description = mine.pop(DESCRIPTION, None)
    try:
        if description is not None:
            _check_scheme(scheme_described(description), scheme)
        check(mine)
    except ZeropointError as error:
        return f"{prefix.removesuffix('.') or '(the module itself)'}: {error}"
    return None


def _check_scheme(found: Scheme, wanted: Scheme) -> None:
    """Raise SchemeError for schemes that differ in more than a seed."""
    if replace(found, rounding=Rounding(mode=found.rounding.mode)) != replace(
        wanted, rounding=Rounding(mode=wanted.rounding.mode)
    ):
        raise SchemeError(f"scheme of the state ({found}) must be that of the module, {wanted}")


def check_dtypes(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise DtypeError for a tensor that loading into ``module`` would silently cast."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for name, tensor in tensors.items():
        if name in own and tensor.dtype != own[name].dtype:
            raise DtypeError(f"{name} (dtype {tensor.dtype}) must be {own[name].dtype} to be loaded")


def check_buffered(params: QuantizationParams, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a ZeropointError unless buffer tensors could replace ``params``."""
    own = params.tensors()
    if tensors.keys() >= own.keys():
        viewed = {name: tensors[name].view(tensor.dtype) for name, tensor in own.items()}
        QuantizationParams.from_tensors(params.scheme, params.shape, viewed, params.dtype)


def keeping_dtypes(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a move like ``nn.Module._apply``'s that keeps the dtype.

    >>> keeping_dtypes(torch.Tensor.half)(torch.ones(1)).dtype
    torch.float32
    """

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        moved = move(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return kept
