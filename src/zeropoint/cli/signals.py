"""Ctrl-C and SIGTERM: one line and an exit status, whenever they come.

While a command works, a signal is an exception, so that whatever was begun is taken back before the process
ends. Before and after, and while modules are imported, the process ends at once: there is nothing to take
back, and an exception in the middle of an import prints pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


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
