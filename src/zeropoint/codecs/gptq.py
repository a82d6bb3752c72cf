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
group_size or sym. Where layers are kept inside of blocks, or blocks have names that transformers' loader does
not know, ``modules_in_block_to_quantize`` names the quantized layers, and ``block_name_to_quantize`` is "".
The second version stores zero points as they are; it is written for asymmetric weights, of which the first
cannot hold a zero point of 0: its words are one less for each field, so that a 0 borrows from the next one.

The order of a source (act-order) is preserved where its codes are, never created. Where it left groups out
of order, a part has the scale and the zero point of each of its inputs, and a weight is written whole.

Source: GPTQModel 7.7 (nn_modules/qlinear/__init__.py, pack_original and dequantize_weight; utils/model.py,
convert_gptq_v1_to_v2_format_module and FUSED_PROJECTION_UNITS; quantization/config.py, dynamic_get). This
module opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..architectures import merged, model_type
from ..errors import CheckpointError, UnsupportedError, option
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout.word_lines import WORD
from ..params.tensors import zero_point_dtype
from ..patterns import REGEX
from ..schemes import Preset, RangeRule, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from . import word_layers
from .act_order import group_index
from .block_extents import blocks, by_column
from .compressed_tensors.config_groups import targets
from .compressed_tensors.tested import TEXT_ALONE, of_gptq
from .containers.safetensors import FILE_DTYPES, torch_name
from .engines import Facts, Loads, Problem, decoded_first, loader_not_run, rules
from .gptq_config import BITS, OTHER, QUANT_METHOD, SKIP, V1, V2, GptqSettings, named_layers
from .held_schemes import FLOAT_SCALES
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, float_scales, needed, record_of
from .tensor_fields import (
    COLUMNS,
    ROWS,
    ZERO_POINT,
    CodeField,
    ConstantField,
    Field,
    LevelField,
    Tensors,
    TensorSpec,
    WeightPart,
    decoded,
)
from .word_layers import CODES, GROUPS, SCALES, ZEROS, facts_of
from .words import fields_of, group_of, whole_words, words_of, words_of_one

_HEAD = "lm_head"
_MARLIN_GROUPS = (0, 32, 64, 128)


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
        scale = f"scale={torch_name(float_scales(tensors, SCALES))}"
        weight = Scheme.parse(str(found).replace("scale=float16", scale))
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
        return record_of(layer, key, tensors, facts_of(known, shape, self._listing.config), (GROUPS,))

    def promised(self) -> tuple[str, ...]:
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


