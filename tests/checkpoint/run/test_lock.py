"""One writer at a time, on file systems with locks and without."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeropoint.checkpoint.run import lock
from zeropoint.checkpoint.run.lock import LOCK, OWNER, Lock, break_lock
from zeropoint.errors import CheckpointError

HOLD = """
import sys
from pathlib import Path
from zeropoint.checkpoint.run.lock import Lock
Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_by_one_process_and_dies_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=rf"is being written by another run \(process {process.pid}\)"
        ):
            Lock(tmp_path)
        break_lock(tmp_path)
        with pytest.raises(CheckpointError, match="wait for it, or write elsewhere"):
            Lock(tmp_path)
        process.kill()
        process.communicate()
    assert (tmp_path / LOCK).exists()
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed = []

    def late(descriptor: int, operation: int) -> None:
        # The holder before removes its file between our open and our flock.
        if not removed:
            removed.append(True)
            os.unlink(tmp_path / LOCK)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    held = Lock(tmp_path)
    assert removed
    with pytest.raises(CheckpointError, match="is being written"):
        Lock(tmp_path)
    held.release()
    held.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_of_the_file_system_an_owner_is_named_until_the_lock_is_broken(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    held = Lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]
    rule = rf"another run \('process {os.getpid()} on .*, boot .*'\); wait for it, or pass break_lock=True"
    with pytest.raises(CheckpointError, match=rule):
        Lock(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []
    Lock(tmp_path)  # of a process that dies without releasing
    break_lock(tmp_path)
    break_lock(tmp_path)
    Lock(tmp_path).release()


def test_locks_of_the_two_kinds_keep_each_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr(lock.fcntl, "flock", refuse)
        held = Lock(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"another run \('process .*'\); wait for it, or pass break_lock=True"
    ):
        Lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]
    held.release()
    held = Lock(tmp_path)
    with monkeypatch.context() as without:
        without.setattr(lock.fcntl, "flock", refuse)
        with pytest.raises(OSError, match="No locks available"):
            Lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]  # else a third run would make another one
    with pytest.raises(CheckpointError, match="is being written"):
        Lock(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_other_failures_of_the_lock_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock.fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"):
        Lock(tmp_path)
