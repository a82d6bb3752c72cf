"""Output files, and sets of weights in several files with one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..read.index import NUMBERED
from .texts import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Weights with one tensor scale, and the shards that hold them."""

    modules: tuple[str, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShard:
    """A file to write: its name, its header and its size."""

    name: str
    head: Text
    size: int

    @property
    def header(self) -> bytes:
        """Its first bytes."""
        return bytes(self.head)


def without_gaps(names: Sequence[str]) -> tuple[str, ...]:
    """Return file names with ``NUMBER-of-COUNT`` renumbered where files are left out.

    >>> without_gaps(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    """
    found = [NUMBERED.fullmatch(name) for name in names]
    if any(match is None or int(match["count"]) == len(names) for match in found):
        return tuple(names)
    stems = [match["stem"] for match in found if match is not None]
    return tuple(f"{stem}-{n:05}-of-{len(names):05}.safetensors" for n, stem in enumerate(stems, start=1))
