"""Codes and values of a tensor, where a code represents several neighbors.

Rows along the last axis are cut into blocks, and blocks into runs of as many values as a code represents; the
last run of a block may be short, so that no code reaches into the next block.
"""

from __future__ import annotations

import functools

import torch

from ..formats import DigitsFormat
from ..formats.codes import decode, decode_runs, encode_codebook, encode_runs, join_digits, split_digits
from ..schemes import Scheme
from . import packing


def packed_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the packed codes of a tensor of ``shape``."""
    return packing.packed_shape(scheme.code_shape(shape), scheme.bits)


def unpack(data: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the code patterns of a tensor of ``shape``, on :meth:`Scheme.code_shape`."""
    codes = scheme.code_shape(shape)
    return packing.unpack(data, scheme.bits, packing.row_length(codes)).reshape(codes)


def decoded(
    patterns: torch.Tensor,
    scheme: Scheme,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    negative: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return decoded values of ``shape``; negative: as in :func:`.formats.codes.decode`."""
    if scheme.element.per_code == 1:
        return decode(patterns.reshape(shape), scheme.element, dtype, negative)
    return _joined(decode_runs(patterns, scheme.element, dtype), scheme, shape)


def encoded(values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return codes of runs of values in units of their scale."""
    return encode_runs(_cut(values, scheme), scheme.element)


def pack_digits(digits: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the packed bytes of one code per value, joining digits."""
    if isinstance(scheme.element, DigitsFormat):
        zero = int(encode_codebook(torch.zeros(1, device="cpu"), scheme.element.digit))
        digits = join_digits(_cut(digits, scheme, zero), scheme.element)
    return packing.pack(digits, scheme.bits)


def unpack_digits(data: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a code for each value, of ``shape``; the inverse of :func:`pack_digits`."""
    patterns = unpack(data, scheme, shape)
    if not isinstance(scheme.element, DigitsFormat):
        return patterns.reshape(shape)
    return _joined(split_digits(patterns, scheme.element), scheme, shape)


def _cut(values: torch.Tensor, scheme: Scheme, missing: int = 0) -> torch.Tensor:
    """Return runs of values, (..., codes, values of a code)."""
    per, count = scheme.element.per_code, packing.row_length(tuple(values.shape))
    lead = tuple(values.shape[:-1])
    block = scheme.row_block((*lead, count))
    blocks, each = -(-count // block), -(-block // per)
    pad = functools.partial(torch.nn.functional.pad, value=missing)
    whole = pad(values.reshape(*lead, count), (0, -count % block)).reshape(*lead, blocks, block)
    runs = pad(whole, (0, -block % per)).reshape(*lead, blocks * each, per)
    return runs[..., : scheme.code_shape((*lead, count))[-1], :]


def _joined(runs: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Return runs as a tensor of ``shape``; the inverse of :func:`_cut`."""
    lead, count = shape[:-1], packing.row_length(shape)
    per, block = scheme.element.per_code, scheme.row_block(shape)
    blocks, each = -(-count // block), -(-block // per)
    whole = torch.nn.functional.pad(runs, (0, 0, 0, blocks * each - runs.shape[-2]))
    rows = whole.reshape(*lead, blocks, each * per)[..., :block].reshape(*lead, blocks * block)
    return rows[..., :count].reshape(shape)
