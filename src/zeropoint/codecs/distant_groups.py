"""Codes of distant groups in one word: lines of HQQ and Quanto.

Of G groups of g codes and n codes to a word, there are L = ceil(G / n) lines of g words: line i has the codes
of groups i, i + L and so on; groups past the last are zeros. Words are bytes, or of 3 bits int32, whose two
highest bits are 0. A weight is read and written whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import packing
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from .containers.safetensors import FILE_DTYPES
from .tensor_fields import CODES, Field, TensorSpec, WeightPart

_THREE, _TEN = 3, 10


def places(bits: int, *, high_first: bool) -> tuple[torch.dtype, list[int]]:
    """Return the dtype of words, and the lowest bit of each code.

    >>> places(4, high_first=True)
    (torch.uint8, [4, 0])
    """
    found = [bits * n for n in range(_TEN if bits == _THREE else 8 // bits)]
    return torch.int32 if bits == _THREE else torch.uint8, found[::-1] if high_first else found


def words_of(groups: torch.Tensor, bits: int, *, high_first: bool) -> torch.Tensor:
    """Return the lines of codes, (groups, codes of each) uint8.

    >>> codes = torch.tensor([[1], [2], [3]], dtype=torch.uint8)
    >>> [words_of(codes, 4, high_first=high).tolist() for high in (False, True)]
    [[[49], [2]], [[19], [32]]]
    """
    dtype, shifts = places(bits, high_first=high_first)
    padded = torch.nn.functional.pad(groups, (0, 0, 0, -len(groups) % len(shifts)))
    found = torch.zeros(len(padded) // len(shifts), groups.shape[1], dtype=dtype)
    for codes, shift in zip(padded.view(len(shifts), *found.shape), shifts, strict=True):
        found |= codes.to(dtype) << shift
    return found


def codes_of(lines: torch.Tensor, bits: int, groups: int, *, high_first: bool) -> torch.Tensor:
    """Return the codes of ``groups`` groups: the inverse of :func:`words_of`."""
    found = [lines >> shift & (1 << bits) - 1 for shift in places(bits, high_first=high_first)[1]]
    return torch.cat(found)[:groups].to(torch.uint8)


@dataclass(frozen=True)
class DistantCodes(Field):
    """Codes of all groups; see the module.

    suffix: the last part of its name. high_first: whether the first code of a word is in its high bits.
    """

    suffix: str
    high_first: bool
    level = CODES

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        word, shifts = places(weight.bits, high_first=self.high_first)
        rows, columns = weight.granularity.grid(shape)
        lines = -(-rows * columns // len(shifts))
        size = (lines, shape[1] // columns)
        return TensorSpec(suffix=self.suffix, dtype=FILE_DTYPES[word], shape=size, lines=lines, per=shape[0])

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        codes = packing.unpack(q.data, q.scheme.bits, q.shape[1])
        return words_of(codes.view(q.scales[0].numel(), -1), q.scheme.bits, high_first=self.high_first)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        each, count = weight.granularity.grid(part.shape)[1], len(places(weight.bits, high_first=True)[1])
        codes = codes_of(lines, weight.bits, len(lines) * count, high_first=self.high_first)
        own = codes[part.start * each : (part.start + part.shape[0]) * each]
        return packing.pack(own.reshape(part.shape), weight.bits)
