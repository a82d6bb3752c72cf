"""Headers of safetensors files, but for refused ones, which tests/hostile has."""

import os
import re
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from tests.checkpoint.read.conftest import Refusal, Write
from tests.checkpoint.safetensors_bytes import blob, spec
from tests.counting import calls
from tests.hostile.files import NAMES

from zeropoint.checkpoint.read.safetensors_file import parse_header
from zeropoint.checkpoint.read.storage import open_regular, read_into
from zeropoint.codecs.containers.safetensors import DTYPE_BITS, MAX_HEADER_BYTES, header_bytes
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating


def test_a_file_of_the_library_is_read_back_in_file_order(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a": torch.ones(4, dtype=torch.int8)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = parse_header(tmp_path / "m.safetensors")
    assert [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries] == [
        ("b", "BF16", (2, 3), 12),
        ("a", "I8", (4,), 4),
    ]
    assert dict(header.metadata) == {"format": "pt"}
    assert header.stamp.size == (tmp_path / "m.safetensors").stat().st_size
    assert header.entries[0].begin == header.stamp.size - 16


def test_the_bytes_at_an_entry_are_the_tensor(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7)
    safetensors.torch.save_file({"w": tensor, "v": tensor[:, 0].clone()}, tmp_path / "m.safetensors")
    for entry in parse_header(tmp_path / "m.safetensors").entries:
        fd = open_regular(entry.file)
        buffer = bytearray(entry.nbytes)
        read_into(fd, memoryview(buffer), entry.begin)
        os.close(fd)
        expected = {"w": tensor, "v": tensor[:, 0]}[entry.name].contiguous()
        assert buffer == expected.numpy().tobytes()


def test_every_dtype_of_the_library_has_its_bits() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(blob({"a": spec(0, 1, dtype="F7")}, b"1"))
    names = re.findall(r"`(\w+)`", str(caught.value).split("expected one of")[1])
    assert set(names) == set(DTYPE_BITS)
    for name, bits in DTYPE_BITS.items():
        size = 8 * bits // 8
        assert safetensors.deserialize(blob({"a": spec(0, size, dtype=name, shape=[8])}, bytes(size)))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_limit_or_the_file_is_refused_before_allocating(
    refusal: Refusal, length: int
) -> None:
    tracemalloc.start()
    message = refusal(length.to_bytes(8, "little") + b"{}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rule = "only 2 follow its length: the file is truncated"
    if length > MAX_HEADER_BYTES:
        rule = f"above the limit of {MAX_HEADER_BYTES}"
    assert f"the header has {length} bytes, " in message
    assert rule in message
    assert peak < 1_000_000


def test_null_metadata_is_accepted_as_absent(write: Write) -> None:
    """As in the safetensors library."""
    assert parse_header(write(blob({"__metadata__": None}))).metadata == {}


def test_empty_tensors_may_share_an_offset_with_others(write: Write) -> None:
    """Accepted, unlike tensors with bytes that overlap."""
    header = {"c": spec(2, 2), "a": spec(0, 2), "b": spec(0, 0), "d": spec(2, 2, dtype="F64", shape=[0, 3])}
    assert [entry.name for entry in parse_header(write(blob(header, b"12"))).entries] == ["b", "a", "c", "d"]


def test_formats_below_a_byte_are_measured_in_bits(write: Write) -> None:
    """F4 and F6 end on a whole byte as a tensor, not as an element."""
    header = {"a": spec(0, 3, dtype="F6_E3M2", shape=[4]), "b": spec(3, 4, dtype="F4", shape=[1, 2])}
    assert [entry.nbytes for entry in parse_header(write(blob(header, b"1234"))).entries] == [3, 1]


def test_hostile_names_are_kept_as_names(write: Write) -> None:
    """They are dictionary keys, never paths or attributes; those that differ stay apart."""
    header = {name: spec(i, i + 1) for i, name in enumerate(NAMES)}
    path = write(blob(header, bytes(len(NAMES))))
    before = sorted(os.listdir(path.parent))
    entries = parse_header(path).entries
    assert [entry.name for entry in entries] == [*NAMES]
    assert all(entry.file == path for entry in entries)
    assert sorted(os.listdir(path.parent)) == before


def many(count: int, size: int) -> bytes:
    entry = '"{0}":{{"dtype":"U8","shape":[{1}],"data_offsets":[{2},{3}]}}'
    parts = (entry.format(i, size, i * size, (i + 1) * size) for i in range(count))
    return blob(("{" + ",".join(parts) + "}").encode(), bytes(count * size))


@pytest.mark.parametrize("size", [0, 1])
def test_the_work_grows_with_the_number_of_tensors_and_no_faster(write: Write, size: int) -> None:
    """Counted in calls, not in seconds; ten times the tensors may take ten times the calls."""
    paths = [write(many(count, size), f"{count}.safetensors") for count in (1_000, 10_000)]
    small, large = (calls(lambda path=path: parse_header(path)) for path in paths)  # type: ignore[misc]
    assert 9 * small < large < 10.5 * small
    assert len(parse_header(paths[1]).entries) == 10_000


@pytest.mark.parametrize("size", [0, 1])
def test_the_memory_per_tensor_is_bounded(write: Write, size: int) -> None:
    """In bytes a tensor, so that 10**6 tensors stay near 1.5 GB with the JSON."""
    path = write(many(20_000, size))
    tracemalloc.start()
    entries = parse_header(path).entries
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000 * len(entries)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1])
def test_a_million_tensors_are_read(write: Write, size: int) -> None:
    assert len(parse_header(write(many(1_000_000, size))).entries) == 1_000_000


def test_a_header_to_write_refuses_a_name_that_clashes() -> None:
    """The planner's names end here too, before any byte is written."""
    rule = re.escape(
        "tensor 'w.scale' cannot be written: the name appears twice in one file; rename the tensor"
    )
    with pytest.raises(CheckpointError, match=rule):
        header_bytes([("w.scale", "U8", (1,), 1), ("w", "U8", (1,), 1), ("w.scale", "U8", (1,), 1)], {})
    with pytest.raises(CheckpointError, match="the name is reserved for the metadata"):
        header_bytes([("__metadata__", "U8", (1,), 1)], {})
