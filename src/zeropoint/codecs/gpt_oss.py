"""gpt-oss layout: fused experts in MXFP4, all else in floats.

For E experts whose gate_up_proj has N = 2 I outputs, gate's and up's in turn, and K inputs (all
little-endian; X is ``model.layers.0.mlp.experts``):

    X.gate_up_proj_blocks   U8 [E, N, K / 32, 16]: 32 codes of float4_e2m1fn, even element in the low nibble
    X.gate_up_proj_scales   U8 [E, N, K / 32]: exponent + 127; a value is ``code * 2 ** exponent``
    X.gate_up_proj_bias     BF16 [E, N], which is kept as it is

and the same of ``X.down_proj``. Checkpoints of floats have ``X.gate_up_proj`` [E, K, N], transposed, which is
what decoding gives. The configuration says ``{"quant_method": "mxfp4", "modules_to_not_convert": [...]}``.

Source: transformers 5.23 (integrations/mxfp4.py, convert_moe_packed_tensors) and, of how scales are chosen,
triton_kernels (numerics_details/mxfp.py, downcast_to_mxfp_torch). This module opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..architectures import DOWN, GATE_UP, expert_layout
from ..errors import CheckpointError, UnsupportedError, printable
from ..formats import get_format
from ..schemes import Granularity, Preset, Scheme, ZeroPoint
from .block_extents import partial_group
from .engines import Facts, Loads, Problem, always, rules
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, model_dtype, names_in, needed
from .tensor_fields import CodeField, Field, LevelField

QUANT_METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_GROUP = 32
_READ = "float4_e2m1fn:g32:scale=floor"
"""The scheme of what is read: any power of two, by whatever rule it was chosen."""


class GptOssReader(Reader):
    """The fused experts of one checkpoint."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        if not expert_layout(listing.config).transposed:
            raise UnsupportedError(
                f"model_type is {listing.config.get('model_type')!r:.40}, but quant_method 'mxfp4' is read "
                "of gpt_oss, whose experts lie as the layout says; pass the original checkpoint"
            )
        weight = Scheme.parse(_READ)
        self._layer = LayerScheme(codec=codec, name=str(weight), weight=weight)
        self._dtype = model_dtype(listing.config, torch.bfloat16)
        self.ignore = names_in(listing.quantization, "modules_to_not_convert")

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the fused experts."""
        codes, scales = needed(tensors, BLOCKS), needed(tensors, SCALES)
        if any(entry.dtype != "U8" for entry in (codes, scales)):
            raise CheckpointError(f"blocks and scales are {codes.dtype} and {scales.dtype}, but must be U8")
        half = _GROUP // 2
        if (
            len(codes.shape) != 4
            or codes.shape[-1] != half
            or codes.shape[:-1] != scales.shape
            or 0 in codes.shape
        ):
            raise CheckpointError(
                f"blocks and scales have shapes {list(codes.shape)} and {list(scales.shape)}, but must have "
                f"(experts, out, in / {_GROUP}, {half}) and the same without the last axis"
            )
        experts, rows, columns = scales.shape
        shape, parts = (rows, columns * _GROUP), (BLOCKS, SCALES)
        dtype = self._dtype if known is None else known.dtype
        return Record(module=key, layer=self._layer, shape=shape, dtype=dtype, parts=parts, experts=experts)


def _gpt_oss(facts: Facts) -> Iterator[Problem]:
    if not expert_layout(facts.family).transposed:
        yield Loads.NO, "it reads this layout of gpt_oss alone"


def _not_run(facts: Facts) -> Iterator[Problem]:
    yield from _gpt_oss(facts)
    yield Loads.UNCHECKED, "it has a loader for this layout, which did not run here"


@dataclass(frozen=True)
class GptOss(Codec):
    """See the module and :class:`Codec`."""

    name = "gpt-oss"
    title = "the layout of gpt-oss"
    presets = MappingProxyType({"mxfp4": Preset(weight="float4_e2m1fn:g32:scale=rceil:dialect=gpt-oss")})
    defaults = MappingProxyType({"scale": "rceil", "dialect": "gpt-oss"})
    engines = rules(
        transformers=_gpt_oss,
        vllm=_not_run,
        tensorrt=_not_run,
        llama_cpp=always(Loads.PARTLY, "its converter reads this layout"),
        mlx_lm=_gpt_oss,
    )
    methods = (QUANT_METHOD,)
    reader = GptOssReader
    fused_experts = True
    separator = ""

    def layout(self, layer: LayerScheme) -> str:
        weight = layer.weight
        plain = (
            weight.element == get_format("float4_e2m1fn")
            and weight.granularity == Granularity.group(_GROUP)
            and len(weight.scales) == 1
            and weight.scales[0].rule.power_of_two
            and weight.chained is None
            and weight.zero_point is ZeroPoint.NONE
        )
        if not plain or layer.input is not None:
            raise UnsupportedError(
                f"({layer.assignment}) is not what gpt-oss stores: float4_e2m1fn in groups of {_GROUP} with "
                "a power of two each, and no input; use mxfp4"
            )
        return QUANT_METHOD

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        if len(shape) != 3:
            return f"has {len(shape)} axes, and the layout stores fused experts"
        return "is empty" if 0 in shape else partial_group(layer.weight, shape[1:])

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        return CodeField(BLOCKS, "U8", blocked=True), LevelField(SCALES, dtype="U8")

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        part = next((part for part in (BLOCKS, SCALES) if name.endswith((GATE_UP + part, DOWN + part))), None)
        return None if part is None else (name.removesuffix(part), part, True)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError where some experts of a layer are kept."""
        quantized = {m.name.rpartition(".")[0] for m in contents.modules() if m.layer is not None}
        split = next((name for name in contents.kept if name in quantized), None)
        if split is not None:
            raise CheckpointError(
                f"some experts of {printable(split)} are kept, but loaders of {self.title} take all of a "
                "layer as quantized, or none; quantize them, too, or ignore them all"
            )
        section = {"quant_method": QUANT_METHOD, "modules_to_not_convert": contents.left_out}
        return Documents(section=section)


CODEC = GptOss()
