"""Quark's names for what a scheme says: its enumerations, read into schemes of ours.

The names are those of quark.torch.quantization.config.type. What they mean is spelled in our own algebra and
default dialect; Quark's own kernels ignore some of them in places (its processors round half to even whatever
``round_method`` says), which is not imitated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import RecipeError, near_misses
from ..schemes import Scheme

DTYPES: Mapping[str, str] = MappingProxyType({
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32)},
    "int3": "int3",
    "bfloat16": "bfloat16", "float16": "float16",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6_e3m2": "float6_e3m2fn",
    "fp6_e2m3": "float6_e2m3fn", "fp4": "float4_e2m1fn", "fp8_e5m3": "float8_ue5m3fn",
    "mx": "", "mx6": "mx6", "mx9": "mx9", "bfp16": "bfp16",
})  # fmt: skip
"""``Dtype``: name to element or preset; an ``mx`` takes its element from ``mx_element_dtype``."""
SCALES: Mapping[str, str] = MappingProxyType({
    "float": "input", "pof2": "ceil", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_ue4m3fn", "fp8_e5m3": "float8_ue5m3fn", "e8m0": "even",
})  # fmt: skip
"""``ScaleType`` and the scale formats of newer releases."""
ROUNDINGS: Mapping[str, str] = MappingProxyType(
    {"round": "half_away", "floor": "floor", "half_even": "half_even"}
)
"""``RoundType``."""
ZERO_POINTS: Mapping[str, str] = MappingProxyType({"int32": "integer", "float32": "real"})
"""``ZeroPointType``."""
DEVICES = ("CPU", "IPU")
"""``DeviceType``; both take the same bytes."""
MODES = ("eager_mode", "fx_graph_mode")
"""``QuantizationMode``."""
THRESHOLDS: Mapping[str, str] = MappingProxyType({"_3SD": "3sd", "_KL_J": "kl_j", "_LL_J": "kl_j"})
"""``TQTThresholdInitMeth``; the documents spell the second ``_LL_J``, the code ``_KL_J``."""
_CASTS = ("bfloat16", "float16")
_PRESETS = ("mx6", "mx9", "bfp16")
_BLOCK = 32
"""Elements under one exponent of an OCP MX block (OCP MX 1.0, section 5)."""
KEYS = (
    "dtype", "qscheme", "ch_axis", "group_size", "symmetric", "zero_point_type", "scale_type", "round_method",
    "mx_element_dtype", "is_dynamic", "observer_cls",
)  # fmt: skip
"""Keys of a specification that are read; the last two say when, not how, and change no scheme."""


def scheme_from_quark(spec: Mapping[str, object]) -> Scheme:
    """Return the scheme that a Quark quantization specification describes.

    spec: ``dtype``, ``qscheme`` (per_tensor, per_channel, per_group), ``ch_axis``, ``group_size``,
    ``symmetric``, ``zero_point_type``, ``scale_type``, ``round_method``, ``mx_element_dtype``.
    Raises RecipeError for an unknown key or name and for what is missing or contradicts itself.

    >>> print(
    ...     scheme_from_quark(
    ...         {"dtype": "uint4", "qscheme": "per_group", "group_size": 64, "symmetric": False}
    ...     )
    ... )
    uint4:g64:asym
    """
    for key in spec:
        if key not in KEYS:
            raise RecipeError(f"Quark's key {key!r} is unknown; {near_misses(str(key), KEYS)}")
    if "dtype" not in spec:
        raise RecipeError("a Quark specification needs a dtype")
    name = str(spec["dtype"])
    element = _named(DTYPES, "dtype", name)
    rounding = _named(ROUNDINGS, "round_method", str(spec.get("round_method", "half_even")))
    ending = "" if rounding == "half_even" else f":round={rounding}"
    if name in _CASTS:
        return Scheme.parse(f"{element}:cast{ending}")
    if name in _PRESETS:
        return Scheme.parse(element + ending)
    if name == "mx":
        inner = _named(DTYPES, "mx_element_dtype", str(spec.get("mx_element_dtype", "")))
        inner = "int8_mx:narrow" if inner == "int8" else inner
        word, _, option = inner.partition(":")
        extra = f":{option}" if option else ""
        return Scheme.parse(f"{word}:g{_whole(spec, 'group_size', _BLOCK)}:scale=even{extra}{ending}")
    return Scheme.parse(f"{element}:{_granularity(spec)}{_zero_point(spec)}{_scale(spec)}{ending}")


def _named(table: Mapping[str, str], key: str, name: str) -> str:
    if name not in table:
        raise RecipeError(f"Quark's {key} {name!r} is unknown; {near_misses(name, table)}")
    return table[name]


def _whole(spec: Mapping[str, object], key: str, default: int | None) -> int:
    value = spec.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecipeError(f"Quark's {key} (={value!r}) must be a whole number")
    return value


def _granularity(spec: Mapping[str, object]) -> str:
    kind = str(spec.get("qscheme", "per_tensor"))
    if kind == "per_channel":
        return f"channel{_whole(spec, 'ch_axis', 0)}"
    if kind == "per_group":
        return f"g{_whole(spec, 'group_size', None)}"
    _named({"per_tensor": "", "per_channel": "", "per_group": ""}, "qscheme", kind)
    return "tensor"


def _zero_point(spec: Mapping[str, object]) -> str:
    if spec.get("symmetric", True):
        return ""
    kind = _named(ZERO_POINTS, "zero_point_type", str(spec.get("zero_point_type", "int32")))
    return ":asym" if kind == "integer" else ":asym=real"


def _scale(spec: Mapping[str, object]) -> str:
    chosen = _named(SCALES, "scale_type", str(spec.get("scale_type", "float32")))
    return "" if chosen == "float32" else f":scale={chosen}"
