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
from collections.abc import Mapping
from dataclasses import replace

import torch

from ...errors import CheckpointError, UnsupportedError
from ...formats import Format, get_format
from ...formats.torch_dtypes import dtype_of, format_of, storage_dtype
from ...layout import packing
from ...params import QuantizationParams
from ...params.tensors import zero_point_dtype
from ...schemes import Scheme, TensorScale, ZeroPoint
from ...tensor import QuantizedTensor
from ..block_extents import blocks, no_matrix, partial_group
from ..protocol import TensorSpec
from ..safetensors_dtypes import FILE_DTYPES

WORD_BITS = 32
"""Bits of a word of pack-quantized; zero points of so many rows come out in whole words."""
MAX_PACKED_BITS = 8
_KNOWN = 4096
"""Answers that are kept: a checkpoint of many tensors has few schemes and shapes."""

PACKED, WEIGHT, SCALE, ZERO_POINT, SHAPE, GLOBAL_SCALE = (
    "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale",
)  # fmt: skip
INPUT_SCALE, INPUT_ZERO_POINT, INPUT_GLOBAL_SCALE = "input_scale", "input_zero_point", "input_global_scale"
"""Last parts of the names of what inputs with parameters from data need."""


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
def row_alignment(weight: Scheme) -> int:
    """Return the row multiple for independent parts of a weight."""
    rows = blocks(weight)[0] or 1
    if weight.zero_point is not ZeroPoint.NONE:
        return rows * WORD_BITS
    return rows


