"""Names of methods and steps, for help texts without loading their modules."""

from __future__ import annotations

from pathlib import Path

LOSSLESS, LOSSLESS_OR_NEAREST = "lossless", "lossless_or_nearest"
OF_CODES = (LOSSLESS, LOSSLESS_OR_NEAREST)
"""Methods that convert existing codes."""
OF_TABLES = ("kmeans",)
"""Methods that fit a format to each weight, which no file layout holds."""
ROTATING = "hadamard"
"""Prefix of methods that rotate weights: what has their codes rotates inputs."""
OF_MODELS = (*OF_CODES, *OF_TABLES, ROTATING)
"""Prefixes of methods that no checkpoint is quantized by."""
_NOT_BEFORE = ("bias", "lowrank")
"""The step that stands behind a method, and the one that checkpoints have no place for."""


def _defining(constant: str) -> tuple[str, ...]:
    """Return the modules of methods that define a constant."""
    paths = sorted((Path(__file__).parent / "methods").glob("*.py"))
    return tuple(path.stem for path in paths if f"\n{constant} = " in path.read_text(encoding="utf-8"))


OF_CHECKPOINTS = tuple(name for name in _defining("METHOD") if not name.startswith(OF_MODELS))
"""Methods that checkpoints are quantized by."""
BEFORE = tuple(name for name in _defining("STEP") if name not in _NOT_BEFORE)
"""Steps that stand before the method of a checkpoint."""
