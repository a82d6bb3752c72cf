"""The layout of Quanto (optimum-quanto), as its modules save themselves in safetensors.

For the layer ``X`` with a weight of shape (N, K), in a model of dtype D, one of floats (all little-endian):

    of 8 bits, a value is ``code * scale``:
    X.weight._data         I8, F8_E4M3 or F8_E5M2 [N, K]
    X.weight._scale        D [N, 1]

    of b = 2 or 4 bits, in R = N K / g groups of g inputs, one after the other over all rows:
    X.weight._data._data   U8 [L, g], L = ceil(R b / 8): line i has the codes of groups i, i + L and so on,
                           the first in the low bits of a byte; groups past the last are zeros
    X.weight._scale        D [R, 1]
    X.weight._shift        D [R, 1]: a value is ``code * scale - shift``; or U8: ``(code - shift) * scale``
    X.weight._size         I64 [2]: N and K, which zeropoint writes; Quanto knows them from the model

    X.input_scale, X.output_scale   D []: 1, where inputs and outputs are not quantized

g follows from K: 128, or the first of 96, 64 and 32 that divides K; where none does, and up to 128 inputs, a
row is one group. Groups of a byte lie far apart, so weights of 2 and 4 bits are read and written whole. The
file quanto_qmap.json says ``{"X": {"weights": "qint4", "activations": "none"}, ...}``, and config.json
nothing. Where a file does not say K, it follows from config.json for the names of Llama and its like. Layers
whose inputs and outputs are quantized are not read.

Source: optimum-quanto 0.2.7 (nn/qmodule.py, tensor/packed.py, tensor/qbits.py and
models/transformers_models.py). Quanto computes values in D; here they are in float32. This module opens no
file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..architectures import Config
from ..errors import CheckpointError, UnsupportedError
from ..formats import get_format
from ..formats.torch_dtypes import storage_dtype
from ..schemes import Preset, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from .block_extents import blocks, no_matrix
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES, torch_name
from .distant_groups import DistantCodes
from .engines import Facts, Loads, Problem, always, loader_not_run, not_read, rules
from .held_schemes import FLOAT_SCALES
from .known import ACTIVATION_SCALES
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, matrix, needed, record_of
from .tensor_fields import (
    COLUMNS,
    ZERO_POINT,
    CodeField,
    ConstantField,
    Field,
    LevelField,
    Tensors,
    WeightPart,
    own_dtype,
)

ENGINE, FILE = "optimum-quanto", "quanto_qmap.json"
CODES, PACKED = "weight._data", "weight._data._data"
SCALE, SHIFT, SIZE = "weight._scale", "weight._shift", "weight._size"
INPUT, OUTPUT = ACTIVATION_SCALES[0], ACTIVATION_SCALES[3]
_ELEMENTS = MappingProxyType(
    {
        "qint8": "int8",
        "qfloat8_e4m3fn": "float8_e4m3fn",
        "qfloat8_e5m2": "float8_e5m2",
        "qint4": "uint4",
        "qint2": "uint2",
    }
)
"""Quanto's names of codes; codes of 2 and 4 bits are stored from 0 on."""
_STORED = MappingProxyType({"qint8": "I8", "qfloat8_e4m3fn": "F8_E4M3", "qfloat8_e5m2": "F8_E5M2"})
_LARGEST, _STEP = 128, 32
_MODEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
"""Layers whose inputs are as many as the model is wide."""


def group_of(columns: int) -> int:
    """Return the inputs per group in a row, 0 for one group.

    >>> group_of(4096), group_of(576), group_of(100), group_of(200)
    (128, 96, 0, 0)
    """
    if columns <= _LARGEST:
        return 0
    return next((group for group in range(_LARGEST, 0, -_STEP) if columns % group == 0), 0)


def kind_of(weight: Scheme) -> str | None:
    """Return Quanto's name of a scheme's codes, or None.

    >>> kind_of(Scheme.parse("int8:channel")), kind_of(Scheme.parse("int4:g128"))
    ('qint8', None)
    """
    kind = next((kind for kind, name in _ELEMENTS.items() if get_format(name) == weight.element), None)
    rows, _ = blocks(weight)
    plain = len(weight.scales) == 1 and weight.center is None and not weight.scales[0].rule.power_of_two
    if kind is None or rows != 1 or not plain or _dtype_of(weight) is None:
        return None
    if kind in _STORED:
        symmetric = weight.zero_point is ZeroPoint.NONE and not weight.offsets
        return kind if symmetric and not blocks(weight)[COLUMNS] else None
    shifted = len(weight.offsets) == 1 and weight.offsets[0].format == weight.scales[0].format
    return kind if shifted or (weight.zero_point is ZeroPoint.INTEGER and not weight.offsets) else None


