"""The output directory: nothing that a loader would open exists before everything is there.

Files are written under hidden names, ``.NAME.partial``, in the directory itself, so that the final rename
never crosses file systems. Publishing renames shards and companions first, then the index, then config.json.
Until then, and after any failure, the directory holds what it held before. A lock keeps a second run out; it
dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .object_store import RemotePath
from .storage import OpenFile, Place, shown

LOCK = ".zeropoint.lock"
COPY_CHUNK = 1 << 26
"""Bytes that one call copies: long enough to be fast, short enough that an interrupt is felt."""
_FALLBACK_CHUNK = 1 << 20
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def partial_name(name: str) -> str:
    """Return the hidden name under which ``name`` is written.

    >>> partial_name("1_Pooling/config.json")
    '1_Pooling/.config.json.partial'
    """
    path = Path(name)
    return str(path.with_name(f".{path.name}.partial"))


class OutputDirectory:
    """A directory that is being filled: a context manager, in which :meth:`publish` comes last.

    path: where to write. Created with its parents where it does not exist. root: the source, which must be
    elsewhere.
    names: every file that will be written. needed: their bytes. overwrite: whether the directory may hold
    files already; those of other names are left alone.

    Raises CheckpointError when the place is taken, locked, inside the source, or has too little room.
    """

    def __init__(
        self, path: Path, root: Place, names: Sequence[str], *, needed: int, overwrite: bool
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._names = tuple(names)
        self._needed = needed
        self._overwrite = overwrite
        self._files: dict[str, int] = {}
        self._published: list[Path] = []
        self._made: list[Path] = []
        self._lock: int | None = None
        _require_apart(path, self.path, root)
        self._require_free(path)

    def __enter__(self) -> OutputDirectory:
        try:
            self._make(self.path)
            self._take_lock()
            self._require_room()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        # Without publish() the run failed, whatever the reason.
        self._discard()

    def create(self, name: str, size: int) -> int:
        """Return the descriptor, ours to close, of a new file that will be published as ``name``."""
        path = self.path / partial_name(name)
        self._require_replaceable(name)
        with self.io(name):
            self._make(path.parent)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(os.lstat(path).st_mode):  # what a killed run left
                    os.unlink(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            self._files[name] = descriptor
            _reserve(descriptor, size)
        return descriptor

    @contextlib.contextmanager
    def io(self, name: str) -> Iterator[None]:
        """Turn operating system errors inside the block into a CheckpointError about ``name``."""
        try:
            yield
        except OSError as error:
            reason = f"{shown(self.path / name)} cannot be written: {error.strerror or error}"
            raise CheckpointError(f"{reason}; {self._remedy(error.errno)}; nothing was published") from error

    def _remedy(self, number: int | None) -> str:
        if number in _FULL:
            free = _available(self.path)
            return f"{self._needed} bytes are needed in all and {free} are free: make room and start again"
        if number == errno.EFBIG:
            return "the file system or `ulimit -f` limits the size of a file: raise it, or use smaller shards"
        if number == errno.EMFILE:
            return "too many files are open: raise `ulimit -n`"
        return "check the directory, its permissions and the disk"

    def publish(self, last: Sequence[str]) -> None:
        """Give every file its name, those of ``last`` at the end, so that no loader sees half of it."""
        order = [name for name in self._files if name not in last] + [
            name for name in last if name in self._files
        ]
        for name in order:
            self._require_replaceable(name)
            with self.io(name):
                os.fsync(self._files[name])
        if self._overwrite:
            # An old index or configuration must not describe new shards, not even for a moment.
            for name in last:
                with self.io(name), contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path / name)
        for name in order:
            with self.io(name):
                os.rename(self.path / partial_name(name), self.path / name)
            os.close(self._files.pop(name))
            self._published.append(self.path / name)
        with self.io("."):
            _sync_directory(self.path)
        self._published.clear()
        self._made.clear()

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._make(folder.parent)
            with self.io("."):
                os.mkdir(folder)
            self._made.append(folder)

    def _require_free(self, given: Path) -> None:
        if os.path.lexists(given) and not os.path.isdir(given):
            raise CheckpointError(f"output {shown(given)} exists and is no directory; pass another path")
        if not self.path.exists():
            return
        if self._overwrite:
            self._require_no_other_weights(given)
            return
        ours = {LOCK, *(partial_name(name) for name in self._names)}
        with self.io("."):
            found = sorted(set(os.listdir(self.path)) - ours)
        # Folders of companions may be left by a killed run; they hold nothing but partial files.
        found = [name for name in found if not self._only_partials(self.path / name)]
        if found:
            listed = ", ".join(map(shown, found[:3])) + (
                f" and {len(found) - 3} more" if len(found) > 3 else ""
            )
            raise CheckpointError(
                f"output {shown(given)} holds {listed}; pass an empty directory, or overwrite"
            )

    def _require_no_other_weights(self, given: Path) -> None:
        with self.io("."):
            found = sorted(set(os.listdir(self.path)) - set(self._names))
        weights = [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]
        if weights:
            listed = ", ".join(map(shown, weights[:3]))
            raise CheckpointError(
                f"output {shown(given)} holds other weights ({listed}), which loaders might take instead; "
                "remove them, or write elsewhere"
            )

    def _only_partials(self, path: Path) -> bool:
        if path.is_symlink() or not path.is_dir():
            return False
        ours = {str(self.path / partial_name(name)) for name in self._names}
        return all(str(found) in ours or self._only_partials(found) for found in path.iterdir())

    def _require_replaceable(self, name: str) -> None:
        path = self.path / name
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(
                f"{shown(path)} exists and is no regular file; move it away, or pass another output"
            )

    def _require_room(self) -> None:
        free = _available(self.path)
        if free < self._needed:
            raise CheckpointError(
                f"{shown(self.path)} has {free} bytes free, but {self._needed} are needed; make room or "
                "write elsewhere"
            )

    def _take_lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.io(LOCK):
            self._lock = os.open(self.path / LOCK, flags, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = None
            rule = f"is being written by another run (process {holder})"
            raise CheckpointError(f"{shown(self.path)} {rule}; wait for it, or write elsewhere") from error
        with self.io(LOCK):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _discard(self) -> None:
        """Remove what this run made and has not published. Safe to call at any point, and twice."""
        for name, descriptor in self._files.items():
            os.close(descriptor)
            _unlink(self.path / partial_name(name))
        self._files.clear()
        for path in self._published:
            _unlink(path)
        self._published.clear()
        if self._lock is not None:
            _unlink(self.path / LOCK)
            os.close(self._lock)
            self._lock = None
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._made.clear()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _reserve(descriptor: int, size: int) -> None:
    if not size:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _available(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_apart(given: Path, out: Path, root: Place) -> None:
    """Refuse an output that is the source, lies in it or holds it, through links and mounts too."""
    if isinstance(root, RemotePath):
        return

    def same(a: Path, b: Path) -> bool:
        return a == b or (a.exists() and b.exists() and os.path.samefile(a, b))

    if any(same(folder, root) for folder in (out, *out.parents)):
        raise CheckpointError(f"output {shown(given)} is the source or lies in it; write elsewhere")
    if any(same(folder, out) for folder in root.parents):
        raise CheckpointError(f"output {shown(given)} holds the source; write elsewhere")


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, bytes, at ``offset``; short writes are resumed."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def copy_range(source: OpenFile, target: int, *, begin: int, to: int, size: int) -> None:
    """Copy ``size`` bytes at offset ``begin`` of ``source`` to offset ``to`` of ``target``.

    In the kernel where it can; blocks are shared on file systems that know how. Raises CheckpointError when
    the source ends before.
    """
    done = 0
    while done < size and source.descriptor is not None:
        try:
            count = os.copy_file_range(source.descriptor, target, size - done, begin + done, to + done)
        except AttributeError:  # not on Linux
            break
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            break
        if count == 0:
            break  # the file is shorter, which reading reports, or the file system has no such call
        done += count
    buffer = bytearray(min(_FALLBACK_CHUNK, size - done))
    while done < size:
        part = memoryview(buffer)[: size - done]
        source.read_into(part, begin + done)
        write_at(target, part, to + done)
        done += len(part)
