"""Sites of a model: input tensors and their linear readers.

A model is run once, and reads and writes of its operators are followed. Layers whose input is one tensor
object share a site; names play no part, so that a router or a gate is a reader like a projection. The stage
of a site is the number of layers of interest that its input has passed, on the longest way: inputs of a stage
depend on layers of earlier stages alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .layer import on_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One input tensor and the linear layers that read it.

    readers: names of the layers, in the order in which they ran. stage: number of layers of interest that the
    input passed. repeated: whether a reader ran more than once.
    """

    readers: tuple[str, ...]
    stage: int
    repeated: bool = False


def sites_of(
    run: Callable[[], Any], readers: Mapping[str, nn.Module], passed: Collection[str]
) -> tuple[Site, ...]:
    """Return the sites of ``readers``, ordered by their first run.

    run: runs the model once. readers: linear layers by name; one that does not run is in no site, and of one
    that runs again the first input counts. passed: names of the layers of interest, which stages count.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> layers = {"0": model[0], "2": model[2]}
    >>> [site.stage for site in sites_of(lambda: model(torch.ones(1, 4)), layers, layers)]
    [0, 1]
    """
    follower = _Follower()
    found: list[tuple[torch.Tensor, int, list[str]]] = []
    runs: Counter[str] = Counter()

    def read(name: str, x: torch.Tensor) -> torch.Tensor:
        runs[name] += bool(x.numel())  # a layer of other tokens than text may get none
        if runs[name] == 1 and x.numel():
            # The tensor is kept, so that no other one gets its identity.
            own = next((names for tensor, _, names in found if tensor is x), None)
            if own is None:
                found.append((x, follower.level(x), [name]))
            else:
                own.append(name)
        return x

    def after(module: nn.Module, args: Any, result: Any) -> None:  # noqa: ARG001 (as hooks)
        follower.raise_level(result)

    with ExitStack() as hooks:
        for name in filter(passed.__contains__, readers):
            hooks.enter_context(readers[name].register_forward_hook(after))
        hooks.enter_context(on_inputs((readers[name], functools.partial(read, name)) for name in readers))
        with follower:
            run()
    return tuple(
        Site(readers=tuple(names), stage=level, repeated=any(runs[name] > 1 for name in names))
        for _, level, names in found
    )


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the passed layers of interest of each memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._levels: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; its outputs inherit the highest input level."""
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        level = max(map(self.level, inputs), default=0)
        known = {_memory(x) for x in inputs}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                # New memory may have the address of some that was given back.
                old = self.level(x) if _memory(x) in known else 0
                self._levels[_memory(x)] = max(level, old)
        return result

    def level(self, x: torch.Tensor) -> int:
        """Return the number of layers that a tensor has passed."""
        return self._levels.get(_memory(x), 0)

    def raise_level(self, result: Any) -> None:
        """Count one layer more for what a layer gave."""
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._levels[_memory(x)] = self.level(x) + 1


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
