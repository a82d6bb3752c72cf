"""Results get into the journal after their bytes are on disk, and never when these may not be."""

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest
from tests.checkpoint.interrupted import plan_of
from tests.checkpoint.written import LINEAR, save, weight

from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.run import commit as module
from zeropoint.checkpoint.run.commit import Commit
from zeropoint.checkpoint.run.directory import Partials, partial_name
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.run.unit_results import UnitResult
from zeropoint.checkpoint.run.units import Unit, Units
from zeropoint.errors import CheckpointError


@pytest.fixture
def cut(tmp_path: Path, small_units: None) -> tuple[Unit, ...]:
    (tmp_path / partial_name("model.safetensors")).write_bytes(b"")
    found = Units(plan_of(save(tmp_path / "in", {LINEAR: weight(2048, 128)}), "w8a8"))
    assert len(found) > 4
    return found


def committing(folder: Path, cut: tuple[Unit, ...]) -> tuple[Commit, Journal]:
    journal = Journal(folder / JOURNAL)
    return Commit(journal, Partials(path=folder, needed=0), cut), journal


def done(number: int) -> UnitResult:
    return UnitResult(number=number, digests=("",), error=None)


def test_results_are_journaled_after_so_many_bytes_once_their_file_is_synchronized(
    cut: tuple[Unit, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync = os.fdatasync

    def watch(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", watch)
    monkeypatch.setattr(module, "COMMIT_BYTES", sum(span.size for unit in cut[:2] for span in unit.spans))
    monkeypatch.setattr(module, "COMMIT_SECONDS", 1e9)
    commit, journal = committing(tmp_path, cut)
    commit.add(done(0))
    assert order == []
    commit.add(done(1))
    commit.flush()
    assert order == [partial_name("model.safetensors"), JOURNAL]
    assert len(journal) == 2
    commit.flush()
    assert len(order) == 2
    commit.close()
    journal.close()
    assert [record["unit"] for record in Journal(tmp_path / JOURNAL).records] == [0, 1]


def test_after_a_failed_sync_nothing_that_was_waiting_is_ever_journaled(
    cut: tuple[Unit, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([True])
    sync = os.fdatasync

    def fail(descriptor: int) -> None:
        if next(left, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(module, "COMMIT_BYTES", 1)
    commit, journal = committing(tmp_path, cut)
    commit.add(done(0))
    commit._pending.append(done(1))  # comes in while the first is on its way to the disk
    with pytest.raises(CheckpointError, match=r"cannot be written: Input/output error; check the directory"):
        commit.flush()
    commit.flush()
    commit.close()
    assert len(journal) == 0
    journal.close()


def test_what_follows_a_write_that_will_fail_is_not_journaled_either(
    cut: tuple[Unit, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, syncs = threading.Event(), itertools.count()
    sync = os.fdatasync

    def fail_first(descriptor: int) -> None:
        if next(syncs) == 0:
            both.wait()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail_first)
    commit, journal = committing(tmp_path, cut)
    for number in (0, 1):
        commit.add(done(number))
        commit.start()
    both.set()
    with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
        commit.flush()
    commit.close()
    assert len(journal) == 0
    journal.close()
