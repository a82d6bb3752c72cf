"""The fp8 layout of Hugging Face, in which DeepSeek-V3 is published: codes, and a factor for each block.

For the weight ``X.weight`` of shape (N, K) and blocks of r x c (all little-endian, rows one after the other;
the last blocks of an axis may be smaller):

    X.weight             F8_E4M3 [N, K]
    X.weight_scale_inv   F32 [ceil(N / r), ceil(K / c)]: the factor of each block, despite its name;
                         also BF16 or F16, or a power of two as F8_E8M0 or as U8 (exponent + 127)

One factor for the whole weight has the shape [] or [1], and vLLM's name ``X.weight_scale`` as well. Fused
experts have a third axis in front and no ``.weight`` in their names:

    X.experts.down_proj            F8_E4M3 [E, N, K]
    X.experts.down_proj_scale_inv  as above; [E, ceil(N / r), ceil(K / c)]

The configuration says ``{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [r, c] or null}``. A
value is ``code * factor`` in float32. With ``"kv_cache_scheme": "static"``, each attention layer ``A`` has

    A.k_scale, A.v_scale           F32 []: the largest magnitude of keys and of values, over 448

Source: transformers 5.23 (integrations/finegrained_fp8.py), which, unlike this module, takes whole blocks
only; compressed-tensors 0.20 (entrypoints/convert/converters/fp8block_dequantizer.py); of scales of a
cache AutoFP8 (quantize.py) and vLLM (model_loader/weight_utils.py). Written are matrices
in blocks, each with a float32 factor, ``amax / 448``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError, printable
from ..formats import get_format
from ..schemes import Granularity, Preset, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from .block_extents import blocks, no_matrix
from .compressed_tensors import decode_rows
from .compressed_tensors.config import require_plain
from .compressed_tensors.layout import SCALE, WEIGHT, Layout
from .data_scales import CacheScales
from .engines import (
    LLAMA_CPP,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
    Facts,
    Loads,
    Problem,
    always,
    decoded_first,
    fused_alike,
    rules,
)  # fmt: skip
from .protocol import ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record

QUANT_METHOD = "fp8"
FACTOR = "weight_scale_inv"
_CODES = "F8_E4M3"
_FACTORS = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""Dtypes of factors; U8 holds the bytes of F8_E8M0."""
_ENDINGS = ("_scale_inv", "_scale")
_FUSED = ("gate_up_proj", "down_proj")
"""Last parts of the names of fused experts."""


def weight_of(name: str) -> str | None:
    """Return the name of the weight whose factors a tensor of this name holds, or None.

    >>> weight_of("model.layers.0.mlp.up_proj.weight_scale_inv"), weight_of("m.experts.down_proj_scale_inv")
    ('model.layers.0.mlp.up_proj.weight', 'm.experts.down_proj')
    >>> weight_of("model.layers.0.mlp.up_proj.input_scale") is None
    True
    """
    for ending in _ENDINGS:
        if name.endswith(ending):
            weight = name.removesuffix(ending)
            return weight if weight.endswith(".weight") or ending == _ENDINGS[0] else None
    return None


def weight_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of the quantized weights under a ``quantization_config``, with float32 scales.

    Raises UnsupportedError for other codes, CheckpointError for a malformed block.

    >>> str(weight_scheme({"weight_block_size": [128, 128]}))
    'float8_e4m3fn:block128x128'
    """
    require_plain(config)
    codes = config.get("fmt", "e4m3")
    if codes not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"fp8 weights with fmt {codes!r} cannot be read; known is 'e4m3'")
    block = config.get("weight_block_size")
    if block is None:
        return Scheme.parse("float8_e4m3fn:tensor:scale=float32")
    valid = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not valid:
        raise CheckpointError(
            f"weight_block_size of quantization_config is {block!r}, but must be two positive numbers; the "
            "file is damaged"
        )
    return Scheme.parse(f"float8_e4m3fn:block{block[0]}x{block[1]}:scale=float32")


class Fp8Reader(Reader):
    """The layers of one fp8 checkpoint, all under one scheme but for fused experts."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._codec = codec
        self._weight = weight_scheme(listing.quantization)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the weight, whose dtype the file does not tell."""
        codes, factor = tensors.get(WEIGHT), tensors.get(FACTOR)
        if codes is None:
            what = "its factors are there" if factor is None else f"{printable(factor.name)} is there"
            raise CheckpointError(f"{what}, but its codes are missing")
        if codes.dtype != _CODES:
            raise CheckpointError(f"its codes are {codes.dtype}, but must be {_CODES}")
        if factor is None:
            raise CheckpointError("it has 0 tensors of factors, but must have one")
        if factor.dtype not in _FACTORS:
            raise CheckpointError(f"its factors are {factor.dtype}, but must be {', '.join(_FACTORS)}")
        module = key.removesuffix(".weight")
        fused = len(codes.shape) == 3 and module.rpartition(".")[2] in _FUSED
        if len(codes.shape) != 2 + fused or 0 in codes.shape:
            raise CheckpointError(f"its codes have shape {list(codes.shape)}, but must be a matrix")
        shape = (codes.shape[-2], codes.shape[-1])
        experts = codes.shape[0] if fused else None
        weight = self._weight if experts is None else _expert_blocks(self._weight, shape, factor.shape)
        grid = _grid(weight, shape)
        wanted = grid if experts is None else (experts, *grid)
        if factor.shape != wanted and (factor.shape, wanted) != ((), (1,)):
            raise CheckpointError(
                f"its factors have shape {list(factor.shape)}, but must have {list(wanted)}"
            )
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        return Record(
            module=module, layer=layer, shape=shape, dtype=torch.float32,
            parts=(WEIGHT, FACTOR), experts=experts,
        )  # fmt: skip


def _expert_blocks(weight: Scheme, shape: tuple[int, int], factors: tuple[int, ...]) -> Scheme:
    """Return the scheme of fused experts: without blocks, or below one, gate and up have a factor each."""
    whole = weight.granularity == Granularity.tensor()
    if len(factors) != 3 or (factors[1:] == weight.granularity.grid(shape) and not whole):
        return weight
    if any(not n or extent % n for extent, n in zip(shape, factors[1:], strict=True)):
        return weight
    extents = [extent // n for extent, n in zip(shape, factors[1:], strict=True)]
    return weight_scheme({"weight_block_size": extents})


def _grid(weight: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors."""
    return (1,) if weight.granularity == Granularity.tensor() else weight.granularity.grid(shape)


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from fused_alike(facts)
    yield Loads.PARTLY, "it quantizes inputs in groups of a block's columns, whatever the scheme says of them"


