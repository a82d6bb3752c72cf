"""Hashes of a unit's bytes: SHA-256 for later, XXH3 for read-back.

SHA-256 goes into the journal and the manifest. XXH3 with 128 bits finds what memory or a disk garbles as
surely, at ten times the speed, so a run reads back with it what it has just written; it is kept in the memory
of that run alone, where nobody can forge it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import xxhash


class Hash(Protocol):
    """A hash of bytes, such as ``hashlib`` has."""

    def update(self, data: memoryview, /) -> None:
        """Hash some more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes, in hexadecimal."""


SHA256: Callable[[], Hash] = hashlib.sha256
XXH3: Callable[[], Hash] = xxhash.xxh3_128


class Hashes:
    """Both hashes of the bytes of one span."""

    def __init__(self) -> None:
        self._both = SHA256(), XXH3()

    def update(self, data: memoryview) -> None:
        """Hash some more bytes."""
        for one in self._both:
            one.update(data)

    @property
    def digests(self) -> tuple[str, str]:
        """SHA-256 and XXH3 of all bytes, in hexadecimal."""
        sha256, xxh3 = (one.hexdigest() for one in self._both)
        return sha256, xxh3
