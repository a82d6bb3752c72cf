"""Hugging Face's fp8 layout of DeepSeek-V3: codes and block factors.

For the weight ``X.weight`` of shape (N, K) and blocks of r x c (all little-endian, rows one after the other;
the last blocks of an axis may be smaller):

    X.weight             F8_E4M3 [N, K]
    X.weight_scale_inv   F32 [ceil(N / r), ceil(K / c)]: the factor of each block, despite its name; also
                         F8_E8M0, or its bytes (exponent + 127) as U8, where factors are powers of two
                         (``scale_fmt: ue8m0``); BF16 and F16 are read, too

One factor for the whole weight has the shape [], or [1] in files of others. They call it ``X.weight_scale``,
too, as vLLM does, and factors of blocks ``X.scale`` and ``X.qscale_weight``. Fused experts have a third axis
in front and no ``.weight`` in their names:

    X.experts.down_proj            F8_E4M3 [E, N, K]
    X.experts.down_proj_scale_inv  as above; [E, ceil(N / r), ceil(K / c)]

The configuration says ``{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [r, c] or null,
"scale_fmt": "ue8m0" or left out}``. A value is ``code * factor`` in float32. Under ``activation_scheme:
static`` there is X.activation_scale (transformers, and written) or X.input_scale (vLLM), F32 [], too; of
fused experts X.experts.down_proj_activation_scale, F32 [E]. With
``"kv_cache_scheme": "static"``, each attention layer ``A`` has

    A.k_scale, A.v_scale           F32 []: the largest magnitude of keys and of values, over 448

Source: transformers 5.23 (integrations/finegrained_fp8.py and quantizers/quantizer_finegrained_fp8.py),
which, unlike this module, takes whole blocks only; vLLM, model_executor/layers/quantization/fp8.py;
compressed-tensors 0.20 (entrypoints/convert/converters/fp8block_dequantizer.py); of scales of a cache AutoFP8
(quantize.py) and vLLM (model_loader/weight_utils.py). Written are matrices, with float32 factors
``amax / 448``, or that rounded up to a power of two in F8_E8M0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..architectures import DOWN, GATE_UP, model_type
from ..errors import CheckpointError, UnsupportedError, option, printable
from ..formats import get_format
from ..formats.torch_dtypes import storage_dtype
from ..recipes import Activation
from ..schemes import PRESETS, Granularity, Scheme, ZeroPoint
from .block_extents import blocks
from .compressed_tensors.config import require_plain
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from .data_scales import CacheScales, InputNames
from .engines import Facts, Loads, Problem, always, decoded_first, fused_alike, loader_not_run, rules
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, names_in
from .tensor_fields import COLUMNS, CodeField, Field, LevelField, ScalarField

QUANT_METHOD = "fp8"
WEIGHT = "weight"
FACTOR = "weight_scale_inv"
_CODES = "F8_E4M3"
_POWERS = ("F8_E8M0", "U8")
_POWER_FORMAT = "ue8m0"
_MOST_FACTORS = 1 << 22
"""More than a weight has; of so many, nothing is said."""
_FACTORS = MappingProxyType(
    {"F32": "float32", "BF16": "bfloat16", "F16": "float16", **dict.fromkeys(_POWERS, "rceil")}
)
"""Dtypes of factors, to what a scheme calls them; U8 holds the bytes of F8_E8M0."""
_ENDINGS = ("_scale_inv", "_scale")
_OTHER_NAMES = (".scale", ".qscale_weight")
"""Ends of names of factors in place of ``.weight``, which other tensors have as well."""
"""Last parts of the names of fused experts."""


def weight_of(name: str) -> str | None:
    """Return the weight whose factors a tensor holds, or None.

    >>> weight_of("model.layers.0.mlp.up_proj.weight_scale_inv"), weight_of("m.experts.down_proj_scale_inv")
    ('model.layers.0.mlp.up_proj.weight', 'm.experts.down_proj')
    >>> weight_of("model.layers.0.mlp.up_proj.input_scale") is None
    True
    >>> weight_of("layers.0.ffn.w1.scale")
    'layers.0.ffn.w1.weight'
    """
    for ending in _OTHER_NAMES:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    for ending in _ENDINGS:
        if name.endswith(ending):
            weight = name.removesuffix(ending)
            return weight if weight.endswith(".weight") or ending == _ENDINGS[0] else None
    return None


def weight_scheme(config: Mapping[str, Any], factors: str = "F32") -> Scheme:
    """Return the scheme of the quantized weights under a ``quantization_config``.

    factors: the dtype of their factors, as a file has it.

    Raises UnsupportedError for other codes, CheckpointError for a malformed block.

    >>> str(weight_scheme({"weight_block_size": [128, 128]}))
    'float8_e4m3fn:block128x128'
    >>> str(weight_scheme({"weight_block_size": None}, "F8_E8M0"))
    'float8_e4m3fn:tensor:scale=rceil'
    """
    require_plain(config)
    codes = config.get("fmt", "e4m3")
    if codes not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"fp8 weights with fmt {codes!r} cannot be read; known is 'e4m3'")
    block, scale = config.get("weight_block_size"), _FACTORS[factors]
    if block is None:
        return Scheme.parse(f"float8_e4m3fn:tensor:scale={scale}")
    valid = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not valid:
        raise CheckpointError(
            f"weight_block_size of quantization_config is {block!r}, but must be two positive numbers; the "
            "file is damaged"
        )
    return Scheme.parse(f"float8_e4m3fn:block{block[0]}x{block[1]}:scale={scale}")


_LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
"""Names of kept layers; the second is what vLLM calls them."""


class Fp8Reader(Reader):
    """Reader of an fp8 checkpoint: one scheme, except fused experts."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._codec = codec
        self._listing = listing
        self._config = listing.quantization
        self._rounded: set[str] = set()
        weight_scheme(self._config)
        self.ignore = tuple(n for key in _LEFT_OUT for n in names_in(self._config, key))

    def input_of(self, module: str) -> Activation | None:
        """See :class:`Reader`; as in vLLM: input groups for blocks, else tokens."""
        if self._config.get("activation_scheme") == "static":
            return Activation.of("float8_e4m3fn:tensor", dynamic=False)
        weight = weight_scheme(self._config)
        return Activation.of(
            f"float8_e4m3fn:{'token' if _is_whole(weight) else f'g{blocks(weight)[COLUMNS]}'}"
        )

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the weight's name; its dtype is unknown."""
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
        fused = len(codes.shape) == 3 and module.rpartition(".")[2] in (GATE_UP, DOWN)
        if len(codes.shape) != 2 + fused or 0 in codes.shape:
            raise CheckpointError(f"its codes have shape {list(codes.shape)}, but must be a matrix")
        shape = (codes.shape[-2], codes.shape[-1])
        experts = codes.shape[0] if fused else None
        weight = weight_scheme(self._config, factor.dtype)
        if experts is not None:
            weight = _expert_blocks(weight, shape, factor)
        grid = (1,) if _is_whole(weight) else weight.granularity.grid(shape)
        wanted = grid if experts is None else (experts, *grid)
        if factor.shape != wanted and (factor.shape, wanted) != ((), (1,)):
            raise CheckpointError(
                f"its factors have shape {list(factor.shape)}, but must have {list(wanted)}"
            )
        if self._config.get("scale_fmt") == _POWER_FORMAT and not self._are_powers(factor):
            self._rounded.add(module)
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        parts = (WEIGHT, FACTOR)
        return Record(
            module=module, layer=layer, shape=shape, dtype=torch.float32, parts=parts, experts=experts
        )

    def _are_powers(self, factor: Entry) -> bool:
        """Return whether all factors are powers of two, by dtype or bits."""
        if factor.dtype in _POWERS or not 0 < math.prod(factor.shape) <= _MOST_FACTORS:
            return True
        raw = bytearray(self._listing.read(factor))
        values = torch.frombuffer(raw, dtype=TORCH_DTYPES[factor.dtype]).float()
        return bool((torch.frexp(values).mantissa.abs() == 0.5).all())

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        if module not in self._rounded:
            return None
        return (
            f"scale_fmt of the configuration is {_POWER_FORMAT!r}, but some of its factors are no powers of "
            "two, to which engines would round them"
        )


