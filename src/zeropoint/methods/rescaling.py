r"""Channel rescaling: inputs divided by a vector, weights multiplied with it.

    y = x W^T = (x / s) (W diag(s))^T          s_c > 0, one number for each input channel

The float model stays the same, and the quantized one changes: channels with large inputs get more of the
range of the weight, and less of the range of a quantized input. The layer that gives the input absorbs the
division. A step gives candidates for ``s``. The one whose outputs have the least error on some input vectors
is taken, and no rescaling is one of them.

Numbers of ``s`` are eighths of powers of two, ``2^(k / 8)``, so that no rounding of a sum decides about codes
and steps that follow each other are exact, and lie within `LARGEST` around their geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..ops.feedback import product
from ..schemes import Scheme
from ..stats import MeanSquare, Statistics
from .channels import PARTS, numbers_of
from .method import MEAN_SQUARE, LayerData, Method
from .step import ChainPart

LARGEST = 4.0
_VECTORS = _ROWS = 512
"""Input vectors, and rows of each weight, on which candidates are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelReader:
    """A layer that reads the channels.

    weight: (rows, channels) float32. scheme: of the weight; None where it stays as it is. method: quantizes
    the weight, where it has a scheme. source: how inputs are quantized, or None.
    """

    weight: torch.Tensor
    scheme: Scheme | None = None
    method: Method | None = None
    source: nn.Module | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels that may be rescaled.

    inputs: some input vectors, (vectors, channels) float32. readers: the layers that read them. place:
    (channels,), the channel of the layer before that each comes from; several may come from one. given: the
    largest magnitude in the rows of the layer before, (channels,); None for a norm.
    """

    inputs: torch.Tensor
    readers: tuple[ChannelReader, ...]
    place: torch.Tensor
    given: torch.Tensor | None = None

    @property
    def largest_weights(self) -> torch.Tensor:
        """The largest magnitude of all weights that read a channel, (channels,) float64."""
        return torch.stack([reader.weight.abs().amax(0) for reader in self.readers]).amax(0).double()


class Rescaling(ChainPart, Protocol):
    """A step that rescales channels."""

    def candidates(self, channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield labeled candidates for ``s``, (channels,) float64.

        channels: the rescaled channels; a number that is not positive keeps its channel.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """The candidate of least error.

    steps: (channels,) int64, ``k`` of each number; zeros where none is better than no rescaling. note: what
    tells it from others, with the error as a share of that without rescaling.
    """

    steps: torch.Tensor
    note: str


def rescaled(step: Rescaling, channels: Channels) -> Rescaled:
    """Return the candidate of ``step`` under which outputs have the least error.

    >>> from zeropoint.methods.awq import STEP
    >>> x = torch.tensor([[8.0, 0.1], [-8.0, 0.1]])
    >>> from zeropoint.methods.nearest import METHOD
    >>> scheme = Scheme.parse("int2:channel")
    >>> reader = ChannelReader(weight=torch.tensor([[0.3, 1.0]]), scheme=scheme, method=METHOD)
    >>> rescaled(STEP, Channels(inputs=x, readers=(reader,), place=torch.arange(2))).steps
    tensor([ 5, -5])
    """
    x = channels.inputs[:: max(1, -(-len(channels.inputs) // _VECTORS))]
    readers = [reader for reader in channels.readers if reader.scheme is not None]
    same = torch.zeros_like(channels.place)
    base = _error(x, readers, same)
    best, found = base, Rescaled(steps=same, note="none better than no rescaling")
    for note, wanted in step.candidates(channels) if readers and len(x) and base > 0 else ():
        steps = _snapped(wanted, channels.place)
        error = _error(x, readers, steps)
        if error < best:
            best, found = error, Rescaled(steps=steps, note=f"{note}, error {error / base:.3f} times")
    return found


def _snapped(wanted: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return a foldable candidate: bounded, one number per source channel."""
    good = torch.isfinite(wanted) & (wanted > 0)
    if not good.any():
        return torch.zeros_like(wanted).long()
    logs = torch.where(good, wanted, torch.ones_like(wanted)).log2()
    logs = torch.where(good, logs - logs[good].mean(), torch.zeros_like(logs))
    size = int(place.max()) + 1
    sums = logs.new_zeros(size).index_add_(0, place, logs)
    counts = logs.new_zeros(size).index_add_(0, place, torch.ones_like(logs))
    mean = (sums / counts.clamp_min(1))[place]
    most = math.log2(LARGEST)
    return (mean.clamp(-most, most) * PARTS).round().long()


def _error(x: torch.Tensor, readers: Sequence[ChannelReader], steps: torch.Tensor) -> float:
    """Return the squared output error of quantized readers with rescaled channels."""
    narrow = numbers_of(steps).float()
    divided = x / narrow
    square = MeanSquare(features=len(steps))
    statistics = {MEAN_SQUARE: Statistics(accumulator=square, state=square.update(square.start(), divided))}
    total = []
    for reader in readers:
        assert reader.scheme is not None
        assert reader.method is not None
        rows = reader.weight[:: max(1, len(reader.weight) // _ROWS)]
        weight = (rows * narrow).contiguous()
        values = reader.method.quantize(weight, reader.scheme, LayerData(statistics=statistics)).dequantize()
        missed = product(divided, (weight - values).T)
        if reader.source is not None:
            missed += product(divided - reader.source(divided), values.T)
        total.append(math.fsum(missed.square().sum(1).tolist()))
    return math.fsum(total)
