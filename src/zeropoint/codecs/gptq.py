"""GPTQ layout of GPTQModel and vLLM: transposed, in 32-bit words.

For the weight ``X.weight`` of shape (N, K), codes of b bits and groups of g inputs (all little-endian):

    X.qweight   I32 [K * b / 32, N]: column n is one stream of the b-bit fields ``code + 2 ** (b - 1)`` of
                output n, low bits first
    X.qzeros    I32 [K / g, N * b / 32]: row r is one stream of the fields of the zero points of group r,
                shifted as codes are; one less each in the first version of the layout, ``2 ** (b - 1) - 1``
                for symmetric weights
    X.scales    F16 [K / g, N]
    X.g_idx     I32 [K]: the group of each input, ``k // g``, or any group after act-order (``desc_act``)

A part of a weight is some of its inputs: whole lines of all four. The configuration says ``{"quant_method":
"gptq", "bits": b, "group_size": g or -1, "desc_act": false, "sym": ..., "checkpoint_format": "gptq" or
"gptq_v2", "dynamic": {...}}``, in config.json and in quantize_config.json. ``dynamic`` has regular
expressions, the first that matches a module decides: ``-:REGEX`` keeps it, ``+:REGEX`` gives it other bits,
group_size or sym. The second version stores zero points as they are; it is written for asymmetric weights, of
which the first cannot hold a zero point of 0: its words are one less for each field, so that a 0 borrows from
the next one.

The order of a source (act-order) is preserved where its codes are, never created. Where it left groups out
of order, a part has the scale and the zero point of each of its inputs, and a weight is written whole.

Source: GPTQModel 7.7 (nn_modules/qlinear/__init__.py, pack_original and dequantize_weight; utils/model.py,
convert_gptq_v1_to_v2_format_module and FUSED_PROJECTION_UNITS; quantization/config.py, dynamic_get). This
module opens no file.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..architectures import merged
from ..errors import CheckpointError, UnsupportedError
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..layout.word_lines import WORD, WordLines
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..patterns import REGEX
from ..schemes import Preset, RangeRule, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from . import engines, words
from .act_order import group_index
from .block_extents import blocks, by_column
from .compressed_tensors.targets import targets
from .engines import LLAMA_CPP, TENSORRT, TRANSFORMERS, Facts, Loads, Problem, decoded_first, rules
from .gptq_config import BITS, OTHER, QUANT_METHOD, SKIP, V1, V2, GptqSettings
from .protocol import COLUMNS, ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, needed
from .safetensors_dtypes import FILE_DTYPES
from .words import (
    CODES,
    GROUPS,
    SCALE_DTYPES,
    SCALES,
    ZEROS,
    fields_of,
    group_of,
    rows_of_words,
    whole_words,
    with_scales,
    word_record,
    words_of,
    words_of_one,
    words_of_rows,
)

_HEAD = "lm_head"
_MARLIN_GROUPS = (0, 32, 64, 128)
_IN_BLOCKS = re.compile(r"\.\d+\\?\.")
"""Block number in rules that keep a layer of a block."""


class GptqReader(Reader):
    """The layers of one GPTQ checkpoint."""

    def __init__(self, listing: Listing, codec: Gptq) -> None:
        self._listing = listing
        self._codec = codec
        self._settings = GptqSettings(listing.quantization)
        self.ignore = self._settings.skipped

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        found = self._settings.of(key)
        no_head = self._listing.quantization.get("lm_head") is False and key.rpartition(".")[2] == _HEAD
        if found is None or no_head:
            what = f"{_HEAD} is false" if no_head else "dynamic leaves it out"
            raise CheckpointError(f"it is quantized, but {what} in the configuration; correct it")
        codes = needed(tensors, CODES)
        weight = with_scales(found, needed(tensors, SCALES))
        if len(codes.shape) != 2 or codes.shape[0] * WORD % weight.bits:
            has = list(codes.shape)
            raise CheckpointError(f"qweight has shape {has}, as no weight of {weight.bits} bits has")
        shape = (codes.shape[1], codes.shape[0] * WORD // weight.bits)
        version = self._settings.version
        codec = replace(
            self._codec,
            version="" if version == _written_version(weight) else version,
            ordered=GROUPS in tensors and self._out_of_order(tensors[GROUPS], weight, shape[1]),
        )
        layer = LayerScheme(codec=codec, name=str(weight), weight=weight)
        return word_record(layer, key, tensors, known, shape=shape, config=self._listing.config)

    def promised(self) -> tuple[str, ...]:
        """See :class:`Reader`."""
        return (_HEAD,) if self._listing.quantization.get("lm_head") is True else ()

    def _out_of_order(self, entry: Entry, weight: Scheme, columns: int) -> bool:
        """Return whether act-order applies; raises CheckpointError for absent groups."""
        if (entry.dtype, entry.shape) != ("I32", (columns,)):
            raise CheckpointError(
                f"g_idx is {entry.dtype} of shape {list(entry.shape)}, but must be I32 of [{columns}]"
            )
        found = torch.frombuffer(bytearray(self._listing.read(entry)), dtype=torch.int32)
        wanted = _groups(weight, columns)
        low, high = (int(extreme) for extreme in torch.aminmax(found))
        if low < 0 or high > int(wanted[-1]):
            raise CheckpointError(f"g_idx has groups {low} to {high}, but there are 0 to {int(wanted[-1])}")
        mixed = not torch.equal(found, wanted)
        if mixed and not self._settings.act_order:
            raise CheckpointError(
                "its g_idx puts inputs into groups out of order, but desc_act of the configuration is false; "
                "correct it"
            )
        return mixed


def _is_symmetric(weight: Scheme) -> bool:
    return weight.zero_point is ZeroPoint.NONE


def _written_version(weight: Scheme) -> str:
    return V1 if _is_symmetric(weight) else V2


def _groups(weight: Scheme, columns: int) -> torch.Tensor:
    # In int64: a group of somebody's file may have more columns than int32 counts.
    return (torch.arange(columns) // group_of(weight, columns)).int()


@functools.lru_cache(maxsize=8)
def _order(bits: int) -> WordLines:
    """Return the packing of codes, with a sign flip for whole words."""
    flip = sum(1 << (at + bits - 1) for at in range(0, WORD, bits))
    return WordLines(flip=0 if WORD % bits else flip)


@functools.lru_cache(maxsize=64)
def _shift(count: int, bits: int) -> torch.Tensor:
    """Return the packed row to XOR: shifts codes by half their range."""
    return packing.pack(torch.full((count,), 1 << (bits - 1)), bits)


def _transformers(facts: Facts) -> Iterator[Problem]:
    yield from words.transformers(facts)
    rules = facts.section.get("dynamic", {})
    several = any(rule.startswith(OTHER) or _IN_BLOCKS.search(rule) for rule in rules)
    if several or facts.section.get("lm_head"):
        yield Loads.NO, "it takes all layers of the blocks, under one scheme; GPTQModel.load reads dynamic"
    yield Loads.PARTLY, "5.23 runs it with optimum 2.3 and gptqmodel 7.7"


def _vllm(facts: Facts) -> Iterator[Problem]:
    if any(layer.weight.bits not in (4, 8) or not _is_symmetric(layer.weight) for layer in facts.layers):
        yield Loads.NO, "release 0.32 reads symmetric integers of 4 and 8 bits alone"
    yield from _sglang(facts)


def _sglang(facts: Facts) -> Iterator[Problem]:
    yield from words.vllm(facts)
    for layer in facts.layers:
        fast = layer.weight.bits in (4, 8) and blocks(layer.weight)[COLUMNS] in _MARLIN_GROUPS
        if not fast or not _is_symmetric(layer.weight):
            yield Loads.PARTLY, f"{layer} has no fast kernel, and not every release reads it"


@dataclass(frozen=True)
class Gptq(Codec):
    """See the module and :class:`Codec`.

    Args:
        version: the ``checkpoint_format`` of somebody's file; empty for the one that is written.
        ordered: whether ``g_idx`` has inputs in groups out of order.
        whole: whether the weight is written so, which takes all of its inputs at once.
    """

    version: str = ""
    ordered: bool = False
    whole: bool = False

    name = "gptq"
    title = "the layout of GPTQ"
    presets = MappingProxyType({
        "w4a16": Preset(weight="int4:g128:scale=float16"),
        "w4a16_asym": Preset(weight="int4:g128:scale=float16:asym"),
        "w8a16": Preset(weight="int8:g128:scale=float16"),
    })  # fmt: skip
    defaults = MappingProxyType({"scale": "float16"})
    parts = MappingProxyType({CODES: True, ZEROS: True, SCALES: False, GROUPS: False})
    engines = rules({
        TRANSFORMERS: _transformers, **engines.with_humming(_vllm), TENSORRT: words.tensorrt,
        engines.SGLANG: _sglang, LLAMA_CPP: decoded_first,
    })  # fmt: skip
    methods = (QUANT_METHOD,)
    negative_scales = True

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        weight, element = layer.weight, layer.weight.element
        if not element.is_whole or not element.signed:
            raise UnsupportedError(f"scheme {weight} has elements that GPTQ does not store; use {_names()}")
        if weight.bits not in BITS or weight.range_rule is not RangeRule.FULL:
            raise UnsupportedError(f"scheme {weight} has codes that GPTQ does not store; use {_names()}")
        alone = len(weight.scales) == 1 and weight.beyond_factors is None
        if weight.zero_point is ZeroPoint.REAL or not alone:
            raise UnsupportedError(f"scheme {weight} has parameters that GPTQ does not store; use {_names()}")
        level = weight.scales[0]
        stored = storage_dtype(level.format_for(format_of(torch.float16)))
        if level.rule.power_of_two or FILE_DTYPES.get(stored) not in SCALE_DTYPES or level.format is None:
            raise UnsupportedError(f"scheme {weight} has scales that GPTQ does not store; use scale=float16")
        if blocks(weight)[ROWS] != 1:
            raise UnsupportedError(f"scheme {weight} has blocks that GPTQ does not store; use g<N>, channel")
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place in GPTQ; leave out the input")
        return self._version(weight) + (" with act-order" if self.ordered else "")

    def _version(self, weight: Scheme) -> str:
        return self.version or _written_version(weight)

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        problem = super().refusal(layer, shape)
        if problem is not None:
            return problem
        fields = whole_words(layer.weight.bits)[1]
        for extent, what in zip(shape, ("first", "last"), strict=True):
            if extent % fields:
                return f"{what} axis {extent} does not fill whole words, of {fields} codes"
        return None

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """See :class:`Codec`."""
        fields = whole_words(layer.weight.bits)[1]
        if axis == ROWS:
            return [(fields, "the zero points that fill whole words")]
        return [*super().multiples(layer, axis), (fields, "the codes that fill whole words")]

    def axis(self, layer: LayerScheme) -> int:
        """See :class:`Codec`: parts are some of the inputs."""
        return COLUMNS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """See :class:`Codec`."""
        if self.whole:
            return shape[1]
        group = 1 if self.ordered else group_of(layer.weight, shape[1])
        return math.lcm(group, whole_words(layer.weight.bits)[1])

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        rows, columns = shape
        bits, group = layer.weight.bits, group_of(layer.weight, columns)
        lines, fields = whole_words(bits)
        groups = -(-columns // group)
        axis, of_groups = (None, COLUMNS) if self.ordered else (COLUMNS, None)
        scale = FILE_DTYPES[storage_dtype(layer.weight.scales[0].format_for(format_of(dtype)))]
        return (
            TensorSpec(
                suffix=CODES, dtype="I32", shape=(columns * bits // WORD, rows), axis=COLUMNS, lines=lines,
                per=fields,
            ),
            TensorSpec(
                suffix=ZEROS, dtype="I32", shape=(groups, rows * bits // WORD), axis=axis, per=group,
                across=(lines, fields),
            ),
            TensorSpec(suffix=SCALES, dtype=scale, shape=(groups, rows), axis=axis, per=group),
            TensorSpec(suffix=GROUPS, dtype="I32", shape=(columns,), axis=of_groups),
        )  # fmt: skip

    def group_index(self, layer: LayerScheme) -> str | None:
        """See :class:`~zeropoint.codecs.act_order.ActOrder`."""
        return GROUPS if self.ordered else None

    def out_of_order(self, layer: LayerScheme) -> LayerScheme | None:
        """See :class:`~zeropoint.codecs.act_order.ActOrder`."""
        return replace(layer, codec=replace(self, ordered=True, whole=True))

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        rows, columns = q.shape
        bits, half = q.scheme.bits, 1 << (q.scheme.bits - 1)
        data = q.data ^ _shift(columns, bits) if WORD % bits else q.data
        codes = words_of_rows(data, q.scheme, (rows, columns), _order(bits))
        scales = q.scales[0].t().contiguous()
        if q.zero_point is None:
            return {CODES: codes, ZEROS: words_of_one(half - 1, *scales.shape, bits), SCALES: scales}
        zeros = (q.zero_point.t().long() + half).contiguous()
        return {CODES: codes, ZEROS: words_of(zeros, bits), SCALES: scales}

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return {GROUPS: _groups(layer.weight, shape[1])}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`; after act-order, each input has a group of its own."""
        weight, bits = layer.weight, layer.weight.bits
        data = rows_of_words(tensors[CODES], weight, (shape[0], shape[1]), _order(bits))
        if WORD % bits:
            data = data ^ _shift(shape[1], bits)
        scales = tensors[SCALES]
        zeros = None
        if not _is_symmetric(weight):
            zeros = self._zeros(weight, tensors[ZEROS]).to(zero_point_dtype(weight))
        if self.ordered:
            groups = tensors[GROUPS].long()
            scales, zeros = scales[groups], None if zeros is None else zeros[groups]
            weight = by_column(weight)
        params = QuantizationParams(
            scheme=weight, shape=shape, scales=(scales.t().contiguous(),), dtype=dtype,
            zero_point=None if zeros is None else zeros.t().contiguous(),
        )  # fmt: skip
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def _zeros(self, weight: Scheme, words: torch.Tensor) -> torch.Tensor:
        """Return zero points of signed codes, of either version."""
        bits = weight.bits
        if self._version(weight) == V1 and WORD % bits == 0:
            # One for each field at once, so that what 0 borrowed from the next field goes back to it.
            words = words + sum(1 << at for at in range(0, WORD, bits))
        fields = fields_of(words, bits).to(torch.int32)
        if self._version(weight) == V1 and WORD % bits:
            fields = (fields + 1) & ((1 << bits) - 1)
        return fields - (1 << (bits - 1))

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """See :class:`Codec`: symmetric weights have one zero point.

        Engines subtract it all the same. Engines differ in what the first version of the layout says by a
        field of ones.
        """
        bits, first = layer.weight.bits, self._version(layer.weight) == V1
        fields = fields_of(tensors[ZEROS], bits)
        if _is_symmetric(layer.weight):
            wanted = (1 << (bits - 1)) - first
            wrong = fields[fields != wanted]
            return f"a zero point is stored as {int(wrong[0])}, not {wanted}" if wrong.numel() else None
        ones = (1 << bits) - 1
        if first and bool((fields == ones).any()):
            return f"a zero point is stored as {ones}, which engines read in different ways in {V1}"
        return None

    def read(self, listing: Listing) -> GptqReader:
        """See :class:`Codec`."""
        return GptqReader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`.

        Raises CheckpointError where some layers are symmetric and others are not, which takes two versions.
        """
        names: dict[LayerScheme, list[str]] = {}
        ordered = False
        for module in contents.modules():
            if module.layer is not None:
                ordered |= group_index(module.layer) is not None
                names.setdefault(replace(module.layer, codec=CODEC), []).append(module.name)
        if len({layer.layout for layer in names}) > 1:
            raise CheckpointError(
                f"{self.title} has one checkpoint_format for all, and here are {', '.join(map(str, names))}; "
                "make all of them symmetric, or all asym"
            )
        most = max(names, key=lambda layer: len(names[layer]))
        every = [name for modules in names.values() for name in modules]
        settings = {
            **_numbers(most), "desc_act": ordered, "lm_head": any(name.endswith(_HEAD) for name in every),
            "quant_method": QUANT_METHOD, "checkpoint_format": most.layout, "pack_dtype": "int32",
            "dynamic": _dynamic(names, most, contents.left_out), "meta": {"quantizer": ["zeropoint"]},
        }  # fmt: skip
        return Documents(section=settings, files={"quantize_config.json": settings})


def _numbers(layer: LayerScheme) -> dict[str, Any]:
    """Return the configuration entries that differ between layers."""
    weight = layer.weight
    return {
        "bits": weight.bits, "group_size": blocks(weight)[COLUMNS] or -1, "sym": _is_symmetric(weight),
    }  # fmt: skip


def _dynamic(
    names: Mapping[LayerScheme, Sequence[str]], most: LayerScheme, kept: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the rules for all but the scheme of most layers.

    vLLM and SGLang ask for the name of what they run as one layer, so rules match that, too.
    """
    others = [layer for layer in names if layer is not most]
    groups = [[each for name in names[layer] for each in (name, *merged(name))] for layer in others]
    rest = [*kept, *(each for name in names[most] for each in (name, *merged(name)))]
    found = {f"{SKIP}^{re.escape(name)}$": dict[str, Any]() for name in kept}
    for layer, expressions in zip(others, targets(groups, rest), strict=True):
        for text in expressions:
            regex = text.removeprefix(REGEX) if text.startswith(REGEX) else f"^{re.escape(text)}$"
            found[OTHER + regex] = _numbers(layer)
    return found


def _names() -> str:
    return ", ".join(f"int{bits}" for bits in BITS)


CODEC = Gptq()
