"""Exceptions of zeropoint, and the writing of names and options in messages.

This module owns the exception classes and how names, sizes, counts and options are written in a sentence. It
knows nothing of tensors, formats or files.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator


class ZeropointError(ValueError):
    """Base of every error that zeropoint raises on purpose."""


class FormatError(ZeropointError):
    """A number format is unknown or its definition is contradictory."""


class SchemeError(ZeropointError):
    """A quantization scheme is unknown, malformed or contradictory."""


class ShapeError(ZeropointError):
    """A tensor's shape does not fit what is asked of it."""


class DtypeError(ZeropointError):
    """Unsuitable dtype, layout or device of a tensor."""


class RangeError(ZeropointError):
    """A scale, zero point or calibration range outside the scheme's limits."""


class CalibrationError(RangeError):
    """Parameters requested of an observer without finite data."""


class NonFiniteError(ZeropointError):
    """NaN or Inf in a tensor to quantize."""


class UnsupportedError(ZeropointError):
    """A well-formed request that no backend, codec or layout supports."""


class RecipeError(ZeropointError):
    """A recipe is malformed, or a rule of it matches nothing."""


class PatternError(ZeropointError):
    """A malformed pattern of names, or one of unbounded matching time."""


class OptionError(ZeropointError):
    """Options that exclude each other, or do not apply."""


class CheckpointError(ZeropointError):
    """A checkpoint on disk is damaged, hostile, incomplete or in the way."""


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(name: str, *, limit: int = 200) -> str:
    r"""Return a name quoted and escaped, safe for terminals.

    >>> printable("a\x1b[31mb")
    "'a\\x1b[31mb'"
    """
    text = ascii(name)
    return text if len(text) <= limit else f"{text[:limit]}...' ({len(name)} characters)"


def size_of(nbytes: int) -> str:
    """Return a byte count in its unit, below 1024.

    >>> size_of(96), size_of(90868376), size_of(1 << 40)
    ('96 B', '86.7 MiB', '1 TiB')
    """
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value.is_integer() else f"{value:.1f} {_UNITS[unit]}"


SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(size: int | str) -> int:
    """Return a byte count, given as number or text like ``2G``.

    K, M, G and T are powers of 1024. Raises OptionError for anything else, and for a size below one byte.

    >>> parse_size("2G"), parse_size("512MiB"), parse_size("1.5k"), parse_size(4096)
    (2147483648, 536870912, 1536, 4096)
    """
    match = SIZE.fullmatch(str(size).strip())
    nbytes = 0 if match is None else int(float(match[1]) * (1 << POWERS[match[2].upper()]))
    if nbytes < 1:
        raise OptionError(
            f"size {printable(str(size))} must be a positive number with K, M, G or T, for example 2G or 512M"
        )
    return nbytes


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> count(1, "tensor"), count(1234, "tensor")
    ('1 tensor', '1,234 tensors')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


_COMMAND_LINE = False
"""Whether sentences are for the command line; they are for Python otherwise."""


@contextlib.contextmanager
def for_the_command_line() -> Iterator[None]:
    """Write options in command-line form inside the context."""
    global _COMMAND_LINE  # noqa: PLW0603 (a process has one reader)
    before, _COMMAND_LINE = _COMMAND_LINE, True
    try:
        yield
    finally:
        _COMMAND_LINE = before


def option(name: str, value: object = None, *, metavar: str = "") -> str:
    """Return an option as the reader writes it: flag or keyword.

    Args:
        name: of the keyword argument, such as ``max_memory``.
        value: ``True`` for a switch, a list for an option that is repeated, None where it is left open.
        metavar: the placeholder of a value that is left open.

    >>> option("overwrite", True), option("to", "w4a16"), option("calibration", metavar="FILE")
    ('overwrite=True', "to='w4a16'", 'calibration=FILE')
    >>> with for_the_command_line():
    ...     option("max_memory", "1G"), option("ignore", ["a", "b.*"]), option("overwrite", True)
    ('--max-memory 1G', "--ignore a --ignore 'b.*'", '--overwrite')
    """
    if not _COMMAND_LINE:
        return f"{name}={metavar if value is None else repr(value)}"
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return f"{flag} {metavar}".rstrip()
    if value is True:
        return flag
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{flag} {shlex.quote(str(each))}" for each in values)


def all_of(words: Iterable[str]) -> str:
    """Return words as a sentence lists them.

    >>> all_of(["a", "b", "c"]), all_of(["a"])
    ('a, b and c', 'a')
    """
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def require_one(**given: object) -> None:
    """Raise OptionError unless exactly one of these options is given."""
    found = [option(name) for name, value in given.items() if value is not None]
    if len(found) != 1:
        example = f", for example {option('to', 'w4a16')}" if "to" in given else ""
        said = f"{all_of(found)} are given" if found else f"none is given{example}"
        raise OptionError(f"give exactly one of {', '.join(map(option, given))}; {said}")


def near_misses(name: str, known: Iterable[str]) -> str:
    """Return a clause of closest known names, or all if none.

    >>> near_misses("flaot8", ["float8", "int8"])
    'did you mean float8?'
    """
    names = sorted(set(known))
    close = closest(name, names)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}"


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three of the known names that resemble one."""
    names = sorted(set(known))
    # What begins with the name, as fp6_e3m2 with fp6, is likelier to be meant than what resembles it.
    begun = [known_name for known_name in names if len(name) > 2 and known_name.startswith(name.lower())]
    return begun[:3] or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
