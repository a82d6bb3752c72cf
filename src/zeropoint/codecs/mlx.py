"""MLX layout of Apple and mlx-lm: weights in 32-bit words.

For the weight ``X.weight`` of shape (N, K), codes of b bits and groups of g inputs (all little-endian, rows
one after the other):

    X.weight   U32 [N, K b / 32]   a row is one stream of bits, low bits first
    X.scales   [N, K / g]          in the dtype of the weight; U8 in the modes of float codes
    X.biases   [N, K / g]          likewise; mode affine alone

    mode      bits                 g             a value
    affine    2, 3, 4, 5, 6, 8     32, 64, 128   ``scale * code + bias``, codes from 0 on, scales of any sign
    mxfp4     4: float4_e2m1fn     32            ``scale * code``, scales float8_e8m0fnu
    mxfp8     8: float8_e4m3fn     32            likewise
    nvfp4     4: float4_e2m1fn     16            ``scale * code``, scales float8_e4m3fn, none of the tensor:
                                                 stacked experts alone may have one each (``global_scale``),
                                                 which is not read

Experts lie in one tensor for each projection, with a first axis more; see :mod:`.mlx_experts`.

The configuration says ``{"group_size": g, "bits": b, "mode": "affine"}`` under ``quantization`` and again
under ``quantization_config``, with an object of the same kind under the name of a layer that differs. A layer
is quantized where it has scales. MLX computes values in the dtype of the scales; here they are in float32.

Source: MLX 0.32.4 (mx.quantize and its documentation), mlx-lm 0.32.2 (utils.py). This module opens no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..architectures import expert_layout, model_type
from ..errors import CheckpointError, UnsupportedError, printable
from ..formats import IntFormat
from ..formats.torch_dtypes import storage_dtype
from ..layout.word_lines import WORD
from ..schemes import Granularity, Preset, Scheme
from ..schemes.structure import stored_numbers
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from .engines import MLX_LM, Facts, Loads, Problem, not_read, rules
from .held_schemes import FLOAT_SCALES, require_held
from .mlx_experts import MlxFormat, expert_count, stacked
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, float_scales, model_dtype, needed, record_of
from .tensor_fields import COLUMNS, CodeField, Field, LevelField

WEIGHT, SCALES, BIASES, GLOBAL = "weight", "scales", "biases", "global_scale"
KEYS = ("quantization", "quantization_config")
AFFINE = "affine"
_STACKED = "switch_mlp.{gate,up,down}_proj"
_RAN = ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Families that mlx-lm ran from files written here; ``sanitize`` of others may change weights on loading."""
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
FLOATS = MappingProxyType(
    {
        "mxfp4": Scheme.parse("float4_e2m1fn:g32:scale=floor"),
        "mxfp8": Scheme.parse("float8_e4m3fn:g32:scale=floor"),
        "nvfp4": Scheme.parse("float4_e2m1fn:g16:scale=float8_ue4m3fn"),
    }
)
"""Modes of float codes."""


def affine(bits: int, group: int) -> Scheme:
    """Return the scheme of mode affine, by the rule of MLX."""
    return Scheme.parse(f"uint{bits}:g{group}:scale=edge_late/input:offset=minimum_late/input:dialect=mlx")


def mode_of(weight: Scheme) -> str | None:
    """Return the mode that holds weights of a scheme, or None.

    >>> mode_of(Scheme.parse("mxfp4")), mode_of(Scheme.parse("q4_1")), mode_of(Scheme.parse("int4:g32"))
    ('mxfp4', 'affine', None)
    """
    numbers = stored_numbers(weight)
    found = next((mode for mode, scheme in FLOATS.items() if stored_numbers(scheme) == numbers), None)
    element, group = weight.element, blocks(weight)[COLUMNS]
    if (
        found is not None
        or not isinstance(element, IntFormat)
        or element.bits not in BITS
        or group not in GROUPS
    ):
        return found
    if len(weight.scales) != 1 or len(weight.offsets) != 1:
        return None
    formats = (weight.scales[0].format, weight.offsets[0].format)
    dtype = None if formats[0] is None else FILE_DTYPES.get(storage_dtype(formats[0]))
    like = stored_numbers(affine(element.bits, group))
    same = (numbers[0], numbers[3:]) == (like[0], like[3:]) and formats[0] == formats[1]
    return AFFINE if same and blocks(weight)[0] == 1 and dtype in (None, *FLOAT_SCALES) else None


def _under_tensor_scale(weight: Scheme) -> bool:
    """Return whether a scheme is a mode's under a tensor scale."""
    coarse = len(weight.scales) == 2 and weight.scales[1].granularity == Granularity.tensor()
    return coarse and mode_of(replace(weight, scales=weight.scales[:1])) not in (None, AFFINE)


