"""The 4-bit layout of bitsandbytes, which transformers writes and reads under ``load_in_4bit``.

For the weight ``X.weight`` of shape (N, K) and blocks of b values, one after the other over all rows (all
little-endian):

    X.weight                                  U8 [N K / 2, 1]: even element in the high nibble
    X.weight.absmax                           F32 [N K / b]: a value is ``quant_map[code] * absmax``
    X.weight.quant_map                        F32 [16]: the table of nf4 or fp4
    X.weight.quant_state.bitsandbytes__nf4    U8: JSON, ``{"quant_type": "nf4", "blocksize": b, "dtype":
                                              "bfloat16", "shape": [N, K]}``; ``__fp4`` for fp4

With double quantization, whose blocks run over rows, too, so that a part of a weight is whole ones:

    X.weight.absmax                U8 [N K / b]: codes of ``nested_quant_map[code] * nested_absmax + offset``
    X.weight.nested_absmax         F32 [ceil(N K / (256 b))]
    X.weight.nested_quant_map      F32 [256]
    the JSON has also              ``"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": x``

The offset is the mean of absmax over the whole weight, known before a part is written: here of the exact sum,
there of a float32 sum in torch's order, which depends on vector width and threads. Spaces follow the JSON
that is written, whose length is fixed before the offset is known.

A block of zeros has absmax 0 there, or one that the second quantization left near 0, and scale 1 here; its
values are the same. The configuration says ``{"quant_method": "bitsandbytes", "load_in_4bit": true,
"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": [...], ...}``.

Source: bitsandbytes 0.50.2 (functional.py, QuantState; backends/default/ops.py, quantize_4bit,
dequantize_4bit) and transformers 5.23 (quantizers/quantizer_bnb_4bit.py). This module opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..formats import CodebookFormat, Format, get_format
from ..formats.codes import rounding_reach
from ..layout import packing
from ..layout.blocks import reduce_blocks, spread_blocks
from ..params import QuantizationParams
from ..params.chains import in_table
from ..params.stored import store
from ..schemes import Granularity, Preset, Scheme
from ..schemes.dialects import get_dialect
from ..tensor import QuantizedTensor
from . import word_layers
from .bitsandbytes_state import BLOCKS, NESTED_BLOCK, StateForm, state_of, state_text
from .block_extents import blocks, partial_group
from .engines import Facts, Loads, Problem, always, in_turn, loader_not_run, rules
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, model_dtype, names_in, needed, record_of
from .tensor_fields import COLUMNS, Tensors, TensorSpec, WeightPart

QUANT_METHOD = "bitsandbytes"
WEIGHT, ABSMAX, MAP = "weight", "weight.absmax", "weight.quant_map"
NESTED, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
_STATE = "weight.quant_state.bitsandbytes__"
TYPES = MappingProxyType({"nf4": "nf4", "fp4": "fp4_bnb"})
"""``quant_type`` to the element format."""
_NESTED_CODES = 256
_SECOND = get_format("dynamic8")
"""The table of absmax less its mean."""
_DIALECT = get_dialect("bitsandbytes")
_STATE_BYTES = 4096
"""No JSON is longer, by an order of magnitude."""
_PARTS = (ABSMAX, MAP, NESTED, NESTED_MAP, *(_STATE + kind for kind in TYPES), WEIGHT)


class BitsandbytesReader(Reader):
    """The layers of one checkpoint of bitsandbytes, each of which describes itself."""

    def __init__(self, listing: Listing, codec: Bitsandbytes) -> None:
        self._listing = listing
        self._codec = codec
        config = listing.quantization
        if not config.get("load_in_4bit", config.get("_load_in_4bit")):
            raise UnsupportedError(
                "quantization_config of bitsandbytes has neither load_in_4bit nor load_in_8bit; pass the "
                "original checkpoint"
            )
        self.ignore = names_in(config, "llm_int8_skip_modules")
        self._said = {
            "bnb_4bit_quant_type": config.get("bnb_4bit_quant_type"),
            "bnb_4bit_use_double_quant": config.get("bnb_4bit_use_double_quant"),
            "bnb_4bit_quant_storage": config.get("bnb_4bit_quant_storage"),
        }

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        kinds = [kind for kind in TYPES if _STATE + kind in tensors]
        if len(kinds) != 1:
            raise CheckpointError(
                f"it has {len(kinds)} tensors {_STATE}nf4 or __fp4, but must have one, which says its shape"
            )
        (kind,) = kinds
        entry = tensors[_STATE + kind]
        if entry.dtype != "U8" or math.prod(entry.shape) > _STATE_BYTES:
            raise CheckpointError(
                f"its quant_state is {entry.dtype} of shape {list(entry.shape)}, but must be U8, the bytes "
                "of a short JSON"
            )
        codes = needed(tensors, WEIGHT, kind)
        if codes.dtype != "U8":
            raise UnsupportedError(f"its codes are stored as {codes.dtype}, which is not read; known is U8")
        state = state_of(self._listing.read(entry), kind)
        weight = plain(TYPES[kind], state.block)
        usual = len(state_text(kind, state.block, state.dtype, state.shape, state.form.offset))
        form = replace(state.form, length=None) if state.form.length == usual else state.form
        codec = (
            self._codec if form == StateForm(length=None, offset=None) else replace(self._codec, form=form)
        )
        layer = LayerScheme(codec=codec, name=str(weight), weight=weight)
        partial = partial_group(weight, state.shape)
        if partial is not None:
            raise UnsupportedError(f"{partial}, so blocks run over rows, which is not read here")
        return record_of(layer, key, tensors, Known(state.shape, state.dtype))

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        kind, _, nested = layer.layout.partition(" ")
        found = {
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": bool(nested),
            "bnb_4bit_quant_storage": "uint8",
        }
        return next(
            (
                f"{key} of the configuration is {self._said[key]!r:.40}, but its tensors have {value!r}"
                for key, value in found.items()
                if self._said[key] not in (None, value)
            ),
            None,
        )


def _values(fmt: Format) -> torch.Tensor:
    assert isinstance(fmt, CodebookFormat)
    return torch.tensor(fmt.values)


def _table(weight: Scheme) -> torch.Tensor:
    return _values(weight.element)


def plain(element: str, block: int) -> Scheme:
    """Return the scheme of absmax in float32."""
    return Scheme.parse(f"{element}:g{block}:dialect={_DIALECT.name}")


def _double(element: str, block: int) -> Scheme:
    """Return the scheme of double quantization, over a weight as one row."""
    coarse = block * NESTED_BLOCK
    return Scheme.parse(
        f"{element}:g{block}:scale=linear_late/dynamic8:scale2=float32@g{coarse}:center=float32@tensor"
        f":dialect={_DIALECT.name}"
    )


def _is_double(weight: Scheme) -> bool:
    return weight.center is not None


def _swapped(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes with their nibbles exchanged."""
    swapped = codes << 4
    return swapped.bitwise_or_(codes >> 4)


