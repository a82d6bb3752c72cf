"""The process of the command ``zeropoint``: signals, and what becomes of errors.

This module imports nothing that takes time before signals are caught; what a command needs comes later.

While a command works, Ctrl-C and SIGTERM are exceptions, so that whatever was begun is taken back before the
process ends. Before and after, and while modules are imported, the process ends at once, with one line: there
is nothing to take back, and an exception in the middle of an import prints pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType

from ..errors import OptionError, ZeropointError, for_the_command_line
from ..libraries import said

UNEXPECTED = "zeropoint failed unexpectedly, which is a defect of its own"
"""Beginning of the message of an unforeseen error."""
_PACKAGE = Path(__file__).parent.parent
_CAUGHT = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    An error is one line on stderr, without a traceback. 0: done. 1: failed. 2: the command line makes no
    sense. 130, 143: interrupted by Ctrl-C or SIGTERM. 141: the reader of stdout went away.
    """
    app = import_module(".app", __package__)  # once signals are caught: it takes a tenth of a second
    as_json = "--json" in arguments
    try:
        with interruptible(), for_the_command_line():
            status = app.call(arguments)
    except app.UsageError as error:
        fail(app.usage(error), as_json=as_json)
        return 2
    except OptionError as error:
        fail(message_of(error), as_json=as_json)
        return 2
    except Interrupted as interruption:
        fail(message_of(interruption), as_json=as_json)
        return interruption.status
    except app.ReaderGoneError:
        return 128 + signal.SIGPIPE
    except (ZeropointError, OSError) as error:
        fail(message_of(error), as_json=as_json)
        return 1
    except MemoryError:
        fail("out of memory; use --max-memory or fewer --workers", as_json=as_json)
        return 1
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        fail(
            f"{UNEXPECTED} ({_where(error)}); report it with what `python -X dev -m zeropoint ...` shows",
            as_json=as_json,
        )
        return 1
    return int(status or 0)


def fail(message: str, *, as_json: bool = False) -> None:
    """Write one line to stderr, and with --json a document to stdout."""
    line = " ".join(message.split())
    print("error:", line, file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(json.dumps({"error": line}), flush=True)


def _where(error: Exception) -> str:
    """Return an exception's message, and our last line in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{said(error)}{place}"


def message_of(error: BaseException) -> str:
    """Return the message of an error, with its notes."""
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


class Interrupted(BaseException):
    """Raised in the main thread by a signal; escapes ``except Exception``."""

    def __init__(self, number: int) -> None:
        super().__init__(_message(number))
        self.status = 128 + number


def _message(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature is Python's)
    with contextlib.suppress(OSError):
        os.write(2, f"error: {_message(number)}\n".encode())
    os._exit(128 + number)


def end_at_once() -> None:
    """Let signals end this process at once, with a line and status."""
    for number in _CAUGHT:
        signal.signal(number, _end)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a signal inside the block do as :func:`end_at_once`."""
    with _handling(_end):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted at the first signal; a second one ends the process."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature is Python's)
        for caught in _CAUGHT:
            signal.signal(caught, signal.SIG_DFL)
        raise Interrupted(number)

    with _handling(interrupt):
        yield


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _CAUGHT}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run() -> None:
    """Carry out this process's command line."""
    end_at_once()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # lines of tables are no ASCII, and names may be anything
    sys.exit(main(sys.argv[1:]))
