"""AWQ (GEMM) layout of AutoAWQ: transposed, packed along the outputs.

vLLM reads it. For the weight ``X.weight`` of shape (N, K), codes of 4 bits and groups of g inputs (all
little-endian):

    X.qweight   I32 [K, N / 8]: word j of a line has outputs 8 j + (0, 2, 4, 6, 1, 3, 5, 7), low bits first; a
                field is ``code + 8``
    X.qzeros    I32 [K / g, N / 8]: zero points, packed and shifted as codes are
    X.scales    F16 [K / g, N]

A part of a weight is some of its inputs: whole lines of all three. The configuration says ``{"quant_method":
"awq", "bits": 4, "group_size": g, "zero_point": true, "version": "gemm", "modules_to_not_convert": [...]}``;
loaders take an entry of the last for a part of a module's name.

Source: AutoAWQ 0.2.9 (awq/modules/linear/gemm.py, from_linear; awq/utils/packing_utils.py). This module opens
no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError, printable
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..layout.word_lines import WORD
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..schemes import Preset, Scheme
from ..tensor import QuantizedTensor
from . import words
from .block_extents import blocks
from .engines import (
    LLAMA_CPP,
    MLX_LM,
    TENSORRT,
    TRANSFORMERS,
    Facts,
    Loads,
    Problem,
    always,
    rules,
    with_humming,
)
from .protocol import COLUMNS, ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, names_in, needed
from .safetensors_dtypes import FILE_DTYPES
from .words import (
    CODES,
    INTERLEAVED,
    SCALE_DTYPES,
    SCALES,
    ZEROS,
    group_of,
    rows_of_words,
    with_scales,
    word_record,
    words_of_rows,
)

QUANT_METHOD = "awq"
_BITS, _HALF = 4, 8
_SHIFTED = replace(INTERLEAVED, flip=0x88888888)
"""Words whose fields are codes and 8, which an exclusive or adds, and takes away again."""
_FIELD = Scheme.parse("uint4")
_FIELDS = WORD // _BITS


def weight_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the weight scheme under a ``quantization_config``, with float16 scales.

    Raises UnsupportedError for what is not read, CheckpointError for a malformed value.

    >>> str(weight_scheme({"bits": 4, "group_size": 128, "zero_point": True}))
    'int4:g128:asym:scale=float16'
    """
    # AutoAWQ's own quant_config.json has other names of the same, as have files of GPTQModel.
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if bits != _BITS or type(bits) is not int or version != "gemm" or not config.get("zero_point", True):
        raise UnsupportedError(
            f"AWQ weights of bits {bits!r:.40}, version {printable(version[:40])} and zero_point "
            f"{config.get('zero_point')!r:.40} are not read; known are 4, gemm and true"
        )
    if type(group) is not int or not (group == -1 or group > 0):
        raise CheckpointError(
            f"group_size of quantization_config is {group!r:.40}, but must be -1 or positive; the file is "
            "damaged"
        )
    return Scheme.parse(f"int4:{'channel' if group == -1 else f'g{group}'}:scale=float16:asym")


