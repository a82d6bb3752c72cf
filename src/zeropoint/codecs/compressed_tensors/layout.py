"""Tensors of the layouts of compressed-tensors, byte for byte.

For the weight ``X.weight`` of shape (N, K), with D its dtype and G = ceil(K / group) scales a row (all
little-endian, rows one after the other):

    pack-quantized
        X.weight_packed        I32 [N, ceil(K * b / 32)]: a row is one stream of b-bit fields
                               ``code + 2 ** (b - 1)``, low bits first; the rest of the last word is 0
        X.weight_scale         D or the scale's own dtype; [N, G], [N, 1] or [1]
        X.weight_zero_point    I32 [ceil(N * b / 32), G]: as above, packed along axis 0; asymmetric only
        X.weight_shape         I64 [2] = N, K
    int-quantized
        X.weight               I8 [N, K], of fewer bits too
        X.weight_scale         as above; [N, G], [N, 1] or [1]
    float-quantized, naive-quantized
        X.weight               F8_E4M3 [N, K]
        X.weight_scale         as above; [N, G], [N, 1], [1]; blocks of r x c: [ceil(N / r), ceil(K / c)]
    mxfp8-quantized
        X.weight               F8_E4M3 [N, K]
        X.weight_scale         U8 [N, K / 32]: exponent + 127
    mxfp4-pack-quantized
        X.weight_packed        U8 [N, K / 2]: even element in the low nibble
        X.weight_scale         U8 [N, K / 32]: exponent + 127
    mxfp6-pack-quantized
        X.weight_packed        U8 [N, K * 3 / 4]: codes of float6_e2m3fn as one stream, low bits first
        X.weight_scale         U8 [N, K / 32]: exponent + 127
    nvfp4-pack-quantized
        X.weight_packed        U8 [N, K / 2]: as above
        X.weight_scale         F8_E4M3 [N, K / 16]
        X.weight_global_scale  F32 [1]: the factor by which the block scales were enlarged
    in any of them, where inputs have parameters from data
        X.input_scale          F32 [1]
        X.input_zero_point     I8 [1]; asymmetric only
        X.input_global_scale   F32 [1]: as X.weight_global_scale, for inputs in nvfp4

Source: compressed-tensors 0.20 (compressors/*/base.py, quantization/utils/helpers.py) and the files that
llm-compressor 0.14 writes with them. This module knows tensors and schemes; it opens no file and decides
nothing about which tensor is quantized.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

from ...errors import CheckpointError, UnsupportedError
from ...formats import Format, get_format
from ...formats.torch_dtypes import dtype_of, storage_dtype
from ...layout import packing
from ...params.tensors import zero_point_dtype
from ...schemes import Scheme, TensorScale, ZeroPoint
from ...tensor import QuantizedTensor
from ..block_extents import blocks, no_matrix, partial_group
from ..containers.safetensors import FILE_DTYPES
from ..tensor_fields import ZERO_POINT as LAST
from ..tensor_fields import (
    CodeField,
    ConstantField,
    Field,
    LevelField,
    ScalarField,
    Tensors,
    TensorSpec,
    WeightPart,
)
from ..words import words_of

WORD_BITS = 32
"""Bits of a word of pack-quantized; zero points of so many rows fill whole words."""
MAX_PACKED_BITS = 8
_KNOWN = 4096
"""Answers that are kept: a checkpoint of many tensors has few schemes and shapes."""

PACKED, WEIGHT, SHAPE = "weight_packed", "weight", "weight_shape"
SCALE, ZERO_POINT, GLOBAL_SCALE = "weight_scale", "weight_zero_point", "weight_global_scale"


class Layout(enum.Enum):
    """The layouts, under the names that stand in ``quantization_config``."""

    PACK = "pack-quantized"
    INT = "int-quantized"
    FLOAT = "float-quantized"
    NAIVE = "naive-quantized"
    """As float-quantized, for weights whose inputs are not quantized."""
    MXFP8 = "mxfp8-quantized"
    MXFP4 = "mxfp4-pack-quantized"
    MXFP6 = "mxfp6-pack-quantized"
    NVFP4 = "nvfp4-pack-quantized"


IN_BYTES = (Layout.MXFP4, Layout.MXFP6, Layout.NVFP4)
"""Layouts of floats of fewer than 8 bits, as a stream in bytes."""
MX = (Layout.MXFP4, Layout.MXFP6, Layout.MXFP8)
"""Layouts with exponents for scales."""
SMALL = tuple(layout.value for layout in (*MX, Layout.NVFP4))
"""Layouts of floats in blocks, which transformers decodes to bfloat16 at the first forward."""

FLOAT8 = (Layout.FLOAT.value, Layout.NAIVE.value)
"""Layouts of which transformers decodes floats next to codes, where it joins tensors."""


@functools.lru_cache(maxsize=_KNOWN)
def strategy(scheme: Scheme) -> str:
    """Return compressed-tensors' word for the granularity: tensor, channel, group, tensor_group or block.

    Raises UnsupportedError for a granularity that it has no word for.
    """
    rows, columns = blocks(scheme)
    if len(scheme.scales) > 1:
        return "tensor_group"
    words = {(0, 0): "tensor", (1, 0): "channel"}
    if (rows, columns) in words:
        return words[rows, columns]
    if rows and columns:
        return "group" if rows == 1 else "block"
    raise UnsupportedError(
        f"granularity {scheme.granularity} of {scheme} has no place in compressed-tensors; use tensor, "
        "channel, g<N> or block<R>x<C>"
    )


@functools.lru_cache(maxsize=_KNOWN)
def layout_of(weight: Scheme, input: Scheme | None = None) -> Layout:  # noqa: A002 (the layer's input)
    """Return the layout of weights of a layer with an input scheme.

    Raises UnsupportedError with the reason when no layout can hold them.

    >>> layout_of(Scheme.parse("int4:g128")).value
    'pack-quantized'
    """
    if not weight.scales:
        raise _refused(weight, "has no scales, and every layout needs them; leave out cast")
    if weight.beyond_factors is not None:
        raise _refused(weight, f"has {weight.beyond_factors}, which no layout stores")
    element = weight.element
    if element.is_integer:
        return _integer_layout(weight, input)
    if element == get_format("float8_e4m3fn"):
        return _float8_layout(weight, input)
    if element == get_format("float4_e2m1fn"):
        return _float4_layout(weight)
    if element == get_format("float6_e2m3fn"):
        return _mx(weight, Layout.MXFP6)
    raise _refused(
        weight, "has elements that no layout stores; use int2..int8, float8_e4m3fn, mxfp6 or float4_e2m1fn"
    )


def _refused(scheme: Scheme, why: str) -> UnsupportedError:
    return UnsupportedError(f"scheme {scheme} {why}")


def _integer_layout(weight: Scheme, input_: Scheme | None) -> Layout:
    element = weight.element
    if not element.signed:
        raise _refused(
            weight,
            f"has unsigned codes, and the layouts store signed ones; use int{element.bits}, with asym or not",
        )
    if element.bits > MAX_PACKED_BITS or not element.is_whole:
        raise _refused(weight, f"has elements that no layout stores; use int2..int{MAX_PACKED_BITS}")
    _require_linear(weight)
    if weight.zero_point is ZeroPoint.REAL:
        raise _refused(weight, "has real zero points, and the layout stores integers; use asym")
    if weight.zero_point is not ZeroPoint.NONE and strategy(weight) == "tensor":
        raise _refused(
            weight, "has one zero point for the tensor, which the layout does not pack; use channel or g<N>"
        )
    if strategy(weight) == "block":
        raise _refused(
            weight, "has two-dimensional blocks, which engines read for float8 only; use g<N> or channel"
        )
    if input_ is None:
        return Layout.PACK
    if weight.zero_point is not ZeroPoint.NONE:
        raise _refused(weight, "with quantized inputs needs symmetric weights; leave out asym")
    return Layout.INT


def _require_linear(weight: Scheme) -> None:
    if len(weight.scales) > 1 or weight.scales[0].rule.power_of_two:
        raise _refused(weight, "needs one level of linear scales in this layout; use scale=input")
    if storage_dtype(weight.scales[0].format_for(get_format("float32"))) not in _SCALE_DTYPES:
        raise _refused(
            weight,
            "has scales that this layout does not store; use scale=input, float32, bfloat16 or float16",
        )


_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _float8_layout(weight: Scheme, input_: Scheme | None) -> Layout:
    if weight.scales[0].rule.power_of_two:
        return _mx(weight, Layout.MXFP8)
    _require_linear(weight)
    strategy(weight)
    return Layout.NAIVE if input_ is None else Layout.FLOAT


def _mx(weight: Scheme, layout: Layout) -> Layout:
    if (
        len(weight.scales) > 1
        or blocks(weight) != (1, 32)
        or dtype_of(_finest(weight)) != torch.float8_e8m0fnu
    ):
        raise _refused(
            weight,
            f"does not fit {layout.value}, which has one e8m0 scale for each group of 32 (g32:scale=even)",
        )
    return layout


def _finest(weight: Scheme) -> Format:
    return weight.scales[0].format_for(get_format("float32"))


def _float4_layout(weight: Scheme) -> Layout:
    if weight.scales[0].rule.power_of_two:
        return _mx(weight, Layout.MXFP4)
    two = len(weight.scales) == 2 and blocks(weight) == (1, 16) and _finest(weight) == get_format("ue4m3")
    if (
        not two
        or weight.scales[1].format != get_format("float32")
        or str(weight.scales[1].granularity) != "tensor"
    ):
        raise _refused(weight, "does not fit the layouts of 4-bit floats, mxfp4 and nvfp4; use one of these")
    if weight.dialect.tensor_scale is not TensorScale.RECIPROCAL:
        raise _refused(
            weight,
            "keeps its tensor scale as a factor, and the layout stores the reciprocal; use "
            "dialect=compressed-tensors",
        )
    return Layout.NVFP4


@functools.lru_cache(maxsize=_KNOWN)
def unfit(weight: Scheme, layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Return why ``layout`` cannot hold a weight, or None.

    compressed-tensors has no ragged groups: its compressors and the engines' kernels take whole ones only.
    """
    problem = no_matrix(shape) or partial_group(weight, shape)
    if problem is not None:
        return problem
    if layout in IN_BYTES and shape[1] % 2:
        return f"last axis {shape[1]} is odd, and codes are stored in pairs"
    return None


