"""``quantization_config`` of compressed-tensors: what a model's config.json says about its quantized layers.

    {"quant_method": "compressed-tensors", "format": LAYOUT, "ignore": [MODULE, ...], "config_groups": {NAME:
    {
       "targets": ["Linear"], "format": LAYOUT, "weights": {ARGUMENTS}, "input_activations": {ARGUMENTS} or
       null}}}

Written as llm-compressor 0.14 writes it (compressed-tensors 0.19, all 13 arguments spelled out), which 0.20
reads too. This module turns schemes into that JSON and back; it opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UnsupportedError, near_misses
from ...formats import get_format
from ...formats.rounding import Overflow
from ...patterns import REGEX, name_patterns
from ...recipes import Activation
from ...schemes import PRESETS, Granularity, Preset, RangeRule, Rounding, Scheme, ZeroPoint
from ...schemes.scale_rules import EVEN, RULES, Search, rule_named
from ..act_order import group_index
from ..block_extents import blocks
from ..protocol import LayerScheme
from .layout import MX, Layout, strategy
from .older import OlderForm, stored_otherwise

if TYPE_CHECKING:
    from . import CompressedTensors

QUANT_METHOD = "compressed-tensors"
DIALECT = "compressed-tensors"
NAMES: Mapping[str, Preset] = MappingProxyType(
    {name: preset for name, preset in PRESETS.items() if preset.weight.endswith(f":dialect={DIALECT}")}
)
"""The presets of this codec by name: those in its dialect."""
VERSION = "0.19.0"
"""The compressed-tensors whose form of the configuration is written."""
LINEAR = "Linear"
_E8M0, _E4M3 = "torch.uint8", "torch.float8_e4m3fn"
_SCALE_RULE = "scale_rule"
"""Key of ``observer_kwargs``, which loaders pass over: the rule of powers of two where it is not even, since
what was clipped, and so the bound, follows from it."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers of one scheme, and their targets: class, modules, ``re:`` patterns."""

    layer: LayerScheme
    targets: tuple[str, ...] = (LINEAR,)
    act_order: bool = False
    """Whether the configuration says that columns may lie in groups out of order."""


@dataclass(frozen=True, kw_only=True)
class WrittenGroup:
    """Layers that another configuration describes, in its own words.

    name: of the group there. layout: what that configuration says of all its groups. written: the group.
    targets: what names the layers now.
    """

    name: str
    layout: str | None
    written: Mapping[str, Any]
    targets: tuple[str, ...]


def quantization_config(
    groups: Sequence[Group | WrittenGroup],
    ignore: Sequence[str],
    *,
    kv_cache: Any = None,
    decodes: bool = True,
) -> dict[str, Any]:
    """Return the JSON object for layers of ``groups``.

    ``ignore`` must name all other matrices' modules. A loader takes the first group that fits. Groups are
    named after their presets, or ``group_<n>``. kv_cache: how keys and values are quantized, in the words of
    another configuration. Where weights alone are quantized, all in one way, ``dequantize`` tells
    transformers to decode them while it loads: what it leaves for the first forward has no ``.weight`` for
    the model code that asks for one (T5, Mamba, SigLIP), and floats of 4 bits would become bfloat16 in a
    float32 model. Other loaders do not know the word. decodes: whether transformers can do so with all
    tensors of the model.
    """
    table: dict[str, Any] = {}
    for number, group in enumerate(groups):
        name = group.name if isinstance(group, WrittenGroup) else _preset_name(group.layer)
        table[f"group_{number}" if name is None or name in table else name] = _entry(group)
    layouts = {entry["format"] for entry in table.values()}
    inputs = ("input_activations", "output_activations")
    alone = all(entry.get(key) is None for entry in table.values() for key in inputs)
    decoded = decodes and len(table) == 1 and kv_cache is None and alone
    return {
        "config_groups": table,
        **({"dequantize": True} if decoded else {}),
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": kv_cache,
        "quant_method": QUANT_METHOD,
        "quantization_status": "compressed",
        "transform_config": {},
        "version": VERSION,
    }


def _preset_name(layer: LayerScheme) -> str | None:
    return layer.name.upper() if layer.name in NAMES else None


