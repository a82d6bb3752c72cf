"""Streaming JSON reader: a file of 100 MB never becomes a tree.

The reader walks: it yields the keys of an object, and for each of them its user takes the value whole, or
walks on inside of it. What is accepted is what Python's json accepts.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*(?=[^ \t\n\r])")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*(?=\")")
_NEAR = 16
"""An error so close to the end of what was read may mean that the rest is missing, as of an escape."""

_AHEAD = 3
"""Characters that must follow a number, so that no `.` or `e+` of it is cut off."""


_SPACES = ("", " ", "\t", "\n", "\r")


class JsonError(ValueError):
    """Malformed JSON; at: the character, counted from the text's begin."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"{what} at its character {at}")


class JsonStream:
    """A JSON text that comes in pieces of UTF-8.

    hooks: as json.loads takes them. Every method raises JsonError, UnicodeDecodeError (whose start is counted
    from the text's begin), what the hooks raise, and RecursionError for what is nested too deeply.

    >>> stream = JsonStream([b'{"a": 1, "b": {"c": ', b"[2, 3]}}"])
    >>> [(key, stream.value()) for key in stream.members()]
    [('a', 1), ('b', {'c': [2, 3]})]
    """

    def __init__(self, pieces: Iterable[bytes], **hooks: Callable[..., Any]) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        decoder: Any = json.JSONDecoder(**hooks)  # type: ignore[arg-type]
        self._scan = decoder.scan_once
        self._text, self._at, self._before, self._bytes = "", 0, 0, 0

    def members(self) -> Iterator[str]:
        """Yield each key of the next object; read each value between."""
        self._take("{", "Expecting value")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            if self._text[self._at : self._at + 1] != '"' and self._peek() != '"':
                raise self._error("Expecting property name enclosed in double quotes")
            key = self.value()
            if not self._pass(_COLON):
                self._take(":", "Expecting ':' delimiter")
            yield key
            if self._pass(_COMMA):
                continue
            if self._peek() == "}":
                self._at += 1
                return
            self._take(",", "Expecting ',' delimiter")

    @property
    def is_object(self) -> bool:
        """Whether what comes next is an object."""
        return self._peek() == "{"

    @property
    def is_text(self) -> bool:
        """Whether what comes next is a string."""
        return self._peek() == '"'

    def value(self, limit: int | None = None) -> Any:
        """Return the next value; refuse one of more than ``limit`` characters."""
        if self._text[self._at : self._at + 1] in _SPACES:
            self._peek()
        while True:
            found, end, problem = self._scanned()
            whole = problem is None and end + _AHEAD <= len(self._text)
            if limit is not None and (end if whole else len(self._text)) - self._at > limit:
                raise self._error(f"a value has more than {limit} characters")
            if not whole:
                begin = self._at
                if self._more():
                    continue
                if problem is not None:
                    raise problem
                end -= begin
            self._at = end
            return found

    def end(self) -> None:
        """Raise JsonError when anything but space follows."""
        if self._peek():
            raise self._error("Extra data")

    def _scanned(self) -> tuple[Any, int, JsonError | None]:
        """Return a value, its end, and an incomplete text's error; raises others."""
        try:
            return (*self._scan(self._text, self._at), None)
        except StopIteration as error:
            message, at = "Expecting value", error.value
        except json.JSONDecodeError as error:
            message, at = error.msg, error.pos
        problem = JsonError(message, self._before + at)
        if message.startswith("Unterminated string") or at + _NEAR >= len(self._text):
            return None, 0, problem
        raise problem

    def _take(self, character: str, message: str) -> None:
        if self._peek() != character:
            raise self._error(message)
        self._at += 1

    def _pass(self, separator: re.Pattern[str]) -> bool:
        """Pass a separator in the buffer: a fast common case."""
        found = separator.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found is not None

    def _peek(self) -> str:
        """Return the next character that is no space, or ""."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read on, doubling the buffered rest: long values take linear time."""
        left = self._text[self._at :]
        parts, size = [left], 0
        for piece in self._pieces:
            parts.append(self._decoded(piece))
            size += len(parts[-1])
            if size and size >= len(left):
                break
        else:
            parts.append(self._decoded(b"", final=True))
        first = not self._before and not self._text
        self._before += self._at
        self._text, self._at = "".join(parts), 0
        if first and self._text.startswith("\ufeff"):
            raise JsonError("Unexpected UTF-8 BOM", 0)
        return len(self._text) > len(left)

    def _decoded(self, piece: bytes, *, final: bool = False) -> str:
        held = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            error.start += self._bytes - held
            raise
        self._bytes += len(piece)
        return text

    def _error(self, message: str) -> JsonError:
        return JsonError(message, self._before + self._at)
