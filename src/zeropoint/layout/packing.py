"""Codes to bytes and back: little-endian, low bits first, rows byte-aligned.

Plain torch, any device. Each row along the last axis is padded to whole bytes. A code of ``b`` bits at
position ``i`` of its row occupies bits ``i * b`` to ``i * b + b - 1`` of the row's bit stream; bit ``k`` of
the stream is bit ``k % 8`` of byte ``k // 8``. For 4 bits, the low nibble comes first.
"""

from __future__ import annotations

import torch

from ..errors import FormatError, ShapeError
from ..formats import Format
from ..formats.torch_dtypes import code_dtype

_PARTS = (1, 2, 4)
"""Widths that divide a byte."""


def row_length(shape: tuple[int, ...]) -> int:
    """Return the codes of a row, 1 for a scalar."""
    return shape[-1] if shape else 1


def packed_length(count: int, bits: int) -> int:
    """Return the bytes that a row of ``count`` codes takes."""
    return -(-count * bits // 8)


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Return the shape of the bytes of a tensor of ``shape``."""
    return (*shape[:-1], packed_length(row_length(shape), bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes packed into bytes; only their low ``bits`` bits count.

    Returns uint8 of shape ``(*codes.shape[:-1], ceil(codes.shape[-1] * bits / 8))``; a scalar packs like a
    row of one.

    Args:
        codes: integers, shape (..., n), of which the low ``bits`` are kept.
        bits: width of a code, 1 to 32.

    Example:
        >>> pack(torch.tensor([1, 2, 3]), 4)
        tensor([33,  3], dtype=torch.uint8)
    """
    _require_bits(bits)
    rows = codes.reshape(1) if codes.ndim == 0 else codes
    if bits in (8, 16, 32):
        return _whole_bytes(rows, bits)
    per = 8 // bits if bits in _PARTS else 8
    padding = -rows.shape[-1] % per
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    if bits in _PARTS:
        # Integers become bytes by their low bits.
        narrow, mask = rows.to(torch.uint8), (1 << bits) - 1
        out: torch.Tensor = narrow[..., ::per] & mask
        for lane in range(1, per):
            out |= (narrow[..., lane::per] & mask) << (lane * bits)
        return out
    lanes = _split(rows, per, bits) & ((1 << bits) - 1)
    group_bytes = per * bits // 8
    out = torch.zeros((*lanes.shape[:-1], group_bytes), dtype=lanes.dtype, device=codes.device)
    for lane in range(per):
        first, shift = divmod(lane * bits, 8)
        value = lanes[..., lane] << shift
        for byte in range(first, min(group_bytes, first + 1 + (shift + bits - 1) // 8)):
            out[..., byte] |= (value >> (8 * (byte - first))) & 0xFF
    length = packed_length(codes.shape[-1] if codes.ndim else 1, bits)
    return out.to(torch.uint8).flatten(-2)[..., :length].contiguous()


def _require_bits(bits: int) -> None:
    if type(bits) is not int or bits < 1:
        raise FormatError(f"bits (={bits!r}) must be a whole number from 1 on")


def _whole_bytes(rows: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return (
            (rows.to(torch.int16) & 0xFF).to(torch.uint8) if rows.dtype != torch.uint8 else rows.contiguous()
        )
    wide = rows.to(torch.int64) & ((1 << bits) - 1)
    parts = [(wide >> (8 * n)) & 0xFF for n in range(bits // 8)]
    return torch.stack(parts, -1).to(torch.uint8).flatten(-2)


def unpack(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return unpacked codes, the inverse of :func:`pack`: uint8, int32 or int64.

    Args:
        data: uint8, shape (..., ceil(n * bits / 8)).
        bits: width of a code, 1 to 32.
        count: ``n``, the codes in a row.

    Raises:
        ShapeError: when the rows have another length than ``count`` codes take.
    """
    _require_bits(bits)
    if data.ndim == 0 or data.shape[-1] != packed_length(count, bits):
        raise ShapeError(
            f"data (shape {tuple(data.shape)}) must have {packed_length(count, bits)} bytes a row for "
            f"{count} codes of {bits} bits"
        )
    if bits == 8:
        return data
    if bits in (16, 32):
        parts = _split(data, bits // 8, bits)
        return sum((parts[..., n] << (8 * n) for n in range(bits // 8)), parts[..., 0] * 0).to(
            code_dtype(bits)
        )
    if bits in _PARTS:
        fields = [(data >> (lane * bits)) & ((1 << bits) - 1) for lane in range(8 // bits)]
        return torch.stack(fields, -1).flatten(-2)[..., :count].contiguous()
    per = 8
    group_bytes = per * bits // 8
    padding = -data.shape[-1] % group_bytes
    rows = torch.nn.functional.pad(data, (0, padding)) if padding else data
    groups = _split(rows, group_bytes, bits)
    lanes = []
    for lane in range(per):
        first, shift = divmod(lane * bits, 8)
        span = range(first, min(group_bytes, first + 1 + (shift + bits - 1) // 8))
        lanes.append((_join(groups, span) >> shift) & ((1 << bits) - 1))
    return torch.stack(lanes, -1).flatten(-2)[..., :count].to(code_dtype(bits)).contiguous()


def _split(rows: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    # A code of up to 8 bits lies in two bytes, and in 16 bits a tile takes a quarter of the memory.
    wide = torch.int16 if bits <= 8 else torch.int64
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size).to(wide)


def _join(parts: torch.Tensor, span: range) -> torch.Tensor:
    value = torch.zeros_like(parts[..., 0])
    for byte in span:
        value |= parts[..., byte] << (8 * (byte - span.start))
    return value


def as_values(patterns: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return patterns of a signed integer format as integers, others unchanged."""
    if not fmt.is_integer or not fmt.signed:
        return patterns
    if fmt.bits == 8:
        return patterns.view(torch.int8)
    wide = patterns.to(torch.int16 if fmt.bits < 8 else torch.int64)
    signed = wide - ((wide >> (fmt.bits - 1)) << fmt.bits)
    return signed.to(torch.int8 if fmt.bits < 8 else torch.int16 if fmt.bits <= 16 else torch.int32)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, uint8 (bytes,), a view if it is contiguous."""
    whole = tensor.contiguous()
    # A tensor of one number is contiguous under any stride, and torch views bytes under stride 1 alone.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
