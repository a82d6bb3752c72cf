"""AWQ (GEMM) layout of AutoAWQ: transposed, packed along the outputs.

vLLM reads it. For the weight ``X.weight`` of shape (N, K), codes of 4 bits and groups of g inputs (all
little-endian):

    X.qweight   I32 [K, N / 8]: word j of a line has outputs 8 j + (0, 2, 4, 6, 1, 3, 5, 7), low bits first; a
                field is ``code + 8``
    X.qzeros    I32 [K / g, N / 8]: zero points, packed and shifted as codes are
    X.scales    F16 [K / g, N]

A part of a weight is some of its inputs: whole lines of all three. The configuration says ``{"quant_method":
"awq", "bits": 4, "group_size": g, "zero_point": true, "version": "gemm", "modules_to_not_convert": [...]}``;
loaders take an entry of the last for a part of a module's name. vLLM takes a quantized head where ``lm_head``
is true.

Source: AutoAWQ 0.2.9 (awq/modules/linear/gemm.py, from_linear; awq/utils/packing_utils.py). This module opens
no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, UnsupportedError, printable
from ..layout.word_lines import WORD
from ..schemes import Preset
from . import word_layers
from .block_extents import blocks
from .engines import CONV1D, Facts, Loads, Problem, loader_not_run, rules
from .held_schemes import SchemePattern, require_held
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import (
    Entry,
    Known,
    Listing,
    Reader,
    Record,
    float_scales,
    group_size,
    names_in,
    needed,
    record_of,
)
from .tensor_fields import COLUMNS, CodeField, Field, InterleavedZeros, LevelField
from .word_layers import CODES, GROUPS, SCALES, ZEROS, facts_of
from .words import INTERLEAVED

QUANT_METHOD = "awq"
_BITS = 4
_FIELDS = WORD // _BITS
_PATTERN = SchemePattern("int{bits}:{blocks}:scale={scale}:asym", (_BITS,))


def weight_settings(config: Mapping[str, Any]) -> int:
    """Return the group of weights under a ``quantization_config``, 0 for whole rows.

    Raises UnsupportedError for what is not read, CheckpointError for a malformed value.

    >>> weight_settings({"bits": 4, "group_size": 128, "zero_point": True})
    128
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
    return group_size(group)


class AwqReader(Reader):
    """The layers of one AWQ checkpoint, all under one scheme."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing = listing
        self._codec = codec
        self._group = weight_settings(listing.quantization)
        self.ignore = names_in(listing.quantization, "modules_to_not_convert")

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        codes = needed(tensors, CODES)
        if len(codes.shape) != 2:
            raise CheckpointError(f"qweight has shape {list(codes.shape)}, as no weight has")
        weight = _PATTERN.scheme(_BITS, self._group, float_scales(tensors, SCALES))
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        shape = (codes.shape[1] * _FIELDS, codes.shape[0])
        return record_of(layer, key, tensors, facts_of(known, shape, self._listing.config), (GROUPS,))


def _transformers(facts: Facts) -> Iterator[Problem]:
    yield from word_layers.transformers(facts)
    if facts.transposed:
        yield Loads.NO, CONV1D
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
    engines = rules(
        transformers=_transformers,
        vllm=word_layers.vllm,
        humming=loader_not_run,
        tensorrt=word_layers.tensorrt,
        mlx_lm=_mlx_lm,
    )
    methods = (QUANT_METHOD,)
    reader = AwqReader
    negative_scales = True
    divisible = ()

    def layout(self, layer: LayerScheme) -> str:
        held = _PATTERN.holds(layer.weight)
        require_held(layer, "AWQ", "int4:g<N>:asym, or int4:channel:asym", fits=held)
        return "gemm"

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        """See :class:`Codec`: parts are some of the inputs."""
        return (
            CodeField(CODES, "I32", along=COLUMNS, order=INTERLEAVED, shifted=True),
            InterleavedZeros(ZEROS, shifted=True),
            LevelField(SCALES, along=COLUMNS),
        )

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        contents.require_distinct(self.title)
        section = {
            "quant_method": QUANT_METHOD,
            "bits": _BITS,
            "group_size": blocks(layer.weight)[COLUMNS] or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": contents.left_out or None,
            **({"lm_head": True} if contents.heads else {}),
        }
        return Documents(section=section)


CODEC = Awq()
