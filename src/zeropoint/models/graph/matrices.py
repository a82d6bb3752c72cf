"""Weights as quantized matrices: one row per output channel.

As in eager mode. The way there and back is a few operators that change no number, so that it can be computed
on a tensor and written into a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Step = tuple[Any, tuple[Any, ...]]
"""An operator, and its arguments after the tensor."""
SHAPING = frozenset({
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.reshape.default,
    aten.view.default, aten.flatten.using_ints,
})  # fmt: skip
"""Operators that only move numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a weight becomes a matrix, and the matrix the weight.

    >>> form = transposed((4, 3, 5), groups=2)
    >>> matrix = form.matrix(torch.rand(4, 3, 5))
    >>> matrix.shape, computed(matrix, form.back).shape
    (torch.Size([6, 10]), torch.Size([4, 3, 5]))
    """

    there: tuple[Step, ...] = ()
    back: tuple[Step, ...] = ()

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix of a weight, contiguous and without gradient."""
        return computed(weight.detach(), self.there).contiguous()


AS_IT_IS = Form()
"""Of a weight that is a matrix, a row for each output channel."""


def transposed_product() -> Form:
    """Return the form of a weight (in, out) of a product."""
    turn: Step = (aten.t.default, ())
    return Form(there=(turn,), back=(turn,))


def flat(shape: tuple[int, ...]) -> Form:
    """Return a convolution weight's matrix form, (out, in / groups * kernel)."""
    if len(shape) == 2:
        return AS_IT_IS
    size = [shape[0], math.prod(shape[1:])]
    return Form(there=((aten.reshape.default, (size,)),), back=((aten.reshape.default, (list(shape),)),))


def transposed(shape: tuple[int, ...], groups: int) -> Form:
    """Return a transposed convolution weight's matrix form.

    (in, out / groups, *kernel) becomes (out, in / groups * kernel).
    """
    share, out, *kernel = shape[0] // groups, *shape[1:]
    return Form(
        there=(
            (aten.reshape.default, ([groups, share, out, *kernel],)),
            (aten.transpose.int, (1, 2)),
            (aten.reshape.default, ([groups * out, share * math.prod(kernel)],)),
        ),
        back=(
            (aten.reshape.default, ([groups, out, share, *kernel],)),
            (aten.transpose.int, (1, 2)),
            (aten.reshape.default, (list(shape),)),
        ),
    )


def computed(tensor: torch.Tensor, steps: tuple[Step, ...]) -> torch.Tensor:
    """Return a tensor after the steps."""
    for operator, rest in steps:
        tensor = operator(tensor, *rest)
    return tensor


def written(node: fx.Node, steps: tuple[Step, ...]) -> fx.Node:
    """Write the steps after ``node``, and return the last node."""
    for operator, rest in steps:
        with node.graph.inserting_after(node):
            following = node.graph.call_function(operator, (node, *rest))
        following.meta["val"] = operator(node.meta["val"], *rest)
        node = following
    return node


def moved_to_user(node: fx.Node) -> fx.Node:
    """Move ``node`` and following shape operators to their user; return it.

    Dequantized values would otherwise all live from the beginning of the graph on.
    """
    chain = [node]
    while chain[-1].target in SHAPING and len(chain[-1].users) == 1:
        chain.append(next(iter(chain[-1].users)))
    place = chain.pop() if chain[-1].target not in SHAPING else min(chain[-1].users)
    for moved in chain:
        place.prepend(moved)
    return node
