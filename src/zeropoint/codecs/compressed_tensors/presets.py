"""The presets of this codec: those in its dialect, under the names that its users know, in lower case."""

from __future__ import annotations

from types import MappingProxyType

from ...schemes import PRESETS, Preset

_DIALECT = ":dialect=compressed-tensors"
NAMES: MappingProxyType[str, Preset] = MappingProxyType(
    {name: preset for name, preset in PRESETS.items() if preset.weight.endswith(_DIALECT)}
)
"""Name to preset."""