@dataclass(frozen=True)
class PackedZeros(Field):
    """Zero points of groups: a line is a stream of fields.

    suffix: the last part of its name. first: whether they are stored one less, as in the first version of the
    layout.
    """

    suffix: str
    first: bool
    level = ZERO_POINT
    along = COLUMNS

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        (rows, groups), bits = weight.granularity.grid(shape), weight.bits
        size, across = (groups, rows * bits // WORD), whole_words(bits)
        per = group_of(weight, shape[1])
        return TensorSpec(suffix=self.suffix, dtype="I32", shape=size, axis=COLUMNS, per=per, across=across)

    def fills(self, weight: Scheme) -> tuple[int, int]:
        return ROWS, whole_words(weight.bits)[1]

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        bits, half = q.scheme.bits, 1 << (q.scheme.bits - 1)
        if q.zero_point is None:
            return words_of_one(half - 1, *q.scales[0].t().shape, bits)
        zeros = (q.zero_point.t().long() + half).contiguous()
        return words_of(zeros, bits)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        bits = weight.bits
        if self.first and WORD % bits == 0:
            # One for each field at once, so that what 0 borrowed from the next field goes back to it.
            lines = lines + sum(1 << at for at in range(0, WORD, bits))
        fields = fields_of(lines, bits).to(torch.int32)
        if self.first and WORD % bits:
            fields = (fields + 1) & ((1 << bits) - 1)
        return (fields - (1 << (bits - 1))).to(zero_point_dtype(weight)).t().contiguous()


def _index(weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _groups(weight, shape[1])


def _transformers(facts: Facts) -> Iterator[Problem]:
    yield from word_layers.transformers(facts)
    other = of_gptq(TEXT_ALONE).get(model_type(facts.family))
    if other is not None:
        yield Loads.NO, other
    if facts.numbered is not None:
        keep = option("ignore", facts.numbered)
        yield Loads.NO, f"optimum replaces no layer that is called by a number; use {keep}"
    if any(rule.startswith(OTHER) for rule in facts.section.get("dynamic", {})):
        yield Loads.NO, "it takes all layers under one scheme; GPTQModel.load reads dynamic"
    yield Loads.PARTLY, "5.23 runs it with optimum 2.3 and gptqmodel 7.7"


def _vllm(facts: Facts) -> Iterator[Problem]:
    if any(layer.weight.bits not in (4, 8) or not _is_symmetric(layer.weight) for layer in facts.layers):
        yield Loads.NO, "release 0.32 reads symmetric integers of 4 and 8 bits alone"
    yield from _sglang(facts)


def _sglang(facts: Facts) -> Iterator[Problem]:
    yield from word_layers.vllm(facts)
    for layer in facts.layers:
        fast = layer.weight.bits in (4, 8) and blocks(layer.weight)[COLUMNS] in _MARLIN_GROUPS
        if not fast or not _is_symmetric(layer.weight):
            yield Loads.PARTLY, f"{layer} has no fast kernel, and not every release reads it"


@dataclass(frozen=True)
class Gptq(Codec):
    """See the module and :class:`Codec`.

    version: the ``checkpoint_format`` of somebody's file; empty for the one that is written. ordered: whether
    ``g_idx`` has inputs in groups out of order. whole: whether the weight is written so, which takes all of
    its inputs at once.
    """

    version: str = ""
    ordered: bool = False
    whole: bool = False

    name = "gptq"
    title = "the layout of GPTQ"
    presets = MappingProxyType(
        {
            "w4a16": Preset(weight="int4:g128:scale=float16"),
            "w4a16_asym": Preset(weight="int4:g128:scale=float16:asym"),
            "w8a16": Preset(weight="int8:g128:scale=float16"),
        }
    )
    defaults = MappingProxyType({"scale": "float16"})
    parts = MappingProxyType({CODES: True, ZEROS: True, SCALES: False, GROUPS: False})
    engines = rules(
        transformers=_transformers,
        vllm=_vllm,
        humming=loader_not_run,
        sglang=_sglang,
        tensorrt=word_layers.tensorrt,
        llama_cpp=decoded_first,
    )
    methods = (QUANT_METHOD,)
    reader = GptqReader
    negative_scales = True
    divisible = ()
    replaces_conv1d = True
    replaces_numbered = False

    def layout(self, layer: LayerScheme) -> str:
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
        if level.rule.power_of_two or FILE_DTYPES.get(stored) not in FLOAT_SCALES or level.format is None:
            raise UnsupportedError(f"scheme {weight} has scales that GPTQ does not store; use scale=float16")
        if blocks(weight)[ROWS] != 1:
            raise UnsupportedError(f"scheme {weight} has blocks that GPTQ does not store; use g<N>, channel")
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place in GPTQ; leave out the input")
        return self._version(weight) + (" with act-order" if self.ordered else "")

    def _version(self, weight: Scheme) -> str:
        return self.version or _written_version(weight)

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        return shape[1] if self.whole else super().alignment(layer, shape)

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        """See :class:`Codec`: parts are some of the inputs."""
        return (
            CodeField(CODES, "I32", along=COLUMNS, shifted=True),
            PackedZeros(ZEROS, first=self._version(layer.weight) == V1),
            LevelField(SCALES, along=COLUMNS),
            ConstantField(GROUPS, _index),
        )

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`; after act-order, any part may have inputs of any group."""
        codes, *of_groups, index = super().tensors(layer, shape, dtype)
        if not self.ordered:
            return codes, *of_groups, index
        return codes, *(replace(spec, axis=None) for spec in of_groups), replace(index, axis=COLUMNS)

    def group_index(self, layer: LayerScheme) -> str | None:
        return GROUPS if self.ordered else None

    def out_of_order(self, layer: LayerScheme) -> LayerScheme | None:
        return replace(layer, codec=replace(self, ordered=True, whole=True))

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """See :class:`Codec`; after act-order, each input has a group of its own."""
        if not self.ordered:
            return super().decode(layer, tensors, part)
        of_inputs = {suffix: tensors[suffix][tensors[GROUPS].long()] for suffix in (ZEROS, SCALES)}
        return decoded(self.fields(layer), {**tensors, **of_inputs}, by_column(layer.weight), part)

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
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
            **_numbers(most),
            "desc_act": ordered,
            "lm_head": any(name.endswith(_HEAD) for name in every),
            "quant_method": QUANT_METHOD,
            "checkpoint_format": most.layout,
            "pack_dtype": "int32",
            "dynamic": _dynamic(names, most, contents.left_out),
            **(named_layers(every, contents.kept, contents.family) if len(names) == 1 else {}),
            "meta": {"quantizer": ["zeropoint"]},
        }
        return Documents(section=settings, files={"quantize_config.json": settings})


def _numbers(layer: LayerScheme) -> dict[str, Any]:
    """Return the configuration entries that differ between layers."""
    weight, group = layer.weight, blocks(layer.weight)[COLUMNS] or -1
    return {"bits": weight.bits, "group_size": group, "sym": _is_symmetric(weight)}


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
