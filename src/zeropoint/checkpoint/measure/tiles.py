"""Quantize tiles of a weight to the bytes of the whole weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ...formats.torch_dtypes import wide_dtype
from ...layout.blocks import reduce_blocks
from ...layout.runs import Runs
from ...methods import LayerData, LayerResult, Method
from ...methods.method import NO_DATA
from ...ops.devices import CPU, own_stream
from ...ops.registry import counter
from ...schemes import Granularity, Scheme
from ...tensor import QuantizedTensor


def needs_extremes(scheme: Scheme) -> bool:
    """Return whether a scheme has a tensor scale, which needs scanning."""
    return any(level.granularity == Granularity.tensor() for level in scheme.scales)


def extremes_of(x: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest value, or NaN for both.

    Quantizing that part will say where the NaN is.
    """
    kernels = counter(x)
    if kernels is not None:
        low, high = (float(end) for end in kernels.extremes(x, Runs(1, 1, x.numel())))
        if math.isfinite(low) and math.isfinite(high):
            return low, high
    low, high = (float(end) for end in torch.aminmax(x))
    return low, high


def scales_in(x: torch.Tensor, scheme: Scheme) -> list[float]:
    """Return the scale of each block before storage, 0 for zeros.

    >>> scales_in(torch.tensor([[1.0, -3.0, 0.0, 0.0]]), Scheme.parse("nf4:g2"))
    [3.0, 0.0]
    """
    largest = reduce_blocks(x.abs(), scheme.granularity, "amax", 0.0).to(wide_dtype(x.dtype))
    found: list[float] = (largest / scheme.divisor).flatten().tolist()
    return found


def widest(found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the joint extremes of parts, in any order.

    >>> widest([(-1.0, 2.0), (-3.0, 0.5)])
    (-3.0, 2.0)
    """
    lows, highs = zip(*found, strict=True)
    if any(map(math.isnan, lows)):
        return math.nan, math.nan
    return min(lows), max(highs)


@dataclass(slots=True)
class Scratch:
    """A thread's own memory, used again for each tile.

    buffer: bytes of the source. device: where tiles are quantized. result: the codes and parameters of the
    last tile, which the next one of the same kind overwrites.
    """

    buffer: bytearray
    device: torch.device = CPU
    result: QuantizedTensor | None = None

    def quantize(
        self, x: torch.Tensor, scheme: Scheme, method: Method, data: LayerData = NO_DATA
    ) -> LayerResult:
        """Quantize rows of a matrix, in the last result's memory if possible.

        method: whose scope these rows are. data: of the whole matrix, with the extremes of its set of
        matrices where its scale needs them. Raises NonFiniteError, RangeError.
        """
        if data.solved is not None:
            return LayerResult(q=data.solved)
        # Methods that take codes or statistics run on the host, where these tensors are.
        if self.device != CPU and data.codes is None and not data.statistics:
            return self._on_device(x, scheme, method, data)
        made = method.quantize(x, scheme, replace(data, out=self._fitting(x, scheme)))
        self.result = made.q
        return made

    def _fitting(self, x: torch.Tensor, scheme: Scheme) -> QuantizedTensor | None:
        """Return the last result if it has the shape of this one."""
        last, shape = self.result, tuple(x.shape)
        fits = last is not None and (last.scheme, last.shape, last.dtype) == (scheme, shape, x.dtype)
        return last if fits else None

    def _on_device(self, x: torch.Tensor, scheme: Scheme, method: Method, data: LayerData) -> LayerResult:
        """Quantize on the device, on this thread's stream; return a host result."""
        with own_stream(self.device):
            there = x.to(self.device, non_blocking=True)
            made = method.quantize(there, scheme, replace(data, out=self._fitting(x, scheme)))
            self.result = made.q
            return made.on(CPU)
