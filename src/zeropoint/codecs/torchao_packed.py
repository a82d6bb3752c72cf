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
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..formats import get_format
from ..formats.torch_dtypes import storage_dtype
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES
from .protocol import LayerScheme
from .tensor_fields import COLUMNS, CodeField, Field, LevelField, ScalarField, Tensors, TensorSpec, WeightPart

CODES, SCALE, ZEROS, TENSOR_SCALE = (
    f"_weight_{name}" for name in ("qdata", "scale", "zero_point", "per_tensor_scale")
)
INT4, MX, NVFP4 = CLASSES = ("Int4Tensor", "MXTensor", "NVFP4Tensor")
_MX_GROUP, _NVFP4_GROUP = 32, 16
_ELEMENTS = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float4_e2m1fn_x2": "float4_e2m1fn",
}
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


def fields(layer: LayerScheme, *, swizzle: bool) -> tuple[Field, ...]:
    """Return the fields of a weight."""
    weight = layer.weight
    if layer.layout == INT4:
        return SignedBytes(CODES, "U8"), GroupLines(SCALE), GroupLines(ZEROS, level=1)
    codes = CodeField(CODES, "U8" if weight.bits < 8 else FILE_DTYPES[storage_dtype(weight.element)])
    kind, dtype = Swizzled if swizzle else LevelField, "F8_E8M0" if layer.layout == MX else "F8_E4M3"
    return codes, kind(SCALE, dtype=dtype), *(ScalarField(TENSOR_SCALE, level=1) for _ in weight.scales[1:])


@dataclass(frozen=True)
class SignedBytes(CodeField):
    """Two codes in a byte with a sign."""

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        return replace(super().spec(weight, shape, dtype), dtype="I8")

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        return super().lines(q).view(torch.int8)


@dataclass(frozen=True)
class GroupLines(LevelField):
    """Numbers of Int4Tensor: a line for each group, over all rows."""

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        found = super().spec(weight, shape, dtype)
        return replace(found, shape=found.shape[::-1], lines=found.shape[1], per=shape[0])

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        return super().lines(q).t().contiguous()

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        rows = lines[:, part.start : part.start + part.shape[0]].t().contiguous()
        return super().numbers(rows, weight, part)


@dataclass(frozen=True)
class Swizzled(LevelField):
    """Scales in tiles, as tensor cores read them."""

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        found = super().spec(weight, shape, dtype)
        down, across = -(-found.shape[0] // _TILE_ROWS), -(-found.shape[1] // _TILE_COLUMNS)
        lying = (down * _LINES, across * _LINES // 2)
        return replace(found, shape=lying, lines=_LINES, per=_TILE_ROWS)

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        return swizzled(super().lines(q))

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        first = part.start % _TILE_ROWS
        rows = straight(lines, weight.granularity.grid(part.shape)[1])[first : first + part.shape[0]]
        return super().numbers(rows, weight, part)


def damage(layer: LayerScheme, tensors: Tensors) -> str | None:
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