@dataclass(frozen=True)
class Fp8Block(Codec):
    """See the module and :class:`Codec`."""

    name = "fp8-block"
    title = "the fp8 layout of blocks"
    presets = MappingProxyType(
        {
            "fp8_block": Preset(
                weight="float8_e4m3fn:block128x128:scale=float32", input="float8_e4m3fn:g128"
            ),
        }
    )
    defaults = MappingProxyType({"scale": "float32"})
    engines = rules({
        TRANSFORMERS: always(
            Loads.PARTLY,
            "5.23 decodes whole blocks with FineGrainedFP8Config(dequantize=True), and runs codes on a GPU",
        ),
        VLLM: _vllm, TENSORRT: _vllm, LLAMA_CPP: decoded_first,
    })  # fmt: skip
    methods = (QUANT_METHOD,)
    cache = CacheScales("k_scale", "v_scale")

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        weight = layer.weight
        plain = (
            weight.element == get_format("float8_e4m3fn")
            and weight.chained is None
            and len(weight.scales) == 1
            and not weight.scales[0].rule.power_of_two
            and weight.scales[0].format == get_format("float32")
            and weight.zero_point is ZeroPoint.NONE
        )
        if not plain or not _is_block(weight):
            raise UnsupportedError(
                f"scheme {weight} has no place in {self.title}, which has float8_e4m3fn codes and a "
                "float32 scale for each block of rows and columns; use fp8_block or "
                "float8_e4m3fn:block<R>x<C>"
            )
        given = layer.input
        if given is not None and str(given.scheme).partition(":")[0] != "float8_e4m3fn":
            raise UnsupportedError(
                f"input {given} has codes that loaders of {self.title} do not take; use float8_e4m3fn"
            )
        return QUANT_METHOD

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        if no_matrix(shape) is None and layer.weight.granularity == Granularity.tensor():
            return "would have one scale, which loaders find under other names; use blocks"
        return super().refusal(layer, shape)

    def tensors(
        self,
        layer: LayerScheme,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        grid, rows = _grid(layer.weight, shape), blocks(layer.weight)[ROWS]
        axis = ROWS if rows else None
        return (
            TensorSpec(suffix=WEIGHT, dtype=_CODES, shape=shape),
            TensorSpec(suffix=FACTOR, dtype="F32", shape=grid, axis=axis, per=rows or 1),
        )

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return {WEIGHT: q.data.view(torch.float8_e4m3fn), FACTOR: q.scales[0]}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        factor = tensors[FACTOR]
        factor = factor.view(torch.float8_e8m0fnu) if factor.dtype is torch.uint8 else factor
        lines = {WEIGHT: tensors[WEIGHT], SCALE: factor.float().reshape(factor.shape or (1,))}
        return decode_rows(Layout.NAIVE, lines, layer.weight, start, shape=shape, dtype=dtype)

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`."""
        weight = weight_of(name)
        return (name, WEIGHT, dtype.startswith("F8_")) if weight is None else (weight, FACTOR, True)

    def read(self, listing: Listing) -> Fp8Reader:
        """See :class:`Codec`."""
        return Fp8Reader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes, of which it can name one."""
        layer = contents.only_layer(self.title)
        return Documents(section={
            "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": list(contents.kept),
            "quant_method": QUANT_METHOD, "weight_block_size": list(blocks(layer.weight)),
        })  # fmt: skip

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`Codec`."""
        return {**document, "kv_cache_scheme": "static"}


def _is_block(weight: Scheme) -> bool:
    return weight.granularity == Granularity.tensor() or all(blocks(weight))


CODEC = Fp8Block()