@functools.lru_cache(maxsize=_KNOWN)
def fields_of(weight: Scheme, layout: Layout) -> tuple[Field, ...]:
    """Return the fields of a weight.

    >>> [field.suffix for field in fields_of(Scheme.parse("int4:g32"), Layout.PACK)]
    ['weight_packed', 'weight_scale', 'weight_shape']
    """
    whole, packs = strategy(weight) == "tensor", layout is Layout.PACK
    scale = "U8" if layout in MX else ""
    fields: list[Field] = [
        _codes(weight, layout),
        ScalarField(SCALE, dtype=scale, shape=(1,)) if whole else LevelField(SCALE, dtype=scale),
    ]
    if layout is Layout.NVFP4:
        fields.append(ScalarField(GLOBAL_SCALE, level=1, shape=(1,)))
    if weight.zero_point is not ZeroPoint.NONE:
        one = ScalarField(ZERO_POINT, LAST, "I8", (1,)) if whole else LevelField(ZERO_POINT, LAST, "I8")
        fields.append(PackedRows(ZERO_POINT) if packs and not whole else one)
    if packs:
        fields.append(ConstantField(SHAPE, lambda _, shape, __: torch.tensor(shape, dtype=torch.int64)))
    return tuple(fields)


def _codes(weight: Scheme, layout: Layout) -> Field:
    if layout is Layout.PACK:
        return CodeField(PACKED, "I32", shifted=True)
    if layout in IN_BYTES:
        return CodeField(PACKED, "U8")
    return NarrowCodes(WEIGHT, "I8") if weight.element.is_integer else CodeField(WEIGHT, "F8_E4M3")


