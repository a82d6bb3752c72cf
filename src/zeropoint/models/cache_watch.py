"""Largest magnitudes of keys and values entering a KV cache.

They are observed where transformers hands them to a cache as a model runs: after rotary embeddings and norms.
Engines quantize these tensors, and the observers of compressed-tensors and NVIDIA ModelOpt see them.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_CACHE = "past_key_values"
"""What the attention layers of transformers call the cache that they are given."""


class KvCacheObserver:
    """Observer of attention layers' KV cache inputs; supplies missing caches.

    enabled, examine: see :class:`~zeropoint.models.sequential.Watching`. layers: attention layers by name.
    keys, values: the largest magnitude so far, by layer, in the dtype of the tensors; NaN where one was.
    """

    def __init__(self, root: nn.Module) -> None:
        self.enabled = True
        self._lock = threading.Lock()  # batches may run in threads
        self.examine: Callable[[str, torch.Tensor], None] | None = None
        self.layers: Mapping[str, nn.Module] = {n: m for n, m in root.named_modules() if _is_attention(m)}
        self.keys: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Let attention layers have caches that observe."""
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                give = functools.partial(self._give, name)
                hooks.enter_context(layer.register_forward_pre_hook(give, with_kwargs=True))
            yield

    def outside(self, blocks: Iterable[nn.Module]) -> bool:
        """Return whether some attention layer is inside none of ``blocks``."""
        inside = {module for block in blocks for module in block.modules()}
        return any(layer not in inside for layer in self.layers.values())

    def _give(
        self,
        name: str,
        layer: nn.Module,  # noqa: ARG002 (a hook's signature)
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**named, _CACHE: PassingCache(functools.partial(self._see, name))}

    def _see(self, name: str, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.enabled:
            return
        for largest, x in ((self.keys, key), (self.values, value)):
            if self.examine is not None:
                self.examine(name, x)
            found = x.detach().abs().amax()
            with self._lock:
                largest[name] = torch.maximum(largest[name], found) if name in largest else found


class PassingCache:
    """An empty cache that records its inputs, and returns them."""

    def __init__(self, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._see = see

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, as an empty cache would."""
        self._see(key_states, value_states)
        return key_states, value_states


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module takes a cache, by compressed-tensors' rule."""
    kind = type(module)
    return "attention" in kind.__name__.lower() and _CACHE in inspect.signature(kind.forward).parameters
