"""A layer between a program and the calls that change files: it numbers and records them, and disturbs some.

Functions of ``os`` are replaced inside one process, which needs no privileges and is quick. That no call
bypasses the layer is shown elsewhere, by comparing its record with what the kernel saw.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITES = ("pwrite", "write", "copy_file_range")
BY_DESCRIPTOR = (*WRITES, "ftruncate", "posix_fallocate", "fsync", "fdatasync", "fchmod", "flock", "close")
BY_PATH = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "chmod", "truncate")
TAKES_SPACE = (*WRITES, "posix_fallocate", "open", "mkdir", "link")
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that changed a file below the root, or made a change durable.

    path, to: relative to the root; to: the new name of a rename. offset, data: what was written; size: the
    least or new size of the file after posix_fallocate or ftruncate.
    created: whether an open made the file. failed: of a fsync that said so; other failures are not recorded.
    """

    number: int
    name: str
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    created: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls the call ``at`` (from 1): it never returns, fails, or does less than it was asked.

    kind: "kill" before the call; "tear": half of a write, then kill; "error" with the errno ``code``;
    "short": a write takes all but one byte; "signal" ``code`` before the call. lasting: the same befalls all
    later calls of ``names``.
    """

    at: int
    kind: str
    code: int = 0
    lasting: bool = False
    names: tuple[str, ...] = ()


@dataclass
class Layer:
    """The calls of this process on files below ``root``, from :meth:`installed` on."""

    root: Path
    fault: Fault | None = None
    before: Callable[[], None] | None = None
    calls: list[Call] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    """The name of each call that the fault befell."""

    def __post_init__(self) -> None:
        self._real: dict[str, Callable[..., Any]] = {}
        self._guard = threading.RLock()
        self._paths: dict[int, str] = {}
        self._count = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[Layer]:
        """Replace the functions inside the block."""
        for name in (*BY_DESCRIPTOR, *BY_PATH):
            owner = fcntl if name == "flock" else os
            if hasattr(owner, name):
                self._real[name] = getattr(owner, name)
                setattr(owner, name, self._stand_in(name))
        try:
            yield self
        finally:
            for name, real in self._real.items():
                setattr(fcntl if name == "flock" else os, name, real)

    def _stand_in(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def stand_in(*args: Any, **options: Any) -> Any:
            path = self._path(name, _absolute(args, options))
            if path is None:
                result = real(*args, **options)
                if name == "open":  # the number may have been that of a file closed out of sight
                    self._paths.pop(result, None)
                return result
            if self.before is not None:
                self.before()
            with self._guard:
                self._count += 1
                return self._carry_out(name, path, args, options)

        return stand_in

    def _path(self, name: str, args: tuple[Any, ...]) -> str | None:
        """Return the relative path of a call that counts."""
        if name in BY_DESCRIPTOR:
            return self._paths.get(args[1] if name == "copy_file_range" else args[0])
        if name == "open" and not args[1] & (_CREATES | os.O_DIRECTORY):
            return None
        return self._relative(args[1 if name == "link" else 0])

    def _relative(self, path: Any) -> str | None:
        given = os.path.abspath(os.fsdecode(path))
        root = str(self.root)
        return os.path.relpath(given, root) if given.startswith(root + os.sep) or given == root else None

    def _carry_out(self, name: str, path: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        real, fault = self._real[name], self._fault(name)
        if name == "close":  # before the number is free for a file that another thread opens out of sight
            self._paths.pop(args[0], None)
        if fault is not None:
            self.struck.append(name)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "signal":
                os.kill(os.getpid(), fault.code)
            elif fault.kind == "error":
                if name == "close":
                    real(*args)
                if name in ("fsync", "fdatasync"):
                    self.calls.append(Call(number=self._count, name=name, path=path, failed=True))
                raise OSError(fault.code, os.strerror(fault.code), *([args[0]] if name in BY_PATH else []))
            elif name in WRITES and fault.kind in ("tear", "short"):
                args = _less(name, args, half=fault.kind == "tear")
        existed = name != "open" or os.path.lexists(self.root / path)
        result = real(*args, **options)
        self._record(name, path, _absolute(args, options), result, existed=existed)
        if fault is not None and fault.kind == "tear":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _fault(self, name: str) -> Fault | None:
        fault = self.fault
        if fault is None or self._count < fault.at:
            return None
        return fault if self._count == fault.at or (fault.lasting and name in fault.names) else None

    def _record(self, name: str, path: str, args: tuple[Any, ...], result: Any, *, existed: bool) -> None:
        facts: dict[str, Any] = {}
        if name == "open":
            self._paths[result] = path
            facts = {"created": not existed}
        elif name in ("rename", "replace"):
            to = self._relative(args[1]) or os.fsdecode(args[1])
            facts = {"to": to}
            self._paths = {d: to if p == path else p for d, p in self._paths.items()}
        elif name == "pwrite":
            facts = {"offset": args[2], "data": bytes(memoryview(args[1]).cast("B")[:result])}
        elif name == "write":
            end = os.lseek(args[0], 0, os.SEEK_CUR)
            facts = {"offset": end - result, "data": bytes(memoryview(args[1]).cast("B")[:result])}
        elif name == "copy_file_range":
            facts = {"offset": args[4], "data": os.pread(args[1], result, args[4])}
        elif name in ("ftruncate", "truncate"):
            facts = {"size": args[1]}
        elif name == "posix_fallocate":
            facts = {"size": args[1] + args[2]}
        self.calls.append(Call(number=self._count, name=name, path=path, **facts))


def _absolute(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call with paths in place of names below the descriptor of a directory."""
    folders = [options.get(key) for key in ("dir_fd", "src_dir_fd", "dst_dir_fd")]
    given = [os.readlink(f"/proc/self/fd/{folder}") for folder in folders if folder is not None]
    paths = [os.path.join(folder, name) for folder, name in zip(given, args, strict=False)]
    return (*paths, *args[len(given) :])


def pauses(seed: int) -> Callable[[], None]:
    """Return a random pause of at most 3 ms, for each call another one."""
    rng = random.Random(seed)
    return lambda: time.sleep(rng.random() * 0.003)


def _less(name: str, args: tuple[Any, ...], *, half: bool) -> tuple[Any, ...]:
    """Return the arguments of a write that takes only a part of the bytes, and at least one."""
    size = args[2] if name == "copy_file_range" else memoryview(args[1]).nbytes
    part = max(1, size // 2 if half else size - 1)
    if name == "copy_file_range":
        return (*args[:2], part, *args[3:])
    return (args[0], memoryview(args[1]).cast("B")[:part], *args[2:])
