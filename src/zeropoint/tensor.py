"""QuantizedTensor: packed codes with the parameters that give them meaning."""

from __future__ import annotations

import copyreg
import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from .errors import CheckpointError, DtypeError, ShapeError, ZeropointError, printable
from .formats.codes import second_grid
from .formats.torch_dtypes import INPUT_DTYPES, wide_dtype
from .layout import code_rows, packing
from .layout.blocks import reduce_blocks, spread_blocks
from .libraries import reading
from .ops import library, straight_through
from .params import QuantizationParams
from .params.bounds import clippable
from .params.tensors import parameter_tensors
from .schemes import Scheme
from .shown import plot, repr_html


@functools.lru_cache(maxsize=1024)
def _result_tensors(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shapes and dtypes of codes and parameters, untraced."""
    return ((code_rows.packed_shape(scheme, shape), torch.uint8), *parameter_tensors(scheme, shape, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far decoded values are from a tensor.

    relative: root of the squared error over the squared values; 0 where they are equal. largest: largest
    error of a value.
    """

    relative: float
    largest: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in decibels; infinite where the values are equal."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)

    def __str__(self) -> str:
        ratio = "exact" if self.relative == 0 else f"{self.sqnr_db:.1f} dB"
        return f"relative error {self.relative:.4f}, SQNR {ratio}, largest error {self.largest:.3g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A tensor in codes.

    Args:
        data: uint8, shape ``(*shape[:-1], ceil(shape[-1] * bits / 8))`` (codes that represent several values
            are fewer: :meth:`Scheme.code_shape`); codes low bits first, rows padded to bytes.
        params: scheme, scales and zero points.
        shape: shape of the tensor that was quantized.
        dtype: its dtype, which ``dequantize`` returns.
        own_params: whether the parameters were chosen from the tensor itself, so that they cover its range.
    """

    data: torch.Tensor
    params: QuantizationParams
    shape: tuple[int, ...]
    dtype: torch.dtype
    own_params: bool = False

    _repr_html_ = repr_html
    plot = plot

    @property
    def scheme(self) -> Scheme:
        """How the tensor was quantized."""
        return self.params.scheme

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """Scales, finest level first."""
        return self.params.scales

    @property
    def zero_point(self) -> torch.Tensor | None:
        """Zero points, or None."""
        return self.params.zero_point

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.data.device

    @property
    def codes(self) -> torch.Tensor:
        """Unpacked codes, signed for signed integer formats, else code patterns.

        Of ``shape``, unless codes represent several values: :meth:`Scheme.code_shape`.
        """
        patterns = code_rows.unpack(self.data, self.scheme, self.shape)
        return packing.as_values(patterns, self.scheme.element)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points in a file."""
        return self.data.numel() + -(-self.params.parameter_bits // 8)

    @property
    def bits_per_value(self) -> float:
        """Average bits an element takes, scales and zero points counted."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    @property
    def compression_ratio(self) -> float:
        """Bytes of the original over bytes now."""
        return math.prod(self.shape) * self.dtype.itemsize / max(1, self.nbytes)

    def error(self, x: torch.Tensor) -> Deviation:
        """Return the deviation of decoded values from a tensor, in float64.

        Args:
            x: what was quantized, or another tensor of its shape.

        Raises:
            ShapeError: for another shape.
        """
        if tuple(x.shape) != self.shape:
            raise ShapeError(
                f"x (shape {tuple(x.shape)}) must have the shape {self.shape} of what was quantized"
            )
        off = self.dequantize().double() - x.double()
        squares, errors = float(x.double().square().sum()), float(off.square().sum())
        ratio = errors / squares if squares else math.inf if errors else 0.0
        return Deviation(relative=math.sqrt(ratio), largest=float(off.abs().max()) if x.numel() else 0.0)

    def error_bound(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return each finest block's proven bound on ``|x - dequantize(x)|``, float64.

        Parameters that were given, and schemes without scales, may have clipped any number to the first or
        the last code. So without the tensor ``x`` itself the bound is Inf for blocks that hold such a code.

        Args:
            x: what was quantized, whose extremes then count.

        Raises:
            ShapeError: for another shape.

        Example:
            >>> q = QuantizedTensor(
            ...     data=torch.tensor([1, 127], dtype=torch.uint8),
            ...     params=QuantizationParams.new(0.5),
            ...     shape=(2,),
            ...     dtype=torch.float32,
            ... )
            >>> q.error_bound(), q.error_bound(torch.tensor([0.6, 65.0]))
            (tensor([inf], dtype=torch.float64), tensor([1.5000], dtype=torch.float64))
        """
        if x is not None:
            return self._measured(x).error_bound(self.dtype)
        own = self.own_params
        bound = self.params.rounding_bound(self.dtype)
        if own:
            bound = replace(self.params, minimum=None, maximum=None).error_bound(self.dtype)
        if own and self.scheme.scales:
            return bound
        if self.scheme.element.per_code > 1:  # any code may belong to a vector past the ends
            return torch.full_like(bound, math.inf)
        scale = self.params.effective_scale()
        ends = self._at_ends(scale) if self.scheme.element.per_scale == 1 else self._at_ends_of_tables()
        lost = reduce_blocks(ends.float(), self.scheme.granularity, "amax", 0.0) > 0
        # A scale of zero makes everything zero, whatever its code.
        return torch.where(lost if scale is None else lost | (scale == 0), math.inf, bound)

    def _at_ends(self, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the mask of possibly clipped codes, given finest scales."""
        patterns = code_rows.unpack(self.data, self.scheme, self.shape)
        spread = None if scale is None else spread_blocks(scale, self.scheme.granularity, self.shape)
        negative = second_grid(spread, self.scheme.element)
        return clippable(patterns, self.scheme, chosen=self.own_params, negative=negative)

    def _at_ends_of_tables(self) -> torch.Tensor:
        low, high = (
            spread_blocks(end, self.scheme.granularity, self.shape) for end in self.params.representable()
        )
        values = self.dequantize(wide_dtype(self.params.dtype))  # as the ends are
        return (values <= low) | (values >= high)

    def _measured(self, x: torch.Tensor) -> QuantizationParams:
        """Return the parameters with the extremes of ``x``."""
        if tuple(x.shape) != self.shape:
            raise ShapeError(f"x (shape {tuple(x.shape)}) must be what was quantized, of shape {self.shape}")
        source, blocks = x.detach(), self.scheme.granularity
        low = reduce_blocks(source, blocks, "amin", math.inf)
        return replace(self.params, minimum=low, maximum=reduce_blocks(source, blocks, "amax", -math.inf))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values, in the original dtype by default; differentiable in scales.

        Args:
            dtype: of the result; the original dtype if None.
        """
        wanted, params = dtype or self.dtype, self.params.stored
        if straight_through.learns(params):
            return straight_through.dequantize_codes(
                self.data, self.scheme, params, shape=self.shape, dtype=wanted, own_dtype=self.dtype
            )
        plain = list(straight_through.detached(params))
        values: torch.Tensor = library.dequantize(
            self.data, plain, self.params.text, list(self.shape), wanted, self.dtype
        )
        return values

    def takes_results(self, device: torch.device, *, params: bool = True) -> bool:
        """Return whether kernels can write results into this tensor.

        Codes, and scales and zero points when ``params``: all must lie contiguous on ``device``, with the
        shapes and dtypes that the scheme gives them.

        Args:
            device: as ``torch.device`` takes it.
            params: whether the parameters are written too.
        """
        wanted = _result_tensors(self.scheme, self.shape, self.dtype)
        tensors = (self.data, *self.params.stored) if params else (self.data,)
        if params and len(tensors) != len(wanted):
            return False
        for x, (shape, dtype) in zip(tensors, wanted, strict=params):
            if x.shape != shape or x.dtype is not dtype or not x.is_contiguous() or x.device != device:
                return False
        return True

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """Return the tensor on another device; DtypeError for a dtype.

        Args:
            device: as ``torch.device`` takes it.
        """
        if isinstance(device, torch.dtype):
            raise DtypeError(f"to({device}) would change packed codes; use dequantize({device})")
        return QuantizedTensor(
            data=self.data.to(device),
            params=self.params.to(device),
            shape=self.shape,
            dtype=self.dtype,
            own_params=self.own_params,
        )

    def save(self, path: str | Path) -> None:
        """Write the tensor to a safetensors file, for :meth:`load`.

        Args:
            path: of the file.
        """
        header = {
            "scheme": str(self.scheme),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "params_dtype": str(self.params.dtype).removeprefix("torch."),
            "own_params": self.own_params,
        }
        with reading(f"{path} cannot be written", "choose another place"):
            save_file(
                {"data": self.data.contiguous(), **self.params.tensors()},
                path,
                metadata={"zeropoint": json.dumps(header)},
            )

    @staticmethod
    def load(path: str | Path) -> QuantizedTensor:
        """Read a tensor that :meth:`save` wrote.

        Args:
            path: of the file.

        Returns:
            The tensor.

        Raises:
            CheckpointError: for any other file, and the errors of :meth:`QuantizationParams.validate` for
                parameters that were damaged.
        """
        with (
            reading(f"{path} is not a safetensors file", "pass what save wrote", system=True),
            safe_open(path, "pt") as file,
        ):
            header = (file.metadata() or {}).get("zeropoint")
            if header is None:
                raise CheckpointError(
                    f"{path} holds no zeropoint tensor; its metadata has no key 'zeropoint'"
                )
            # Copies: a mapped file that changes later would change the numbers, or end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        facts = _facts(header, path)
        params = QuantizationParams.from_tensors(facts.scheme, facts.shape, tensors, dtype=facts.params_dtype)
        data, wanted = tensors.get("data"), code_rows.packed_shape(facts.scheme, facts.shape)
        if data is None or data.dtype != torch.uint8 or tuple(data.shape) != wanted:
            have = "absent" if data is None else f"{data.dtype}, shape {tuple(data.shape)}"
            raise CheckpointError(f"tensor 'data' of {path} ({have}) must be torch.uint8 of shape {wanted}")
        read = QuantizedTensor(
            data=data, params=params, shape=facts.shape, dtype=facts.dtype, own_params=facts.own_params
        )
        _require_codes(read, path)
        return read

    def __repr__(self) -> str:
        kind = "integers" if self.scheme.element.is_integer else "codes"
        return (
            f"QuantizedTensor({self.scheme}, shape={self.shape}, dtype={self.dtype}, {kind} in "
            f"{self.nbytes} bytes, {self.bits_per_value:.3f} bits a value)"
        )


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the header of a saved tensor says."""

    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    params_dtype: torch.dtype
    own_params: bool


def _facts(header: str, path: str | Path) -> _Facts:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in INPUT_DTYPES}
    what = f"metadata 'zeropoint' of {path} (={printable(header)}) is damaged"
    with reading(what, "pass what save wrote"):
        read = json.loads(header)
        shape = tuple(read["shape"])
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"shape {shape} is not a list of sizes")
        try:
            scheme = Scheme.parse(str(read["scheme"]))
        except ZeropointError as error:
            raise CheckpointError(f"{what}: {error}") from error
        return _Facts(
            scheme=scheme,
            shape=shape,
            dtype=names[read["dtype"]],
            params_dtype=names[read["params_dtype"]],
            own_params=read.get("own_params") is True,
        )


def _require_codes(q: QuantizedTensor, path: str | Path) -> None:
    """Raise CheckpointError for codes beyond the end of a codebook."""
    count = q.scheme.element.code_count
    if count < 1 << q.scheme.bits and q.data.numel():
        largest = int(q.codes.max())
        if largest >= count:
            name = q.scheme.element_name
            raise CheckpointError(f"tensor 'data' of {path} holds code {largest}; {name} has 0..{count - 1}")


def _flatten(q: QuantizedTensor) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    return [q.data, *q.params.stored], (q.scheme, q.shape, q.dtype, q.params.dtype)


def _unflatten(
    leaves: Iterable[torch.Tensor], context: tuple[Scheme, tuple[int, ...], torch.dtype, torch.dtype]
) -> QuantizedTensor:
    scheme, shape, dtype, params_dtype = context
    data, *stored = leaves
    params = QuantizationParams.of(scheme, shape, params_dtype, stored)
    return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)


# torch.utils._pytree is where torch itself registers containers; it is what vmap, export and checkpointing
# walk.
pytree.register_pytree_node(
    QuantizedTensor, _flatten, _unflatten, serialized_type_name="zeropoint.QuantizedTensor"
)


def _reduced_params(params: QuantizationParams) -> tuple[Any, ...]:
    observed = params.minimum, params.maximum
    return restored_params, (str(params.scheme), params.shape, params.dtype, params.stored, *observed)


def restored_params(
    scheme: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    stored: tuple[torch.Tensor, ...],
    minimum: torch.Tensor | None,
    maximum: torch.Tensor | None,
) -> QuantizationParams:
    """Return a pickle's parameters, or CheckpointError for unfit tensors."""
    parsed = Scheme.parse(scheme)
    wanted, found = parameter_tensors(parsed, shape, dtype), tuple((tuple(x.shape), x.dtype) for x in stored)
    if found != wanted:
        raise CheckpointError(
            f"parameters of {scheme} for a tensor of shape {shape} must be {wanted}, got {found}"
        )
    return replace(QuantizationParams.of(parsed, shape, dtype, stored), minimum=minimum, maximum=maximum)


def _reduced(q: QuantizedTensor) -> tuple[Any, ...]:
    return restored, (q.data, q.params, q.shape, q.dtype, q.own_params)


def restored(
    data: torch.Tensor,
    params: QuantizationParams,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    own_params: bool,
) -> QuantizedTensor:
    """Return a pickle's tensor, or CheckpointError for unfit codes."""
    wanted = code_rows.packed_shape(params.scheme, shape)
    if data.dtype is not torch.uint8 or tuple(data.shape) != wanted or params.shape != shape:
        raise CheckpointError(
            f"codes of {params} ({data.dtype}, shape {tuple(data.shape)}) must be torch.uint8 of shape "
            f"{wanted} for a tensor of shape {shape}"
        )
    return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype, own_params=own_params)


# Functions that check what a pickle holds, so that torch.load(weights_only=True) may call them.
copyreg.pickle(QuantizationParams, _reduced_params)
copyreg.pickle(QuantizedTensor, _reduced)
torch.serialization.add_safe_globals([restored_params, restored, Scheme.parse("int8").__reduce__()[0]])