def of_transformers(facts: Facts) -> Iterator[Problem]:
    """Yield what transformers does not read of either layout of bitsandbytes."""
    if facts.experts:
        yield Loads.NO, "it quantizes linear layers in this layout, and experts are none there"
    if facts.nonlinear:
        yield Loads.NO, "quantized embeddings and routers are not read in this layout"


by_plugin = always(Loads.UNCHECKED, "from 0.28 on it reads this layout with the package vllm-bnb-plugin")
"""The rule of vLLM for models that it did not run."""


@dataclass(frozen=True)
class Bitsandbytes(Codec):
    """See the module and :class:`Codec`.

    form: of the tensors of a weight in somebody's file; None is the form that is written.
    """

    form: StateForm | None = None

    name = "bitsandbytes"
    title = "the 4-bit layout of bitsandbytes"
    presets = MappingProxyType(
        {name: Preset(weight=str(plain(name, 64))) for name in ("nf4", "fp4_bnb")}
        | {"nf4_double": Preset(weight=str(_double("nf4", 64)))}
    )
    engines = rules(
        transformers=of_transformers,
        vllm=in_turn(word_layers.vllm, by_plugin),
        sglang=loader_not_run,
        diffusers=loader_not_run,
    )
    reader = BitsandbytesReader
    defaults = MappingProxyType({"dialect": _DIALECT.name})
    methods = (QUANT_METHOD,)
    replaces_conv1d = True

    @property
    def negative_scales(self) -> bool:  # type: ignore[override]  # a class says it for all files elsewhere
        """See :class:`Codec`: double quantization makes absmax of small blocks negative."""
        return self.form is not None and self.form.offset is not None

    def layout(self, layer: LayerScheme) -> str:
        weight, block = layer.weight, blocks(layer.weight)[COLUMNS]
        kinds = [
            kind
            for kind, element in TYPES.items()
            if block in BLOCKS
            and replace(weight, dialect=_DIALECT) in (plain(element, block), _double(element, block))
        ]
        if not kinds:
            raise UnsupportedError(
                f"scheme {weight} is not what bitsandbytes stores; use nf4 or fp4_bnb, with g64 to g4096, "
                "or nf4_double"
            )
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place in bitsandbytes; leave out the input")
        return f"{kinds[0]} with double quantization" if self._nested(weight) else kinds[0]

    def _nested(self, weight: Scheme) -> bool:
        return _is_double(weight) or (self.form is not None and self.form.offset is not None)

    def needs_mean(self, layer: LayerScheme) -> bool:
        """See :class:`Codec`: absmax is stored less its mean."""
        return _is_double(layer.weight)

    def with_mean(self, layer: LayerScheme, mean: float) -> LayerScheme:
        """See :class:`Codec`: a first level as without double quantization, then the second."""
        if not _is_double(layer.weight):
            return layer
        offset = float(torch.tensor(mean, dtype=torch.float64).float())
        codec = replace(self, form=StateForm(length=None, offset=offset))
        weight = replace(
            plain(TYPES[layer.layout.partition(" ")[0]], blocks(layer.weight)[COLUMNS]),
            dialect=layer.weight.dialect,
        )
        return LayerScheme(codec=codec, name=layer.name, weight=weight)

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        kind, block = layer.layout.partition(" ")[0], blocks(layer.weight)[COLUMNS]
        count, line = math.prod(shape) // block, shape[1] // block
        nested = self._nested(layer.weight)
        length = None if self.form is None else self.form.length
        text = state_text(kind, block, dtype, shape, 0.0 if nested else None)
        length = len(text) if length is None else length
        found = (
            TensorSpec(suffix=WEIGHT, dtype="U8", shape=(math.prod(shape) // 2, 1), lines=shape[1] // 2),
            TensorSpec(suffix=ABSMAX, dtype="U8" if nested else "F32", shape=(count,), lines=line),
            TensorSpec(suffix=MAP, dtype="F32", shape=(len(_table(layer.weight)),), axis=None),
            TensorSpec(suffix=_STATE + kind, dtype="U8", shape=(length,), axis=None),
        )
        if not nested:
            return found
        coarse, per = -(-count // NESTED_BLOCK), _rows_of_second(layer.weight, shape[1])
        lines = per * line // NESTED_BLOCK
        return (
            *found,
            TensorSpec(suffix=NESTED, dtype="F32", shape=(coarse,), lines=lines, per=per),
            TensorSpec(suffix=NESTED_MAP, dtype="F32", shape=(_NESTED_CODES,), axis=None),
        )

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        codes, absmax = _swapped(q.data).reshape(-1, 1), q.scales[0].reshape(-1)
        if self.form is None or self.form.offset is None:
            return {WEIGHT: codes, ABSMAX: absmax}
        absmax = torch.where(_zeros(layer.weight, q.data, q.shape).reshape(-1), 0.0, absmax)
        numbers, second = absmax - torch.tensor(self.form.offset), Granularity.group(NESTED_BLOCK)
        coarse = reduce_blocks(numbers.abs(), second, "amax", 0.0)
        coarse = torch.where(coarse == 0, 1.0, coarse)
        factors = spread_blocks(coarse, second, tuple(numbers.shape))
        values = in_table(numbers, factors, _SECOND, _DIALECT.table_steps)
        return {WEIGHT: codes, ABSMAX: store(values, _SECOND), NESTED: coarse}

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        kind, block = layer.layout.partition(" ")[0], blocks(layer.weight)[COLUMNS]
        offset = None if self.form is None else self.form.offset
        text = bytearray(state_text(kind, block, params.dtype, shape, offset))
        found = {MAP: _table(layer.weight), _STATE + kind: torch.frombuffer(text, dtype=torch.uint8)}
        return found if offset is None else found | {NESTED_MAP: _values(_SECOND)}

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """See :class:`Codec`; the type decides the table, as in bitsandbytes."""
        scales = self._absmax(layer, tensors, part).view(layer.weight.granularity.grid(part.shape))
        data = _swapped(tensors[WEIGHT].view(part.shape[0], -1))
        if bool((scales <= 0).any()):
            zeros = _zeros(layer.weight, data, part.shape)
            scales = torch.where(zeros & (scales <= 0), 1.0, scales)
        return part.quantized(layer.weight, data, scales)

    def _absmax(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> torch.Tensor:
        """Return absmax in float32 of a part's blocks."""
        stored = tensors[ABSMAX]
        if self.form is None or self.form.offset is None:
            return stored
        coarse = _second_scales(layer, tensors, part)
        return tensors[NESTED_MAP][stored.int()] * coarse + torch.tensor(self.form.offset)

    def drift(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> torch.Tensor | None:
        """See :class:`Codec`: what the second quantization changes absmax by, at most."""
        if self.form is None or self.form.offset is None:
            return None
        coarse = _second_scales(layer, tensors, part).double()
        values = _values(_SECOND)[tensors[ABSMAX].int()].double().abs()
        off = rounding_reach(values, _SECOND) - values + 2 / _DIALECT.table_steps
        roundings = (coarse + abs(self.form.offset)) * 2.0**-21
        return (off * coarse * (1 + 2.0**-20) + roundings).view(layer.weight.granularity.grid(part.shape))

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """See :class:`Codec`; some engines decode with the table of the file."""
        kind = layer.layout.partition(" ")[0]
        same = torch.equal(tensors[MAP], _table(layer.weight))
        return None if same else f"quant_map is not the table of {kind}, by which engines differ"

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`; a weight of bytes without a quant_state counts."""
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is None:
            return None
        return name.removesuffix(f".{part}"), part, part != WEIGHT or dtype == "U8"

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`: what is 8 bits has another layout."""
        eight = quantization.get("load_in_8bit", quantization.get("_load_in_8bit"))
        return super().claims(quantization) and not eight

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        contents.require_distinct(self.title)
        compute = str(model_dtype(contents.family, torch.float32)).removeprefix("torch.")
        section = {
            "quant_method": QUANT_METHOD,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": layer.layout.partition(" ")[0],
            "bnb_4bit_use_double_quant": _is_double(layer.weight),
            "bnb_4bit_compute_dtype": compute,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": contents.left_out,
        }
        return Documents(section=section)


def _zeros(weight: Scheme, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return which blocks of packed codes are zeros."""
    values = _table(weight)[packing.unpack(data, weight.bits, shape[1]).int()]
    return (values == 0.0).view(*weight.granularity.grid(shape), -1).all(-1)


def _rows_of_second(weight: Scheme, columns: int) -> int:
    """Return the fewest rows that are whole second-level blocks."""
    values = blocks(weight)[COLUMNS] * NESTED_BLOCK
    return values // math.gcd(values, columns)


def _second_scales(layer: LayerScheme, tensors: Tensors, part: WeightPart) -> torch.Tensor:
    """Return the factors of the absmax in a part."""
    start, shape = part.start, part.shape
    line, per = shape[1] // blocks(layer.weight)[COLUMNS], _rows_of_second(layer.weight, shape[1])
    numbers = torch.arange(start % per * line, start % per * line + len(tensors[ABSMAX]))
    return tensors[NESTED][numbers // NESTED_BLOCK]


CODEC = Bitsandbytes()
