"""``quantization_config`` of GPTQ: the scheme of each module, by rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..architectures import Config, is_expert
from ..errors import CheckpointError, UnsupportedError, printable
from ..loaded_names import loaded_names, transformers_names
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


_BLOCKS = (
    "transformer.h",
    "model.decoder.layers",
    "gpt_neox.layers",
    "model.layers",
    "model.language_model.layers",
)
"""Where optimum 2.3 looks for layers: the first with which a module's name begins (gptq/constants.py).

It looks for ``h``, ``decoder.layers`` and ``layers`` as well, with which many other names begin.
"""
_TO_BLOCK = re.compile(r"^.*?\.\d+\.")
"""A layer's name up to the first number."""


def named_layers(quantized: Sequence[str], kept: Sequence[str], family: Config) -> dict[str, Any]:
    """Return settings that name quantized layers, if loaders need them.

    transformers' loader otherwise takes all layers in the blocks that it knows, which is right for most
    models, and fails where there are none. It reads no experts.

    >>> names = [f"encoder.layer.{n}.attention.self.key" for n in (0, 1)]
    >>> named_layers(names, ["encoder.layer.0.output.dense"], {})["modules_in_block_to_quantize"]
    [['attention.self.key', 'attention.output.key']]
    >>> named_layers(["model.layers.0.mlp.up_proj"], ["lm_head"], {})
    {}
    """
    made, left = ([transformers_names(name, family)[-1] for name in names] for names in (quantized, kept))
    blocks = next((block for block in _BLOCKS if any(name.startswith(block) for name in [*made, *left])), "")
    inside = blocks and all(name.startswith(blocks) for name in made)
    usual = inside and not any(name.startswith(blocks) for name in left)
    if usual or any(map(is_expert, quantized)):
        return {}
    left = [each for name in kept for each in loaded_names(name, family)]
    found: dict[str, None] = {}
    for each in dict.fromkeys(each for name in quantized for each in loaded_names(name, family)):
        short = _TO_BLOCK.sub("", each)
        # Loaders take the end of a name, or any part of it.
        found[each if any(short in other for other in left) else short] = None
    return {"block_name_to_quantize": "", "modules_in_block_to_quantize": [list(found)]}
