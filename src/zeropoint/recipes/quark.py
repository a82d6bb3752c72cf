"""Quark's enumerations and specifications, read into zeropoint schemes.

The names are from quark.torch.quantization.config.type (amd-quark 0.13). What they mean is spelled in our
own algebra and default dialect; Quark's own kernels ignore some of them in places (its processors round half
to even whatever ``round_method`` says), which is not imitated here. Nothing of a specification is dropped: a
key is read, or it is refused by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from ..errors import RecipeError, near_misses
from ..schemes import Granularity, Scheme

E = TypeVar("E", bound=enum.StrEnum)


class QSchemeType(enum.StrEnum):
    """Which elements share parameters."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


class ZeroPointType(enum.StrEnum):
    """What a zero point is: a code, or a real number."""

    int32 = "int32"
    float32 = "float32"


class Dtype(enum.StrEnum):
    """The formats of codes; an ``mx`` takes its element from ``mx_element_dtype``."""

    int8 = "int8"
    uint8 = "uint8"
    int16 = "int16"
    uint16 = "uint16"
    int32 = "int32"
    uint32 = "uint32"
    int4 = "int4"
    uint4 = "uint4"
    int3 = "int3"
    int2 = "int2"
    uint2 = "uint2"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    fp8_e5m3 = "fp8_e5m3"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    mx = "mx"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"


class ScaleType(enum.StrEnum):
    """Formats of scales; ``float`` means the tensor's own dtype."""

    float = "float"
    pof2 = "pof2"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"


class RoundType(enum.StrEnum):
    """How quotients become codes."""

    round = "round"
    floor = "floor"
    half_even = "half_even"


class DeviceType(enum.StrEnum):
    """What a model is made for; both take the same bytes."""

    CPU = "CPU"
    IPU = "IPU"


class QuantizationMode(enum.StrEnum):
    """Quantization of modules (``zp.quantize_model``) or of graphs (``quantize_graph``)."""

    eager_mode = "eager_mode"
    fx_graph_mode = "fx_graph_mode"


class TQTThresholdInitMeth(enum.StrEnum):
    """Initial value of trained thresholds; documents and code spell ``_LL_J``, ``_KL_J``."""

    _3SD = "_3SD"
    _LL_J = "_LL_J"
    _KL_J = "_LL_J"


