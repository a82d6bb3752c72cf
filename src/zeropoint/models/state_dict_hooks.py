"""Hooks that keep the float model's names and shapes in states.

The ``state_dict`` of a prepared model thus holds the float model's entries and its quantizers', and the float
model can load the trained weights from it. Loading accepts the names of either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
Change = Callable[[State], State]
"""From a module's state to the float module's, or back; names are relative to the module."""


def add_state_hooks(module: nn.Module, saved: Change, loaded: Change) -> None:
    """Register hooks: ``saved`` changes collected states, ``loaded`` those to load."""
    module.register_state_dict_post_hook(partial(_saved, saved))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(partial(_loaded, loaded))  # type: ignore[no-untyped-call]


def _saved(change: Change, _module: nn.Module, state: State, prefix: str, _metadata: object) -> None:
    """Change a collected state, which ends with the module's entries."""
    own: State = {}
    for name in reversed(list(state) if prefix == "" else state):
        if not name.startswith(prefix):
            break
        own[name] = state[name]
    taken = {name.removeprefix(prefix): state.pop(name) for name in reversed(own)}
    state.update({prefix + name: value for name, value in change(taken).items()})


def _loaded(change: Change, _module: nn.Module, state: State, prefix: str, *_: object) -> None:
    """Change a copied state that is about to be loaded."""
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    for name in own:
        del state[prefix + name]
    state.update({prefix + name: value for name, value in change(own).items()})


class Inside:
    """Entries of a child under its parent's names, next to ``others``."""

    def __init__(self, child: str, others: tuple[str, ...]) -> None:
        self.child, self.others = f"{child}.", (child, *others)

    def out(self, state: State) -> State:
        """Leave out the child's name."""
        return {name.removeprefix(self.child): value for name, value in state.items()}

    def back(self, state: State) -> State:
        """Add the child's name where it is absent."""
        return {
            name if name.partition(".")[0] in self.others else self.child + name: value
            for name, value in state.items()
        }


def transposed_weight(state: State) -> State:
    """Transpose a replaced ``Conv1D``'s weight, in either direction."""
    weight = state.get("weight")
    return {**state, "weight": weight.t().contiguous()} if isinstance(weight, torch.Tensor) else state
