"""Configuration of ModelOpt: the algorithm of each layer, and its schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from ..schemes import Preset, Scheme
from .block_extents import blocks

DIALECT = "modelopt"
MIXED = "MIXED_PRECISION"

_NVFP4 = f"float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor:dialect={DIALECT}"
_FP8, _CHANNEL = (f"float8_e4m3fn:{cut}:scale=float32:dialect={DIALECT}" for cut in ("tensor", "channel"))
_MXFP8 = "float8_e4m3fn:g32:scale=rceil"
PRESETS = MappingProxyType(
    {
        "nvfp4": Preset(weight=_NVFP4, input=_NVFP4, static=True, without_data="nvfp4a16"),
        "nvfp4a16": Preset(weight=_NVFP4),
        "fp8": Preset(weight=_FP8, input="float8_e4m3fn:tensor", static=True, without_data="fp8_dynamic"),
        "fp8_dynamic": Preset(weight=_CHANNEL, input="float8_e4m3fn:token"),
        "mxfp8": Preset(weight=f"{_MXFP8}:dialect={DIALECT}", input=_MXFP8),
    }
)
ALGORITHMS = MappingProxyType(
    {
        "NVFP4": PRESETS["nvfp4"],
        "W4A16_NVFP4": PRESETS["nvfp4a16"],
        "FP8": PRESETS["fp8"],
        "FP8_PER_CHANNEL_PER_TOKEN": PRESETS["fp8_dynamic"],
        "MXFP8": PRESETS["mxfp8"],
    }
)
"""``quant_algo`` to what it says of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings in either configuration file.

    algorithm: ``quant_algo``, in upper case. ignore: names and globs of modules that are not quantized.
    layers: ``quant_algo`` by module, of MIXED_PRECISION.
    """

    algorithm: str
    ignore: tuple[str, ...]
    layers: Mapping[str, str]

    def of(self, module: str) -> str:
        """Return the algorithm of a quantized layer.

        Raises CheckpointError for one that is not named, UnsupportedError for an algorithm that is not read.
        """
        found = self.algorithm
        if found == MIXED:
            if module not in self.layers:
                raise CheckpointError(
                    "it is quantized, but quantized_layers of the configuration does not name it"
                )
            found = self.layers[module]
        return _known(found)


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"quant_algo {algorithm!r:.40} of ModelOpt is not read here; known are {', '.join(ALGORITHMS)}, "
            f"{MIXED}"
        )
    return algorithm


def settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings in either configuration file.

    Raises CheckpointError for malformed ones, UnsupportedError for a ``quant_algo`` that is not read.

    >>> settings({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}).ignore
    ('lm_head',)
    """
    table = config.get("quantization", config)
    if not isinstance(table, dict):
        raise CheckpointError("quantization of the configuration must be an object; the file is damaged")
    algorithm = _text(table)
    ignore = table.get("exclude_modules", table.get("ignore")) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise CheckpointError("ignore and exclude_modules must be lists of names; the file is damaged")
    layers = table.get("quantized_layers") or {}
    if algorithm != MIXED:
        _known(algorithm)
        _require_agreement(algorithm, table)
        return Settings(algorithm=algorithm, ignore=tuple(ignore), layers={})
    if not isinstance(layers, dict) or not layers or not all(isinstance(v, dict) for v in layers.values()):
        raise CheckpointError(
            f"{MIXED} needs quantized_layers, an object of objects that is not empty; the file is damaged"
        )
    for entry in layers.values():
        _require_agreement(_text(entry), entry)
    return Settings(
        algorithm=MIXED, ignore=tuple(ignore), layers={name: _text(entry) for name, entry in layers.items()}
    )


def _text(table: Mapping[str, Any]) -> str:
    found = table.get("quant_algo")
    if not isinstance(found, str) or not found:
        raise CheckpointError(f"quant_algo is {found!r:.40}, but must be text; the file is damaged")
    return found.upper()


def _require_agreement(algorithm: str, table: Mapping[str, Any]) -> None:
    """Raise CheckpointError where an entry contradicts its algorithm's weights."""
    if algorithm not in ALGORITHMS:
        return
    weight = Scheme.parse(ALGORITHMS[algorithm].weight)
    group = table.get("group_size")
    if group not in (None, 0, blocks(weight)[1]):
        raise CheckpointError(
            f"group_size is {group!r:.40}, but {algorithm} has {blocks(weight)[1] or 'no groups'}; correct "
            "the configuration"
        )
    groups = table.get("config_groups")
    for entry in groups.values() if isinstance(groups, dict) else ():
        weights = entry.get("weights") if isinstance(entry, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if bits not in (None, weight.bits):
            raise CheckpointError(
                f"config_groups has weights of {bits!r:.40} bits, but {algorithm} has {weight.bits}; correct "
                "the configuration"
            )
