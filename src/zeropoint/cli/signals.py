"""Ctrl-C and SIGTERM: one line and an exit status, whenever they come.

While a block writes, a signal is an exception, so that whatever was begun is taken back before the process
ends. Before it, while torch is imported, and after it there is nothing to take back, and the process ends at
once: an exception in the middle of an import prints pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised in the main thread by a signal; no Exception, so that nothing on the way catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(_said(number))
        self.status = 128 + number


def _said(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"


def end_at_once() -> None:
    """Let a signal end the process from now on, with one line on stderr and the status of the signal."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature is Python's)
        with contextlib.suppress(OSError):
            os.write(2, f"error: {_said(number)}\n".encode())
        os._exit(128 + number)

    for number in _CAUGHT:
        signal.signal(number, end)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted at the first signal inside the block; a second one ends the process at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature is Python's)
        for caught in _CAUGHT:
            signal.signal(caught, signal.SIG_DFL)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in _CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