class AwqReader(Reader):
    """The layers of one AWQ checkpoint, all under one scheme."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing = listing
        self._codec = codec
        self._weight = weight_scheme(listing.quantization)
        self.ignore = names_in(listing.quantization, "modules_to_not_convert")

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        codes, scales = needed(tensors, CODES), needed(tensors, SCALES)
        if len(codes.shape) != 2:
            raise CheckpointError(f"qweight has shape {list(codes.shape)}, as no weight has")
        weight = with_scales(self._weight, scales)
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        shape = (codes.shape[1] * _FIELDS, codes.shape[0])
        return word_record(layer, key, tensors, known, shape=shape, config=self._listing.config)


def _transformers(facts: Facts) -> Iterator[Problem]:
    yield from words.transformers(facts)
    yield Loads.PARTLY, "5.23 runs it with gptqmodel 7.7"


def _mlx_lm(facts: Facts) -> Iterator[Problem]:
    if facts.experts:
        yield Loads.NO, "it does not stack experts in this layout"
    yield Loads.YES, "0.32 takes the words apart; the value of code 0 is rounded to the dtype of scales there"


@dataclass(frozen=True)
class Awq(Codec):
    """See the module and :class:`Codec`."""

    name = "awq"
    title = "the layout of AWQ"
    presets = MappingProxyType({"w4a16_asym": Preset(weight="int4:g128:scale=float16:asym")})
    defaults = MappingProxyType({"scale": "float16"})
    parts = MappingProxyType({CODES: True, ZEROS: True, SCALES: False})
    engines = rules({
        TRANSFORMERS: _transformers, **with_humming(words.vllm), TENSORRT: words.tensorrt,
        LLAMA_CPP: always(Loads.NO, "it reads GGUF, and its converter does not know this layout"),
        MLX_LM: _mlx_lm,
    })  # fmt: skip
    methods = (QUANT_METHOD,)
    negative_scales = True

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        weight = layer.weight
        rows, columns = blocks(weight)
        formats = [level.format_for(format_of(torch.float16)) for level in weight.scales]
        stored = storage_dtype(formats[0]) if formats else torch.bool
        wanted = None
        if rows == 1 and FILE_DTYPES.get(stored, "") in SCALE_DTYPES:
            groups = f"g{columns}" if columns else "channel"
            wanted = Scheme.parse(f"int4:{groups}:scale={str(stored).removeprefix('torch.')}:asym")
        if weight != wanted:
            raise UnsupportedError(
                f"scheme {weight} is not what AWQ stores; use int4:g<N>:asym, or int4:channel:asym"
            )
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place in AWQ; leave out the input")
        return "gemm"

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        problem = super().refusal(layer, shape)
        if problem is None and shape[0] % _FIELDS:
            return f"first axis {shape[0]} does not fill whole words, of {_FIELDS} codes"
        return problem

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """See :class:`Codec`."""
        if axis == ROWS:
            return [(_FIELDS, "the codes that fill whole words")]
        return super().multiples(layer, axis)

    def axis(self, layer: LayerScheme) -> int:
        """See :class:`Codec`: parts are some of the inputs."""
        return COLUMNS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """See :class:`Codec`: whole groups, and whole bytes of a row of codes."""
        return math.lcm(group_of(layer.weight, shape[1]), 2)

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        rows, columns = shape
        group = group_of(layer.weight, columns)
        groups, line = -(-columns // group), rows // _FIELDS
        scale = FILE_DTYPES[storage_dtype(layer.weight.scales[0].format_for(format_of(dtype)))]
        across = (1, _FIELDS)
        return (
            TensorSpec(suffix=CODES, dtype="I32", shape=(columns, line), axis=COLUMNS, across=across),
            TensorSpec(
                suffix=ZEROS, dtype="I32", shape=(groups, line), axis=COLUMNS, per=group, across=across
            ),
            TensorSpec(suffix=SCALES, dtype=scale, shape=(groups, rows), axis=COLUMNS, per=group),
        )

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        assert q.zero_point is not None
        rows, groups = q.zero_point.shape
        zeros = packing.pack(q.zero_point + _HALF, _BITS)
        return {
            CODES: words_of_rows(q.data, _FIELD, (q.shape[0], q.shape[1]), _SHIFTED),
            ZEROS: words_of_rows(zeros, _FIELD, (rows, groups), INTERLEAVED),
            SCALES: q.scales[0].t().contiguous(),
        }

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        weight = layer.weight
        groups = len(tensors[ZEROS])
        fields = rows_of_words(tensors[ZEROS], _FIELD, (shape[0], groups), INTERLEAVED)
        zeros = packing.unpack(fields, _BITS, groups).to(torch.int32) - _HALF
        data = rows_of_words(tensors[CODES], _FIELD, (shape[0], shape[1]), _SHIFTED)
        params = QuantizationParams(
            scheme=weight, shape=shape, scales=(tensors[SCALES].t().contiguous(),),
            zero_point=zeros.to(zero_point_dtype(weight)), dtype=dtype,
        )  # fmt: skip
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def read(self, listing: Listing) -> AwqReader:
        """See :class:`Codec`."""
        return AwqReader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        contents.require_distinct(self.title)
        section = {
            "quant_method": QUANT_METHOD, "bits": _BITS,
            "group_size": blocks(layer.weight)[COLUMNS] or -1,
            "zero_point": True, "version": "gemm", "modules_to_not_convert": contents.left_out or None,
        }  # fmt: skip
        return Documents(section=section)


CODEC = Awq()
