"""Packed classes of torchao in files: Int4Tensor, MXTensor and NVFP4Tensor.

For the weight ``X.weight`` of shape (N, K); the first of two codes in a byte is the low half:

    Int4Tensor    X._weight_qdata I8 [N, K / 2], codes -8 to 7; X._weight_scale and X._weight_zero_point in
                  the dtype of the model, [K / g, N]: a value is ``code * scale + zero_point``
    MXTensor      X._weight_qdata F8_E4M3 or F8_E5M2 [N, K], or U8 [N, K / 2] of float4_e2m1fn;
                  X._weight_scale F8_E8M0 [N, K / 32]
    NVFP4Tensor   X._weight_qdata U8 [N, K / 2] of float4_e2m1fn; X._weight_scale F8_E4M3 [N, K / 16];
                  X._weight_per_tensor_scale F32 [], a factor, which may be missing

Scales of the last two lie as tensor cores read them where ``is_swizzled_scales`` is true: tiles of 128 rows
and 4 columns, padded with zeros, one after the other in rows of tiles; of a tile, row r is in line
``r % 32``, at ``r // 32 * 4``. The tensor then has the shape [32 ceil(N / 128), 16 ceil(columns / 4)].

Source: torchao 0.18 (quantization/quantize_/workflows/int4/int4_tensor.py; prototype/mx_formats/mx_tensor.py,
nvfp4_tensor.py, and utils.py, to_blocked). This module opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..formats import get_format
from ..formats.torch_dtypes import format_of, storage_dtype
from ..params import QuantizationParams
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .protocol import COLUMNS, LayerScheme, TensorSpec
from .safetensors_dtypes import FILE_DTYPES

CODES, SCALE, ZEROS, TENSOR_SCALE = (
    f"_weight_{name}" for name in ("qdata", "scale", "zero_point", "per_tensor_scale")
)
INT4, MX, NVFP4 = CLASSES = ("Int4Tensor", "MXTensor", "NVFP4Tensor")
_MX_GROUP, _NVFP4_GROUP = 32, 16
_ELEMENTS = {
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "float4_e2m1fn_x2": "float4_e2m1fn",
}  # fmt: skip
"""``elem_dtype`` to the element format."""
_MODES = {"FLOOR": "floor", "RCEIL": "rceil", "CEIL": "ceil", "EVEN": "even"}
_TILE_ROWS, _TILE_COLUMNS, _LINES = 128, 4, 32
_SCALES = ("F32", "BF16", "F16")
DYNAMIC_NVFP4 = Activation.of("float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor", dynamic=True)


def int4(group: int) -> Scheme:
    """Return the scheme of Int4Tensor."""
    return Scheme.parse(f"int4:g{group}:scale=linear_late/input:offset=minimum_late/input")


def microscaled(element: str, mode: str) -> Scheme:
    """Return the scheme of MXTensor."""
    return Scheme.parse(f"{element}:g{_MX_GROUP}:scale={mode}")


def nvfp4(*, tensor: bool) -> Scheme:
    """Return the scheme of NVFP4Tensor, with or without tensor scale."""
    level = ":scale2=float32@tensor" if tensor else ""
    return Scheme.parse(f"float4_e2m1fn:g{_NVFP4_GROUP}:scale=float8_ue4m3fn{level}")


def class_of(weight: Scheme) -> str | None:
    """Return which of these classes holds weights of a scheme, or None.

    >>> class_of(microscaled("float4_e2m1fn", "rceil")), class_of(nvfp4(tensor=True)), class_of(int4(32))
    ('MXTensor', 'NVFP4Tensor', 'Int4Tensor')
    """
    numbers = stored_numbers(weight)[:-1]
    if numbers in (stored_numbers(nvfp4(tensor=tensor))[:-1] for tensor in (True, False)):
        return NVFP4 if not stored_numbers(weight)[-1] else None
    if numbers in (stored_numbers(microscaled(element, "floor"))[:-1] for element in _ELEMENTS.values()):
        return MX
    group = blocks(weight)[COLUMNS]
    shaped = len(weight.scales) == len(weight.offsets) == 1 and weight.zero_point is ZeroPoint.NONE
    if not shaped or not group or group % 2 or weight.element != get_format("int4") or weight.center:
        return None
    like, formats = int4(group), (weight.scales[0].format, weight.offsets[0].format)
    dtype = None if formats[0] is None else FILE_DTYPES.get(storage_dtype(formats[0]))
    same = weight.granularity == like.granularity == weight.offsets[0].granularity
    return INT4 if same and formats[0] == formats[1] and dtype in (None, *_SCALES) else None


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return byte-sized scales (rows, columns) in tensor-core tiles, zero-padded."""
    rows, columns = scale.shape
    down, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    padded = torch.zeros(down * _TILE_ROWS, across * _TILE_COLUMNS, dtype=torch.uint8)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(down, _TILE_ROWS // _LINES, _LINES, across, _TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * _LINES, -1).view(scale.dtype)


def straight(scale: torch.Tensor, columns: int) -> torch.Tensor:
    """Return untiled scales, rows padded: inverse of :func:`swizzled`.

    >>> x = torch.arange(200, dtype=torch.uint8).view(40, 5)
    >>> torch.equal(straight(swizzled(x), 5)[:40], x)
    True
    """
    down, across = len(scale) // _LINES, -(-columns // _TILE_COLUMNS)
    tiles = scale.view(torch.uint8).view(down, across, _LINES, _TILE_ROWS // _LINES, _TILE_COLUMNS)
    found = tiles.permute(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, -1)[:, :columns]
    return found.contiguous().view(scale.dtype)


def alignment(layout: str, shape: tuple[int, ...], *, swizzle: bool) -> int:
    """Return the row multiple of parts: a tile's; all for Int4Tensor."""
    return shape[0] if layout == INT4 else _TILE_ROWS if swizzle else 1


def tensors(layer: LayerScheme, shape: tuple[int, ...], own: str, *, swizzle: bool) -> tuple[TensorSpec, ...]:
    """Return a weight's tensors; Int4Tensor's scales in the ``own`` dtype."""
    rows, columns = shape
    weight, group = layer.weight, blocks(layer.weight)[COLUMNS]
    count = columns // group
    packed = "I8" if layer.layout == INT4 else "U8"
    codes = TensorSpec(suffix=CODES, dtype=packed, shape=(rows, columns // 2))
    if weight.bits == 8:
        codes = TensorSpec(
            suffix=CODES, dtype=FILE_DTYPES[storage_dtype(weight.element)], shape=(rows, columns)
        )
    if layer.layout == INT4:
        return codes, *(
            TensorSpec(suffix=suffix, dtype=own, shape=(count, rows), lines=count, per=rows)
            for suffix in (SCALE, ZEROS)
        )
    dtype = "F8_E8M0" if layer.layout == MX else "F8_E4M3"
    scale = TensorSpec(suffix=SCALE, dtype=dtype, shape=(rows, count))
    if swizzle:
        lying = (-(-rows // _TILE_ROWS) * _LINES, -(-count // _TILE_COLUMNS) * _LINES // 2)
        scale = TensorSpec(suffix=SCALE, dtype=dtype, shape=lying, lines=_LINES, per=_TILE_ROWS)
    if len(weight.scales) == 1:
        return codes, scale
    return codes, scale, TensorSpec(suffix=TENSOR_SCALE, dtype="F32", shape=(), axis=None)


def encode(layer: LayerScheme, q: QuantizedTensor, *, swizzle: bool) -> dict[str, torch.Tensor]:
    """Return the lines of a part."""
    stored = q.params.stored
    if layer.layout == INT4:
        # A code of zeropoint is the four bits of the integer, and so is it here.
        return {
            CODES: q.data.view(torch.int8),
            SCALE: stored[0].t().contiguous(),
            ZEROS: stored[1].t().contiguous(),
        }
    data = q.data if q.scheme.bits < 8 else q.data.view(storage_dtype(q.scheme.element))
    scale = stored[0].view(torch.float8_e8m0fnu if layer.layout == MX else torch.float8_e4m3fn)
    return {CODES: data, SCALE: swizzled(scale) if swizzle else scale}


def decode(
    layer: LayerScheme, tensors: Mapping[str, torch.Tensor], place: tuple[int, tuple[int, ...]],
    dtype: torch.dtype, *, swizzle: bool,
) -> QuantizedTensor:  # fmt: skip
    """Return a part of a weight at ``place``: first row, shape."""
    start, shape = place
    weight, rows = layer.weight, slice(start, start + shape[0])
    grid = weight.granularity.grid(shape)
    if layer.layout == INT4:
        stored = [tensors[suffix][:, rows].t().contiguous() for suffix in (SCALE, ZEROS)]
    else:
        scale = tensors[SCALE]
        if swizzle:
            first = start % _TILE_ROWS
            scale = straight(scale, grid[1])[first : first + shape[0]]
        kept = storage_dtype(weight.scales[0].format_for(format_of(dtype)))
        stored = [scale.view(kept), *(tensors[TENSOR_SCALE].view(1, 1) for _ in weight.scales[1:])]
    params = QuantizationParams.of(weight, shape, dtype, stored)
    data = tensors[CODES].view(torch.uint8)
    return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)


def damage(layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return damage in stored values that decoding ignores, or None."""
    if layer.layout == NVFP4 and bool(torch.signbit(tensors[SCALE].float()).any()):
        return "a scale is negative"
    return None


def scheme_of(kind: str, data: Mapping[str, Any], *, tensor: bool, mode: object) -> Scheme | str:
    """Return the scheme in a weight's metadata, or its unread part.

    data: attributes, of which those that are dtypes and the like are unwrapped. tensor: whether there is a
    scale of the tensor. mode: how scales were chosen, where that is known.
    """
    block = data.get("block_size")
    if kind == INT4:
        group = block[1] if isinstance(block, list) and len(block) == 2 and block[0] == 1 else None
        if type(group) is not int or group < 2 or group % 2:
            return f"block_size {block!r:.40} in its metadata"
        return int4(group)
    if (block, type(block)) != (_MX_GROUP if kind == MX else _NVFP4_GROUP, int):
        return f"block_size {block!r:.40} in its metadata"
    if kind == NVFP4:
        return nvfp4(tensor=tensor)
    element = data.get("elem_dtype")
    if element not in _ELEMENTS:
        return f"elem_dtype {element!r:.40} in its metadata"
    return microscaled(_ELEMENTS[str(element)], _MODES.get(str(mode), "rceil"))


def input_of(kind: str, weight: Scheme, given: Mapping[str, Any]) -> Activation | None:
    """Return the input quantization of unwrapped ``act_quant_kwargs``, or None."""
    if kind == NVFP4:
        return DYNAMIC_NVFP4 if given.get("use_dynamic_per_tensor_scale") is True else None
    mode = _MODES.get(str(given.get("scaling_mode")))
    element = _ELEMENTS.get(str(given.get("elem_dtype")))
    if mode is None or element is None or given.get("block_size") != _MX_GROUP:
        return None
    if get_format(element) != weight.element:
        return None
    return Activation.of(str(microscaled(element, mode)), dynamic=True)


def element_name(weight: Scheme) -> str:
    """Return torchao's name of an element."""
    return next(name for name, element in _ELEMENTS.items() if get_format(element) == weight.element)


def mode_name(weight: Scheme) -> str:
    """Return torchao's name of the power-of-two scale rule."""
    text = str(weight)
    return next(name for name, rule in _MODES.items() if f"scale={rule}" in text.split(":"))
