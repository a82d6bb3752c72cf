"""ONNX types of codes, and scale layouts of DequantizeLinear.

Layout of a weight in an ONNX file:

    codes        an initializer of the weight's shape: INT8, UINT8, INT16, UINT16, FLOAT8E4M3FN, ... or INT4,
                 UINT4, INT2, UINT2, FLOAT4E2M1, packed from the first element to the last, low bits first
    scale        float32: a scalar, one number along ``axis``, or blocks of ``block_size`` along ``axis``
    zero point   of the type of the codes, shaped like the scale; absent where it is 0
    value        (code - zero point) * scale

All levels of scales of a scheme are multiplied into one, coarsest first, as dequantization does; the product
is the number that dequantization uses, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UnsupportedError
from ...formats import Format, format_name
from ...formats.codes import decode
from ...formats.torch_dtypes import dtype_of
from ...layout import packing
from ...params.effective import effective_scale
from ...schemes import Scheme, ZeroPoint
from ...tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeType:
    """A type of ONNX for codes.

    name: in ``TensorProto``. opset: the first in which DequantizeLinear takes it. carrier: the dtype in
    which torch holds one code. bits: of a code in the file.
    """

    name: str
    opset: int
    carrier: torch.dtype
    bits: int = 8

    @property
    def is_packed(self) -> bool:
        """Whether several codes share a byte."""
        return self.bits < 8


INTEGER_TYPES = (
    CodeType(name="INT2", opset=25, carrier=torch.int8, bits=2),
    CodeType(name="UINT2", opset=25, carrier=torch.uint8, bits=2),
    CodeType(name="INT4", opset=21, carrier=torch.int8, bits=4),
    CodeType(name="UINT4", opset=21, carrier=torch.uint8, bits=4),
    CodeType(name="INT8", opset=21, carrier=torch.int8),
    CodeType(name="UINT8", opset=21, carrier=torch.uint8),
    CodeType(name="INT16", opset=21, carrier=torch.int16, bits=16),
    CodeType(name="UINT16", opset=21, carrier=torch.uint16, bits=16),
)
FLOAT_TYPES = (
    CodeType(name="FLOAT4E2M1", opset=23, carrier=torch.uint8, bits=4),
    CodeType(name="FLOAT8E4M3FN", opset=21, carrier=torch.float8_e4m3fn),
    CodeType(name="FLOAT8E5M2", opset=21, carrier=torch.float8_e5m2),
    CodeType(name="FLOAT8E4M3FNUZ", opset=21, carrier=torch.float8_e4m3fnuz),
    CodeType(name="FLOAT8E5M2FNUZ", opset=21, carrier=torch.float8_e5m2fnuz),
)


def code_type(element: Format, opset: int) -> CodeType:
    """Return the narrowest type for every value, the element's own first.

    Raises UnsupportedError when there is none.

    >>> from zeropoint.formats import get_format
    >>> [code_type(get_format(name), 21).name for name in ("int3", "uint8", "float4_e2m1fn", "float8_e5m2")]
    ['INT4', 'UINT8', 'FLOAT8E4M3FN', 'FLOAT8E5M2']
    """
    if element.is_integer:
        for kind in INTEGER_TYPES:
            if (
                kind.opset <= opset
                and element.bits <= kind.bits
                and kind.name.startswith("U") != element.signed
            ):
                return kind
    if element.is_float:
        own = [kind for kind in FLOAT_TYPES if _is_own(kind, element)]
        for kind in (*own, *FLOAT_TYPES):
            if kind.opset <= opset and (kind in own or _holds(kind, element)):
                return kind
    raise UnsupportedError(f"{format_name(element)} has no type in ONNX operator set {opset}")


def _is_own(kind: CodeType, element: Format) -> bool:
    if kind.is_packed:
        return (element.bits, element.mantissa_bits, element.signed) == (4, 1, True)
    return dtype_of(element) is kind.carrier


def _holds(kind: CodeType, element: Format) -> bool:
    """Whether the type represents every number of ``element``, none of it special."""
    if kind.is_packed or element.bits > 8:
        return False
    values = decode(torch.arange(element.code_count, dtype=torch.uint8), element, torch.float32)
    return bool(torch.equal(values.to(kind.carrier).float(), values))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeight:
    """A weight as ONNX holds it.

    codes: one a byte or word, of the weight's shape, in the carrier of ``type``. scale: float32. zero_point:
    in the carrier, or None. axis, block_size: attributes of DequantizeLinear, or None.
    """

    type: CodeType
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    axis: int | None
    block_size: int | None

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes and inputs of DequantizeLinear."""
        given = {"axis": self.axis, "block_size": self.block_size}
        return {name: value for name, value in given.items() if value is not None}


