"""Guard around libraries that parse foreign files: their exceptions become ours.

Such a library raises whatever its parser meets: a KeyError, its own classes, the bare class Exception, and,
of one in Rust, a panic that derives from none of these. A list of them would be out of date with the next
version, so that here, and nowhere else, everything is caught.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from .errors import CheckpointError, ZeropointError, printable

_LONGEST = 300


@contextlib.contextmanager
def reading(
    what: str, remedy: str, kind: type[ZeropointError] = CheckpointError, *, system: bool = False
) -> Iterator[None]:
    """Turn a library's exception into an error with remedy.

    The error says ``what`` happened. Our own errors and a lack of memory pass. system: whether errors of the
    operating system pass, too.

    >>> with reading("the file is no number", "pass another one"):
    ...     int("")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    zeropoint.errors.CheckpointError: the file is no number (ValueError: ...); pass another one
    """
    try:
        yield
    except (ZeropointError, MemoryError):
        raise
    except OSError as error:
        if system:
            raise
        raise kind(f"{what} ({said(error)}); {remedy}") from error
    except Exception as error:
        raise kind(f"{what} ({said(error)}); {remedy}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which derives from no Exception
            raise
        raise kind(f"{what} ({said(error)}); {remedy}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop a library's stderr inside the context, such as Rust's panics."""
    with _QUIET:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


_QUIET = threading.RLock()
"""Two threads would put back what the other one dropped."""


def said(error: BaseException) -> str:
    """Return an exception's text as one safe, bounded line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {printable(text, limit=_LONGEST)[1:-1]}" if text else kind
