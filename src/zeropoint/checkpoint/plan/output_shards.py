"""What is said of the files that are written, and of weights in several that take one scale."""

from __future__ import annotations

from dataclasses import dataclass

from .texts import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Weights whose tensor scale is that of all of them, and the shards in which they lie."""

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