@dataclass(frozen=True)
class NarrowCodes(CodeField):
    """Codes in bytes; raises CheckpointError for wider ones."""

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        low, high = (int(extreme) for extreme in torch.aminmax(lines)) if lines.numel() else (0, 0)
        if not weight.qmin <= low <= high <= weight.qmax:
            raise CheckpointError(
                f"{WEIGHT} holds codes from {low} to {high}, but those of {weight.element_name} lie in "
                f"{weight.qmin} to {weight.qmax}; the file is damaged"
            )
        return super().numbers(lines, weight, part)


@dataclass(frozen=True)
class PackedRows(Field):
    """Zero points of groups, packed along the rows."""

    suffix: str
    level = LAST

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        (rows, groups), bits = weight.granularity.grid(shape), weight.bits
        packed = (-(-rows * bits // WORD_BITS), groups)
        return TensorSpec(suffix=self.suffix, dtype="I32", shape=packed, lines=bits, per=WORD_BITS)

    def lines(self, q: QuantizedTensor) -> torch.Tensor | None:
        assert q.zero_point is not None
        fields = (q.zero_point + (1 << (q.scheme.bits - 1))).t().contiguous()
        return words_of(fields, q.scheme.bits).t().contiguous()

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        bits, (rows, groups) = weight.bits, weight.granularity.grid(part.shape)
        # By way of one axis, as in to_words.
        stream = lines.t().reshape(-1).view(torch.uint8).view(groups, -1)
        fields = packing.unpack(stream[:, : packing.packed_length(rows, bits)], bits, rows)
        return (fields.t().to(torch.int32) - (1 << (bits - 1))).to(zero_point_dtype(weight)).contiguous()


def require_stored(weight: Scheme, layout: Layout, tensors: Tensors, part: WeightPart) -> None:
    """Raise CheckpointError for missing tensors, and other dtypes or shapes."""
    for field in fields_of(weight, layout):
        spec, found = field.spec(weight, part.shape, part.dtype), tensors.get(field.suffix)
        if found is None:
            raise CheckpointError(
                f"{spec.suffix} is missing, which {layout.value} needs; the file is incomplete"
            )
        if tuple(found.shape) != spec.shape or FILE_DTYPES.get(found.dtype) != spec.dtype:
            raise CheckpointError(
                f"{spec.suffix} ({FILE_DTYPES.get(found.dtype)}, shape {tuple(found.shape)}) must be "
                f"{spec.dtype} of shape {spec.shape} in {layout.value} for a weight of shape {part.shape}"
            )
