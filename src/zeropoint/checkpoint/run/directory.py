"""The output directory: hidden partial files until all of them are complete.

Files are written under hidden names, ``.NAME.partial``, in the directory itself, so that the final rename
never crosses file systems. Publishing renames shards and companions first, then the manifest, config.json and
the index, whose rename is the commit; a file without an index comes between companions and manifest. A run
that ends before leaves the hidden files, from which the next one resumes, or removes them, and no other file
is touched: what has a final name is removed only where its inode says that it is ours. A lock keeps a second
run out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, option, size_of
from ..read.file_names import JOURNAL, require_outputs
from ..read.object_store import RemotePath
from ..read.problems import ObstacleError, listed
from ..read.source import folders_of
from ..read.storage import Place, shown
from .folder import Folder, write_at
from .lock import LOCK, OWNER, Lock

_FULL = (errno.ENOSPC, errno.EDQUOT)


def partial_name(name: str) -> str:
    """Return the hidden name under which ``name`` is written.

    >>> partial_name("1_Pooling/config.json")
    '1_Pooling/.config.json.partial'
    """
    path = Path(name)
    return str(path.with_name(f".{path.name}.partial"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Partial files of a directory, open to any process of a run.

    needed: bytes of all files, for messages.
    """

    path: Path
    needed: int

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Give a partial file's descriptor for the block, to read and write.

        Operating system errors inside the block, and on closing, become a CheckpointError about ``name``.
        """
        with self.io(name):
            descriptor = Folder(self.path).open(partial_name(name), os.O_RDWR)
            try:
                yield descriptor
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                raise
            os.close(descriptor)

    @contextlib.contextmanager
    def io(self, name: str, so_far: str = "nothing was published") -> Iterator[None]:
        """Turn operating system errors inside the block into a CheckpointError about ``name``.

        so_far: what has become of the output by then.
        """
        try:
            yield
        except OSError as error:
            reason = f"{shown(self.path / name)} cannot be written: {error.strerror or error}"
            raise CheckpointError(f"{reason}; {self._remedy(error.errno)}; {so_far}") from error

    def _remedy(self, number: int | None) -> str:
        if number in _FULL:
            free = _available(self.path)
            if number == errno.EDQUOT:
                return "your quota on this file system is used up: make room and start again"
            found = os.statvfs(self.path)
            if found.f_files and not found.f_favail:
                return "the file system has no room for more files (inodes): remove some and start again"
            needed = size_of(self.needed)
            return f"{needed} are needed in all and {size_of(free)} are free: make room and start again"
        if number == errno.EFBIG:
            return "the file system or `ulimit -f` limits the size of a file: raise it, or use smaller shards"
        if number == errno.EMFILE:
            return "too many files are open: raise `ulimit -n`"
        return "check the directory, its permissions and the disk"


class OutputDirectory:
    """An output directory, locked for this process: a context manager.

    path: where to write. Created with its parents where it does not exist. root: the source, which must be
    elsewhere, or None for a model in memory. sizes: bytes of every file that will be written, by name.
    overwrite: whether the directory may hold files already; other names are kept.

    Raises CheckpointError when the place is no directory, locked, or inside the source, and when a name leads
    out of it.
    """

    def __init__(
        self,
        path: Path,
        root: Place | None,
        sizes: Mapping[str, int],
        *,
        overwrite: bool,
        below: bool = False,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.partials = Partials(path=self.path, needed=sum(sizes.values()))
        self._given = path
        self.names = tuple(sizes)
        self._sizes = sizes
        self.overwrite = overwrite
        self._folder = Folder(self.path)
        self._begun = False
        self._made: list[Path] = []
        self._inner: list[str] = []
        self._ours: dict[str, tuple[int, int]] = {}
        self._lock: Lock | None = None
        self._root = root
        require_outputs(sizes)
        if root is not None:
            _require_apart(path, self.path, root, below=below)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CheckpointError(f"output {shown(path)} exists and is not a directory; choose another path")

    def __enter__(self) -> OutputDirectory:
        try:
            with self.partials.io(LOCK):
                while self._lock is None:
                    self._make(self.path)
                    # The run before may just be removing the directory that it made.
                    with contextlib.suppress(FileNotFoundError):
                        self._lock = Lock(self.path)
            self._require_unseen(self._lock)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self._leave()

    def require_free(self, *, published: bool) -> None:
        """Raise CheckpointError for files of others, or too little room.

        published: whether an interrupted run of the same plan had begun to give files their names.
        """
        self._begun = published
        with self.partials.io("."):
            found = sorted(set(os.listdir(self.path)) - {LOCK, OWNER, JOURNAL, *self._own()})
        if self.overwrite or published:
            found = [name for name in found if name not in self._sizes]
        if self.overwrite:
            self._require_no_other_weights(found)
        else:
            self._require_nothing(found)
        self._require_room()

    def prepare(self, name: str, size: int, head: bytes = b"") -> None:
        """Create or reuse a partial file with this size and head."""
        partial = partial_name(name)
        with self.partials.io(name):
            self._require_replaceable(name)
            self._inner += self._folder.make(name)
            found = self._folder.file(partial)
            if found is not None and found.st_nlink > 1:
                # Another name holds the same bytes, which are not ours to change.
                self._folder.unlink(partial)
            descriptor = self._folder.open(partial, os.O_RDWR | os.O_CREAT)
            try:
                self._ours[name] = _inode(os.fstat(descriptor))
                if os.fstat(descriptor).st_size > size:
                    os.ftruncate(descriptor, size)
                _reserve(descriptor, size)
                write_at(descriptor, memoryview(head), 0)
            finally:
                os.close(descriptor)

    def published(self, name: str) -> bool:
        """Return whether ``name`` is published, with no newer partial file."""
        found = self._folder.state(name)
        waits = self._folder.state(partial_name(name)) is not None
        return not waits and found is not None and stat.S_ISREG(found.st_mode)

    def adopt(self, name: str) -> None:
        """Mark a published file with proven bytes as this run's.

        With ``overwrite`` it may be an older one, and is not marked.
        """
        found = self._folder.state(name)
        if found is not None and not self.overwrite:
            self._ours[name] = _inode(found)

    def sync(self, skip: Collection[str] = ()) -> dict[str, str]:
        """Sync all files except ``skip``; return the state of each, as text."""
        found = {}
        for name in self._sizes:
            if name not in skip:
                self._require_replaceable(name)
                with self.partials.open(name) as descriptor:
                    os.fsync(descriptor)
                    found[name] = _state(os.fstat(descriptor))
        return found

    def publish(self, last: Sequence[str], *, skip: Collection[str] = ()) -> None:
        """Rename every file to its final name, ``last`` at the end.

        last: each of these has its name on disk before the next, and loses an old one after it.
        skip: files that have theirs. Raises ObstacleError when a file of somebody else has one.
        """
        order = [name for name in self._sizes if name not in (*last, *skip)] + list(last)
        self.sync_names()
        for name in reversed(last) if self.overwrite else ():
            # An old index or configuration must not describe new shards, not even for a moment.
            with self.partials.io(name), contextlib.suppress(FileNotFoundError):
                self._folder.unlink(name)
            self.sync_names()
        for number, name in enumerate(order):
            if number >= len(order) - len(last):
                self.sync_names(_PARTLY)
            self._require_replaceable(name)
            with self.partials.io(name, "nothing was published" if number == 0 else _PARTLY):
                self._folder.rename(partial_name(name), name)
        self.sync_names("all files were published")
        self._made.clear()
        self._inner.clear()

    def sync_names(self, so_far: str = "nothing was published") -> None:
        """Sync the directories of all files, and the parents of new directories."""
        folders = {(self.path / name).parent for name in self._sizes} | {made.parent for made in self._made}
        with self.partials.io(".", so_far):
            for folder in sorted(folders):
                _sync_directory(folder)

    def finish(self) -> None:
        """Remove the journal: the run is over."""
        with self.partials.io(JOURNAL, "all files were published"):
            with contextlib.suppress(FileNotFoundError):  # somebody was faster
                self._folder.unlink(JOURNAL)
            _sync_directory(self.path)

    def discard(self, names: Iterable[str] = (), published: Mapping[str, str] | None = None) -> None:
        """Remove partial files of this or an interrupted run, then the journal.

        names: the files of the interrupted run. published: files that have their names, with the state that
        the interrupted run gave them; by default this run's. A file that is another one meanwhile
        stays.
        """
        for name in dict.fromkeys((*self.names, *names)):
            self._remove(partial_name(name))
        for name, was in (self._ours if published is None else published).items():
            self._remove(name, was)
        self._remove(JOURNAL)  # the journal last: until then it says what the others are

    def _remove(self, name: str, was: object = None) -> None:
        """Remove a file; was: its inode or state, where another file stays."""
        with contextlib.suppress(OSError, CheckpointError):
            found = self._folder.file(name)
            if found is not None and was in (None, _inode(found), _state(found)):
                self._folder.unlink(name)

    def _own(self) -> list[str]:
        return [partial_name(name) for name in self._sizes]

    def _leave(self) -> None:
        """Release the lock, remove empty folders of this run; idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        for inner in reversed(self._inner):
            with contextlib.suppress(OSError, CheckpointError):
                self._folder.remove(inner)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._made.clear()
        self._inner.clear()

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._make(folder.parent)
            with self.partials.io("."):
                os.makedirs(folder, exist_ok=True)  # another run may have been faster
            self._made.append(folder)

    def _require_unseen(self, lock: Lock) -> None:
        """Refuse an output that overlaps the source through a mount."""
        if self._root is None or isinstance(self._root, RemotePath):
            return
        parts = self.path.parts[1:]
        below = [self._root.joinpath(*parts[begin:]) for begin in range(len(parts))]
        for folder in (
            *(place for root in folders_of(self._root) for place in (root, *root.parents)),
            *below,
        ):
            if folder != self.path and lock.is_seen_in(folder):
                raise CheckpointError(
                    f"output {shown(self._given)} is the source, lies in it or holds it: it is also seen as "
                    f"{shown(folder)}; write elsewhere"
                )

    def _require_nothing(self, found: Sequence[str]) -> None:
        # Folders of companions may be left by a killed run; they hold nothing but its files.
        found = [name for name in found if not self._only_own(self.path / name)]
        if found:
            raise CheckpointError(
                f"output {shown(self._given)} holds {listed([*map(shown, found)], 3)}; choose an empty "
                f"directory, or add {option('overwrite', True)}"
            )

    def _require_no_other_weights(self, found: Sequence[str]) -> None:
        weights = [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]
        if weights:
            listed = ", ".join(map(shown, weights[:3]))
            raise CheckpointError(
                f"output {shown(self._given)} holds other weights ({listed}), which loaders might take "
                "instead; remove them, or write elsewhere"
            )

    def _only_own(self, path: Path) -> bool:
        if path.is_symlink() or not path.is_dir():
            return False
        own = {str(self.path / name) for name in (*self._own(), *(self._sizes if self._begun else ()))}
        return all(str(found) in own or self._only_own(found) for found in path.iterdir())

    def _require_replaceable(self, name: str) -> None:
        """Refuse a name of no file, or of a protected file."""
        with self.partials.io(name):
            if self._folder.file(name) is not None and not self.overwrite:
                raise ObstacleError(
                    f"{shown(self.path / name)} is not a file of this run; move it away, and run the same "
                    "command again to resume"
                )

    def _require_room(self) -> None:
        free = _available(self.path)
        missing = sum(self._missing(name, size) for name, size in self._sizes.items())
        if free < missing:
            raise CheckpointError(
                f"{shown(self.path)} has {size_of(free)} free, but {size_of(missing)} are needed; make room "
                "or write elsewhere"
            )

    def _missing(self, name: str, size: int) -> int:
        """Return the missing disk bytes of a partial file, whole blocks."""
        with self.partials.io(name):
            found = self._folder.state(partial_name(name))
        if found is None:
            return -(-size // _BLOCK) * _BLOCK
        return max(0, size - 512 * found.st_blocks)


_PARTLY = "some files were published, but not the index"
_BLOCK = 4096


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _state(found: os.stat_result) -> str:
    # A new name changes none of these, and without the device, as in plan/identity.py.
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"


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


def _require_apart(given: Path, out: Path, root: Place, *, below: bool) -> None:
    """Refuse an output that overlaps the source, through links and mounts too.

    below: whether it may lie in the source's folder, of which one file is read.
    """
    if isinstance(root, RemotePath):
        return

    def same(a: Path, b: Path) -> bool:
        return a == b or (a.exists() and b.exists() and os.path.samefile(a, b))

    inner = (out,) if below else (out, *out.parents)
    if any(same(folder, place) for folder in inner for place in folders_of(root)):
        raise CheckpointError(f"output {shown(given)} is the source or lies in it; write elsewhere")
    if any(same(folder, out) for folder in root.parents):
        raise CheckpointError(f"output {shown(given)} holds the source; write elsewhere")