def _dtype_of(weight: Scheme) -> str | None:
    """Return the scales' dtype, "" for the weight's, or None."""
    fmt = weight.scales[0].format
    name = "" if fmt is None else FILE_DTYPES.get(storage_dtype(fmt), "-")
    return name if name in ("", *FLOAT_SCALES) else None


def _shifted(bits: int, group: int, scale: str, *, integer: bool) -> Scheme:
    place = f"g{group}" if group else "channel"
    rest = "asym" if integer else f"offset={scale}"
    return Scheme.parse(f"uint{bits}:{place}:scale={scale}:{rest}")


class Shifts(LevelField):
    """Offsets, stored as what is subtracted."""

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        return -super().lines(q)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        return -super().numbers(lines, weight, part)


def _one(weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((), dtype=own_dtype(weight, 0, dtype))


class QuantoReader(Reader):
    """Reader of a Quanto checkpoint, whose map names its layers."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing, self._codec = listing, codec
        said = listing.quantization
        self._map = listing.document(FILE) or {} if "quant_method" in said else said
        self._config = listing.config

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        said = self._map.get(key)
        if not isinstance(said, dict) or said.get("weights") not in _ELEMENTS:
            what = said.get("weights") if isinstance(said, dict) else said
            raise UnsupportedError(
                f"{FILE} says {what!r:.40} of its weight, which is not read; known are {', '.join(_ELEMENTS)}"
            )
        if said.get("activations", "none") != "none":
            raise UnsupportedError(
                f"{FILE} says that its inputs and outputs are {said['activations']!r:.40}, which is not "
                "read, as no layout has scales of outputs; save the model with activations none"
            )
        kind, scale = str(said["weights"]), needed(tensors, SCALE, "Quanto")
        if scale.dtype not in FLOAT_SCALES or len(scale.shape) != 2:
            raise CheckpointError(
                f"{SCALE} is {scale.dtype} of shape {list(scale.shape)}, but must be a column of one of "
                f"{', '.join(FLOAT_SCALES)}"
            )
        name, own = torch_name(scale.dtype), TORCH_DTYPES[scale.dtype]
        if kind in _STORED:
            shape = matrix(tensors, CODES, kind)
            weight = Scheme.parse(f"{_ELEMENTS[kind]}:channel:scale={name}")
        else:
            lines, shift = needed(tensors, PACKED, kind), needed(tensors, SHIFT, kind)
            if len(lines.shape) != 2 or 0 in (*lines.shape, *scale.shape):
                raise CheckpointError(f"{PACKED} has shape {list(lines.shape)}, but must be lines of codes")
            shape = self._shape(key, tensors, (scale.shape[0], lines.shape[1]), known)
            bits, integer = get_format(_ELEMENTS[kind]).bits, shift.dtype == "U8"
            weight = _shifted(bits, group_of(shape[1]), name, integer=integer)
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        optional = (SIZE, INPUT, OUTPUT)
        return record_of(layer, key, tensors, Known(shape, own), optional)

    def _shape(
        self, module: str, tensors: Mapping[str, Entry], groups: tuple[int, int], known: Known | None
    ) -> tuple[int, int]:
        """Return the shape of a weight from its groups."""
        count, width = groups
        if SIZE in tensors:
            entry = tensors[SIZE]
            if (entry.dtype, entry.shape) != ("I64", (2,)):
                raise CheckpointError(
                    f"{SIZE} is {entry.dtype} of {list(entry.shape)}, but must be I64 of [2]"
                )
            rows, columns = struct.unpack("<2q", self._listing.read(entry))
        else:
            found = None if known is None else known.shape[1]
            columns = (
                found or _columns(module, self._config) or (0 if group_of(2 * width) == width else width)
            )
            if not columns:
                raise UnsupportedError(
                    "its number of inputs is neither in the file nor known from its name and config.json; "
                    "pass the original checkpoint"
                )
            rows = count * width // columns
        if (
            rows < 1
            or columns < 1
            or rows * columns != count * width
            or (group_of(columns) or columns) != width
        ):
            raise CheckpointError(
                f"{count} groups of {width} inputs are not those of a weight with rows of {columns}, as "
                f"{'its size' if SIZE in tensors else 'the model'} says"
            )
        return rows, columns


def _columns(module: str, config: Config) -> int | None:
    """Return the inputs of a decoder layer by name, or None."""
    last, width = module.rpartition(".")[2], config.get("hidden_size")
    if type(width) is not int:
        return None
    if last in _MODEL:
        return width
    found = config.get("intermediate_size") if last == "down_proj" and "experts" not in module else None
    if last == "o_proj" and type(heads := config.get("num_attention_heads")) is int and heads > 0:
        found = heads * (config.get("head_dim") or width // heads)
    return found if type(found) is int and found > 0 else None


def _engine(facts: Facts) -> Iterator[Problem]:
    if facts.experts:
        yield Loads.NO, "transformers 5 has experts in one tensor, and it quantizes linear layers"
    if facts.nonlinear or facts.transposed:
        yield Loads.NO, "it quantizes linear layers, and no embeddings, routers or weights of Conv1D"


_rules = rules(
    transformers=always(Loads.NO, "it quantizes by Quanto as it loads, and reads no such files"),
    vllm=not_read,
    diffusers=loader_not_run,
)


@dataclass(frozen=True)
class Quanto(Codec):
    """See the module and :class:`Codec`."""

    name = "quanto"
    title = "the layout of Quanto"
    presets = MappingProxyType(
        {
            "quanto_int8": Preset(weight="int8:channel:narrow:scale=input"),
            "quanto_float8": Preset(weight="float8_e4m3fn:channel:scale=input"),
            "quanto_int4": Preset(weight="uint4:g128:scale=input:offset=input"),
            "quanto_int2": Preset(weight="uint2:g128:scale=input:offset=input"),
        }
    )
    defaults = MappingProxyType({"scale": "input"})
    parts = MappingProxyType(
        dict.fromkeys((PACKED, CODES, SCALE, SHIFT, SIZE), True) | dict.fromkeys((INPUT, OUTPUT), False)
    )
    engines = MappingProxyType({**_rules, ENGINE: _engine})
    reader = QuantoReader
    methods = ("quanto",)
    usual = (ENGINE,)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: what Quanto calls the codes."""
        found = kind_of(layer.weight)
        if found is None:
            raise UnsupportedError(
                f"scheme {layer.weight} is not what Quanto stores; use {', '.join(self.presets)}, or uint4 "
                "or uint2 with an offset, or with asym, in groups or by channel"
            )
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place here; leave out the input")
        return found

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`; groups must be Quanto's for the inputs."""
        problem = no_matrix(shape)
        if problem is not None or layer.layout in _STORED:
            return problem
        wanted = group_of(shape[1])
        if blocks(layer.weight)[COLUMNS] == wanted:
            return None
        return f"Quanto has {f'groups of {wanted}' if wanted else 'one group a row'} for {shape[1]} inputs"

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        """See :class:`Codec`; codes of 2 and 4 bits come whole."""
        scale, ends = (
            LevelField(SCALE, trailing=(1,)),
            (ConstantField(INPUT, _one), ConstantField(OUTPUT, _one)),
        )
        if layer.layout in _STORED:
            return CodeField(CODES, _STORED[layer.layout]), scale, *ends
        shift = LevelField(SHIFT, ZERO_POINT, "U8", trailing=(1,))
        if layer.weight.offsets:
            shift = Shifts(SHIFT, 1, trailing=(1,))
        size = ConstantField(SIZE, lambda _, shape, __: torch.tensor(shape))
        return DistantCodes(PACKED, high_first=False), scale, shift, size, *ends

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        shift = tensors.get(SHIFT)
        most = (1 << layer.weight.bits) - 1
        if shift is None or shift.dtype != torch.uint8 or int(shift.max()) <= most:
            return None
        return f"{SHIFT} has a zero point of {int(shift.max())}, above the largest code, {most}"

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`; parts contain dots, the longest come first."""
        for part, sure in self.parts.items():
            module = name.removesuffix(f".{part}")
            if module != name and module:
                return module, part, sure
        return None

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`: a map of layers, or a named method."""
        if super().claims(quantization):
            return True
        said = [each for each in quantization.values() if isinstance(each, dict)]
        return bool(said) and len(said) == len(quantization) and all("weights" in each for each in said)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the map, in a file of its own."""
        found = {
            module.name: {"weights": module.layer.layout, "activations": "none"}
            for module in contents.modules()
            if module.layer is not None
        }
        return Documents(section=None, files={FILE: found})


CODEC = Quanto()
