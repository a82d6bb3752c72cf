"""Bugs, each planted on purpose: a suite that does not fail with its bug proves nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from zeropoint.checkpoint.measure import tiles as quantize
from zeropoint.checkpoint.read import source
from zeropoint.checkpoint.run import directory as output
from zeropoint.checkpoint.run import executor, folder, read_back, work
from zeropoint.cli import main as command


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run the block with the bug of that name; without any for None."""
    with pytest.MonkeyPatch.context() as patched:
        if name is not None:
            PLANTS[name](patched)
        yield


def no_flock(patched: pytest.MonkeyPatch) -> None:
    """A file system that has no locks, which is no bug."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    patched.setattr(fcntl, "flock", flock)


def no_lock(patched: pytest.MonkeyPatch) -> None:
    """Every run believes that it is alone."""

    class Unlocked:
        def __init__(self, folder: Any) -> None:
            pass

        def is_seen_in(self, _: Any) -> bool:
            return False

        def release(self) -> None:
            pass

    patched.setattr(output, "Lock", Unlocked)


def no_sync(patched: pytest.MonkeyPatch) -> None:
    """Nothing is made durable."""
    patched.setattr(os, "fsync", lambda _: None)
    patched.setattr(os, "fdatasync", lambda _: None)


def no_data_sync(patched: pytest.MonkeyPatch) -> None:
    """The journal says what is on disk before it is."""
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".partial"):
            real(descriptor)

    patched.setattr(os, "fdatasync", fdatasync)


def no_preflight(patched: pytest.MonkeyPatch) -> None:
    """The disk is not asked for room, which is no bug: others may take it after it was asked."""
    patched.setattr(output.OutputDirectory, "_require_room", lambda _: None)


def trusting(patched: pytest.MonkeyPatch) -> None:
    """The journal is believed, whatever the bytes are."""
    patched.setattr(read_back, "wrong", lambda *_, **__: [])


def codes_only(patched: pytest.MonkeyPatch) -> None:
    """Of a unit that was done, only the first output is proved."""
    real = read_back._Proof._digest

    def digest(self: Any, found: Any, file: Any, span: Any, buffer: bytearray) -> str:
        place = self.unit.spans.index(span)
        known = self.done.checks or self.done.digests
        return real(self, found, file, span, buffer) if place == 0 else known[place]

    patched.setattr(read_back._Proof, "_digest", digest)


def index_first(patched: pytest.MonkeyPatch) -> None:
    """The index gets its name before the shards have theirs."""
    real = output.OutputDirectory.publish

    def publish(self: Any, last: Sequence[str], *, skip: Collection[str] = ()) -> None:
        if last:
            os.rename(self.path / output.partial_name(last[-1]), self.path / last[-1])
        real(self, last[:-1], skip=(*skip, *last[-1:]))

    patched.setattr(output.OutputDirectory, "publish", publish)


def no_directory_sync(patched: pytest.MonkeyPatch) -> None:
    """Names are not made durable."""
    patched.setattr(output, "_sync_directory", lambda _: None)


def deaf(patched: pytest.MonkeyPatch) -> None:
    """Nobody listens to what making durable says."""
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def unheard(descriptor: int, real: Callable[[int], None] = real) -> None:
            with contextlib.suppress(OSError):
                real(descriptor)

        patched.setattr(os, name, unheard)


def zeros_behind_the_end(patched: pytest.MonkeyPatch) -> None:
    """A file that ends too early reads as zeros."""
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, buffers, offset) or len(buffers[0])

    patched.setattr(os, "preadv", preadv)
    patched.setattr(source.Source, "check_unchanged", lambda _: None)


def uninterruptible(patched: pytest.MonkeyPatch) -> None:
    """Signals are left to Python."""
    patched.setattr(command, "interruptible", contextlib.nullcontext)


def private(patched: pytest.MonkeyPatch) -> None:
    """Files are for their owner only, whatever the umask."""
    real = os.open

    def open_private(path: Any, flags: int, mode: int = 0o600, **at: Any) -> int:
        return real(path, flags, min(mode, 0o600), **at)

    patched.setattr(os, "open", open_private)


def single_write(patched: pytest.MonkeyPatch) -> None:
    """A write is taken for whole."""

    def write_at(descriptor: int, data: memoryview, offset: int) -> None:
        os.pwrite(descriptor, data, offset)

    for module in (output, work, folder):
        patched.setattr(module, "write_at", write_at)


def hasty(patched: pytest.MonkeyPatch) -> None:
    """A set takes its scale from the first of its units that is scanned."""
    real = executor._Extremes.wait

    def wait(self: Any) -> tuple[float, float]:
        real(self)
        return quantize.widest((found.low, found.high) for found in self._found[:1])

    patched.setattr(executor._Extremes, "wait", wait)


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no flock": no_flock,
    "no lock": no_lock,
    "no sync": no_sync,
    "no data sync": no_data_sync,
    "no preflight": no_preflight,
    "trusting": trusting,
    "hasty": hasty,
    "codes only": codes_only,
    "index first": index_first,
    "no directory sync": no_directory_sync,
    "deaf": deaf,
    "zeros behind the end": zeros_behind_the_end,
    "uninterruptible": uninterruptible,
    "private": private,
    "single write": single_write,
}
