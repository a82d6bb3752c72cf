"""Quark's configuration of weights and inputs, and its schemes.

This module knows words of the configuration, and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from ..formats import get_format
from ..formats.torch_dtypes import storage_dtype
from ..recipes import Activation
from ..schemes import Granularity, Scheme, ZeroPoint
from ..schemes.scale_rules import LINEAR
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES

SCALE_DTYPES = ("F32", "BF16", "F16")
_INTEGERS = ("int4", "uint4", "int8", "uint8")
ELEMENTS = MappingProxyType(
    {**{name: name for name in _INTEGERS}, "fp8_e4m3": "float8_e4m3fn", "fp4": "float4_e2m1fn"}
)
"""``dtype`` to the element format."""
CODE_DTYPES = MappingProxyType(
    {"int4": "I32", "uint4": "I32", "int8": "I8", "uint8": "U8", "fp8_e4m3": "F8_E4M3", "fp4": "U8"}
)
MX = 32
E5M3, E8M0 = "e5m3", "e8m0"
"""``scale_format`` of 4-bit floats: AMD's and OCP's."""
_E5M3_GROUPS = (16, 32)
_UE5M3 = get_format("float8_ue5m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarkKind:
    """Kind of a layer, which decides its tensors.

    dtype; qscheme; group: 0 without one. scale: ``scale_format`` of 4-bit floats, nothing for others.
    """

    dtype: str
    qscheme: str
    group: int
    scale: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} {self.qscheme}" + (f" {self.scale}" if self.scale == E5M3 else "")

    @property
    def integer(self) -> bool:
        """Whether codes are integers, with zero points, transposed in groups."""
        return self.dtype in _INTEGERS

    @property
    def symmetric(self) -> bool:
        """Whether codes are integers whose zero points are 0."""
        return self.dtype in ("int4", "int8")

    @property
    def words(self) -> bool:
        """Whether codes lie in words."""
        return CODE_DTYPES[self.dtype] == "I32"

    @property
    def transposed(self) -> bool:
        """Whether the lines of its tensors are inputs."""
        return self.integer and bool(self.group)


def kind_of(weight: Scheme) -> QuarkKind | None:
    """Return Quark's kind of a scheme, or None.

    >>> print(kind_of(Scheme.parse("int4:g128")))
    int4 per_group
    """
    dtype = next((name for name, text in ELEMENTS.items() if weight.element == get_format(text)), None)
    if dtype is None or weight.beyond_factors is not None or len(weight.scales) != 1 or weight.offsets:
        return None
    (rows, group), (level,) = blocks(weight), weight.scales
    whole = weight.granularity == Granularity.tensor()
    kind = QuarkKind(
        dtype=dtype, qscheme="per_tensor" if whole else "per_group" if group else "per_channel", group=group
    )
    fits = (whole or rows == 1) and (weight.zero_point is ZeroPoint.INTEGER) == (dtype in ("uint4", "uint8"))
    if dtype == "fp4":
        amd = level.rule == LINEAR and level.format == _UE5M3 and group in _E5M3_GROUPS
        fits &= amd or (group == MX and level.rule.power_of_two)
        kind = replace(kind, scale=E5M3 if amd else E8M0)
    else:
        storable = level.format is None or FILE_DTYPES.get(storage_dtype(level.format)) in SCALE_DTYPES
        fits &= storable and not level.rule.power_of_two
        fits &= not (whole and kind.words) and not (group and not kind.integer)
    return kind if fits else None


def text_of(kind: QuarkKind, scale: str) -> str:
    """Return the scheme text of a kind, with a torch scale dtype."""
    cut = {"per_tensor": "tensor", "per_channel": "channel"}.get(kind.qscheme, f"g{kind.group}")
    element = f"{ELEMENTS[kind.dtype]}:{cut}"
    if kind.scale == E5M3:
        return f"{element}:scale=float8_ue5m3fn"
    if kind.dtype == "fp4":
        return f"{element}:scale=even:dialect=compressed-tensors"
    if not kind.integer:
        return f"{element}:scale={scale}:dialect=compressed-tensors"
    return f"{element}{':asym' if kind.dtype.startswith('u') else ''}:scale={scale}:dialect=torch"


def kind_in(spec: object) -> QuarkKind:
    """Return the kind that a weight's entry of the configuration describes.

    Raises CheckpointError for a malformed one, UnsupportedError for one that is not read.

    >>> print(kind_in({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}))
    fp8_e4m3 per_tensor
    """
    if not isinstance(spec, dict):
        raise CheckpointError(f"weight of the configuration is {spec!r:.40}, but must be an object")
    dtype, qscheme, group = spec.get("dtype"), spec.get("qscheme"), spec.get("group_size")
    if isinstance(dtype, str) and dtype in ELEMENTS and isinstance(qscheme, str):
        size = group if qscheme == "per_group" and type(group) is int and group > 0 else 0
        said = str(spec.get("scale_format")) if dtype == "fp4" else ""
        kind = QuarkKind(dtype=dtype, qscheme=qscheme, group=size, scale=said)
        if (
            (qscheme == "per_group") == bool(size)
            and kind_of(Scheme.parse(text_of(kind, "float32"))) == kind
            and not (kind.integer and spec.get("symmetric") is not kind.symmetric)
            and spec.get("zero_point_type") != "float32"
            and spec.get("ch_axis") in (None, *((0,) if qscheme == "per_channel" else (1, -1)))
        ):
            return kind
    shown = {key: spec.get(key) for key in ("dtype", "qscheme", "group_size", "symmetric", "ch_axis")}
    raise UnsupportedError(
        f"weights of Quark with {shown!r:.160} are not read; known dtypes are {', '.join(ELEMENTS)}"
    )


_INPUTS: MappingProxyType[str, tuple[str, bool]] = MappingProxyType(
    {
        "fp8_e4m3 per_tensor": ("float8_e4m3fn:tensor", True),
        "fp8_e4m3 per_channel": ("float8_e4m3fn:token", False),
        "fp4 per_group": (f"float4_e2m1fn:g{MX}:scale=even", False),
        **{
            f"fp4 per_group e5m3 {group}": (f"float4_e2m1fn:g{group}:scale=float8_ue5m3fn", False)
            for group in _E5M3_GROUPS
        },
    }
)
"""The kinds of inputs, to their schemes and whether they may be static."""


def input_in(spec: object) -> Activation | None:
    """Return the configured input quantization, or None.

    Raises UnsupportedError for what is not read.

    >>> str(input_in({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}))
    'float8_e4m3fn:token dynamic'
    """
    if spec is None:
        return None
    table = spec if isinstance(spec, dict) else {}
    dynamic = table.get("is_dynamic") is True
    name, group = f"{table.get('dtype')} {table.get('qscheme')}", table.get("group_size")
    amd = table.get("scale_format") == E5M3
    scheme, static = _INPUTS.get(f"{name} {E5M3} {group}" if amd else name, ("", False))
    if not scheme or not (dynamic or static) or (group not in (None, MX) and not amd):
        shown = {key: table.get(key) for key in ("dtype", "qscheme", "group_size", "is_dynamic")}
        raise UnsupportedError(
            f"inputs of Quark with {shown!r:.160} are not read; known are {', '.join(_INPUTS)}"
        )
    return Activation.of(scheme, dynamic=dynamic)


def weight_spec(kind: QuarkKind) -> dict[str, Any]:
    """Return the configuration of a weight."""
    groups = {"per_group": -1, "per_channel": 0}
    observers = {"per_group": "PerGroup", "per_channel": "PerChannel", "per_tensor": "PerTensor"}
    mx, amd = kind.dtype == "fp4", kind.scale == E5M3
    return {
        "dtype": kind.dtype, "qscheme": kind.qscheme, "ch_axis": groups.get(kind.qscheme),
        "group_size": kind.group or None, "block_size": None, "is_dynamic": False,
        "symmetric": None if mx else not kind.dtype.startswith("u"), "round_method": "half_even",
        "observer_cls": "PerBlockMXObserver" if mx else f"{observers[kind.qscheme]}MinMaxObserver",
        "scale_type": "float8_e5m3" if amd else "float", "scale_format": kind.scale or None,
        "scale_calculation_mode": "even" if mx and not amd else None, "mx_element_dtype": None,
        "zero_point_type": "int32", "is_scale_quant": False,
    }  # fmt: skip


def input_spec(given: Activation) -> dict[str, Any] | None:
    """Return the configuration of inputs, or None if inexpressible."""
    for name, (text, static) in _INPUTS.items():
        if given.scheme == Scheme.parse(text) and (given.dynamic or static):
            dtype, qscheme, *more = name.split()
            group = int(more[-1]) if more else MX if dtype == "fp4" else 0
            scale = E5M3 if more else E8M0 if dtype == "fp4" else ""
            spec = weight_spec(QuarkKind(dtype=dtype, qscheme=qscheme, group=group, scale=scale))
            return spec | {"is_dynamic": given.dynamic} | ({"ch_axis": 1} if qscheme == "per_channel" else {})
    return None
