"""Operands of a plan: shape, dtype, strides and device, checked per call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from ..formats.torch_dtypes import INPUT_DTYPES
from ..functional import check_apart, tensors_of
from ..layout.code_rows import packed_shape
from ..ops.registry import HeldKernel
from ..params import QuantizationParams
from ..params.tensors import parameter_tensors
from ..schemes import Scheme
from ..tensor import QuantizedTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A tensor of values without its data.

    dtype: float64, float32, float16 or bfloat16.
    strides: None for a contiguous tensor.

    Raises DtypeError for another dtype, UnsupportedError for the meta device, ShapeError for a
    negative length or strides that do not fit.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    device: torch.device

    def __post_init__(self) -> None:
        if self.dtype not in INPUT_DTYPES:
            known = ", ".join(str(dtype) for dtype in INPUT_DTYPES)
            raise DtypeError(f"dtype (={self.dtype}) must be one of {known}; convert the tensor first")
        if self.device.type == "meta":
            raise UnsupportedError("device (=meta) holds no data to run on; name the device of the tensors")
        if any(length < 0 for length in self.shape):
            raise ShapeError(f"shape (={self.shape}) must not have a negative length")
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise ShapeError(
                f"strides (={self.strides}) must number {len(self.shape)}, as shape {self.shape}"
            )

    def check(self, name: str, x: torch.Tensor) -> None:
        """Raise DtypeError or ShapeError unless ``x`` is such a tensor."""
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.dtype is not self.dtype:
            found = getattr(x, "dtype", "no dtype")
            raise DtypeError(
                f"{name} (a {type(x).__name__} of {found}) must be a plain dense tensor of {self.dtype}; "
                "make a plan for it"
            )
        laid = x.is_contiguous() if self.strides is None else x.stride() == self.strides
        if x.shape != self.shape or not laid or x.device != self.device:
            raise ShapeError(
                f"{name} (shape {tuple(x.shape)}, strides {x.stride()}, on {x.device}) must be {self}; "
                "make a plan for it"
            )

    def check_out(self, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Raise unless ``out`` is contiguous, gradient-free and apart from inputs."""
        self.contiguous().check("out", out)
        if out.requires_grad:
            raise ShapeError("out (requires_grad=True) must not require a gradient; detach it first")
        check_apart((out,), inputs)

    def contiguous(self) -> Operand:
        """Return the same tensor in contiguous memory."""
        if self.strides is None:
            return self
        return Operand(shape=self.shape, dtype=self.dtype, strides=None, device=self.device)

    def empty(self) -> torch.Tensor:
        """Return uninitialized contiguous memory of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        laid = "contiguous" if self.strides is None else f"of strides {self.strides}"
        return f"{self.dtype} of shape {self.shape}, {laid}, on {self.device}"


class Staged:
    """An input as kernels take it, staged contiguously where needed."""

    def __init__(self, operand: Operand, kernel: HeldKernel | None = None) -> None:
        as_it_is = operand.strides is None or (kernel is not None and kernel.strided)
        self._buffer = None if as_it_is else operand.contiguous().empty()
        self.nbytes = 0 if self._buffer is None else self._buffer.nbytes

    def ready(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, or its copy."""
        source = x.detach() if x.requires_grad else x
        return source if self._buffer is None else self._buffer.copy_(source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """A quantized tensor without its data: packed codes, scales and zero points.

    operand: the tensor of values that it represents.
    """

    scheme: Scheme
    operand: Operand

    def empty(self, params: QuantizationParams | None) -> QuantizedTensor:
        """Return uninitialized memory for codes, and for parameters unless they are given."""
        shape, device = self.operand.shape, self.operand.device
        if params is None:
            wanted = parameter_tensors(self.scheme, shape, self.operand.dtype)
            made = [torch.empty(side, dtype=dtype, device=device) for side, dtype in wanted]
            params = QuantizationParams.of(self.scheme, shape, self.operand.dtype, made)
        codes = packed_shape(self.scheme, shape)
        data = torch.empty(codes, dtype=torch.uint8, device=device)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=self.operand.dtype)

    def check(self, name: str, q: QuantizedTensor, *, whole: bool) -> None:
        """Raise ShapeError for other quantized tensors; ``whole``: parameters too."""
        wanted = self.operand
        if not isinstance(q, QuantizedTensor):
            raise DtypeError(
                f"{name} (a {type(q).__name__}) must be a QuantizedTensor, as Plan.empty() gives; "
                f"its integers are {name}.codes"
            )
        same = (q.scheme, q.shape, q.dtype) == (self.scheme, wanted.shape, wanted.dtype)
        if not same or not q.takes_results(wanted.device, params=whole):
            raise ShapeError(
                f"{name} ({q}) must be a result for {self.scheme}, contiguous, of a tensor {wanted}; "
                "make a plan for it"
            )


def bytes_of(q: QuantizedTensor) -> int:
    """Return the bytes of all tensors of ``q``."""
    return sum(tensor.nbytes for tensor in tensors_of(q))
