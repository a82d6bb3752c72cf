"""The parameters of ToRSh: one object that changes, in the vocabulary of torsh_backend::quantization.

A thin view for programs that come from there, in which its examples hold word for word. The numbers are those
of an immutable :class:`zeropoint.QuantizationParams`, which every function of zeropoint takes, in ``value``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError
from ..schemes import Granularity, Scheme
from . import parameters


class QuantizedDType(enum.Enum):
    """The types of codes, by the name of their format."""

    Int8 = "int8"
    UInt8 = "uint8"
    Int4 = "int4"

    def bits(self) -> int:
        """Return the bits of a code."""
        return Scheme.parse(self.value).bits


@dataclass
class QuantizationParams:
    """ToRSh's object: scales and zero points as lists, changed by :meth:`from_statistics`.

    value: the parameters as zeropoint keeps them; give these to ``zp.quantize`` and the rest.

    >>> params = QuantizationParams.int8_symmetric()
    >>> params.from_statistics(-2.0, 2.0)
    >>> round(params.scale[0], 6), params.zero_point[0], params.dtype.bits()
    (0.015686, 0, 8)
    """

    value: parameters.QuantizationParams

    @classmethod
    def int8_symmetric(cls) -> QuantizationParams:
        """Return int8 parameters with scale 1 and zero point 0."""
        return cls(parameters.QuantizationParams.int8_symmetric())

    @classmethod
    def new(cls, scale: float, zero_point: int) -> QuantizationParams:
        """Return parameters with this scale and zero point, uint8 where the zero point is above int8."""
        return cls(parameters.QuantizationParams.new(scale, zero_point))

    @classmethod
    def uint8_asymmetric(cls) -> QuantizationParams:
        """Return uint8 parameters with scale 1 and zero point 128."""
        return cls(parameters.QuantizationParams.uint8_asymmetric())

    @classmethod
    def int4_symmetric(cls) -> QuantizationParams:
        """Return int4 parameters with scale 1 and zero point 0."""
        return cls(parameters.QuantizationParams.int4_symmetric())

    @classmethod
    def channel_wise(cls, num_channels: int, dtype: QuantizedDType) -> QuantizationParams:
        """Return parameters with scale 1 and zero point 0 for each channel of axis 0."""
        return cls(parameters.QuantizationParams.channel_wise(num_channels, dtype.value))

    @classmethod
    def block_wise(cls, block_size: int, dtype: QuantizedDType) -> QuantizationParams:
        """Return parameters with scale 1 for blocks of so many elements of the last axis."""
        return cls(parameters.QuantizationParams.block_wise(block_size, dtype.value))

    @property
    def dtype(self) -> QuantizedDType:
        """The type of codes; raises UnsupportedError for one that ToRSh does not name."""
        name = self.scheme.element_name
        if name not in {member.value for member in QuantizedDType}:
            raise UnsupportedError(f"element {name} has no name in ToRSh; look at value.scheme.element")
        return QuantizedDType(name)

    @property
    def scheme(self) -> Scheme:
        """How tensors are quantized."""
        return self.value.scheme

    @property
    def scale(self) -> list[float]:
        """One scale for each parameter set."""
        scale = self.value.effective_scale()
        return [1.0] if scale is None else scale.flatten().tolist()

    @property
    def zero_point(self) -> list[int]:
        """One zero point for each parameter set, 0 for symmetric schemes."""
        zeros = self.value.zero_point
        return [0] * self.num_parameter_sets() if zeros is None else zeros.flatten().tolist()

    @property
    def block_size(self) -> int | None:
        """The size of blocks along the last axis, or None for schemes of other blocks."""
        blocks = self.scheme.granularity
        (size,) = blocks.extents if len(blocks.extents) == 1 else (0,)
        return size if size > 0 and blocks == Granularity.group(size) else None

    @property
    def min_val(self) -> float | None:
        """The smallest value that was observed, or None."""
        return _extreme(self.value.minimum, torch.amin)

    @property
    def max_val(self) -> float | None:
        """The largest value that was observed, or None."""
        return _extreme(self.value.maximum, torch.amax)

    def from_statistics(self, min_val: float, max_val: float) -> None:
        """Take scales and zero points from a range; raises RangeError or NonFiniteError where it is none."""
        self.value = self.value.with_range(min_val, max_val)

    def validate(self) -> None:
        """Raise a ZeropointError unless lengths agree, scales are positive and zero points are codes."""
        self.value.validate()

    def num_parameter_sets(self) -> int:
        """Return the number of pairs of scale and zero point."""
        return self.value.num_parameter_sets

    def is_per_channel(self) -> bool:
        """Return whether each channel has parameters of its own."""
        return self.value.is_per_channel

    def quantization_error_bound(self) -> float:
        """Return the largest error of a value in the range of the codes."""
        return float(self.value.error_bound().max())

    def compression_ratio(self) -> float:
        """Return the bits of float32 over those of the codes, scales counted where the shape is known."""
        return self.value.compression_ratio


def _extreme(values: torch.Tensor | None, reduce: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
    return None if values is None else float(reduce(values))