def _expert_blocks(weight: Scheme, shape: tuple[int, int], factor: Entry) -> Scheme:
    """Return the scheme of fused experts; gate and up may differ."""
    factors = factor.shape
    whole = _is_whole(weight)
    if len(factors) != 3 or (factors[1:] == weight.granularity.grid(shape) and not whole):
        return weight
    if any(not n or extent % n for extent, n in zip(shape, factors[1:], strict=True)):
        return weight
    extents = [extent // n for extent, n in zip(shape, factors[1:], strict=True)]
    return weight_scheme({"weight_block_size": extents}, factor.dtype)


def _is_whole(weight: Scheme) -> bool:
    return weight.granularity == Granularity.tensor()


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from fused_alike(facts)
    if any(layer.input is not None and not layer.input.dynamic for layer in facts.layers):
        yield (
            Loads.NO,
            (
                "it has another name for the scale of static inputs; use "
                f"{option('format', 'compressed-tensors')}"
            ),
        )
    if any(_is_whole(layer.weight) for layer in facts.layers):
        yield (
            Loads.NO,
            (
                "it has another name for the scale of a whole weight; use "
                f"{option('format', 'compressed-tensors')}"
            ),
        )
    yield Loads.PARTLY, "it quantizes inputs in groups of a block's columns, whatever the scheme says of them"


_transformers = always(
    Loads.PARTLY,
    "5.23 decodes whole blocks with FineGrainedFP8Config(dequantize=True), and runs codes on a GPU",
)


def _mlx_lm(facts: Facts) -> Iterator[Problem]:
    """Yield the verdicts of mlx-lm 0.32.2 (sanitize): few families load these."""
    if model_type(facts.family) != "deepseek_v3":
        yield Loads.NO, "it looks for this layout in DeepSeek-V3 and a few others alone"
    yield Loads.PARTLY, "it decodes the weights of DeepSeek-V3 to bfloat16"


@dataclass(frozen=True)
class Fp8Block(Codec):
    """See the module and :class:`Codec`."""

    name = "fp8-block"
    title = "the fp8 layout of blocks"
    presets = MappingProxyType(
        {
            "fp8_block": replace(PRESETS["fp8_block"], weight="float8_e4m3fn:block128x128:scale=float32"),
            "fp8": replace(
                PRESETS["fp8"], weight="float8_e4m3fn:tensor:scale=float32", without_data="fp8_block"
            ),
        }
    )
    defaults = MappingProxyType({"scale": "float32"})
    engines = rules(
        transformers=_transformers,
        vllm=_vllm,
        humming=loader_not_run,
        tensorrt=_vllm,
        llama_cpp=decoded_first,
        mlx_lm=_mlx_lm,
    )
    methods = (QUANT_METHOD,)
    reader = Fp8Reader
    input_names = InputNames(
        "activation_scale", "activation_zero_point", "activation_scale", shape=(), also=("input_scale",)
    )
    cache = CacheScales("k_scale", "v_scale")

    def layout(self, layer: LayerScheme) -> str:
        weight = layer.weight
        plain = (
            weight.element == get_format("float8_e4m3fn")
            and weight.chained is None
            and len(weight.scales) == 1
            and _stored_as(weight) is not None
            and weight.zero_point is ZeroPoint.NONE
        )
        if not plain or not (_is_whole(weight) or all(blocks(weight))):
            raise UnsupportedError(
                f"scheme {weight} has no place in {self.title}, which has float8_e4m3fn codes and a "
                "float32 or float8_e8m0fnu scale for each block of rows and columns, or for the weight; use "
                "fp8_block or float8_e4m3fn:block<R>x<C>"
            )
        given = layer.input
        if given is not None and str(given.scheme).partition(":")[0] != "float8_e4m3fn":
            raise UnsupportedError(
                f"input {given} has codes that loaders of {self.title} do not take; use float8_e4m3fn"
            )
        if given is not None and not given.dynamic and not _is_whole(given.scheme):
            raise UnsupportedError(
                f"input {given} has several scales from data, and files of {self.title} have one; use "
                "float8_e4m3fn:tensor, or a dynamic input"
            )
        return QUANT_METHOD

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        kind = ScalarField if _is_whole(layer.weight) else LevelField
        return CodeField(WEIGHT, _CODES), kind(FACTOR, dtype=str(_stored_as(layer.weight)))

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`; engines round inputs in groups of a block's columns."""
        problem, width = super().refusal(layer, shape), blocks(layer.weight)[COLUMNS]
        if problem is None and width and shape[-1] % width:
            return f"last axis {shape[-1]} is not a multiple of the group of inputs, {width}"
        return problem

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        weight = weight_of(name)
        if weight is None:
            return name, WEIGHT, dtype.startswith("F8_")
        return weight, FACTOR, not name.endswith(_OTHER_NAMES)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        whole, static = _is_whole(layer.weight), layer.input is not None and not layer.input.dynamic
        section = {
            "activation_scheme": "static" if static else "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": contents.left_out,
            "quant_method": QUANT_METHOD,
            "weight_block_size": None if whole else list(blocks(layer.weight)),
        }
        powers = layer.weight.scales[0].rule.power_of_two
        return Documents(section=section | ({"scale_fmt": _POWER_FORMAT} if powers else {}))

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**document, "kv_cache_scheme": "static"}


def _stored_as(weight: Scheme) -> str | None:
    """Return the dtype of stored factors, or None if files have none."""
    scale = weight.scales[0]
    stored = None if scale.format is None else FILE_DTYPES.get(storage_dtype(scale.format))
    powers = stored in _POWERS
    return stored if stored in _FACTORS and scale.rule.power_of_two is powers else None


CODEC = Fp8Block()
