"""The safetensors library as the oracle: it loads what we write, and we accept what it accepts."""

import random
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.checkpoint.read.safetensors_file import Header, parse_header
from zeropoint.codecs.containers import safetensors as container
from zeropoint.codecs.containers.safetensors import DTYPE_BITS, header_bytes
from zeropoint.errors import CheckpointError


def test_a_written_header_has_the_bytes_of_the_library() -> None:
    name = 'a\x1b\x7f\u00e9\n/"\\\U0001f600'
    ours = header_bytes([(name, "F32", (2,), 8), ("b", "I8", (0, 3), 0)], {"k\u00e9": "v\t"}) + bytes(8)
    tensors = {name: torch.zeros(2), "b": torch.zeros((0, 3), dtype=torch.int8)}
    assert ours == safetensors.torch.save(tensors, metadata={"k\u00e9": "v\t"})


TENSORS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(sorted(DTYPE_BITS)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ).filter(lambda t: t[0] != "__metadata__"),
    max_size=8,
    unique_by=lambda t: t[0],
)
METADATA = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.text("a\u00e9\n"), max_size=3
)


@given(TENSORS, METADATA)
def test_written_headers_load_in_the_library_and_here(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, str, tuple[int, ...]]],
    metadata: dict[str, str],
) -> None:
    entries = []
    for name, dtype, sizes in tensors:
        shape = (*sizes, 4) if DTYPE_BITS[dtype] % 8 else sizes  # four elements of 4 or 6 bits end on a byte
        entries.append((name, dtype, shape, torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8))
    head = header_bytes(entries, metadata)
    data = random.Random(len(head)).randbytes(sum(entry[3] for entry in entries))
    assert len(head) % 8 == 0
    path = tmp_path_factory.mktemp("written") / "x.safetensors"
    path.write_bytes(head + data)
    header = parse_header(path)
    assert header.metadata == metadata
    assert sorted((e.name, e.dtype, e.shape, e.nbytes) for e in header.entries) == sorted(entries)
    begins = {e.name: e.begin - len(head) for e in header.entries}
    assert [begins[entry[0]] for entry in entries] == [
        sum(e[3] for e in entries[:i]) for i in range(len(entries))
    ]
    loaded = {name: value["data"] for name, value in safetensors.deserialize(head + data)}
    assert loaded == {n: data[begins[n] : begins[n] + size] for n, _, _, size in entries}
    with safetensors.safe_open(path, "pt") as opened:
        assert (opened.metadata() or {}) == metadata


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        (("a", "U8", (3,), 2), r"has 2 bytes, but U8 of shape \[3\] takes 3; pass matching ones"),
        (("a", "F7", (1,), 1), "has the unknown dtype 'F7'"),
        (("a", "U8", (-1,), 1), "each size must be an unsigned integer"),
        (("a\udc00", "U8", (1,), 1), "half a surrogate pair"),
        (("a" * 5000, "U8", (1,), 1), "above the limit of 4096"),
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(
    entry: tuple[str, str, tuple[int, ...], int], rule: str
) -> None:
    with pytest.raises(CheckpointError, match=rule):
        header_bytes([entry], {})


def test_a_header_above_the_limit_of_loaders_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 100)
    with pytest.raises(
        CheckpointError, match="above the limit of 100 that loaders set; write more, smaller shards"
    ):
        header_bytes([(str(i), "U8", (1,), 1) for i in range(10)], {})


def verdict(path: Path) -> Header | str:
    """Return the header, or the message with which the file is refused."""
    try:
        return parse_header(path)
    except CheckpointError as error:
        return str(error)


@given(st.binary(max_size=200))
def test_random_bytes_end_in_a_header_or_in_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("random") / "x.safetensors"
    path.write_bytes(content)
    found = verdict(path)
    assert found.isprintable() if isinstance(found, str) else found.stamp.size == len(content)
