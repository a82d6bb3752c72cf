"""Headers of safetensors files, well formed or hostile; the numbers are those of the bad inputs."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from tests.checkpoint.safetensors_bytes import blob, spec

from zeropoint.checkpoint.safetensors_file import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    header_bytes,
    parse_header,
)
from zeropoint.checkpoint.storage import open_regular, read_into
from zeropoint.errors import CheckpointError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: bytes, name: str = "x.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def refusal(write: Write) -> Callable[..., str]:
    """Return the message with which a file is refused: one line, with the path in it."""

    def refusal(content: bytes, name: str = "x.safetensors") -> str:
        path = write(content, name)
        with pytest.raises(CheckpointError) as caught:
            parse_header(path)
        message = str(caught.value)
        assert name in message
        assert "\n" not in message
        assert message.isprintable()
        return message

    return refusal


Refusal = Callable[..., str]


def test_a_file_of_the_library_is_read_back_in_file_order(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a": torch.ones(4, dtype=torch.int8)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = parse_header(tmp_path / "m.safetensors")
    assert [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries] == [
        ("b", "BF16", (2, 3), 12),
        ("a", "I8", (4,), 4),
    ]
    assert dict(header.metadata) == {"format": "pt"}
    assert header.file_size == (tmp_path / "m.safetensors").stat().st_size
    assert header.entries[0].begin == header.data_begin


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


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_small_for_a_length_is_refused(refusal: Refusal, size: int) -> None:
    """D62: empty and 1 to 7 bytes."""
    assert f"{size} bytes are too small for a header" in refusal(bytes(size))


def test_a_file_that_ends_after_the_length_is_refused(refusal: Refusal) -> None:
    """D62: header length only."""
    message = refusal((16).to_bytes(8, "little"))
    assert "the header has 16 bytes, but only 0 follow its length: the file is truncated" in message
    assert "the header is not JSON" in refusal(bytes(8))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_above_the_limit_is_refused_before_allocating(refusal: Refusal, length: int) -> None:
    """D63."""
    tracemalloc.start()
    message = refusal(length.to_bytes(8, "little") + b"{}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"the header has {length} bytes, above the limit of {MAX_HEADER_BYTES}" in message
    assert peak < 1_000_000


def test_a_header_length_beyond_the_file_is_refused_before_allocating(refusal: Refusal) -> None:
    """D63: below the limit, but above the file."""
    tracemalloc.start()
    message = refusal(MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "but only 2 follow its length: the file is truncated" in message
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"\xff\xfe{}", "the header is not UTF-8 at its byte 0"),
        (b'{"a\xc0\x80":1}', "the header is not UTF-8 at its byte 3"),
        (b"\xef\xbb\xbf{}", "the header is not JSON"),
        (b"{", "the header is not JSON"),
        (b"{}\0", "the header is not JSON"),
        (b"{} {}", "the header is not JSON"),
        (b"{'a':1}", "the header is not JSON"),
        (b'{"a\n":1}', "the header is not JSON"),
        (b"[]", "a JSON list, but must be an object"),
        (b"7", "a JSON int, but must be an object"),
        (b"1e400", "but must be an object"),
        (b"NaN", "but must be an object"),
        (b"null", "but must be an object"),
        (b'"{}"', "a JSON str, but must be an object"),
        (b'{"a":NaN}', "tensor 'a' is NaN, but must be an object"),
        (b'{"a":-Infinity}', "tensor 'a' is -Infinity, but must be an object"),
        (b'{"a":1e400}', "tensor 'a' is 1e400, but must be an object"),
        (b"[" * 100_000, "the header is nested deeper than 3 levels"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "the header is nested deeper than 3 levels"),
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "tensor 'a' is [[[[[[[...]]]]]]], but must be an object"),
        (b'{"a":' + b"9" * 100_000 + b"}", "tensor 'a' is 999"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(refusal: Refusal, raw: bytes, rule: str) -> None:
    """D64."""
    message = refusal(blob(raw))
    assert rule in message
    assert len(message) < 2000


@pytest.mark.parametrize("space", [b" ", b"\n\t\r  "])
def test_white_space_before_and_after_the_object_is_accepted(write: Write, space: bytes) -> None:
    """D65: files with it exist; our own headers begin with the brace."""
    path = write(blob(space + json.dumps({"a": spec(0, 2)}).encode() + space, b"12"))
    assert parse_header(path).entries[0].begin == path.stat().st_size - 2
    assert header_bytes([], {})[8:9] == b"{"


@pytest.mark.parametrize("second", [b"U8", b"I8"])
def test_a_tensor_name_that_stands_twice_is_refused(refusal: Refusal, second: bytes) -> None:
    """D66: the library keeps the last in silence."""
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = b"{" + one + b"," + one.replace(b"U8", second) + b"}"
    assert safetensors.deserialize(blob(raw, b"1"))
    assert "in the header, 'a' stands twice in one object, but each name must be unique" in refusal(
        blob(raw, b"1")
    )


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b'{"__metadata__":{},"__metadata__":{}}', "'__metadata__' stands twice"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', "'k' stands twice"),
        (b'{"__metadata__":{"k":1}}', "__metadata__: 'k' is 1, but must be a string"),
        (b'{"__metadata__":{"k":null}}', "__metadata__: 'k' is None, but must be a string"),
        (b'{"__metadata__":{"k":{"a":"b"}}}', "__metadata__: 'k' is {'a': 'b'}, but must be a string"),
        (b'{"__metadata__":["k"]}', "__metadata__ is ['k'], but must be an object of strings"),
        (b'{"__metadata__":"k"}', "__metadata__ is 'k', but must be an object of strings"),
        (b'{"__metadata__":{"k":"\\udc00"}}', "__metadata__: 'k' holds half a surrogate pair"),
    ],
)
def test_malformed_metadata_is_refused(refusal: Refusal, raw: bytes, rule: str) -> None:
    """D67."""
    assert rule in refusal(blob(raw))


def test_null_metadata_is_accepted_as_absent(write: Write) -> None:
    """D67: as the library does."""
    assert parse_header(write(blob({"__metadata__": None}))).metadata == {}


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ({**spec(0, 1), "strides": [1]}, "has the unknown keys ['strides']"),
        ({"dtype": "U8", "shape": [1]}, "lacks the keys ['data_offsets']"),
        ({}, "lacks the keys ['data_offsets', 'dtype', 'shape']"),
        (["U8", [1], [0, 1]], "is ['U8', [1], [0, 1]], but must be an object"),
        (None, "is None, but must be an object"),
    ],
)
def test_a_tensor_has_exactly_the_three_keys(refusal: Refusal, entry: object, rule: str) -> None:
    """D68: an unknown key may change the meaning of the bytes, so it is an error."""
    assert f"tensor 'a' {rule}" in refusal(blob({"a": entry}, b"1"))


@pytest.mark.parametrize(
    ("offsets", "rule"),
    [
        ("[-1,1]", "has the data_offsets [-1, 1], but they must be two unsigned integers"),
        ("[-0,2]", "has the data_offsets [-0, 2], but they must be two unsigned integers"),
        ("[0.0,2]", "has the data_offsets [0.0, 2], but they must be two unsigned integers"),
        ("[0,2e0]", "has the data_offsets [0, 2e0], but they must be two unsigned integers"),
        ('["0",2]', "has the data_offsets ['0', 2], but they must be two unsigned integers"),
        ("[false,2]", "has the data_offsets [False, 2], but they must be two unsigned integers"),
        ("[0,2,4]", "but they must be two unsigned integers"),
        ("[0]", "but they must be two unsigned integers"),
        ("2", "but they must be two unsigned integers"),
        ("[2,0]", "has the data_offsets [2, 0], which end before they begin"),
        ("[18446744073709551615,18446744073709551617]", "leaves a hole of 18446744073709551615 bytes"),
        ("[1,3]", "begins at data offset 1, which leaves a hole of 1 bytes after the header"),
    ],
)
def test_malformed_offsets_are_refused(refusal: Refusal, offsets: str, rule: str) -> None:
    """D69."""
    raw = f'{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{offsets}}}}}'.encode()
    message = refusal(blob(raw, b"12"))
    assert "tensor 'a' " in message
    assert rule in message


@pytest.mark.parametrize(
    ("second", "rule"),
    [
        ((1, 3), "tensor 'b' begins at data offset 1, which overlaps by 1 bytes with tensor 'a'"),
        ((0, 2), "tensor 'b' begins at data offset 0, which overlaps by 2 bytes with tensor 'a'"),
        ((3, 5), "tensor 'b' begins at data offset 3, which leaves a hole of 1 bytes after tensor 'a'"),
        ((2, 9), "tensor 'b' ends at byte"),
        ((1, 1), "tensor 'b' begins at data offset 1, which overlaps by 1 bytes with tensor 'a'"),
    ],
)
def test_tensors_that_do_not_cover_the_data_are_refused(
    refusal: Refusal, second: tuple[int, int], rule: str
) -> None:
    """D69: overlap, hole, out of the file, an empty tensor inside another."""
    assert rule in refusal(blob({"a": spec(0, 2), "b": spec(*second)}, b"12345"))


def test_empty_tensors_may_share_an_offset_with_others(write: Write) -> None:
    """D69: the control, which must be accepted."""
    header = {"c": spec(2, 2), "a": spec(0, 2), "b": spec(0, 0), "d": spec(2, 2, dtype="F64", shape=[0, 3])}
    assert [entry.name for entry in parse_header(write(blob(header, b"12"))).entries] == ["b", "a", "c", "d"]


@pytest.mark.parametrize(
    ("shape", "dtype", "rule"),
    [
        ([3], "U8", "has 2 bytes of data, but U8 of shape [3] takes 3"),
        ([2], "F32", "has 2 bytes of data, but F32 of shape [2] takes 8"),
        ([2**63, 2], "U8", "overflows 63 bits"),
        ([2**32, 2**32], "U8", "overflows 63 bits"),
        ([2**32, 2**32, 0], "U8", "overflows 63 bits"),
        ([0, 2**32, 2**32], "U8", "overflows 63 bits"),
        ([2**62, 0], "F32", "overflows 63 bits"),
        ([10**40], "U8", "each size must be an unsigned integer"),
        ([-2], "U8", "has the shape [-2], but each size must be an unsigned integer"),
        ([2.0], "U8", "has the shape [2.0], but each size must be an unsigned integer"),
        ([True, 2], "U8", "has the shape [True, 2], but each size must be an unsigned integer"),
        ([[2]], "U8", "each size must be an unsigned integer"),
        ("2", "U8", "has the shape '2', but it must be an array"),
        ({"2": 2}, "U8", "but it must be an array"),
        ([3], "F4", "takes 12 bits (F4 of shape [3]), but must end on a whole byte"),
        ([1], "F6_E2M3", "takes 6 bits (F6_E2M3 of shape [1]), but must end on a whole byte"),
    ],
)
def test_a_shape_that_contradicts_the_bytes_is_refused(
    refusal: Refusal, shape: object, dtype: str, rule: str
) -> None:
    """D70."""
    message = refusal(blob({"a": spec(0, 2, dtype=dtype, shape=shape)}, b"12"))
    assert "tensor 'a' " in message
    assert rule in message


def test_formats_below_a_byte_are_measured_in_bits(write: Write) -> None:
    """D70: the control; F4 and F6 end on a whole byte as a tensor, not as an element."""
    header = {"a": spec(0, 3, dtype="F6_E3M2", shape=[4]), "b": spec(3, 4, dtype="F4", shape=[1, 2])}
    assert [entry.nbytes for entry in parse_header(write(blob(header, b"1234"))).entries] == [3, 1]


@pytest.mark.parametrize("trailer", [b"\0", b"PK\x05\x06" + bytes(18), pickle.dumps({"a": 1})])
def test_trailing_bytes_are_refused(refusal: Refusal, trailer: bytes) -> None:
    """D71: also a zip's end, which makes the file a zip too, and a pickle."""
    message = refusal(blob({"a": spec(0, 2)}, b"12" + trailer))
    assert f"has {len(trailer)} trailing bytes after the data of its last tensor" in message
    assert "trailing bytes" in refusal(blob({}, trailer))


