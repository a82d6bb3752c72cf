"""States of prepared and opened layers, with the names and shapes of the model that they came from.

So a prepared model is saved as the float model that it still is, with what quantizers hold beside, and
whoever loads the original loads the trained weights. Loading takes the names of either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
Change = Callable[[State], State]
"""From the state of one module to that of its original, or back; names are those in the module."""


def stated(module: nn.Module, saved: Change, loaded: Change) -> None:
    """Let the state of ``module`` pass ``saved`` after it is taken, and ``loaded`` before it is loaded."""
    module.register_state_dict_post_hook(_Saved(saved))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_Loaded(loaded))  # type: ignore[no-untyped-call]


class _Saved:
    """A hook on a state that was taken: what the module gave stands at its end."""

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
    """What lies in a child, under the names of its parent; ``others`` are the parent's other children."""

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


def turned(state: State) -> State:
    """Transpose the weight of a Linear layer that stands for a transposed one, in either direction."""
    weight = state.get("weight")
    return {**state, "weight": weight.t().contiguous()} if isinstance(weight, torch.Tensor) else state
