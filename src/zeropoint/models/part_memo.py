"""What the parts of a block give once their weights are solved, kept so that they do not compute it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class PartMemo:
    """What the parts of a block gave whose weights are solved, by batch: they are not computed again.

    block: inside of which parts are. layers: those that are solved, by name. batch: returns the number of the
    batch that runs. limit: most bytes that are kept.
    """

    def __init__(
        self, block: nn.Module | None, layers: Mapping[str, nn.Module], batch: Callable[[], int], limit: int
    ) -> None:
        self._block, self._batch, self._left = block, batch, limit
        self._layers = {module: name for name, module in layers.items()}
        self._solved: set[str] = set()
        self._kept: dict[nn.Module, dict[int, _Result]] = {}
        self._again: set[nn.Module] = set()
        self._pass = 0

    def finish(self, readers: Iterable[str]) -> None:
        """Keep from now on what parts give all of whose layers are solved with these."""
        self._solved |= set(readers)
        self._pass += 1
        if self._block is None or self._left <= 0:
            return
        for part in self._parts(self._block):
            for inner in part.modules():
                if inner is not part and self._kept.get(inner) and self._kept.get(part):
                    self._left += sum(result.nbytes for result in self._kept[inner].values())
                    self._kept[inner].clear()
            if part not in self._kept:
                self._kept[part] = {}
                part.forward = functools.partial(self._call, part, part.forward)

    def close(self) -> None:
        """Let all parts compute again."""
        for part in self._kept:
            vars(part).pop("forward", None)
        self._kept.clear()

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost parts inside of a module that hold solved layers and no others."""
        for child in module.children():
            held = {self._layers[m] for m in child.modules() if m in self._layers}
            if held and held <= self._solved:
                yield child
            elif held:
                yield from self._parts(child)

    def _call(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        known, batch = self._kept[part], self._batch()
        found = known.get(batch)
        if found is not None and found.made == self._pass:
            self._again.add(part)  # it runs several times on a batch
        if found is not None and part not in self._again and found.is_unchanged():
            return found.value
        result = _Result(forward(*args, **named), self._pass)
        if found is None and result.nbytes <= self._left:
            self._left -= result.nbytes
            known[batch] = result
        return result.value


class _Result:
    """What a part of a block gave, in the pass of a number."""

    def __init__(self, value: Any, made: int) -> None:
        self.value, self.made = value, made
        self._tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        self._versions = [x._version for x in self._tensors]
        self.nbytes = sum(x.nbytes for x in self._tensors)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written into it since."""
        return [x._version for x in self._tensors] == self._versions
