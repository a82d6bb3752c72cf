"""Memo of outputs of block parts whose weights are solved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size; 8 bytes at a time are summed sixteen times as fast as 4."""


class PartMemo:
    """Cached outputs of solved parts, by batch and inputs.

    block: inside of which parts are. layers: those that are solved, by name. batch: returns the number of the
    batch that runs. limit: most bytes that are kept.
    """

    def __init__(
        self, block: nn.Module | None, layers: Mapping[str, nn.Module], batch: Callable[[], int], limit: int
    ) -> None:
        self._block, self._batch, self._left = block if limit > 0 else None, batch, limit
        self._layers = {module: name for name, module in layers.items()}
        self._solved: set[str] = set()
        self._kept: dict[nn.Module, dict[int, MarkedOutput]] = {}

    def finish(self, readers: Iterable[str]) -> None:
        """Count layers as solved, and cache the parts they complete."""
        self._solved |= set(readers)
        if self._block is None:
            return
        for part in self._parts(self._block):
            if part not in self._kept:
                self._kept[part] = {}
                part.forward = functools.partial(self._call, part, part.forward)

    def close(self) -> None:
        """Let all parts compute again."""
        for part in self._kept:
            vars(part).pop("forward", None)
        self._kept.clear()

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost parts that hold solved layers alone."""
        for child in module.children():
            held = {self._layers[m] for m in child.modules() if m in self._layers}
            if held and held <= self._solved:
                yield child
            elif held:
                yield from self._parts(child)

    def _call(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        known, batch = self._kept[part], self._batch()
        # A part may also read what layers give that are not solved yet, and may run twice on a batch.
        mark = _mark((args, named))
        found = known.get(batch)
        if found is not None and found.mark == mark and found.is_unchanged():
            return found.value
        result = MarkedOutput(forward(*args, **named), mark)
        if found is None:
            self._forget_inside(part, batch)
            if result.nbytes <= self._left:
                self._left -= result.nbytes
                known[batch] = result
        return result.value

    def _forget_inside(self, part: nn.Module, batch: int) -> None:
        """Give back what parts of a part gave for a batch."""
        for inner in part.modules():
            given = self._kept[inner].pop(batch, None) if inner is not part and inner in self._kept else None
            self._left += 0 if given is None else given.nbytes


class MarkedOutput:
    """Output of a module, and a mark of what it depends on."""

    def __init__(self, value: Any, mark: Any) -> None:
        self.value, self.mark = value, mark
        self._tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        self._versions = [x._version for x in self._tensors]
        self.nbytes = sum(x.nbytes for x in self._tensors)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written into it since."""
        return [x._version for x in self._tensors] == self._versions


def _mark(value: Any) -> tuple[Any, ...]:
    """Return a fingerprint of inputs: shapes, and sums of bits."""
    return tuple(
        (tuple(x.shape), _sum_of_bits(x.contiguous().view(-1)))
        if isinstance(x, torch.Tensor) and x.numel() and not x.is_complex()
        else str(type(x))
        for x in tree_leaves(value)
    )


def _sum_of_bits(x: torch.Tensor) -> int:
    if x.nbytes % 8:
        return int(x.view(_WORDS[x.element_size()]).sum())
    aligned = x if x.storage_offset() * x.element_size() % 8 == 0 else x.clone()
    return int(aligned.view(torch.int64).sum())