def test_data_short_of_one_byte_is_refused(refusal: Refusal) -> None:
    """D71."""
    message = refusal(blob({"a": spec(0, 2), "b": spec(2, 4)}, b"123"))
    assert re.search(r"tensor 'b' ends at byte (\d+), but the file has \d+: it is truncated", message)


@pytest.mark.parametrize("dtype", ["F7", "bf16", "", "F\x1b[31m", None, 8, {"U8": None}])
def test_an_unknown_dtype_is_refused_by_its_name(refusal: Refusal, dtype: object) -> None:
    """D72: without its size not even a copy is possible."""
    message = refusal(blob({"a": spec(0, 2, dtype=dtype)}, b"12"))
    assert "tensor 'a' has the unknown dtype " in message
    assert "\x1b" not in message


HOSTILE = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/abs",
    "a\0b",
    "a\nb",
    "\x1b[31mred",
    "__proto__",
    "__class__",
    "a\u202eb",
    "e\u0301",
    "\u00e9",
    "\U0001f600",
    "x" * MAX_NAME_BYTES,
]


def test_hostile_names_are_kept_as_names(write: Write) -> None:
    """D73: they are dictionary keys, never paths or attributes; those that differ stay apart."""
    header = {name: spec(i, i + 1) for i, name in enumerate(HOSTILE)}
    path = write(blob(header, bytes(len(HOSTILE))))
    before = sorted(os.listdir(path.parent))
    entries = parse_header(path).entries
    assert [entry.name for entry in entries] == HOSTILE
    assert all(entry.file == path for entry in entries)
    assert sorted(os.listdir(path.parent)) == before


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_escaped_in_messages(refusal: Refusal, name: str) -> None:
    """D73: `refusal` checks that the message is one printable line."""
    message = refusal(blob({name: spec(1, 2)}, b"12"))
    assert message.isascii()
    assert len(message) < 1500


