"""``quantization_config`` of GPTQ: the scheme of each module, by rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedError, printable
from ..patterns import REGEX, name_patterns
from ..schemes import Scheme
from .records import group_size

QUANT_METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
SKIP, OTHER = "-:", "+:"
"""Prefixes of ``dynamic`` rules that keep a module, or give it another scheme."""
BITS = (2, 3, 4, 8)


def weight_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the weight scheme under a ``quantization_config``, with float16 scales.

    Raises UnsupportedError for what is not read, CheckpointError for a malformed value.

    >>> str(weight_scheme({"bits": 4, "group_size": 128, "sym": True}))
    'int4:g128:scale=float16'
    """
    bits, group = config.get("bits"), config.get("group_size")
    if bits not in BITS or type(bits) is not int:
        raise UnsupportedError(f"GPTQ weights of {bits!r:.40} bits cannot be read; known are {BITS}")
    size = group_size(group)
    text = f"int{bits}:{f'g{size}' if size else 'channel'}:scale=float16"
    return Scheme.parse(text if config.get("sym", True) else f"{text}:asym")


class GptqSettings:
    """Schemes of all modules in a ``quantization_config``.

    config: the object. Raises UnsupportedError for files that are not read, CheckpointError for malformed
    values, PatternError for a regular expression that is none or could take forever.

    >>> found = GptqSettings(
    ...     {"bits": 4, "group_size": 32, "dynamic": {"+:.*down": {"bits": 8}, "-:head": {}}}
    ... )
    >>> str(found.of("a.down")), str(found.of("a.up")), found.of("head")
    ('int8:g32:scale=float16', 'int4:g32:scale=float16', None)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.version = config.get("checkpoint_format", V1)
        if self.version not in (V1, V2) or config.get("pack_dtype", "int32") != "int32":
            found = self.version, config.get("pack_dtype", "int32")
            raise UnsupportedError(
                f"GPTQ files of checkpoint_format and pack_dtype {found!r:.80} are not read here; verify it "
                "with the tool that wrote it"
            )
        rules = config.get("dynamic") or {}
        if not isinstance(rules, dict):
            raise CheckpointError("dynamic of quantization_config must be an object; the file is damaged")
        tables = (table for table in (config, *rules.values()) if isinstance(table, dict))
        self.act_order = any(table.get("desc_act") for table in tables)
        self.skipped = tuple(rule for rule in rules if rule.startswith(SKIP))
        self._base = weight_scheme(config)
        expressions = name_patterns(REGEX + rule.removeprefix(SKIP).removeprefix(OTHER) for rule in rules)
        others = (_other(config, rule, given) for rule, given in rules.items())
        self._rules = list(zip(expressions, others, strict=True))

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weight, or None if kept."""
        return next((weight for rule, weight in self._rules if rule.matches(module)), self._base)


def _other(config: Mapping[str, Any], rule: str, given: object) -> Scheme | None:
    """Return the scheme of a ``dynamic`` rule, or None to keep."""
    if rule.startswith(SKIP):
        return None
    if not isinstance(given, dict):
        raise CheckpointError(
            f"dynamic of quantization_config has {given!r:.40} for {printable(rule)}, but must have an "
            "object; the file is damaged"
        )
    return weight_scheme({**config, **given})
