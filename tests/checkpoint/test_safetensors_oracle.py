"""The safetensors library as the oracle: it loads what we write, and we accept what it accepts."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.safetensors_bytes import blob, spec

from zeropoint.checkpoint import safetensors_file
from zeropoint.checkpoint.safetensors_file import (
    DTYPE_BITS,
    Header,
    header_bytes,
    parse_header,
)
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
    begins = {e.name: e.begin - header.data_begin for e in header.entries}
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
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(
        CheckpointError, match="above the limit of 100 that loaders set; write more, smaller shards"
    ):
        header_bytes([(str(i), "U8", (1,), 1) for i in range(10)], {})


# What the library takes and we refuse, by our message; the module's docstring says why.
DOCUMENTED = re.compile(
    r"stands twice in one object|has the unknown keys|but must be an object|has the unknown dtype \{"
    r"|overflows 63 bits|bytes, above the limit of 4096"
)
SEEDS = [
    blob(
        {"__metadata__": {"k": "v"}, "a": spec(0, 2), "b": spec(2, 10, dtype="F32", shape=[1, 2])}, bytes(10)
    ),
    blob(
        {"a": spec(0, 0, shape=[0]), "b": spec(0, 3, dtype="F6_E2M3", shape=[4]), "c": spec(3, 3)}, bytes(3)
    ),
    blob(b' {"\\u00e9":{"shape":[],"dtype":"F64","data_offsets":[0,8]},"__metadata__":null} ', bytes(8)),
    blob({}),
]
TOKENS = [
    *(b'{ } [ ] , : " \\ 0 1 2 8 -1 -0 1.0 1e0 1e400 NaN null true Infinity 4294967296'.split(b" ")),
    *(b'"a" "b" "__metadata__" "dtype" "shape" "data_offsets" "x" "U8" "F4" "BF16" "\\ud800"'.split(b" ")),
    *(b'\\u0000 \\ud83d\\ude00 "a":1, "x":{}, "k":"v", [0,0] [0,2] "shape":[1],'.split(b" ")),
    *(
        b"18446744073709551615",
        b"18446744073709551616",
        b"\xff",
        b"\xc3\xa9",
        b"\n",
        b"\0",
        b"\xef\xbb\xbf",
        b"  ",
    ),
]


# One token becomes another of its kind, so that many mutants stay JSON and reach the deeper rules.
KINDS = (
    (re.compile(rb'"[^"]*"(?=:)'), [t for t in TOKENS if t.startswith(b'"')]),
    (re.compile(rb'(?<=:)"[^"]*"'), [b'"U8"', b'"I8"', b'"F4"', b'"F7"', b'"BF16"', b'{"U8":null}', b"1"]),
    (
        re.compile(rb"\d+"),
        [b"0", b"1", b"2", b"3", b"8", b"10", b"-1", b"-0", b"1.0", b"9223372036854775808"],
    ),
    (re.compile(rb"\[[^\[\]]*\]"), [b"[]", b"[0]", b"[0,0]", b"[0,2]", b"[2,0]", b"[1,2]", b"{}", b"null"]),
    (re.compile(rb"\{[^{}]*\}"), [b"{}", b'["U8",[2],[0,2]]', b"null", b'{"k":"v"}', b'{"k":1}']),
    (
        re.compile(rb"(?<=[{,])(?=\")"),
        [b'"x":1,', b'"a":{},', b'"a":["U8",[0],[0,0]],', b'"__metadata__":{},'],
    ),
    (re.compile(rb'(?<=[{,])"[^"]*":(\{[^{}]*\}|\[[^\[\]]*\])'), [b""]),  # doubled below
)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Change the header, and now and then the data or the length, in one to three places."""
    length = int.from_bytes(content[:8], "little")
    raw, data = bytearray(content[8 : 8 + length]), content[8 + length :]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.75:
            pattern, others = rng.choice(KINDS)
            spots = [found.span() for found in pattern.finditer(raw)]
            begin, end = rng.choice(spots) if spots else (0, 0)
            old = bytes(raw[begin:end])
            raw[begin:end] = rng.choice([*others, old + b"," + old]) if spots else b""
        else:
            at = rng.randrange(len(raw) + 1)
            raw[at : at + rng.choice([0, 0, 1, 9])] = rng.choice([*TOKENS, b""])
    if rng.random() < 0.1:
        data = data[:-1] if rng.random() < 0.5 else data + b"\0"
    shift = rng.choice([-1, 1, 8, 2**40]) if rng.random() < 0.05 else 0
    return max(0, len(raw) + shift).to_bytes(8, "little") + bytes(raw) + data


def verdict(path: Path) -> Header | str:
    """Return the header, or the message with which the file is refused."""
    try:
        return parse_header(path)
    except CheckpointError as error:
        return str(error)


def test_mutated_files_are_accepted_and_refused_as_the_library_does(tmp_path: Path) -> None:
    rng, path = random.Random(20), tmp_path / "x.safetensors"
    tally = {"both accept": 0, "both refuse": 0, "documented": 0}
    for _ in range(4000):
        content = mutate(rng.choice(SEEDS), rng)
        path.write_bytes(content)
        try:
            theirs = dict(safetensors.deserialize(content))
        except safetensors.SafetensorError:
            theirs = None
        ours = verdict(path)
        if theirs is None:
            assert isinstance(ours, str), content
            tally["both refuse"] += 1
        elif isinstance(ours, str):
            assert DOCUMENTED.search(ours), (content, ours)
            tally["documented"] += 1
        else:
            found = {e.name: (e.dtype, list(e.shape), content[e.begin :][: e.nbytes]) for e in ours.entries}
            assert found == {n: (v["dtype"], v["shape"], bytes(v["data"])) for n, v in theirs.items()}
            tally["both accept"] += 1
    assert min(tally.values()) > 100, tally


@given(st.binary(max_size=200))
def test_random_bytes_end_in_a_header_or_in_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("random") / "x.safetensors"
    path.write_bytes(content)
    found = verdict(path)
    assert found.isprintable() if isinstance(found, str) else found.file_size == len(content)
