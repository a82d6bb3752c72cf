"""A disk in memory on which recorded calls are played again, and what it may hold after the power went.

What is durable follows POSIX at its weakest, as in T. S. Pillai et al., "All File Systems Are Not Created
Equal" (OSDI 2014): bytes of a file are durable after fsync or fdatasync of the file, a name after fsync of
its directory. Before that each write and each change of a name may be there or not, independently.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.calls import Call

_NAMES = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link")
_DATA = ("pwrite", "write", "copy_file_range", "ftruncate", "truncate", "posix_fallocate")
DIRECTORY = -1
"""The file number of every directory."""


@dataclass
class Content:
    """A file: what every reader sees, its durable bytes, and the calls that are not durable yet.

    After fsync failed, what was pending may never reach the disk although readers see it, and no later fsync
    changes that: only writing again does.
    """

    seen: bytes = b""
    durable: bytes = b""
    pending: list[Call] = field(default_factory=list)

    def write(self, call: Call) -> None:
        """Carry out a call that changes the content."""
        self.seen = changed(self.seen, [call])
        self.pending.append(call)

    def sync(self) -> None:
        """Make everything durable that is pending."""
        self.durable = changed(self.durable, self.pending)
        self.pending.clear()


def changed(data: bytes, calls: Iterable[Call]) -> bytes:
    """Return bytes as calls leave them."""
    buffer = bytearray(data)
    for call in calls:
        if call.name in ("ftruncate", "truncate"):
            del buffer[call.size :]
            buffer.extend(bytes(call.size - len(buffer)))
            continue
        end = max(call.offset + len(call.data), call.size)
        buffer.extend(bytes(max(0, end - len(buffer))))
        buffer[call.offset : call.offset + len(call.data)] = call.data
    return bytes(buffer)


State = dict[str, bytes | None]
"""What a disk holds: the bytes of each file by name, None for a directory."""


class Disk:
    """Files and names, durable and pending. start: what is there, durably, before the first call."""

    def __init__(self, start: State) -> None:
        self.files: dict[int, Content] = {}
        self.names: dict[str, int] = {}
        self.pending: list[Call] = []
        for number, (name, data) in enumerate(start.items(), start=2):
            self.names[name] = DIRECTORY if data is None else -number
            if data is not None:
                self.files[-number] = Content(seen=data, durable=data)
        self._now = dict(self.names)

    def play(self, calls: Iterable[Call]) -> None:
        """Carry out calls in their order."""
        for call in calls:
            if call.name == "open" and call.created:
                self.files[call.number] = Content()
                self._change(call)
            elif call.name in _NAMES:
                self._change(call)
            elif call.name in _DATA:
                self.files[self._now[call.path]].write(call)
            elif call.name in ("fsync", "fdatasync"):
                self._sync(call)

    def _change(self, call: Call) -> None:
        self.pending.append(call)
        _apply(self._now, call)

    def _sync(self, call: Call) -> None:
        number = DIRECTORY if call.path == "." else self._now[call.path]
        if number != DIRECTORY:
            if call.failed:
                self.files[number].pending.clear()
            else:
                self.files[number].sync()
            return
        for change in [c for c in self.pending if _folder(c.path) == call.path and not call.failed]:
            self.pending.remove(change)
            _apply(self.names, change)

    def now(self) -> State:
        """Return what every reader sees."""
        return self._state(self._now, lambda content: content.seen)

    def state(self, names: Iterable[Call], data: Mapping[int, Call]) -> State:
        """Return what is there when only some pending calls took effect.

        data: by the identity of each pending write that took effect, what it wrote.
        """
        there = dict(self.names)
        for call in names:
            _apply(there, call)
        return self._state(
            there, lambda c: changed(c.durable, (data[id(call)] for call in c.pending if id(call) in data))
        )

    def _state(self, names: Mapping[str, int], data: Callable[[Content], bytes]) -> State:
        state: State = {}
        for name, number in sorted(names.items()):
            if _folder(name) == "." or _folder(name) in state:  # else its directory was lost
                state[name] = None if number == DIRECTORY else data(self.files[number])
        return state

    def after_power_loss(self, rng: random.Random, *, mixes: int) -> Iterator[State]:
        """Yield states that the disk may be in: the extremes, each name alone or alone missing, and mixes."""
        names = list(self.pending)
        data = {id(call): call for content in self.files.values() for call in content.pending}
        for some in (names, []):
            for written in (data, {}):
                yield self.state(some, written)
        for call in names:
            yield self.state([call], {})
            yield self.state([c for c in names if c is not call], data)
        for _ in range(mixes if names or data else 0):
            some = [call for call in names if rng.random() < 0.5]
            yield self.state(some, {key: _torn(c, rng) for key, c in data.items() if rng.random() < 0.5})


def _folder(path: str) -> str:
    return os.path.dirname(path) or "."


def _torn(call: Call, rng: random.Random) -> Call:
    """Return a write of which, every third time, only the first bytes took effect."""
    if len(call.data) < 2 or rng.random() > 1 / 3:
        return call
    return replace(call, data=call.data[: rng.randrange(1, len(call.data))])


def _apply(names: dict[str, int], call: Call) -> None:
    """Change names as a call does; one whose file is not there does nothing."""
    if call.name == "mkdir":
        names[call.path] = DIRECTORY
    elif call.name == "open":
        names[call.path] = call.number
    elif call.name in ("rename", "replace"):
        if call.path in names:
            names[call.to] = names.pop(call.path)
    elif call.name == "link":
        if call.path in names:
            names[call.to] = names[call.path]
    else:
        names.pop(call.path, None)


def until_byte(calls: Sequence[Call], count: int) -> list[Call]:
    """Return the calls up to the one that writes byte ``count`` of all, which is cut in front of it."""
    done = 0
    kept: list[Call] = []
    for call in calls:
        if done + len(call.data) > count:
            part = call.data[: count - done]
            return [*kept, *([replace(call, data=part)] if part else [])]
        done += len(call.data)
        kept.append(call)
    return kept


def on_disk(folder: Path) -> State:
    """Return what a folder holds."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def make(state: State, folder: Path) -> None:
    """Make a folder hold exactly a state."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in sorted(state.items()):
        if data is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).write_bytes(data)


def fingerprint(state: State) -> bytes:
    """Return a short name for a state, by which equal ones are tried once."""
    digest = hashlib.sha256()
    for name, data in sorted(state.items()):
        digest.update(repr((name, None if data is None else hashlib.sha256(data).digest())).encode())
    return digest.digest()
