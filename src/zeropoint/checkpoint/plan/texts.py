"""Long texts in little memory, such as indexes, manifests and headers."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

_PIECE = 1 << 20
_LEVEL = 1
"""zlib's fastest: names repeat so much that more effort saves little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A UTF-8 text, compressed or generated on each read.

    size: in bytes. sha256: hex digest.
    """

    size: int
    sha256: str
    _packed: tuple[bytes, ...] | Callable[[], Iterable[str]] = field(repr=False, compare=False)

    @staticmethod
    def of(pieces: str | bytes | bytearray | Iterable[str]) -> Text:
        """Return a text that may come in pieces.

        >>> text = Text.of(["ab", "c"])
        >>> text.size, str(text), text == Text.of("abc")
        (3, 'abc', True)
        """
        packer, packed, size, digest = zlib.compressobj(_LEVEL), [], 0, hashlib.sha256()
        whole = [pieces] if isinstance(pieces, str | bytes | bytearray) else pieces
        for piece in _gathered(whole):
            size += len(piece)
            digest.update(piece)
            packed.append(packer.compress(piece))
        packed.append(packer.flush())
        return Text(size=size, sha256=digest.hexdigest(), _packed=tuple(filter(None, packed)))

    @staticmethod
    def made(pieces: Callable[[], Iterable[str]]) -> Text:
        """Return a text generated on each read, such as incompressible digests.

        >>> text = Text.made(lambda: iter(["ab", "c"]))
        >>> text.size, str(text), text == Text.of("abc")
        (3, 'abc', True)
        """
        size, digest = 0, hashlib.sha256()
        for piece in _gathered(pieces()):
            size += len(piece)
            digest.update(piece)
        return Text(size=size, sha256=digest.hexdigest(), _packed=pieces)

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes, a piece at a time."""
        if callable(self._packed):
            yield from _gathered(self._packed())
            return
        unpacker = zlib.decompressobj()
        for packed in self._packed:
            left = packed
            while left:
                piece = unpacker.decompress(left, _PIECE)
                left = unpacker.unconsumed_tail
                if piece:
                    yield piece
        rest = unpacker.flush()
        if rest:
            yield rest

    def lines(self) -> Iterator[str]:
        """Yield its lines, without line ends."""
        rest = b""
        for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode("utf-8") for line in whole)

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    def __str__(self) -> str:
        return bytes(self).decode("utf-8")


def _gathered(parts: Iterable[str | bytes | bytearray]) -> Iterator[bytes]:
    """Yield the bytes of texts in pieces that are worth a call."""
    buffer = bytearray()
    for part in parts:
        buffer += part.encode("utf-8") if isinstance(part, str) else part
        if len(buffer) >= _PIECE:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)
