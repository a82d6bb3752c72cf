"""Bugs to plant, as data: each is a record of ``catalog/*.toml`` that changes one place of the package.

name   what is wrong, as a sentence
file   the file, below src/zeropoint
old    its text, which occurs there once
new    the text in its place
tests  folders, files or tests of the quick suite that see it, the nearest first
"""

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = PurePosixPath("src/zeropoint")
CATALOG = Path(__file__).with_name("catalog")


class DoesNotApplyError(Exception):
    """A text to replace is not in its file, or more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug to plant in one file of the package."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The part of the package that the bug is in."""
        return room_of(PurePosixPath(self.file))

    @property
    def is_compiled(self) -> bool:
        """Whether the file is one of those of which kernels for processors are compiled."""
        host = self.file.startswith("kernels/cpu/host/")
        return self.file == "ops/lowering.py" or (self.file.startswith("kernels/cpu/") and not host)

    def applied(self, source: str) -> str:
        """Return the source of the file with the bug in it.

        Raises:
            DoesNotApplyError: where the old text does not occur exactly once, or the new text is the same.
        """
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise DoesNotApplyError(f"the text to replace must occur once in {self.file}, not {count} times")
        return source.replace(self.old, self.new)

    def digest(self) -> str:
        """Return a hash of the record."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def room_of(file: PurePosixPath) -> str:
    """Return the room of a file below the package: its folder, or itself where it is in none.

    >>> room_of(PurePosixPath("checkpoint/run/journal.py")), room_of(PurePosixPath("tensor.py"))
    ('checkpoint/run', 'tensor')
    """
    folder = file.parent.as_posix()
    return file.stem if folder == "." else folder


def rooms() -> set[str]:
    """Return each room of the package that has code of its own."""
    package = ROOT / PACKAGE
    files = (path for path in package.rglob("*.py") if not path.stem.startswith("__"))
    return {room_of(PurePosixPath(path.relative_to(package).as_posix())) for path in files}


def catalog() -> list[Mutant]:
    """Return every bug, in the order of the files and of their records."""
    return [
        Mutant(**{**record, "tests": tuple(record["tests"])})
        for path in sorted(CATALOG.glob("*.toml"))
        for record in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]