def _scheme(mode: object, bits: object, group: object) -> Scheme:
    """Return the configured scheme; raises UnsupportedError if not read."""
    if mode == AFFINE and type(bits) is int and bits in BITS and type(group) is int and group in GROUPS:
        return affine(bits, group)
    found = FLOATS.get(str(mode))
    if found is None or (bits, group) != (found.bits, blocks(found)[COLUMNS]):
        raise UnsupportedError(
            f"mode {mode!r:.20} with bits {bits!r:.20} and group_size {group!r:.20} is not read; known are "
            f"affine of {', '.join(map(str, BITS))} bits in groups of 32, 64 or 128, and {', '.join(FLOATS)}"
        )
    return found


class MlxReader(Reader):
    """The layers of one checkpoint of MLX."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._config, self._codec = listing.quantization, codec
        self._dtype = model_dtype(listing.config, torch.bfloat16)
        self._experts = expert_count(listing.config)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        said = self._config.get(_module(key), self._config.get(key, self._config))
        if not isinstance(said, dict):
            raise CheckpointError(f"the configuration says {said!r:.40} of it, but it has scales")
        weight = _scheme(said.get("mode", AFFINE), said.get("bits"), said.get("group_size"))
        codes = needed(tensors, WEIGHT, "MLX")
        if len(codes.shape) != 2:
            raise UnsupportedError(
                f"{WEIGHT} has shape {list(codes.shape)}; only matrices are read, and experts as {_STACKED}"
            )
        needed(tensors, SCALES, "MLX")
        dtype = self._dtype if known is None else known.dtype
        if weight.offsets:
            dtype = TORCH_DTYPES[float_scales(tensors, SCALES)]
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        shape = (codes.shape[0], codes.shape[1] * WORD // weight.bits)
        return record_of(layer, key, tensors, Known(shape, dtype))

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        """See :class:`Reader`: experts that config.json does not count."""
        found = stacked(module)
        if found is None or self._experts is None or found[1] < self._experts:
            return None
        return f"it is of expert {found[1]}, but config.json counts {self._experts} experts, from 0 on"


def _engine(facts: Facts) -> Iterator[Problem]:
    if facts.experts and expert_layout(facts.family).biased:
        yield Loads.NO, "it has other names for experts with biases, which are not written"
    elif model_type(facts.family) not in _RAN:
        yield Loads.UNCHECKED, f"this family was not tried there; {', '.join(_RAN)} ran"
    if facts.transposed:
        yield Loads.NO, "weights of Conv1D are not read"


@dataclass(frozen=True)
class Mlx(Codec):
    """See the module and :class:`Codec`."""

    name = "mlx"
    title = "the layout of MLX"
    presets = MappingProxyType({f"mlx_int{bits}": Preset(weight=str(affine(bits, 64))) for bits in BITS})
    defaults = MappingProxyType({"scale": "input"})
    parts = MappingProxyType({SCALES: True, BIASES: True, WEIGHT: False, GLOBAL: False})
    engines = rules(transformers=not_read, vllm=not_read, mlx_lm=_engine)
    methods = ()
    reader = MlxReader
    code_dtypes = ("U32",)
    model_format = MlxFormat()
    usual = (MLX_LM,)
    candidates = tuple(f"mlx_int{bits}" for bits in BITS)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the mode."""
        found = mode_of(layer.weight)
        if found is None and _under_tensor_scale(layer.weight):
            raise UnsupportedError(
                f"scheme {layer.weight} has a scale of the tensor, which linear layers of MLX lack; use "
                f"{FLOATS['nvfp4']}, which holds most of its values"
            )
        others = "integers from 0 on with scales and offsets of one dtype in groups of 32, 64 or 128"
        require_held(layer, "MLX", f"{', '.join(self.presets)}, mxfp4, or {others}", fits=found is not None)
        return str(found)

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        codes = CodeField(WEIGHT, "U32")
        if layer.layout != AFFINE:
            return codes, LevelField(SCALES, dtype="U8")
        return codes, LevelField(SCALES), LevelField(BIASES, level=1)

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`: it names no method."""
        return "quant_method" not in quantization and {"group_size", "bits"} <= quantization.keys()

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the prevalent scheme for all, others by name."""
        layers = {module.name: module.layer for module in contents.modules() if module.layer is not None}
        (usual, _), *_ = Counter(layers.values()).most_common(1)
        other = {_module(name): _layer_config(layer) for name, layer in layers.items() if layer != usual}
        clash = sorted(other.keys() & _layer_config(usual).keys())
        if clash:
            raise CheckpointError(f"{printable(clash[0])} names a layer and a number of the configuration")
        return Documents(section=_layer_config(usual) | other, keys=KEYS)


def _module(name: str) -> str:
    """Return mlx-lm's module of a layer: itself, or all experts'."""
    found = stacked(name)
    return name if found is None else found[0]


def _layer_config(layer: LayerScheme) -> dict[str, Any]:
    """Return the configuration of a layer."""
    group = blocks(layer.weight)[COLUMNS]
    return {"group_size": group, "bits": layer.weight.bits, "mode": layer.layout}


CODEC = Mlx()