@pytest.mark.parametrize(
    "name", ["x" * (MAX_NAME_BYTES + 1), "\u00e9" * (MAX_NAME_BYTES // 2 + 1), "x" * 65536]
)
def test_a_name_above_the_limit_is_refused(refusal: Refusal, name: str) -> None:
    """D73."""
    assert f"bytes, above the limit of {MAX_NAME_BYTES}; rename it" in refusal(blob({name: spec(0, 1)}, b"1"))


def test_half_a_surrogate_pair_in_a_name_is_refused(refusal: Refusal) -> None:
    """D73: no UTF-8 file could hold it."""
    assert "has half a surrogate pair in its name" in refusal(blob({"a\ud800": spec(0, 1)}, b"1"))


def many(count: int, size: int) -> bytes:
    entry = '"{0}":{{"dtype":"U8","shape":[{1}],"data_offsets":[{2},{3}]}}'
    parts = (entry.format(i, size, i * size, (i + 1) * size) for i in range(count))
    return blob(("{" + ",".join(parts) + "}").encode(), bytes(count * size))


@pytest.mark.parametrize("size", [0, 1])
def test_the_work_grows_with_the_number_of_tensors_and_no_faster(write: Write, size: int) -> None:
    """D74: counted in calls, not in seconds; ten times the tensors may take ten times the calls."""

    def calls(count: int) -> int:
        path, seen = write(many(count, size)), 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            header = parse_header(path)
        finally:
            sys.setprofile(None)
        assert len(header.entries) == count
        return seen

    small, large = calls(1_000), calls(10_000)
    assert 9 * small < large < 10.5 * small


@pytest.mark.parametrize("size", [0, 1])
def test_the_memory_per_tensor_is_bounded(write: Write, size: int) -> None:
    """D74: in bytes a tensor, so that 10**6 tensors stay near 1.5 GB with the JSON."""
    path = write(many(20_000, size))
    tracemalloc.start()
    entries = parse_header(path).entries
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000 * len(entries)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1])
def test_a_million_tensors_are_read(write: Write, size: int) -> None:
    """D74."""
    assert len(parse_header(write(many(1_000_000, size))).entries) == 1_000_000


def test_a_header_to_write_refuses_a_name_that_clashes() -> None:
    """D75: the planner's names end here too, before any byte is written."""
    rule = re.escape(
        "tensor 'w.scale' cannot be written: the name stands twice in one file; rename the tensor"
    )
    with pytest.raises(CheckpointError, match=rule):
        header_bytes([("w.scale", "U8", (1,), 1), ("w", "U8", (1,), 1), ("w.scale", "U8", (1,), 1)], {})
    with pytest.raises(CheckpointError, match="the name is reserved for the metadata"):
        header_bytes([("__metadata__", "U8", (1,), 1)], {})
