"""How safetensors files are opened and read, and what is none."""

import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
from tests.checkpoint.read.conftest import Refusal, Write
from tests.checkpoint.safetensors_bytes import blob, spec

from zeropoint.checkpoint.read import storage
from zeropoint.checkpoint.read.safetensors_file import parse_header
from zeropoint.checkpoint.read.storage import open_regular, read_into
from zeropoint.errors import CheckpointError


def test_a_sparse_file_of_a_terabyte_costs_its_header_only(tmp_path: Path) -> None:
    """Parse and tile reads allocate neither tensor nor file."""
    size = 2**40
    path = tmp_path / "sparse.safetensors"
    head = blob({"a": spec(0, size, dtype="BF16", shape=[2**20, 2**19])})
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    tracemalloc.start()
    (entry,) = parse_header(path).entries
    fd = open_regular(path)
    tile = bytearray(b"\xff" * 4096)
    read_into(fd, memoryview(tile), entry.begin + entry.nbytes - 4096)
    os.close(fd)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert entry.nbytes == size
    assert tile == bytes(4096)
    assert peak < 1_000_000


def test_a_file_truncated_while_reading_is_an_error_and_no_crash(write: Write) -> None:
    """With mmap this would be SIGBUS."""
    path = write(blob({"a": spec(0, 100_000)}, bytes(100_000)))
    (entry,) = parse_header(path).entries
    fd = open_regular(path)
    os.truncate(path, entry.begin + 10)
    with pytest.raises(
        CheckpointError, match=rf"'.*' ends at byte {entry.begin + 10}.*changed while reading"
    ):
        read_into(fd, memoryview(bytearray(entry.nbytes)), entry.begin, path=path)
    os.close(fd)


def test_short_and_interrupted_reads_are_resumed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second call is interrupted, and the others give one byte."""
    content = bytes(range(200))
    fd = open_regular(write(content))
    real, calls = os.preadv, 0

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise InterruptedError
        return real(fd, [buffers[0][:1]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = bytearray(100)
    read_into(fd, memoryview(buffer), 50)
    os.close(fd)
    assert buffer == content[50:150]
    assert calls == 200


def test_a_failing_disk_is_named_with_its_offset(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = open_regular(write(b"12345678"))

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match="'shard' cannot be read at byte 4: Input/output error"):
        read_into(fd, memoryview(bytearray(2)), 4, path="shard")
    os.close(fd)


def test_a_read_stays_below_what_one_system_call_takes(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger tensors are read in several calls."""
    monkeypatch.setattr(storage, "MAX_READ_BYTES", 3)
    fd = open_regular(write(b"0123456789"))
    buffer = bytearray(10)
    read_into(fd, memoryview(buffer), 0)
    os.close(fd)
    assert buffer == b"0123456789"


class Bomb:
    """Fail the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("was unpickled",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_is_named_and_never_unpickled(refusal: Refusal, protocol: int) -> None:
    """Files .bin, .pt and .ckpt of old torch."""
    message = refusal(pickle.dumps([Bomb(), "x" * 2000], protocol), "pytorch_model.bin")
    assert (
        "is not a safetensors file but a Python pickle (.bin, .pt or .ckpt); convert it to safetensors"
        in message
    )


def test_a_zip_of_torch_is_named_and_never_unpickled(tmp_path: Path) -> None:
    """Files .pt of new torch, and .npz."""
    torch.save({"a": torch.ones(100)}, tmp_path / "m.pt")
    with pytest.raises(
        CheckpointError, match=r"but a zip archive, such as torch\.save .* convert it to safetensors"
    ):
        parse_header(tmp_path / "m.pt")


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "a gzip archive"),
        (b"\x28\xb5\x2f\xfd\x04\0", "a zstd archive"),
        (b"\xfd7zXZ\x00", "a xz archive"),
        (b"BZh9", "a bzip2 archive"),
        (b"\x93NUMPY\x01\0", "a numpy array file"),
        (b"\x89HDF\r\n\x1a\n", "a HDF5 file"),
        (b"<!DOCTYPE html><html>", "a HTML page"),
    ],
)
@pytest.mark.parametrize("size", [0, 700_000])
def test_other_known_files_are_named(refusal: Refusal, head: bytes, what: str, size: int) -> None:
    """Also where the magic, read as a length, lies inside of the file."""
    assert f"is not a safetensors file but {what}" in refusal(head + bytes(size))


def test_the_bytes_of_booleans_are_not_looked_at(write: Write) -> None:
    """Bytes 0 to 255 come back as they are."""
    path = write(blob({"a": spec(0, 256, dtype="BOOL")}, bytes(range(256))))
    (entry,) = parse_header(path).entries
    fd = open_regular(path)
    buffer = bytearray(256)
    read_into(fd, memoryview(buffer), entry.begin)
    os.close(fd)
    assert buffer == bytes(range(256))


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str) -> None:
    """To open a FIFO would wait for ever."""
    path = tmp_path / "x.safetensors"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(CheckpointError, match=f"is a {kind}, but must be a regular file"):
        parse_header(path)


def test_a_file_swapped_for_a_fifo_before_the_open_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open does not block, and the descriptor is asked again."""
    path, real = write(b""), os.open

    def swap(name: Path, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(name, flags)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(CheckpointError, match="is a FIFO"):
        parse_header(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.safetensors", "cannot be opened: .*; check the path"),
        ("a\0b", "has a NUL character, which no path has; choose another one"),
        ("x" * 300, "has a name of 300 bytes, and file systems take 255; choose a shorter one"),
    ],
)
def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_header(tmp_path / name)
