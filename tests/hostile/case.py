"""One hostile file or directory: what to write to disk, and what must be said of it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Content = bytes | Callable[[Path], None]
"""The bytes of a file, or what makes it at its path: a link, a FIFO, a sparse file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file or directory.

    topic: what is wrong or odd. content: a file's, or by name those of a directory.
    refusal: words of the error, or None for what must be accepted.
    library: why safetensors 0.8 decides otherwise, or None where it decides alike.
    """

    topic: str
    name: str
    content: Content | Mapping[str, Content]
    refusal: str | None
    library: str | None = None

    def __str__(self) -> str:
        return f"{self.topic}: {self.name}"

    @property
    def is_directory(self) -> bool:
        """Whether this is a checkpoint directory, not one file."""
        return isinstance(self.content, Mapping)

    def write(self, folder: Path) -> Path:
        """Write the case into an empty folder and return the path to pass to a command."""
        if isinstance(self.content, Mapping):
            for name, content in self.content.items():
                _put(folder / name, content)
            return folder
        path = folder / "model.safetensors"
        _put(path, self.content)
        return path


def _put(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


def link(target: str) -> Callable[[Path], None]:
    """Return what makes a symbolic link."""
    return lambda path: path.symlink_to(target)


def sparse(head: bytes, size: int) -> Callable[[Path], None]:
    """Return what makes a file that begins with ``head`` and has ``size`` bytes, zeros without blocks."""

    def make(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, size)

    return make


def fifo(path: Path) -> None:
    """Make a FIFO, which waits for a writer when it is opened."""
    os.mkfifo(path)


def folder(path: Path) -> None:
    """Make a directory where a file belongs."""
    path.mkdir()