@functools.lru_cache(maxsize=_KNOWN)
def tensor_specs(
    weight: Scheme, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[TensorSpec, ...]:
    """Return the tensors that a weight of ``shape`` and ``dtype`` becomes.

    >>> [s.suffix for s in tensor_specs(Scheme.parse("int4:g32"), Layout.PACK, (8, 64), torch.float32)]
    ['weight_packed', 'weight_scale', 'weight_shape']
    """
    rows, columns = shape
    if layout is Layout.PACK:
        specs = [TensorSpec(suffix=PACKED, dtype="I32", shape=(rows, -(-columns * weight.bits // WORD_BITS)))]
    elif layout in IN_BYTES:
        specs = [TensorSpec(suffix=PACKED, dtype="U8", shape=(rows, columns * weight.bits // 8))]
    else:
        dtype_ = "I8" if weight.element.is_integer else "F8_E4M3"
        specs = [TensorSpec(suffix=WEIGHT, dtype=dtype_, shape=shape)]
    grid = weight.granularity.grid(shape)
    scale = storage_dtype(weight.scales[0].format_for(format_of(dtype)))
    name = "U8" if layout in MX else FILE_DTYPES[scale]
    if strategy(weight) == "tensor":
        specs.append(TensorSpec(suffix=SCALE, dtype=name, shape=(1,), axis=None))
    else:
        specs.append(TensorSpec(suffix=SCALE, dtype=name, shape=grid, per=blocks(weight)[0]))
    if layout is Layout.NVFP4:
        specs.append(TensorSpec(suffix=GLOBAL_SCALE, dtype="F32", shape=(1,), axis=None))
    if weight.zero_point is not ZeroPoint.NONE:
        if _packs_zero_points(weight, layout):
            packed = (-(-grid[0] * weight.bits // WORD_BITS), grid[1])
            specs.append(
                TensorSpec(suffix=ZERO_POINT, dtype="I32", shape=packed, lines=weight.bits, per=WORD_BITS)
            )
        else:
            specs.append(replace(specs[1], suffix=ZERO_POINT, dtype="I8"))
    if layout is Layout.PACK:
        specs.append(TensorSpec(suffix=SHAPE, dtype="I64", shape=(2,), axis=None))
    return tuple(specs)


def _packs_zero_points(weight: Scheme, layout: Layout) -> bool:
    """Return whether zero points are packed in words, not bytes."""
    return layout is Layout.PACK and strategy(weight) != "tensor"


@functools.lru_cache(maxsize=64)
def _offset_row(count: int, bits: int) -> torch.Tensor:
    """Return the packed row to XOR: shifts codes by half their range."""
    return packing.pack(torch.full((count,), 1 << (bits - 1)), bits)


def to_words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes as 32-bit words, zero-padded."""
    padding = -rows.shape[-1] % (WORD_BITS // 8)
    padded = torch.nn.functional.pad(rows, (0, padding)) if padding else rows
    # By way of one axis: a single row may have any stride, and then counts as contiguous but not as words.
    return padded.reshape(-1).view(torch.int32).view(len(padded), -1)


def _pack_zero_point(zero: torch.Tensor, bits: int) -> torch.Tensor:
    fields = (zero + (1 << (bits - 1))).t().contiguous()
    return to_words(packing.pack(fields, bits)).t().contiguous()


def _unpack_zero_point(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    # By way of one axis, as in to_words.
    stream = words.t().reshape(-1).view(torch.uint8).view(words.shape[1], -1)
    stream = stream[:, : packing.packed_length(rows, bits)]
    fields = packing.unpack(stream, bits, rows)
    return fields.t().to(torch.int32) - (1 << (bits - 1))


def encode_part(layout: Layout, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return, by suffix, the lines of a part in each tensor.

    ``q`` is a whole weight or some of its rows. Tensors that are the same for every part are left to
    :func:`encode_constants`.
    """
    scheme = q.scheme
    if layout is Layout.PACK:
        offset = _offset_row(q.shape[1], scheme.bits)
        lines = {PACKED: to_words(q.data ^ offset)}
    elif layout in IN_BYTES:
        lines = {PACKED: q.data}
    elif layout is Layout.INT:
        lines = {WEIGHT: q.codes}
    else:
        lines = {WEIGHT: q.data.view(torch.float8_e4m3fn)}
    if strategy(scheme) != "tensor":
        scale = q.scales[0]
        lines[SCALE] = scale.view(torch.uint8) if scale.dtype is torch.float8_e8m0fnu else scale
    if q.zero_point is not None:
        lines[ZERO_POINT] = _pack_zero_point(q.zero_point, scheme.bits)
    return lines


def encode_constants(
    layout: Layout, params: QuantizationParams, shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return, by suffix, the tensors shared by all parts."""
    constants: dict[str, torch.Tensor] = {}
    if strategy(params.scheme) == "tensor":
        constants[SCALE] = params.scales[0].reshape(1)
    if layout is Layout.NVFP4:
        constants[GLOBAL_SCALE] = params.scales[1].reshape(1)
    if layout is Layout.PACK:
        constants[SHAPE] = torch.tensor(shape, dtype=torch.int64)
    return constants


def encode(layout: Layout, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return a weight's tensors by suffix; :func:`decode` is the inverse."""
    return {**encode_part(layout, q), **encode_constants(layout, q.params, q.shape)}


def _narrow_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return narrow codes in bytes; raises CheckpointError for wider codes."""
    low, high = (int(extreme) for extreme in torch.aminmax(codes)) if codes.numel() else (0, 0)
    if not scheme.qmin <= low <= high <= scheme.qmax:
        raise CheckpointError(
            f"{WEIGHT} holds codes from {low} to {high}, but those of {scheme.element_name} lie in "
            f"{scheme.qmin} to {scheme.qmax}; the file is damaged"
        )
    return codes


def decode(
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    scheme: Scheme,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> QuantizedTensor:
    """Return the quantized tensor of ``shape`` from a layout's tensors.

    dtype: of the weight before it was quantized. Scales and zero points are not judged here;
    ``params.validate()`` does. Raises CheckpointError where a tensor is missing, or has another dtype or
    shape than the layout says.
    """
    for spec in tensor_specs(scheme, layout, shape, dtype):
        found = tensors.get(spec.suffix)
        if found is None:
            raise CheckpointError(
                f"{spec.suffix} is missing, which {layout.value} needs; the file is incomplete"
            )
        if tuple(found.shape) != spec.shape or FILE_DTYPES.get(found.dtype) != spec.dtype:
            raise CheckpointError(
                f"{spec.suffix} ({FILE_DTYPES.get(found.dtype)}, shape {tuple(found.shape)}) must be "
                f"{spec.dtype} of shape {spec.shape} in {layout.value} for a weight of shape {shape}"
            )
    if layout is Layout.PACK:
        stream = tensors[PACKED].view(torch.uint8)[:, : packing.packed_length(shape[1], scheme.bits)]
        data = stream ^ _offset_row(shape[1], scheme.bits)
    elif scheme.element.is_integer and scheme.bits < MAX_PACKED_BITS:
        data = packing.pack(_narrow_codes(tensors[WEIGHT], scheme), scheme.bits)
    else:
        name = PACKED if layout in IN_BYTES else WEIGHT
        data = tensors[name].view(torch.uint8)
    finest = storage_dtype(scheme.scales[0].format_for(format_of(dtype)))
    grid = scheme.granularity.grid(shape)
    scale = tensors[SCALE]
    scales = [(scale.view(finest) if finest is torch.float8_e8m0fnu else scale).reshape(grid)]
    if layout is Layout.NVFP4:
        scales.append(tensors[GLOBAL_SCALE].reshape(scheme.scales[1].granularity.grid(shape)))
    zero = None
    if scheme.zero_point is not ZeroPoint.NONE:
        zero = tensors[ZERO_POINT]
        if _packs_zero_points(scheme, layout):
            zero = _unpack_zero_point(zero, scheme.bits, grid[0])
        zero = zero.reshape(grid).to(zero_point_dtype(scheme))
    params = QuantizationParams(
        scheme=scheme, shape=shape, scales=tuple(scales), zero_point=zero, dtype=dtype
    )
    return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)
