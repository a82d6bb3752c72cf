"""QuantizationParams: a scheme with scales, zero points and offsets of one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from ..errors import RangeError, SchemeError, ShapeError, UnsupportedError
from ..schemes import Granularity, Scheme
from ..shown import repr_html
from . import arithmetic
from .checks import check, float_dtype
from .effective import effective_offset, effective_scale
from .error_bounds import errors_of
from .given import (
    as_numbers,
    given_ranges,
    given_scales,
    given_scheme,
    given_shape,
    given_zero_points,
    middle_code,
    with_blocks,
)
from .tensors import Params, brief, parameter_bits, parameter_names, same_bytes, zero_point_of
from .tracing import scheme_text


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizationParams:
    """Everything that turns codes of a tensor of ``shape`` into numbers.

    Args:
        scheme: how the tensor is quantized; a text is parsed.
        shape: of the tensor that the codes represent.
        scales: one tensor a level, finest first, shaped like the level's grid (tables have a last axis of
            their numbers), in the dtype of the level's format (uint8 codes where torch has no such dtype).
        zero_point: int32 (or wide real) tensor shaped like the finest grid, or None for symmetric schemes.
        dtype: dtype of the tensor, which a scale format of ``input`` takes.
        minimum, maximum: observed extremes of each finest block, or None.
        offsets: one tensor a level of the offset, as for scales.
        center: the summand of the product of the scales, or None.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    scales: tuple[torch.Tensor, ...]
    zero_point: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    minimum: torch.Tensor | None = None
    maximum: torch.Tensor | None = None
    offsets: tuple[torch.Tensor, ...] = ()
    center: torch.Tensor | None = None

    @staticmethod
    def of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, stored: Params) -> QuantizationParams:
        """Return the parameters whose tensors operators take and return; nothing is checked.

        Args:
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            shape: of the tensor that the codes represent.
            dtype: of that tensor; scales of ``scale=input`` have it, too.
            stored: one tensor for each of :attr:`Scheme.levels`, then the zero point where there is one.
        """
        first, last = len(scheme.scales), len(scheme.scales) + len(scheme.offsets)
        return QuantizationParams(
            scheme=scheme, shape=shape, scales=tuple(stored[:first]),
            zero_point=zero_point_of(scheme, stored), dtype=dtype,
            offsets=tuple(stored[first:last]), center=None if scheme.center is None else stored[last],
        )  # fmt: skip

    @property
    def levels(self) -> tuple[torch.Tensor, ...]:
        """The tensors of all levels, in the order of :attr:`Scheme.levels`."""
        return (*self.scales, *self.offsets, *(() if self.center is None else (self.center,)))

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """Operator arguments: the tensors of all levels, then any zero point."""
        return self.levels if self.zero_point is None else (*self.levels, self.zero_point)

    def __post_init__(self) -> None:
        # A text is otherwise found out far from here, as a missing attribute of str.
        object.__setattr__(self, "scheme", Scheme.parse(self.scheme))

    @staticmethod
    def from_range(
        scheme: str | Scheme,
        minimum: float | torch.Tensor,
        maximum: float | torch.Tensor,
        *,
        shape: tuple[int, ...] = (1,),
        dtype: torch.dtype = torch.float32,
    ) -> QuantizationParams:
        """Return parameters for ``minimum..maximum``, scalars or one a finest block.

        Coarser levels take the extremes over their blocks.

        Args:
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            minimum: the smallest value, or one for each block.
            maximum: the largest value, or one for each block.
            shape: of the tensor to be quantized.
            dtype: of that tensor; scales of ``scale=input`` take it.

        Raises:
            RangeError: when a minimum exceeds its maximum.
            NonFiniteError: when one is not finite.

        Example:
            >>> QuantizationParams.from_range("uint8:tensor:asym", -1.0, 3.0).zero_point
            tensor([64], dtype=torch.int32)
        """
        parsed = Scheme.parse(scheme)
        ranges = given_ranges(parsed, minimum, maximum, shape, dtype)
        chosen = QuantizationParams.of(parsed, shape, dtype, arithmetic.scales_from_ranges(parsed, ranges))
        return replace(chosen, minimum=ranges.minimum[0], maximum=ranges.maximum[0])

    @staticmethod
    def new(scale: float, zero_point: float = 0, scheme: str | Scheme | None = None) -> QuantizationParams:
        """Return per-tensor parameters with this scale and zero point, validated.

        Args:
            scale: of the whole tensor.
            zero_point: of the whole tensor.
            scheme: int8 per tensor unless given, or uint8 for a zero point above the codes of int8. A zero
                point other than 0 makes a symmetric scheme affine; fractions are for ``asym=real`` alone.

        Raises:
            RangeError: for fractions in other schemes, and what :meth:`validate` raises.

        Example:
            >>> QuantizationParams.new(255.0, 128)
            QuantizationParams(uint8:tensor:asym, shape=(1,), scales 255, zero_point 128)
        """
        parsed = Scheme.parse(scheme or "int8:tensor")
        for name, value in (("scale", scale), ("zero_point", zero_point)):
            if not isinstance(value, int | float):
                raise RangeError(
                    f"{name} (={value!r}) must be a number; QuantizationParams.given takes tensors"
                )
        if scheme is None and zero_point > parsed.qmax:
            parsed = Scheme.parse("uint8:tensor")
        return QuantizationParams.given(parsed, scale, zero_point, shape=(1,))

    @staticmethod
    def given(
        scheme: str | Scheme,
        scale: float | Sequence[float] | torch.Tensor,
        zero_point: float | Sequence[float] | torch.Tensor = 0,
        *,
        axis: int | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QuantizationParams:
        """Return validated parameters of given scales and zero points.

        Args:
            scheme: one scale level. A zero point other than 0 makes a symmetric scheme affine.
            scale, zero_point: one number for all blocks, or a flat vector of one a block. Scales are rounded
                to their format.
            axis: the axis whose channels the vectors are for; unless given, the scheme says it.
            shape: of the tensor that they are for. Without it, vectors are for the channels of any tensor
                that has as many, and a number is for tensors and blocks of any shape.
            dtype: of the tensor, which scales of ``scale=input`` share.

        Raises:
            SchemeError: for several levels.
            ShapeError: for vectors of a wrong length.
            RangeError: for a zero point that is no code, or a fraction other than for ``asym=real``, and what
                :meth:`validate` raises.

        Example:
            >>> params = QuantizationParams.given("uint8", [0.5, 0.25], [128, 3], axis=1)
            >>> str(params.scheme), params.shape
            ('uint8:channel1:asym', (1, 2))
        """
        count = max(as_numbers("scale", scale).numel(), as_numbers("zero_point", zero_point).numel())
        parsed = given_scheme(Scheme.parse(scheme), as_numbers("zero_point", zero_point), axis)
        shape = given_shape(parsed, count) if shape is None else tuple(shape)
        grid = parsed.granularity.grid(shape)
        zeros = given_zero_points(parsed, zero_point, grid, dtype)
        stored = [given_scales(parsed, scale, grid, dtype), *([] if zeros is None else [zeros])]
        params = QuantizationParams.of(parsed, shape, dtype, stored)
        params.validate()
        return params

    @staticmethod
    def int8_symmetric() -> QuantizationParams:
        """Return int8 per-tensor parameters with scale 1 and no zero point."""
        return QuantizationParams.new(1.0)

    @staticmethod
    def uint8_asymmetric() -> QuantizationParams:
        """Return uint8 per-tensor parameters with scale 1 and zero point 128."""
        return QuantizationParams.new(1.0, 128, "uint8:tensor:asym")

    @staticmethod
    def int4_symmetric() -> QuantizationParams:
        """Return int4 per-tensor parameters with scale 1."""
        return QuantizationParams.new(1.0, 0, "int4:tensor")

    @staticmethod
    def channel_wise(count: int, element: str | Scheme = "int8", *, axis: int = 0) -> QuantizationParams:
        """Return parameters with scale 1 for ``count`` channels of an axis.

        Args:
            count: of channels.
            element: a scheme whose blocks do not matter: ``int8``, ``uint8:asym``. Zero points are in the
                middle of the codes, 128 for uint8.
            axis: of the channels.

        Raises:
            ShapeError: for a count below 1.

        Example:
            >>> QuantizationParams.channel_wise(2, "uint8:asym", axis=1).zero_point
            tensor([[128, 128]], dtype=torch.int32)
        """
        if type(count) is not int or count < 1:
            raise ShapeError(f"count (={count!r}) must be a whole number of channels, at least 1")
        parsed = Scheme.parse(element)
        ones = torch.ones(count)
        return QuantizationParams.given(parsed, ones, ones * middle_code(parsed), axis=axis)

    @staticmethod
    def block_wise(size: int, element: str | Scheme = "int8", *, axis: int = -1) -> QuantizationParams:
        """Return parameters with scale 1 for blocks of ``size`` elements.

        Args:
            size: values in a block.
            element: as :meth:`channel_wise`.
            axis: along which the blocks run.

        Raises:
            SchemeError: for a size below 1.

        Example:
            >>> QuantizationParams.block_wise(128).block_size
            (128,)
        """
        if type(size) is not int or size < 1:
            raise SchemeError(f"block size (={size!r}) must be a whole number, at least 1")
        parsed = with_blocks(Scheme.parse(element), Granularity.along(axis, size))
        rank = len(parsed.granularity.extents)
        return QuantizationParams.given(parsed, 1.0, middle_code(parsed), shape=(1,) * rank)

    def with_range(self, minimum: float | torch.Tensor, maximum: float | torch.Tensor) -> QuantizationParams:
        """Return parameters like these for newly observed extremes; see :meth:`from_range`.

        Args:
            minimum: the smallest value, or one for each block.
            maximum: the largest value, or one for each block.
        """
        return QuantizationParams.from_range(
            self.scheme, minimum, maximum, shape=self.shape, dtype=self.dtype
        )

    def from_statistics(self, minimum: float, maximum: float) -> NoReturn:
        """Refuse ToRSh's mutating method: these parameters never change.

        Args:
            minimum: ignored.
            maximum: ignored.

        Raises:
            UnsupportedError: always; use :meth:`with_range` or :mod:`zeropoint.params.torsh`.
        """
        raise UnsupportedError(
            f"from_statistics({minimum}, {maximum}) changes its object in ToRSh, and these parameters never "
            "change; write params = params.with_range(minimum, maximum), or take zeropoint.params.torsh"
        )

    def validate(self, *, negative_scales: bool = False) -> None:
        """Check shapes, dtypes and values.

        Of meta tensors, values are not checked.

        Args:
            negative_scales: whether scales of any scheme may be negative, as they are in the files of some
                tools, such as auto-round: engines multiply by them all the same. Scales of rule ``signed``
                may be without it.

        Raises:
            ShapeError: for a tensor off its grid.
            SchemeError: for a tensor too many, too few or of another dtype.
            RangeError: for a scale that is not positive and finite or whose reciprocal overflows (finer
                levels of several may be zero), or a zero point outside the codes.
        """
        check(self, negative_scales=negative_scales)

    def validate_once(self) -> None:
        """Check what :meth:`validate` does, unless these very parameters were found valid before."""
        if not self.__dict__.get("_valid"):
            self.validate()
            object.__setattr__(self, "_valid", True)

    @property
    def num_parameter_sets(self) -> int:
        """Number of finest blocks."""
        return self.scheme.granularity.block_count(self.shape)

    @property
    def is_per_channel(self) -> bool:
        """Whether each index of one axis has parameters, and nothing finer."""
        extents, rank = self.scheme.granularity.extents, len(self.shape)
        named = self.scheme.granularity in {Granularity.channel(axis) for axis in range(-rank, rank)}
        return bool(extents) and named

    @property
    def block_size(self) -> tuple[int, ...]:
        """Shape of a full finest block."""
        return self.scheme.granularity.block_shape(self.shape)

    @property
    def compression_ratio(self) -> float:
        """Bits of float32 over bits a value, scales and zero points counted.

        Of parameters for tensors of any shape, where each set belongs to one value, the codes alone count:
        what scales add depends on the tensor, see :meth:`Scheme.bits_per_value`.
        """
        values = math.prod(self.shape)
        if 0 < values == self.num_parameter_sets:
            return 32 * self.scheme.element.per_code / self.scheme.bits
        codes = self.scheme.bits * math.prod(self.scheme.code_shape(self.shape))
        return 32 * values / max(1, codes + self.parameter_bits)

    @property
    def parameter_bits(self) -> int:
        """Bits of scales and zero points: integer ones code-wide, real float32."""
        return parameter_bits(self.scheme, self.shape, self.dtype)

    @property
    def text(self) -> str:
        """Text form of the scheme, the spelling that operators take."""
        return scheme_text(self.scheme)

    def effective_scale(self) -> torch.Tensor | None:
        """Return each finest block's product of levels, wide dtype, or None."""
        return effective_scale(self.scheme, self.levels, self.shape, self.dtype)

    def effective_offset(self) -> torch.Tensor | None:
        """Return each finest block's offset, wide dtype, or None without offsets."""
        return effective_offset(self.scheme, self.levels, self.shape, self.dtype)

    def error_bound(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return each block's proven bound on ``|x - dequantize(quantize(x))|``, float64.

        One number for each finest block. It holds for numbers within ``minimum..maximum``, where these are
        known, and otherwise for data for which the scheme's rules choose these parameters. Clipping is
        counted. It is Inf where the result may overflow. :mod:`zeropoint.params.bounds` has the formula.

        Args:
            dtype: dtype of the dequantized values, the tensor's own unless given.

        Raises:
            DtypeError: for a dtype other than floats.
        """
        errors = errors_of(self.scheme, self.stored, shape=self.shape, dtype=self.dtype)
        extremes = errors.implied()
        if self.minimum is not None and self.maximum is not None:
            grid = self.scheme.granularity.grid(self.shape)
            extremes = (self.minimum.double().reshape(grid), self.maximum.double().reshape(grid))
        return errors.bound(extremes, float_dtype(dtype, self.dtype))

    def representable(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each finest block's smallest and largest decoded value, float64."""
        return errors_of(self.scheme, self.stored, shape=self.shape, dtype=self.dtype).representable()

    def rounding_bound(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the bound of :meth:`error_bound` for numbers that are not clipped.

        Args:
            dtype: as for :meth:`error_bound`.
        """
        errors = errors_of(self.scheme, self.stored, shape=self.shape, dtype=self.dtype)
        return errors.bound(errors.representable(), float_dtype(dtype, self.dtype))

    def to(self, device: torch.device | str) -> QuantizationParams:
        """Return the parameters on another device.

        Args:
            device: as ``torch.device`` takes it.
        """

        def moved(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.to(device)

        stored = [each.to(device) for each in self.stored]
        params = QuantizationParams.of(self.scheme, self.shape, self.dtype, stored)
        return replace(params, minimum=moved(self.minimum), maximum=moved(self.maximum))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors under the names that :meth:`from_tensors` reads."""
        named = zip(parameter_names(self.scheme), self.stored, strict=True)
        return {name: tensor.contiguous() for name, tensor in named}

    @staticmethod
    def from_tensors(
        scheme: Scheme,
        shape: tuple[int, ...],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> QuantizationParams:
        """Return validated parameters from the tensors that :meth:`tensors` names.

        Args:
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            shape: of the tensor that the codes represent.
            tensors: by level names, as :meth:`tensors` gives them.
            dtype: of that tensor; scales of ``scale=input`` must have it, too.

        Raises:
            SchemeError: when the tensor of a level is missing.
        """
        missing = [name for name in scheme.level_names if name not in tensors]
        if missing:
            raise SchemeError(f"tensors {missing} are missing for scheme {scheme}")
        stored = [tensors[name] for name in (*scheme.level_names, "zero_point") if name in tensors]
        params = QuantizationParams.of(scheme, shape, dtype, stored)
        params.validate()
        return params

    def __eq__(self, other: object) -> bool:
        """Compare scheme, shape, dtype and every tensor."""
        if not isinstance(other, QuantizationParams):
            return NotImplemented
        same = (self.scheme, self.shape, self.dtype) == (other.scheme, other.shape, other.dtype)
        mine, theirs = self.tensors(), other.tensors()
        return same and mine.keys() == theirs.keys() and all(same_bytes(mine[k], theirs[k]) for k in mine)

    __hash__ = None  # type: ignore[assignment]  # tensors are compared by value and may change
    _repr_html_ = repr_html

    @property
    def numbers(self) -> str:
        """Scales, zero points and offsets in a few words."""
        parts = [f"scales {', '.join(map(brief, self.scales))}"]
        if self.zero_point is not None:
            parts.append(f"zero_point {brief(self.zero_point)}")
        if self.offsets:
            parts.append(f"offsets {', '.join(map(brief, self.offsets))}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"QuantizationParams({self.scheme}, shape={self.shape}, {self.numbers})"
