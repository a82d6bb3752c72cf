"""Refusal of adapters without their base model."""

from __future__ import annotations

from pathlib import Path

from ...architectures import ADAPTED, adapted_module, is_adapter
from ...errors import CheckpointError, printable
from ..read.source import CONFIG, Source
from ..read.storage import shown
from .selection import WEIGHT

_ADAPTER_CONFIG = "adapter_config.json"


def require_model(source: Source) -> None:
    """Raise CheckpointError for an adapter, or a useless config.json."""
    part = _adapter_alone(source)
    if part is not None:
        raise CheckpointError(
            f"{shown(source.root)} is an adapter (it holds {printable(part)}), not a model; merge it into "
            "its base model first, as with merge_and_unload() of PEFT"
        )
    if source.config is None and Path(CONFIG) in source.companions:
        raise CheckpointError(
            f"{shown(source.root / CONFIG)} is not a valid configuration, and the result could not say in it "
            "what is quantized; correct it, or remove it to quantize the weights alone"
        )


def _adapter_alone(source: Source) -> str | None:
    """Return a part of a bare adapter, or None for a model.

    Models may hold adapters next to their weights; next to an adapter there may be heads that it came with.
    """
    parts = [name for name in source.entries if is_adapter(name)]
    saved = Path(_ADAPTER_CONFIG) in source.companions
    if not parts:
        return _ADAPTER_CONFIG if saved and source.config is None else None
    if saved:
        bases = {f"{adapted_module(name)}{ending}" for name in parts for ending in (WEIGHT, ADAPTED + WEIGHT)}
        return None if any(name in source.entries for name in bases) else parts[0]
    others = (e for e in source.entries.values() if len(e.shape) > 1 and not is_adapter(e.name))
    return parts[0] if next(others, None) is None else None