def _entry(group: Group | WrittenGroup) -> dict[str, Any]:
    """Return the JSON object of one group."""
    if isinstance(group, WrittenGroup):
        layout = group.written.get("format") or group.layout
        return {**group.written, "targets": list(group.targets), "format": layout}
    layer = group.layer
    return {
        "targets": list(group.targets),
        "weights": _arguments(layer.weight) | ({"actorder": "group"} if group_index(layer) else {}),
        "input_activations": None if layer.input is None else input_arguments(layer.input),
        "output_activations": None,
        "format": layer.layout.partition(" ")[0],
    }


def input_arguments(given: Activation) -> dict[str, Any]:
    """Return the thirteen arguments of inputs.

    Codes without a sign count as signed ones, shifted. Raises UnsupportedError for inputs that engines, which
    quantize them by rules of their own, do not have.

    >>> static = input_arguments(Activation.of("uint8:tensor:asym"))
    >>> static["type"], static["dynamic"], static["strategy"], static["symmetric"]
    ('int', False, 'tensor', False)
    """
    scheme = given.scheme
    for refused, why in _INPUT_RULES:
        if refused(scheme):
            raise UnsupportedError(f"input {given} {why}")
    arguments = _arguments(scheme)
    word = arguments["strategy"]
    if given.dynamic:
        return {**arguments, "strategy": "token" if word == "channel" else word, "dynamic": True}
    if word not in ("tensor", "tensor_group") or scheme.scales[0].rule.power_of_two:
        raise UnsupportedError(
            f"input {given} needs more than one linear scale from data, and the layouts hold one; use tensor"
        )
    return {**arguments, "dynamic": False if word == "tensor" else "local"}


_INPUT_ELEMENTS = (*map(get_format, ("int8", "uint8", "float8_e4m3fn", "float4_e2m1fn")),)
_INPUT_RULES: tuple[tuple[Callable[[Scheme], bool], str], ...] = (
    (
        lambda s: s.element not in _INPUT_ELEMENTS or not s.scales,
        "has codes that no engine takes; use int8, uint8 with asym, float8_e4m3fn or float4_e2m1fn",
    ),
    (
        lambda s: s.zero_point is ZeroPoint.REAL or (s.element.is_whole and s.qmin == 0 and not _affine(s)),
        "has codes that no engine takes; use int8, or uint8 with asym",
    ),
    (
        lambda s: s.range_rule is not RangeRule.FULL,
        "leaves out a code, and engines use all; leave out narrow",
    ),
    (
        lambda s: s.rounding != Rounding() or s.overflow is not Overflow.SATURATE,
        "rounds or overflows as no engine does; leave out round and overflow",
    ),
    (
        lambda s: s.scales[0].rule.power_of_two and s.scales[0].rule != EVEN,
        "has another rule for powers of two than engines; use scale=even",
    ),
)
"""Inputs that engines do not have, with their refusals."""


def read_input(arguments: object) -> Activation | None:
    """Return the input quantization in a group's ``input_activations``, or None.

    Raises UnsupportedError for what is not read.

    >>> print(read_input(input_arguments(Activation.of("uint8:tensor:asym"))))
    int8:tensor:asym:dialect=compressed-tensors static
    """
    if arguments is None:
        return None
    if not isinstance(arguments, dict):
        raise CheckpointError("input_activations of a group must be an object; the file is damaged")
    e8m0 = arguments.get("scale_dtype") == _E8M0 or (
        arguments.get("strategy") == "group" and arguments.get("group_size") == _MX_BLOCK
    )
    word = "channel" if arguments.get("strategy") == "token" else arguments.get("strategy")
    scheme = _scheme({**arguments, "strategy": word, "dynamic": False}, e8m0=e8m0)
    scale = scheme.scales[0]
    if scale.format is None:  # computed and kept in float32
        scheme = replace(scheme, scales=(replace(scale, format=get_format("float32")),))
    if word == "channel":
        levels = (replace(scheme.scales[0], granularity=Granularity.token()),)
        scheme = replace(scheme, scales=levels)
    return Activation(scheme=scheme, dynamic=arguments.get("dynamic") is True)


_MX_BLOCK = 32
"""Elements under one exponent of an OCP MX block (OCP MX 1.0, section 5)."""


def _affine(scheme: Scheme) -> bool:
    return scheme.zero_point is not ZeroPoint.NONE


