"""ToRSh's mutable parameters, in the vocabulary of torsh_backend::quantization.

A thin view for programs that come from there, in which its examples hold word for word. The numbers are those
of an immutable :class:`zeropoint.QuantizationParams`, which every function of zeropoint takes, in ``value``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ShapeError, UnsupportedError
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


class ParameterList(list[Any]):
    """Scales or zero points as a list that writes changes back.

    numbers: the items. write: takes the changed list; what it raises, the change raises.
    """

    def __init__(self, numbers: Sequence[float], write: Callable[[ParameterList], None]) -> None:
        super().__init__(numbers)
        self._write = write


def _written(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def change(self: ParameterList, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        self._write(self)
        return result

    return change


for _name in (
    "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert", "pop", "remove",
    "clear", "sort", "reverse",
):  # fmt: skip
    setattr(ParameterList, _name, _written(_name))


@dataclass
class QuantizationParams:
    """ToRSh's object: mutable lists of scales and zero points.

    Lists are changed by assignment or :meth:`from_statistics`. value: the parameters as zeropoint keeps them;
    give these to ``zp.quantize`` and the rest.

    >>> params = QuantizationParams.int8_symmetric()
    >>> params.from_statistics(-2.0, 2.0)
    >>> round(params.scale[0], 6), params.zero_point[0], params.dtype.bits()
    (0.015686, 0, 8)
    >>> params.scale[0] = 0.5
    >>> float(params.value.scales[0])
    0.5
    """

    value: parameters.QuantizationParams

    @classmethod
    def int8_symmetric(cls) -> QuantizationParams:
        """Return int8 parameters with scale 1 and zero point 0."""
        return cls(parameters.QuantizationParams.int8_symmetric())

    @classmethod
    def new(cls, scale: float, zero_point: int) -> QuantizationParams:
        """Return parameters of a scale and zero point, uint8 beyond int8."""
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
        """Return parameters with scale 1 and zero point 0 per channel."""
        return cls(parameters.QuantizationParams.channel_wise(num_channels, dtype.value))

    @classmethod
    def block_wise(cls, block_size: int, dtype: QuantizedDType) -> QuantizationParams:
        """Return parameters with scale 1 for blocks of the last axis."""
        return cls(parameters.QuantizationParams.block_wise(block_size, dtype.value))

    @property
    def dtype(self) -> QuantizedDType:
        """Type of codes; raises UnsupportedError for one unknown to ToRSh."""
        name = self.scheme.element_name
        if name not in {member.value for member in QuantizedDType}:
            raise UnsupportedError(f"element {name} has no name in ToRSh; look at value.scheme.element")
        return QuantizedDType(name)

    @property
    def scheme(self) -> Scheme:
        """How tensors are quantized."""
        return self.value.scheme

    @property
    def scale(self) -> ParameterList:
        """One scale per parameter set; item assignments change the parameters."""
        scale = self.value.effective_scale()
        numbers = [1.0] if scale is None else scale.flatten().tolist()
        return ParameterList(numbers, lambda changed: setattr(self, "scale", changed))

    @scale.setter
    def scale(self, scales: Sequence[float]) -> None:
        if len(self.value.scales) != 1:
            raise UnsupportedError(f"scale of {self.scheme} lies in levels; assign to value")
        (old,) = self.value.scales
        self.value = self._changed(scales=(_like(old, scales, "scale"),))

    @property
    def zero_point(self) -> ParameterList:
        """One zero point per parameter set, 0 if symmetric; assignments apply."""
        zeros = self.value.zero_point
        numbers = [0] * self.num_parameter_sets() if zeros is None else zeros.flatten().tolist()
        return ParameterList(numbers, lambda changed: setattr(self, "zero_point", changed))

    @zero_point.setter
    def zero_point(self, zeros: Sequence[int]) -> None:
        old = self.value.zero_point
        if old is None:
            raise UnsupportedError(
                f"{self.scheme} is symmetric and has no zero point; use uint8_asymmetric()"
            )
        self.value = self._changed(zero_point=_like(old, zeros, "zero_point"))

    def _changed(self, **parts: Any) -> parameters.QuantizationParams:
        """Return validated parameters with other tensors, without observed extremes."""
        changed = replace(self.value, minimum=None, maximum=None, **parts)
        changed.validate()
        return changed

    @property
    def block_size(self) -> int | None:
        """Block length along the last axis, or None for other blocks."""
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
        """Set parameters from a range; RangeError or NonFiniteError if invalid."""
        self.value = self.value.with_range(min_val, max_val)

    def validate(self) -> None:
        """Raise a ZeropointError for wrong lengths, scales or zero points."""
        self.value.validate()

    def num_parameter_sets(self) -> int:
        """Return the number of pairs of scale and zero point."""
        return self.value.num_parameter_sets

    def is_per_channel(self) -> bool:
        """Return whether each channel has parameters of its own."""
        return self.value.is_per_channel

    def quantization_error_bound(self) -> float:
        """Return the largest error of a value inside the codes' range."""
        return float(self.value.error_bound().max())

    def compression_ratio(self) -> float:
        """Return float32 bits over code bits, with scales where countable."""
        return self.value.compression_ratio


def _like(old: torch.Tensor, numbers: Sequence[float], name: str) -> torch.Tensor:
    """Return numbers with the old shape and dtype, or raise ShapeError."""
    if len(numbers) != old.numel():
        raise ShapeError(
            f"{name} (length {len(numbers)}) must hold {old.numel()} numbers, one for each block"
        )
    return torch.tensor(list(numbers)).to(old.dtype).reshape(old.shape)


def _extreme(values: torch.Tensor | None, reduce: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
    return None if values is None else float(reduce(values))
