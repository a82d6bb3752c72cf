"""Sums over inputs of linear layers, shared by their readers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..progress import counted
from ..stats import GramMatrix, MeanSquare, State
from .block_chain import BlockChain, Steps, keeping
from .calibrate import evaluating
from .layer import on_inputs
from .model_blocks import blocks_of


@dataclass(slots=True, kw_only=True)
class InputSums:
    """Sums over the inputs of layers that read one tensor.

    readers: names of the layers. squares: state of a :class:`~zeropoint.stats.MeanSquare`. gram: state of a
    :class:`~zeropoint.stats.GramMatrix`, where that is wanted.
    """

    readers: list[str]
    squares: State
    gram: State | None


def sum_inputs(
    root: nn.Module, batches: Sequence[Any], layers: Mapping[str, int], steps: Steps,
    *, gram: bool, progress: bool = False,
) -> Iterator[list[InputSums]]:  # fmt: skip
    """Run a model block by block; yield each block's input sums.

    Layers outside of blocks come last. Layers that nothing reaches have sums over no vectors.

    Args:
        root: the model, with fused weights apart.
        batches: at least one.
        layers: inputs of linear layers, by name.
        steps: blocks, and how they run.
        gram: whether Gram matrices are summed, too.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: for blocks that are not in the model.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with evaluating(root), torch.no_grad(), keeping(steps.folder, steps.dtype) as values:
        blocks = blocks_of(root, steps.blocks)
        chain = BlockChain(root, blocks, values)
        for step in counted(range(len(blocks)), "Observing blocks", shown=progress):
            name, block = blocks[step]
            own = {layer: n for layer, n in layers.items() if layer.startswith(f"{name}.")}
            with steps.loaded(name), _summing(root, own, chain, gram=gram) as found:
                chain.run(step, batches, block)
            yield found
        inside = tuple(f"{name}." for name, _ in blocks)
        outside = {layer: n for layer, n in layers.items() if not layer.startswith(inside)}
        # One batch, at least, shows that the last block does not run again.
        with _summing(root, outside, chain, gram=gram) as found:
            chain.visit(len(blocks), batches if outside else batches[:1], lambda *_, **__: None)
        yield found


@contextmanager
def _summing(
    root: nn.Module, layers: Mapping[str, int], chain: BlockChain, *, gram: bool
) -> Iterator[list[InputSums]]:
    """Return a context that sums layer inputs; complete at its end."""
    found: list[InputSums] = []
    leaders: dict[str, InputSums | None] = {}
    fresh: dict[str, tuple[torch.Tensor, InputSums]] = {}
    at = -1

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        nonlocal at
        if chain.batch != at:
            at = chain.batch
            fresh.clear()
        if name not in leaders:
            # Tensors that are kept have identities of their own.
            same = next((sums for seen, sums in fresh.values() if seen is x), None)
            if same is not None:
                same.readers.append(name)
            else:
                found.append(_of_nothing(name, x.shape[-1], gram=gram))
                fresh[name] = x, found[-1]
            leaders[name] = None if same is not None else found[-1]
        own = leaders[name]
        if own is not None:
            _add(own, x)
        return x

    with on_inputs((root.get_submodule(name), functools.partial(see, name)) for name in layers):
        yield found
    found += [_of_nothing(name, n, gram=gram) for name, n in layers.items() if name not in leaders]


def _of_nothing(name: str, features: int, *, gram: bool) -> InputSums:
    squares, matrix = MeanSquare(features=features), GramMatrix(features=features)
    return InputSums(readers=[name], squares=squares.start(), gram=matrix.start() if gram else None)


def _add(sums: InputSums, x: torch.Tensor) -> None:
    features = x.shape[-1]
    sums.squares = MeanSquare(features=features).update(sums.squares, x)
    if sums.gram is not None:
        sums.gram = GramMatrix(features=features).update(sums.gram, x)
