"""The process of the command ``zeropoint``: signals, and what becomes of errors.

This module imports nothing that takes time before signals are caught; what a command needs comes later.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import OptionError, ZeropointError, for_the_command_line
from .signals import Interrupted, end_at_once, interruptible


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status; an error is one line on stderr, no traceback.

    0: done. 1: failed. 2: the command line makes no sense. 130, 143: interrupted by Ctrl-C or SIGTERM. 141:
    the reader of stdout went away.
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
        fail(_said(error), as_json=as_json)
        return 2
    except Interrupted as interruption:
        fail(_said(interruption), as_json=as_json)
        return interruption.status
    except app.ReaderGoneError:
        return 128 + signal.SIGPIPE
    except (ZeropointError, OSError) as error:
        fail(_said(error), as_json=as_json)
        return 1
    except MemoryError:
        fail("out of memory; use --max-memory or fewer --workers")
        return 1
    return int(status or 0)


def fail(message: str, *, as_json: bool = False) -> None:
    """Write one line to stderr, whatever the message holds, and a document to stdout in place of a result."""
    line = " ".join(message.split())
    print("error:", line, file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(json.dumps({"error": line}), flush=True)


def _said(error: BaseException) -> str:
    """Return the message of an error with what was noted on its way."""
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def run() -> None:
    """Carry out this process's command line."""
    end_at_once()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # lines of tables are no ASCII, and names may be anything
    sys.exit(main(sys.argv[1:]))