_ELEMENTS: Mapping[Dtype, str] = MappingProxyType({
    **{dtype: dtype.value for dtype in Dtype if "int" in dtype.value},
    Dtype.bfloat16: "bfloat16", Dtype.float16: "float16", Dtype.fp8_e4m3: "float8_e4m3fn",
    Dtype.fp8_e5m2: "float8_e5m2", Dtype.fp8_e5m3: "float8_ue5m3fn", Dtype.fp6_e3m2: "float6_e3m2fn",
    Dtype.fp6_e2m3: "float6_e2m3fn", Dtype.fp4: "float4_e2m1fn",
})  # fmt: skip
_OCP_ELEMENTS: Mapping[Dtype, str] = MappingProxyType(
    {
        **{
            dtype: _ELEMENTS[dtype] for dtype in Dtype if dtype.value.startswith("fp") and dtype != "fp8_e5m3"
        },
        Dtype.int8: "int8_mx",
    }
)
"""The element types of OCP MX 1.0, table 1."""
_SCALES: Mapping[ScaleType, str] = MappingProxyType({
    # ``rceil`` is the smallest power of two that clips nothing; ``ceil``, of OCP elements, leaves half of the
    # integers unused where amax is just above a power of two.
    ScaleType.float: "input", ScaleType.pof2: "rceil", ScaleType.float32: "float32",
    ScaleType.float16: "float16", ScaleType.bfloat16: "bfloat16", ScaleType.float8_e5m3: "float8_ue5m3fn",
})  # fmt: skip
_SCALE_FORMATS: Mapping[str, str] = MappingProxyType(
    {"float32": "float32", "e5m3": "float8_ue5m3fn", "e4m3": "float8_ue4m3fn", "e8m0": "e8m0"}
)
_MODES = ("even", "floor", "ceil")
_ROUNDINGS: Mapping[RoundType, str] = MappingProxyType(
    {RoundType.round: ":round=half_away", RoundType.floor: ":round=floor", RoundType.half_even: ""}
)
_CASTS = (Dtype.bfloat16, Dtype.float16)
_BLOCKS: Mapping[Dtype, int] = MappingProxyType({Dtype.mx: 32, Dtype.mx6: 16, Dtype.mx9: 16, Dtype.bfp16: 8})
"""Elements under one exponent: OCP MX 1.0, section 5; arXiv:2302.08007, table 2."""
_OBSERVERS = (
    "PlaceholderObserver", "PerTensorMinMaxObserver", "PerTensorPowOf2MinMaxObserver",
    "PerChannelMinMaxObserver", "PerChannelPowOf2MinMaxObserver", "PerGroupMinMaxObserver",
    "PerBlockMXObserver", "PerBlockMXBufferReuseObserver", "PerBlock2DMinMaxObserver", "PerBlockBFPObserver",
)  # fmt: skip
"""Those that take the extremes of the data, as schemes do."""
_ALWAYS = (
    "dtype", "round_method", "is_dynamic", "observer_cls", "target_device", "device", "quant_mode",
    "enable_buffer_reuse", "max_input_numel",
)  # fmt: skip
"""Keys that mean something, or say when and where and not how, for every dtype."""
_SCALED = (
    "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "zero_point_type", "scale_type",
    "scale_format", "scale_calculation_mode",
)  # fmt: skip
KEYS = (*_ALWAYS, *_SCALED, "mx_element_dtype", "is_scale_quant", "qat_spec")
"""All keys of a specification."""


def scheme_from_quark(spec: Mapping[str, object]) -> Scheme:
    """Return the scheme that a Quark quantization specification describes.

    Args:
        spec: what ``QTensorConfig.to_dict()`` gives, or its fields: names as text or as members of Quark's or
            of these enumerations. None means that a key is not given. Without ``symmetric`` there is no zero
            point, without ``scale_type`` scales are float32, without ``qscheme`` there is one for the tensor.

    Raises:
        RecipeError: for an unknown key or name, for what is missing or contradicts itself, and for a key that
            the dtype does not use.
        SchemeError: for a combination without meaning.

    Example:
        >>> print(
        ...     scheme_from_quark(
        ...         {"dtype": Dtype.uint4, "qscheme": "per_group", "group_size": 64, "symmetric": False}
        ...     )
        ... )
        uint4:g64:asym
    """
    for key in spec:
        if key not in KEYS:
            raise RecipeError(f"Quark's key {key!r} is unknown; {near_misses(str(key), KEYS)}")
    given = {key: value for key, value in spec.items() if value is not None}
    if "dtype" not in given:
        raise RecipeError("a Quark specification needs a dtype")
    dtype = _member(Dtype, "dtype", given)
    _check_circumstances(given)
    ending = _ROUNDINGS[_member(RoundType, "round_method", given, RoundType.half_even)]
    if dtype in _CASTS:
        _refuse_others(dtype, given, ())
        return Scheme.parse(f"{_ELEMENTS[dtype]}:cast{ending}")
    if dtype in _BLOCKS:
        return Scheme.parse(_shared_exponent(dtype, given) + ending)
    _refuse_others(dtype, given, _SCALED)
    zeros = _zero_point(given)
    return Scheme.parse(f"{_ELEMENTS[dtype]}:{_granularity(given)}{zeros}{_scale(given)}{ending}")