def stored(q: QuantizedTensor, opset: int) -> StoredWeight:
    """Return a quantized tensor's ONNX weight; it dequantizes bit-equally.

    Raises UnsupportedError for a scheme that DequantizeLinear cannot say.
    """
    scheme = q.scheme
    kind = code_type(scheme.element, opset)
    if scheme.chained is not None:
        raise UnsupportedError(f"ONNX has no word for its {scheme.chained}")
    if scheme.zero_point is ZeroPoint.REAL:
        raise UnsupportedError("its zero points are no integers")
    if q.dtype == torch.float64:
        raise UnsupportedError("its numbers are float64")
    factor = _factor(q)
    scale, axis, block_size = _layout(factor, scheme, q.shape)
    zero = None
    if q.zero_point is not None:
        zeros = q.zero_point.reshape(scheme.granularity.grid(q.shape))
        zero = _layout(zeros.expand(factor.shape), scheme, q.shape)[0].to(kind.carrier)
    return StoredWeight(
        type=kind, codes=_codes(q, kind), scale=scale, zero_point=zero, axis=axis, block_size=block_size
    )


def _factor(q: QuantizedTensor) -> torch.Tensor:
    """Return each finest block's factor, float32, with fixed-point step."""
    scheme = q.scheme
    factor = effective_scale(scheme, q.scales, q.shape, q.dtype)
    factor = torch.ones(scheme.granularity.grid(q.shape)) if factor is None else factor.contiguous()
    if (step := float(scheme.element_step)) != 1:
        if not torch.equal(factor * step / step, factor):
            raise UnsupportedError("a scale times the step of its fixed point is below the least float32")
        factor = factor * step
    return factor


def _codes(q: QuantizedTensor, kind: CodeType) -> torch.Tensor:
    """Return the codes in the type's carrier, same numbers."""
    if q.scheme.element.is_integer:
        return q.codes.to(kind.carrier)
    element = q.scheme.element
    if kind.is_packed or _is_own(kind, element):
        return q.codes.view(kind.carrier)
    return decode(q.codes, element, torch.float32).to(kind.carrier)


def _layout(
    grid: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]
) -> tuple[torch.Tensor, int | None, int | None]:
    """Return block numbers as scalar, axis or blocks, with axis and size.

    Blocks over several axes are repeated along all but the last of them.
    """
    extents = scheme.granularity.block_shape(shape)
    cut = [axis for axis, count in enumerate(grid.shape) if count > 1]
    if not cut:
        return grid.reshape(()).clone(), None, None
    if len(cut) == 1 and extents[cut[0]] == 1:
        return grid.reshape(-1).clone(), cut[0], None
    wide = [axis for axis, extent in enumerate(extents) if extent > 1]
    axis = wide[-1] if wide else len(shape) - 1
    spread = grid
    for other, length in enumerate(shape):
        if other != axis and spread.shape[other] != length:
            spread = spread.repeat_interleave(extents[other], other).narrow(other, 0, length)
    return spread.contiguous(), axis, min(extents[axis], shape[axis])


def packed_bytes(codes: torch.Tensor, kind: CodeType) -> bytes:
    """Return a file's code bytes: one row, low bits first.

    >>> packed_bytes(torch.tensor([[1, -2, 3]], dtype=torch.int8), INTEGER_TYPES[2]).hex()
    'e103'
    """
    return packing.pack(codes.reshape(-1).to(torch.int64), kind.bits).numpy().tobytes()