def _arguments(scheme: Scheme) -> dict[str, Any]:
    """Return the thirteen arguments of weights."""
    rows, columns = blocks(scheme)
    word = strategy(scheme)
    affine = _affine(scheme)
    rule = scheme.scales[0].rule
    scale_dtype = _E4M3 if word == "tensor_group" else _E8M0 if rule.power_of_two else None
    return {
        "actorder": None,
        "block_structure": [rows, columns] if word == "block" else None,
        "dynamic": False,
        "group_size": columns if word in ("group", "tensor_group") else None,
        "num_bits": scheme.bits,
        "observer": None,
        "observer_kwargs": {_SCALE_RULE: rule.text} if rule.power_of_two and rule != EVEN else {},
        "scale_dtype": scale_dtype,
        "strategy": word,
        "symmetric": not affine,
        "type": "int" if scheme.element.is_integer else "float",
        "zp_dtype": "torch.int8" if affine else None,
    }


def _scheme(arguments: Mapping[str, Any], *, e8m0: bool) -> Scheme:
    """Return the weight scheme of ``arguments``, scales linear in its dtype."""
    _require_known(arguments)
    bits, kind = arguments.get("num_bits"), str(arguments.get("type"))
    floats = {4: "float4_e2m1fn", 6: "float6_e2m3fn", 8: "float8_e4m3fn"}
    elements = {("float", b): name for b, name in floats.items()}
    elements |= {("int", b): f"int{b}" for b in range(2, 9)}
    if not isinstance(bits, int) or (kind, bits) not in elements:
        raise UnsupportedError(
            f"quantized weights of type {kind!r} with {bits!r} bits cannot be read; known are "
            f"{_known(elements)}"
        )
    group, shape = arguments.get("group_size"), arguments.get("block_structure")
    word = arguments.get("strategy") or ("group" if isinstance(group, int) and group > 0 else "tensor")
    parts = [elements[kind, bits]]
    if word in ("tensor", "channel"):
        parts.append(word)
    elif word in ("group", "tensor_group") and isinstance(group, int):
        parts.append(f"g{group}" if group > 0 else "channel")
    elif word == "block" and isinstance(shape, list):
        parts.append("block" + "x".join(str(extent) for extent in shape))
    else:
        raise UnsupportedError(
            f"strategy {word!r} of quantized weights cannot be read; known are tensor, channel, group, block"
        )
    if word == "tensor_group":
        parts.append("scale=float8_ue4m3fn:scale2=float32@tensor")
    else:
        parts.append(f"scale={_rule(arguments)}" if e8m0 else "scale=input")
    if arguments.get("symmetric") is False:
        parts.append("asym")
    return Scheme.parse(":".join([*parts, f"dialect={DIALECT}"]))


def _rule(arguments: Mapping[str, Any]) -> str:
    """Return the power-of-two scale rule's name, by default even."""
    kwargs = arguments.get("observer_kwargs")
    found = kwargs.get(_SCALE_RULE) if isinstance(kwargs, dict) else None
    if found is None:
        return EVEN.text
    rule = rule_named(found) if isinstance(found, str) else None
    if isinstance(rule, Search):
        return f"{found}/{_POWERS}"
    if rule is None or not rule.power_of_two:
        known = [name for name, rule in RULES.items() if rule.power_of_two]
        raise UnsupportedError(f"{_SCALE_RULE} {found!r:.40} is unknown; known are {', '.join(known)}")
    return str(found)