def _check_circumstances(given: Mapping[str, object]) -> None:
    """Check the keys that change no scheme."""
    for key in ("target_device", "device"):
        _member(DeviceType, key, given, DeviceType.CPU)
    _member(QuantizationMode, "quant_mode", given, QuantizationMode.eager_mode)
    for key in ("is_dynamic", "enable_buffer_reuse", "is_scale_quant"):
        _truth(given, key, default=False)
    _whole(given, "max_input_numel", 1)
    observer = given.get("observer_cls", _OBSERVERS[0])
    name = observer.__name__ if isinstance(observer, type) else str(observer)
    if name not in _OBSERVERS:
        raise RecipeError(
            f"Quark's observer_cls {name!r} takes other ranges than the extremes, which no scheme says; "
            "leave it out, and give zp.calibrate a statistic"
        )
    if _truth(given, "is_scale_quant", default=False):
        raise RecipeError(
            "Quark's is_scale_quant (=True) describes the scales of another specification; write the scheme, "
            "as in float4_e2m1fn:g16:scale=ue4m3:scale2=float32@tensor"
        )
    if "qat_spec" in given:
        raise RecipeError(
            "Quark's qat_spec says how a model is trained, not how a tensor is quantized; leave it out and "
            "take a quantizer of zeropoint.training"
        )


def _refuse_others(dtype: Dtype, given: Mapping[str, object], used: Iterable[str]) -> None:
    """Raise RecipeError for meaningless keys, but for Quark's written defaults."""
    idle = {"zero_point_type": "int32", "is_scale_quant": "False"}
    for key, value in given.items():
        if key not in (*_ALWAYS, *used) and _word(value) != idle.get(key):
            raise RecipeError(
                f"Quark's {key} (={_word(value)}) means nothing for dtype {dtype}; leave it out"
            )


def _shared_exponent(dtype: Dtype, given: Mapping[str, object]) -> str:
    """Return the scheme of shared-exponent blocks, without rounding."""
    mine = ("ch_axis", "group_size", "scale_calculation_mode")
    of_mx = ("mx_element_dtype", "qscheme", "scale_type", "scale_format") if dtype is Dtype.mx else ()
    _refuse_others(dtype, given, (*mine, *of_mx))
    axis, size = _whole(given, "ch_axis", -1), _whole(given, "group_size", _BLOCKS[dtype])
    mode = _named(_MODES, "scale_calculation_mode", given.get("scale_calculation_mode", "even"))
    blocks = _blocks(size, axis)
    if dtype is Dtype.mx:
        element = _OCP_ELEMENTS.get(_member(Dtype, "mx_element_dtype", given))
        if element is None:
            known = ", ".join(_OCP_ELEMENTS)
            raise RecipeError(
                f"Quark's mx_element_dtype (={_word(given['mx_element_dtype'])}) must be one of {known}"
            )
        for key, wanted in (("qscheme", "per_group"), ("scale_format", "e8m0")):
            if _word(given.get(key, wanted)) != wanted:
                raise RecipeError(f"Quark's {key} (={_word(given[key])}) must be {wanted} for dtype mx")
        if _word(given.get("scale_type", "float")) not in ("float", "pof2", "float8_e8m0fnu"):
            raise RecipeError(f"Quark's scale_type (={_word(given['scale_type'])}) must be pof2 for dtype mx")
        return f"{element}:{blocks}:scale={mode}" + (":narrow" if element == "int8_mx" else "")
    if mode != "even":
        raise RecipeError(
            f"Quark's scale_calculation_mode (={mode}) means nothing for dtype {dtype}; leave it out"
        )
    if dtype is Dtype.bfp16:
        return f"int8_mx:{blocks}:scale=even"
    if size % 2:
        raise RecipeError(
            f"Quark's group_size (={size}) must be even for dtype {dtype}, whose pairs share a bit"
        )
    return f"{dtype}_element:{_blocks(2, axis)}:scale=floor/microexponent:scale2=floor@{blocks}"


