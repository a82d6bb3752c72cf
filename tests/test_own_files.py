"""Files that are written whole: what they replace, what they leave behind, and what a failure leaves."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zeropoint.errors import CheckpointError
from zeropoint.own_files import FileKind, OwnFile

NOTE = FileKind("note", b"# note of a test")
TEXT = [b"# note of a test\n", b"one"]


@pytest.fixture(params=["files without a name", "named drafts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "named drafts":
        plain = os.open

        def opened(path: object, flags: int, *more: object, **options: object) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return plain(path, flags, *more, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", opened)
    return tmp_path


def test_a_file_of_the_kind_is_replaced_where_that_is_asked_for_and_no_other(folder: Path) -> None:
    file = OwnFile(folder / "a", NOTE)
    file.write(TEXT, overwrite=False)
    file.write(TEXT, overwrite=False)  # the same content
    with pytest.raises(CheckpointError, match=r"note '.*a' exists; name a new file, or move it away"):
        file.write([*TEXT, b"two"], overwrite=False)
    assert file.path.read_bytes() == b"".join(TEXT)
    file.write([*TEXT, b"two"], overwrite=True)
    assert file.path.read_bytes() == b"".join([*TEXT, b"two"])
    for content in (b"mine", b"x" * 5000 + NOTE.mark):
        file.path.write_bytes(content)
        with pytest.raises(CheckpointError, match="exists and is no note of zeropoint"):
            file.write(TEXT, overwrite=True)
        assert file.path.read_bytes() == content
    assert os.listdir(folder) == ["a"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_regular_file_is_not_replaced(folder: Path, make: object) -> None:
    make(folder / "a")  # type: ignore[operator]
    for kind in (NOTE, FileKind("file")):
        with pytest.raises(CheckpointError, match="exists and is no"):
            OwnFile(folder / "a", kind).write(TEXT, overwrite=True)
    assert os.listdir(folder) == ["a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failure_leaves_the_old_content_and_no_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = OwnFile(folder / "a", NOTE)
    file.write(TEXT, overwrite=False)

    def fail(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    def close_and_fail(descriptor: int, close: Callable[[int], None] = os.close) -> None:
        close(descriptor)
        fail()

    for call, is_closed in itertools.product(("write", "fsync", "rename"), (True, False)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            if not is_closed:
                patch.setattr(os, "close", close_and_fail)
            with pytest.raises(CheckpointError, match=f"cannot be written: {os.strerror(number)}; choose"):
                file.write([*TEXT, b"two"], overwrite=True)
        assert os.listdir(folder) == ["a"]
        assert file.path.read_bytes() == b"".join(TEXT)


def test_bytes_are_on_disk_before_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for call in ("fsync", "rename", "link"):

        def noted(
            *given: object, call: str = call, plain: object = getattr(os, call), **more: object
        ) -> object:
            calls.append(call)
            return plain(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(os, call, noted)
    OwnFile(folder / "a", NOTE).write(TEXT, overwrite=False)
    assert calls[0] == calls[-1] == "fsync"
    assert len(calls) == 3


def test_nothing_is_written_where_a_checkpoint_lies(folder: Path) -> None:
    inner = folder / "source" / "deep"
    inner.mkdir(parents=True)
    (folder / "link").symlink_to(inner)
    weights = folder / "model.gguf"
    weights.write_bytes(b"GGUF")
    apart = [folder / "source", weights]
    for path in (inner / "a", folder / "link" / "a", inner / ".." / "a", weights):
        with pytest.raises(CheckpointError, match="lies in the checkpoint that is read; write elsewhere"):
            OwnFile(path, FileKind("file"), apart).write(TEXT, overwrite=True)
    OwnFile(folder / "a", NOTE, apart).write(TEXT, overwrite=False)
    assert weights.read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a" * 300, "File name too long"),
        ("no/a", "No such file or directory"),
        ("a\0b", "embedded null byte"),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_is_a_sentence(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be written: {reason}; choose another place"):
        OwnFile(folder / name, NOTE).write(TEXT, overwrite=False)
    assert os.listdir(folder) == []