_POWERS = "float8_e8m0fnu"
_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder")
_ARGUMENTS = frozenset((*_KEYS, "observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
_ACT_ORDER = (True, "group", "dynamic")
"""Values of actorder under which ``weight_g_idx`` may put columns into groups out of order."""
_IN_ORDER = (None, False, "weight", "static")
"""Those under which it does not."""


def _require_known(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for arguments with an unknown meaning."""
    unknown = sorted(key for key, value in arguments.items() if key not in _ARGUMENTS and value is not None)
    if unknown:
        raise UnsupportedError(
            f"weights of quantization_config have the key {unknown[0]!r} (={arguments[unknown[0]]!r:.40}), "
            "whose meaning is not known here; update zeropoint, or verify it with the tool that wrote it"
        )
    if arguments.get("dynamic"):
        raise UnsupportedError(
            f"weights of quantization_config are dynamic (={arguments['dynamic']!r:.40}), so they have no "
            "stored scales; the file is damaged"
        )
    if arguments.get("actorder") not in (*_ACT_ORDER, *_IN_ORDER):
        raise UnsupportedError(
            f"weights of quantization_config have actorder {arguments['actorder']!r:.40}, which is not known "
            "here; verify it with the tool that wrote it"
        )


def _known(elements: Mapping[tuple[str, int], str]) -> str:
    return ", ".join(elements.values())


_UNREAD = ("transform_config", "sparsity_config")
"""Parts of a configuration under which the stored numbers differ from the model's weights."""


def require_plain(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where stored weights are not the model's."""
    for key in _UNREAD:
        found = config.get(key)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            raise UnsupportedError(
                f"its {key} is not empty, so that the stored weights are not those of the model; pass the "
                "original checkpoint"
            )


_OTHER_ARGUMENTS = ("input_activations", "output_activations")


def weight_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups with weights; others quantize inputs alone."""
    return [
        group
        for group in config["config_groups"].values()
        if group.get("weights") is not None or not any(map(group.get, _OTHER_ARGUMENTS))
    ]


def read_config(
    config: Mapping[str, Any], codec: CompressedTensors
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Return the groups and ignored modules of a ``quantization_config``.

    Inputs are not read. Raises CheckpointError for another quantization method or a malformed object,
    UnsupportedError for what these layouts do not cover.
    """
    method = config.get("quant_method")
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"quant_method is {method!r}, but only {QUANT_METHOD} and fp8 are read; pass one of these"
        )
    require_plain(config)
    found = config.get("config_groups")
    if not isinstance(found, dict) or not all(isinstance(group, dict) for group in found.values()):
        raise CheckpointError(
            "config_groups of quantization_config must be an object of objects; the file is damaged"
        )
    groups = []
    for group in weight_groups(config):
        text = group.get("format") or config.get("format")
        layouts = {layout.value: layout for layout in Layout}
        if not isinstance(text, str) or text not in layouts:
            raise UnsupportedError(f"layout {text!r} cannot be read; {near_misses(str(text), layouts)}")
        arguments, targets = group.get("weights"), group.get("targets")
        if not isinstance(arguments, dict) or not isinstance(targets, list):
            raise CheckpointError(
                "a group of quantization_config lacks weights or targets; the file is damaged"
            )
        layout = layouts[text]
        weight = _scheme(arguments, e8m0=layout in MX)
        given = _ANY_INPUT if layout in (Layout.INT, Layout.FLOAT) else None
        own = replace(codec, form=OlderForm(layout=layout)) if stored_otherwise(layout, weight) else codec
        layer = LayerScheme(codec=own, name=str(weight), weight=weight, input=given)
        if layer.layout != text:
            raise CheckpointError(
                f"layout {text!r} does not fit {weight}, which takes {layer.layout}; the file is damaged"
            )
        order = arguments.get("actorder") in _ACT_ORDER
        groups.append(Group(layer=layer, targets=tuple(map(str, targets)), act_order=order))
    ignore = config.get("ignore") or []
    if not isinstance(ignore, list):
        raise CheckpointError("ignore of quantization_config must be a list; the file is damaged")
    return tuple(groups), tuple(map(str, ignore))


_ANY_INPUT = Activation.of("int8:token")
"""Placeholder for the inputs of layouts that have some: how they are quantized is not read."""


class Targets:
    """Targets of modules, compiled for many lookups: a class, modules, patterns."""

    def __init__(self, targets: Iterable[str]) -> None:
        found = list(targets)
        self._names = frozenset(target for target in found if not target.startswith(REGEX))
        self._patterns = name_patterns(target for target in found if target.startswith(REGEX))

    def match(self, module: str, *, linear: bool = False) -> bool:
        """Return whether it names ``module``, or the class of ``linear`` ones."""
        if module in self._names or (linear and LINEAR in self._names):
            return True
        return any(pattern.matches(module) for pattern in self._patterns)


def matches(module: str, targets: Iterable[str], *, linear: bool = False) -> bool:
    """Return whether one of ``targets`` names ``module``; see :class:`Targets`.

    >>> matches("model.layers.0.mlp.gate", ["re:.*mlp.gate$"])
    True
    """
    return Targets(targets).match(module, linear=linear)
