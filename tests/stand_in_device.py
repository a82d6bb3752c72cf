"""A device that stands in for a GPU: tensors of the host that say they are elsewhere, and refuse to be mixed.

A tensor elsewhere meets those of the host as one of CUDA does: in copies, as numbers without axes and as
indices. Anything else fails, and so do numpy and pointers. Arithmetic is that of the host, so that
numbers are equal where code takes the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zeropoint.ops import library

NAME = "elsewhere"
_MEETING = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
"""Operators in which CUDA takes tensors of the host next to its own."""


_INSIDE: list[bool] = []
"""One for each context that is open; outside of them torch, which forgets no device, finds none there."""


class MixedDevicesError(Exception):
    """An operator got tensors of the host and of the device."""


class Elsewhere(torch.Tensor):
    """A tensor of the device; held: its numbers, on the host."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made: torch.Tensor = Elsewhere(self.held.clone())
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if _is_parameter(self) else made
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the numbers, which tells views of one tensor from others."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Return the numbers."""
        return self.held.tolist()

    def data_ptr(self) -> int:
        """Return the address of the numbers."""
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees operators without tensors, which say by name where their results are to be."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "zeropoint":
            with self:
                return getattr(library, func._schema.name.partition("::")[2])._function(*args)
        return _run(func, args, kwargs or {})


@contextmanager
def standing_in() -> Iterator[torch.device]:
    """Return a context in which the device is there."""
    _register()
    _INSIDE.append(True)
    # torch.tensor then makes its result on the host and moves it, where the mode sees that.
    before: bool = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Factories():
            yield torch.device(NAME, 0)
    finally:
        _INSIDE.pop()
        torch._C._set_only_lift_cpu_tensors(before)


@functools.cache
def _register() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU, whose gradients torch would look for on the other device; its own tests run")
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no devices that Python makes")
    module, hook = backend_registration._DummyBackendModule, backend_registration._DummyPrivateUse1Hook
    there = {"is_available": lambda _: bool(_INSIDE), "device_count": lambda _: len(_INSIDE)}
    backend_registration._setup_privateuseone_for_python_backend(
        rename=NAME, backend_module=type("Module", (module,), there)(), hook=type("Hook", (hook,), there)()
    )


def _run(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, named)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    here = [x for x in tensors if not isinstance(x, Elsewhere) and x.ndim]
    name = func._schema.name.partition("::")[2]
    if there and here and name not in _MEETING:
        raise MixedDevicesError(f"{func} of {[(type(x).__name__, tuple(x.shape)) for x in tensors]}")
    asked = named.get("device")
    elsewhere = bool(there) if asked is None else torch.device(asked).type == NAME
    if name in _MEETING and name != "_to_copy":
        elsewhere = isinstance(args[0], Elsewhere)
        if name.startswith(("index", "_index")) and not elsewhere and there:
            raise MixedDevicesError(f"{func}: an index of the device into a tensor of the host")
    own = dict(named) if asked is None else {**named, "device": torch.device("cpu")}
    known = {id(x.held): x for x in there}
    found = func(*tree_map(_inner, tuple(args)), **tree_map(_inner, own))
    return tree_map(lambda x: _outer(x, known) if elsewhere else x, found)


def _is_parameter(x: torch.Tensor) -> bool:
    return isinstance(x, nn.Parameter)


def _inner(x: Any) -> Any:
    return x.held if isinstance(x, Elsewhere) else x


def _outer(x: Any, known: Mapping[int, Elsewhere]) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return known[id(x)] if id(x) in known else Elsewhere(x)
