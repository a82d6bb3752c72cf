"""One writer at a time: the lock of an output directory.

The kernel's lock (flock) on ``.zeropoint.lock`` dies with its process. Where the file system has none, a file
``.zeropoint.owner`` that only one process can create represents it, and names who did; what a killed process
left of that kind has to be broken by hand, since nothing here can see whether its host still runs it.

The two kinds keep each other out, since hosts may differ in what they can lock, and a system may run out of
locks for a moment: each says that it is there before it looks for the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
from pathlib import Path

from ...errors import CheckpointError, option
from ..read.problems import ObstacleError
from ..read.storage import shown

LOCK, OWNER = ".zeropoint.lock", ".zeropoint.owner"
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lock:
    """The lock of a directory, held until :meth:`release`.

    Raises CheckpointError when another run holds it, and OSError when it cannot be taken at all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = LOCK
        self._text = b""
        self._descriptor: int | None = self._take()

    def is_seen_in(self, folder: Path) -> bool:
        """Return whether its file is visible in a folder, its alias."""
        try:
            descriptor = os.open(
                folder / self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return False
        try:
            return os.read(descriptor, _LONGEST) == self._text
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock up and remove its file; safe to call twice."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._folder / self._name)
        with contextlib.suppress(OSError):  # closed it is, and nothing in it matters
            os.close(self._descriptor)
        self._descriptor = None

    def _take(self) -> int:
        path = self._folder / LOCK
        while True:
            with contextlib.ExitStack() as unless_held:
                descriptor = os.open(path, _FLAGS, 0o666)
                unless_held.callback(os.close, descriptor)
                _require_one_name(descriptor, path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    holder = (
                        os.pread(descriptor, 64, 0).decode("ascii", "replace").partition(" ")[0] or "unknown"
                    )
                    rule = f"is being written by another run (process {holder})"
                    raise CheckpointError(
                        f"{shown(self._folder)} {rule}; wait for it, or write elsewhere"
                    ) from error
                except OSError as error:
                    if error.errno not in _NO_FLOCK:
                        raise
                    return self._own(descriptor, error)
                # Between our open and our lock, the holder before may have removed the file and gone.
                if _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    self._write(descriptor, f"{os.getpid()}")
                    if os.path.lexists(self._folder / OWNER):
                        os.unlink(path)
                        raise self._owned()
                    unless_held.pop_all()
                    return descriptor

    def _own(self, lock: int, refusal: OSError) -> int:
        """Create the owner file; raises ``refusal`` when another run has one."""
        path = self._folder / OWNER
        try:
            descriptor = os.open(path, _FLAGS | os.O_EXCL, 0o666)
        except FileExistsError as error:
            self._removes_empty(lock)
            raise self._owned() from error
        self._write(descriptor, _identity())
        if not self._removes_empty(lock):
            os.unlink(path)
            os.close(descriptor)
            raise refusal
        self._name = OWNER
        return descriptor

    def _write(self, descriptor: int, holder: str) -> None:
        """Say who holds the lock, and something that only this file says."""
        self._text = f"{holder} {secrets.token_hex(16)}".encode()
        os.pwrite(descriptor, self._text, 0)

    def _removes_empty(self, lock: int) -> bool:
        """Remove the kernel lock's file, unless it holds a run's number."""
        if os.fstat(lock).st_size:
            return False
        with contextlib.suppress(OSError):
            os.unlink(self._folder / LOCK)
        return True

    def _owned(self) -> CheckpointError:
        """Return the error that names the owner."""
        holder = "unknown"
        with contextlib.suppress(OSError):  # it has just ended
            holder = (self._folder / OWNER).read_text(encoding="utf-8", errors="replace")[:200]
        return CheckpointError(
            f"{shown(self._folder)} is being written by another run ({shown(holder)}); wait for it, or pass "
            f"{option('break_lock', True)} when you know that it has died"
        )


def break_lock(folder: Path | str) -> None:
    """Remove a dead run's owner file; kernel locks are not touched."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(Path(folder) / OWNER)


def _require_one_name(descriptor: int, path: Path) -> None:
    """Refuse a lock file with a second hard link."""
    if os.fstat(descriptor).st_nlink > 1:
        raise ObstacleError(f"{shown(path)} is not a lock of a run: it has another name too; move it away")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _identity() -> str:
    """Return who holds the lock: process, host and boot."""
    boot = "unknown"
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"process {os.getpid()} on {socket.gethostname()}, boot {boot}"
