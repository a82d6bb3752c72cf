"""Pieces of a file at equal distances, read in few calls: bytes of each, wherever it lies."""

import os
from pathlib import Path

import pytest

from zeropoint.checkpoint.read.storage import LocalFile, OpenFile, read_pieces
from zeropoint.errors import CheckpointError


class Elsewhere:
    """A file that no descriptor of the system reads, as an object of a store is."""

    descriptor = None

    def __init__(self, file: LocalFile) -> None:
        self.stamp, self.read_into, self.close = file.stamp, file.read_into, file.close


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("size", "stride", "count"),
    [
        (1, 1, 9),
        (7, 8, 1),
        (7, 8, 511),
        (7, 8, 512),
        (3, 10, 1200),
        (512, 4096, 600),
        (5, 40_000, 7),
        (5, 9, 0),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_each_piece_has_the_bytes_at_its_place(
    tmp_path: Path, size: int, stride: int, count: int, *, local: bool
) -> None:
    path, begin = tmp_path / "numbers", 11
    raw = os.urandom(begin + max(0, count - 1) * stride + size)
    path.write_bytes(raw)
    own = LocalFile(path)
    file: OpenFile = own if local else Elsewhere(own)
    buffer = bytearray(count * size)
    read_pieces(file, memoryview(buffer), begin, size=size, stride=stride)
    own.close()
    places = range(begin, begin + count * stride, stride)
    assert bytes(buffer) == b"".join(raw[at : at + size] for at in places)


@pytest.mark.parametrize("stride", [8, 40_000])
def test_a_file_that_ends_within_a_piece_is_refused(tmp_path: Path, stride: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(99 * stride + 3))
    file = LocalFile(path)
    with pytest.raises(
        CheckpointError, match=f"'.*short' ends at byte {99 * stride + 3}, but 4 bytes from byte"
    ):
        read_pieces(file, memoryview(bytearray(100 * 4)), 0, size=4, stride=stride)
    file.close()
