"""Ctrl-C and SIGTERM as one exception, so that whatever was begun is taken back before the process ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised in the main thread by a signal; no Exception, so that nothing on the way catches it."""

    def __init__(self, number: int) -> None:
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        super().__init__(f"interrupted{by}")
        self.status = 128 + number


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
