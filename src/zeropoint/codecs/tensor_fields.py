"""Fields of a layout: tensors that hold numbers of a weight.

A codec lists the fields of a layer (:meth:`Codec.fields`); its tensors, their lines for a part of the weight
and the way back follow. A layout that no field here describes has a field of its own, with the same three
functions, or a codec that defines ``tensors``, ``encode`` and ``decode``. This module knows no layout.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..layout.word_lines import WORD, WordLines
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..schemes import Granularity, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from . import words
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES

ROWS, COLUMNS = 0, 1
"""The axes of a weight, (outputs, inputs)."""
Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors of a weight by suffix, or the lines of each under a part."""
CODES, ZERO_POINT = -2, -1
"""Levels of codes, and of zero points, which are the last of the stored parameters."""
_PACKED = MappingProxyType({"U8": 8, "I32": WORD, "U32": WORD})
"""Dtypes whose items hold several codes, and their bits."""
IN_ORDER = WordLines()
"""Words whose codes lie in order."""
_EIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a layout.

    Args:
        suffix: the last part of its name, such as ``weight_scale``.
        dtype: in the container's spelling, such as ``F8_E4M3``.
        shape: of the whole tensor; () is one number, which counts as a line.
        axis: the weight's axis which the tensor's first axis follows, or None for a tensor that no part of a
            weight gives alone.
        lines, per: each ``per`` values of the weight along that axis give ``lines`` lines along the tensor's
            first axis.
        across: the same, (lines, per), of the weight's other axis and the tensor's second one; it is looked
            at where a weight is read across the axis along which it is cut.
        stacked: whether it holds all fused experts: its first two axes are experts and lines of each.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None = ROWS
    lines: int = 1
    per: int = 1
    across: tuple[int, int] = (1, 1)
    stacked: bool = False

    @property
    def height(self) -> int:
        """Number of lines along its first axis, or first two."""
        return math.prod(self.shape[: 2 if self.stacked else 1])

    def span(self, start: int, count: int) -> tuple[int, int]:
        """Return the tensor's first line under a part, and their number.

        start: index of the part's first value along ``axis``. count: how many values of that axis the part
        has.
        """
        if self.axis is None:
            return 0, self.height
        first = start // self.per * self.lines
        return first, min(self.height, -(-(start + count) // self.per) * self.lines) - first


class WeightPart(NamedTuple):
    """A part of a weight, along its codec's axis.

    start: index of its first value along that axis. shape: its rows and columns. dtype: of the weight before
    it was quantized, in which dequantized values are given.
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def quantized(self, scheme: Scheme, data: torch.Tensor, *stored: torch.Tensor) -> QuantizedTensor:
        """Return the part in codes.

        scheme: of the codes. data: packed codes, uint8 (rows, bytes of a row). stored: one tensor for each of
        :attr:`Scheme.levels`, then the zero point where there is one.
        """
        params = QuantizationParams.of(scheme, self.shape, self.dtype, stored)
        return QuantizedTensor(data=data, params=params, shape=self.shape, dtype=self.dtype)


class Field(ABC):
    """A tensor of a layout with numbers of a weight.

    A field with an axis has :meth:`lines`, one without has :meth:`whole`. suffix: the last part of its name.
    level: of its numbers: CODES, an index among :attr:`Scheme.levels`, ZERO_POINT, or None where decoding
    needs none of them. along: the axis of the weight that its lines follow.
    """

    suffix: str
    level: int | None
    along: int = ROWS

    @abstractmethod
    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        """Return the tensor of a whole weight.

        weight: its scheme. shape: (out_features, in_features). dtype: of the weight before it is quantized.
        """

    def lines(self, q: QuantizedTensor) -> torch.Tensor | None:
        """Return the lines of a part, or None."""
        return None

    def whole(self, params: QuantizationParams, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a tensor that all parts share, or None.

        params: of any part: what they have for the whole tensor, all parts have. shape: of the whole weight.
        """
        return None

    def fills(self, weight: Scheme) -> tuple[int, int] | None:
        """Return the axis along which codes fill whole words, and their number.

        None where nothing has to.
        """
        return None

    @abstractmethod
    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        """Return packed codes, or parameters in the shape of the part's blocks.

        lines: of the tensor under the part. weight: its scheme. part: which one.
        """


@functools.lru_cache(maxsize=64)
def half_range(count: int, bits: int) -> torch.Tensor:
    """Return the packed row to XOR: shifts codes by half their range."""
    return packing.pack(torch.full((count,), 1 << (bits - 1)), bits)


@dataclass(frozen=True)
class CodeField(Field):
    """Codes, packed in bytes or words, or one item each.

    suffix: the last part of its name. dtype: U8, I32 or U32 of packed rows; I8 or a float8 of one item for
    each code. along: ROWS, or COLUMNS for lines of inputs. order: of codes in words. shifted: whether half
    the range is added, so that signed codes are stored without a sign. blocked: whether rows are cut in
    blocks, along a third axis.
    """

    suffix: str
    dtype: str
    along: int = ROWS
    order: WordLines = IN_ORDER
    shifted: bool = False
    blocked: bool = False
    level = CODES

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        (rows, columns), bits = shape, weight.bits
        lines, fields = words.whole_words(bits)
        made = functools.partial(TensorSpec, suffix=self.suffix, dtype=self.dtype)
        if self.along == COLUMNS and (self.order.places or self.dtype != "I32"):
            fields = fields if self.dtype == "I32" else 1
            return made(shape=(columns, rows // fields), axis=COLUMNS, across=(1, fields))
        if self.along == COLUMNS:
            return made(shape=(columns * bits // WORD, rows), axis=COLUMNS, lines=lines, per=fields)
        if self.blocked:
            group = blocks(weight)[COLUMNS]
            return made(shape=(rows, columns // group, group * bits // 8), across=(1, group))
        return made(shape=(rows, -(-columns * bits // _PACKED.get(self.dtype, bits))))

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        bits, (rows, columns) = q.scheme.bits, q.shape
        if self.dtype == "I8" and bits < 8:
            return q.codes
        order, flip = self._flipped(bits)
        data = q.data ^ half_range(columns, bits) if flip else q.data
        if self.along == COLUMNS and self.dtype == "I32":
            return words.words_of_rows(data, q.scheme, (rows, columns), order)
        if self.along == COLUMNS:
            data = data.t().contiguous()
        if order.places:
            return words.interleaved_words(packing.unpack(data, bits, columns))
        if _PACKED.get(self.dtype) == WORD:
            data = words.to_words(data)
        if self.blocked:
            return data.view(rows, -1, blocks(q.scheme)[COLUMNS] * bits // 8)
        return data.view(TORCH_DTYPES[self.dtype])

    def fills(self, weight: Scheme) -> tuple[int, int] | None:
        if self.along == ROWS or self.dtype != "I32":
            return None
        return (ROWS if self.order.places else COLUMNS), words.whole_words(weight.bits)[1]

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        bits, (rows, columns) = weight.bits, part.shape
        if self.dtype == "I8" and bits < 8:
            return packing.pack(lines, bits)
        order, flip = self._flipped(bits)
        if self.along == COLUMNS and self.dtype == "I32":
            data = words.rows_of_words(lines, weight, (rows, columns), order)
        elif self.along == COLUMNS:
            data = lines.view(torch.uint8).t().contiguous()
        elif order.places:
            data = packing.pack(words.interleaved_fields(lines), bits)
        else:
            data = lines.view(torch.uint8).reshape(rows, -1)[:, : packing.packed_length(columns, bits)]
        return data ^ half_range(columns, bits) if flip else data

    def _flipped(self, bits: int) -> tuple[WordLines, bool]:
        """Return the order of words, and whether rows lack half the range."""
        if self.along == ROWS or not self.shifted or WORD % bits:
            return self.order, self.shifted
        return _with_half(self.order, bits), False


@functools.cache
def _with_half(order: WordLines, bits: int) -> WordLines:
    return replace(order, flip=sum(1 << (at + bits - 1) for at in range(0, WORD, bits)))


@dataclass(frozen=True)
class LevelField(Field):
    """Parameters of one level, a number for each block.

    suffix: the last part of its name. level: an index among :attr:`Scheme.levels`, or ZERO_POINT. dtype: of
    the tensor; empty for the level's own. along: ROWS, or COLUMNS for lines of inputs. trailing: the axes
    behind the first, which then counts all blocks; None keeps rows of blocks.
    """

    suffix: str
    level: int = 0
    dtype: str = ""
    along: int = ROWS
    trailing: tuple[int, ...] | None = None

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        rows, columns = grid = weight.granularity.grid(shape)
        own = self.dtype or FILE_DTYPES[own_dtype(weight, self.level, dtype)]
        made = functools.partial(TensorSpec, suffix=self.suffix, dtype=own)
        if self.along == COLUMNS:
            return made(shape=(columns, rows), axis=COLUMNS, per=words.group_of(weight, shape[1]))
        if self.trailing is not None:
            return made(shape=(rows * columns, *self.trailing), lines=columns)
        return made(shape=grid, per=blocks(weight)[ROWS])

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        found = _stored(q.params, self.level)
        if self.along == COLUMNS:
            found = found.t().contiguous()
        if self.trailing is not None:
            found = found.reshape(-1, *self.trailing)
        return _cast(found, TORCH_DTYPES[self.dtype]) if self.dtype else found

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        found = _cast(lines, own_dtype(weight, self.level, part.dtype))
        found = found.t().contiguous() if self.along == COLUMNS else found
        return found.reshape(weight.granularity.grid(part.shape))


def _stored(params: QuantizationParams, level: int) -> torch.Tensor:
    """Return a level's numbers; zeros for zero points of symmetric schemes."""
    if level == ZERO_POINT and params.zero_point is None:
        return torch.zeros_like(params.scales[0], dtype=torch.uint8)
    return params.stored[level].to(own_dtype(params.scheme, level, params.dtype))


def own_dtype(weight: Scheme, level: int, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a level's numbers in memory.

    dtype: of the weight before it is quantized.
    """
    if level == ZERO_POINT:
        return torch.float32 if weight.zero_point is ZeroPoint.REAL else zero_point_dtype(weight)
    return storage_dtype(weight.levels[level].format_for(format_of(dtype)))


@dataclass(frozen=True)
class InterleavedZeros(Field):
    """Zero points of 4 bits in words, in AWQ's order.

    suffix: the last part of its name. along: COLUMNS for lines of groups, or ROWS for one vector of words.
    shifted: whether 8 is added, for codes with a sign.
    """

    suffix: str
    along: int = COLUMNS
    shifted: bool = False
    level = ZERO_POINT

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        rows, groups = weight.granularity.grid(shape)
        made = functools.partial(TensorSpec, suffix=self.suffix, dtype="I32")
        if self.along == ROWS:
            return made(shape=(rows // _EIGHT,), per=_EIGHT)
        size, per = (groups, rows // _EIGHT), words.group_of(weight, shape[1])
        return made(shape=size, axis=COLUMNS, per=per, across=(1, _EIGHT))

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        zero = torch.zeros(q.scales[0].shape) if q.zero_point is None else q.zero_point
        found = words.interleaved_words((zero.to(torch.int32) + self._half).t().to(torch.uint8))
        return found if self.along == COLUMNS else found.reshape(-1)

    def fills(self, weight: Scheme) -> tuple[int, int]:
        return ROWS, _EIGHT

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        found = words.interleaved_fields(lines.reshape(-1, lines.shape[-1]))
        fields = found.t().to(torch.int32) - self._half
        return fields.to(zero_point_dtype(weight)).contiguous()

    @property
    def _half(self) -> int:
        return _EIGHT if self.shifted else 0


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in another dtype; between bytes, bit for bit."""
    return x.view(dtype) if x.itemsize == dtype.itemsize == 1 else x.to(dtype)


@dataclass(frozen=True)
class ScalarField(Field):
    """One number of the whole weight.

    suffix: the last part of its name. level: an index among :attr:`Scheme.levels`. dtype: of the tensor;
    empty for the level's own. shape: () or (1,).
    """

    suffix: str
    level: int = 0
    dtype: str = "F32"
    shape: tuple[int, ...] = ()

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        own = self.dtype or FILE_DTYPES[own_dtype(weight, self.level, dtype)]
        return TensorSpec(suffix=self.suffix, dtype=own, shape=self.shape, axis=None)

    def whole(self, params: QuantizationParams, shape: tuple[int, ...]) -> torch.Tensor:
        found = _stored(params, self.level).reshape(self.shape)
        return found.to(TORCH_DTYPES[self.dtype]) if self.dtype else found

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        found = _cast(lines, own_dtype(weight, self.level, part.dtype))
        return found.reshape(weight.levels[max(self.level, 0)].granularity.grid(part.shape))


@dataclass(frozen=True)
class ConstantField(Field):
    """A tensor that follows from a weight's scheme, shape and dtype.

    suffix: the last part of its name. value: returns it, of the scheme, the shape and the dtype of the whole
    weight.
    """

    suffix: str
    value: Callable[[Scheme, tuple[int, ...], torch.dtype], torch.Tensor]
    level = None

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        found = self.value(weight, shape, dtype)
        return TensorSpec(
            suffix=self.suffix, dtype=FILE_DTYPES[found.dtype], shape=tuple(found.shape), axis=None
        )

    def whole(self, params: QuantizationParams, shape: tuple[int, ...]) -> torch.Tensor:
        return self.value(params.scheme, shape, params.dtype)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        return lines


def rows_of_blocks(tensors: Tensors, scale: str, weight: Scheme, part: WeightPart) -> tuple[Tensors, Scheme]:
    """Return the tensors and scheme of rows inside a block.

    They take its scale as one of their own; rows from the begin of a block on need nothing.
    """
    height = blocks(weight)[ROWS]
    if height <= 1 or part.start % height == 0:
        return tensors, weight
    rows = torch.arange(part.start % height, part.start % height + part.shape[0]) // height
    of_rows = tensors[scale].view(torch.uint8)[rows].view(tensors[scale].dtype)
    by_row = Granularity.group(blocks(weight)[COLUMNS])
    first = replace(weight.scales[0], granularity=by_row)
    return {**tensors, scale: of_rows}, replace(weight, scales=(first,))


def decoded(fields: Sequence[Field], tensors: Tensors, weight: Scheme, part: WeightPart) -> QuantizedTensor:
    """Return a part of a weight from the lines of its tensors."""
    by_level = {field.level: field for field in fields}
    tensors, weight = rows_of_blocks(tensors, by_level[0].suffix, weight, part)
    zero = () if weight.zero_point is ZeroPoint.NONE else (ZERO_POINT,)
    levels = (CODES, *range(len(weight.levels)), *zero)
    data, *stored = [by_level[n].numbers(tensors[by_level[n].suffix], weight, part) for n in levels]
    return part.quantized(weight, data, *stored)
