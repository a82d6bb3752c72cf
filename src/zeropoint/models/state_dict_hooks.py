"""Hooks that give the state of prepared and unfused layers the names and shapes of the float model.

So the ``state_dict`` of a prepared model holds the float model's entries and those of its quantizers, and the
float model can load the trained weights from it. Loading accepts the names of either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
Change = Callable[[State], State]
"""From the state of one module to that of the float module, or back; names are those in the module."""


def add_state_hooks(module: nn.Module, saved: Change, loaded: Change) -> None:
    """Apply ``saved`` to the state of ``module`` after it is collected, ``loaded`` before it is loaded."""
    module.register_state_dict_post_hook(_Saved(saved))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_Loaded(loaded))  # type: ignore[no-untyped-call]


class _Saved:
    """A hook on a collected state, at whose end are the entries of the module."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, state: State, prefix: str, metadata: object) -> None:  # noqa: ARG002
        own: State = {}
        for name in reversed(list(state) if prefix == "" else state):
            if not name.startswith(prefix):
                break
            own[name] = state[name]
        taken = {name.removeprefix(prefix): state.pop(name) for name in reversed(own)}
        state.update({prefix + name: value for name, value in self.change(taken).items()})


class _Loaded:
    """A hook on a state that is about to be loaded, which is a copy and holds nothing of other modules."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, state: State, prefix: str, *rest: object) -> None:  # noqa: ARG002
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for name in own:
            del state[prefix + name]
        state.update({prefix + name: value for name, value in self.change(own).items()})


class Inside:
    """The entries of a child under the names of its parent; ``others`` are the parent's other children."""

    def __init__(self, child: str, others: tuple[str, ...]) -> None:
        self.child, self.others = f"{child}.", (child, *others)

    def out(self, state: State) -> State:
        """Leave out the child's name."""
        return {name.removeprefix(self.child): value for name, value in state.items()}

    def back(self, state: State) -> State:
        """Put it before all that does not have it and is not of another child."""
        return {
            name if name.partition(".")[0] in self.others else self.child + name: value
            for name, value in state.items()
        }


def transposed_weight(state: State) -> State:
    """Transpose the weight of a Linear layer that replaces a ``Conv1D``, in either direction."""
    weight = state.get("weight")
    return {**state, "weight": weight.t().contiguous()} if isinstance(weight, torch.Tensor) else state