def _granularity(given: Mapping[str, object]) -> str:
    kind = _member(QSchemeType, "qscheme", given, QSchemeType.per_tensor)
    used = {
        QSchemeType.per_tensor: (),
        QSchemeType.per_channel: ("ch_axis",),
        QSchemeType.per_group: ("ch_axis", "group_size"),
        QSchemeType.per_block: ("block_size",),
    }[kind]
    for key in ("ch_axis", "group_size", "block_size"):
        if key in given and key not in used:
            raise RecipeError(
                f"Quark's {key} (={given[key]!r}) means nothing for qscheme {kind}; leave it out"
            )
    if kind is QSchemeType.per_channel:
        return str(Granularity.channel(_whole(given, "ch_axis", 0)))
    if kind is QSchemeType.per_group:
        return _blocks(_whole(given, "group_size", None), _whole(given, "ch_axis", -1))
    if kind is QSchemeType.per_block:
        sides = given.get("block_size")
        if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(s) is int for s in sides):
            raise RecipeError(f"Quark's block_size (={sides!r}) must be two whole numbers, rows and columns")
        return str(Granularity.block(*sides))
    return str(Granularity.tensor())


def _blocks(size: int, axis: int) -> str:
    """Return blocks of ``size`` along ``axis``; -1: the whole axis."""
    if size < 1 and size != -1:
        raise RecipeError(f"Quark's group_size (={size}) must be positive, or -1 for a whole axis")
    return str(Granularity.along(axis, 0 if size == -1 else size))


def _zero_point(given: Mapping[str, object]) -> str:
    kind = _member(ZeroPointType, "zero_point_type", given, ZeroPointType.int32)
    if not _truth(given, "symmetric", default=True):
        return ":asym" if kind is ZeroPointType.int32 else ":asym=real"
    if kind is ZeroPointType.float32:
        raise RecipeError("Quark's zero_point_type (=float32) needs symmetric (=False), or leave it out")
    return ""


def _scale(given: Mapping[str, object]) -> str:
    kind = _member(ScaleType, "scale_type", given, ScaleType.float32)
    chosen = _SCALES.get(kind, "e8m0")
    # Quark's own specifications write the format of block scales next to a scale_type that says "float".
    if "scale_format" in given:
        named = _SCALE_FORMATS[_named(_SCALE_FORMATS, "scale_format", given["scale_format"])]
        if kind in (ScaleType.float, ScaleType.float32):
            chosen = chosen if named == "float32" else named
        elif named not in (chosen, "float32"):
            raise RecipeError(
                f"Quark's scale_format (={given['scale_format']}) contradicts scale_type (={kind}); "
                "leave out one"
            )
    if chosen == "e8m0":
        chosen = _named(_MODES, "scale_calculation_mode", given.get("scale_calculation_mode", "even"))
    elif "scale_calculation_mode" in given:
        raise RecipeError(
            f"Quark's scale_calculation_mode (={given['scale_calculation_mode']}) needs power-of-two scales, "
            "scale_format e8m0"
        )
    return "" if chosen == "float32" else f":scale={chosen}"


def _word(value: object) -> str:
    """Return an enumeration member's name, or another value's text."""
    return value.name if isinstance(value, enum.Enum) else str(value)


def _named(known: Iterable[str], key: str, value: object) -> str:
    name = _word(value)
    if name not in known:
        raise RecipeError(f"Quark's {key} {name!r} is unknown; {near_misses(name, known)}")
    return name


def _member(kind: type[E], key: str, given: Mapping[str, object], default: E | None = None) -> E:
    if key not in given and default is not None:
        return default
    return kind[_named(kind.__members__, key, given.get(key, ""))]


def _truth(given: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise RecipeError(f"Quark's {key} (={value!r}) must be True or False")
    return value


def _whole(given: Mapping[str, object], key: str, default: int | None) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecipeError(f"Quark's {key} (={value!r}) must be a whole number")
    return value
