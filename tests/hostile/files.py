"""Single safetensors files, hostile or damaged, and what must be said of each."""

import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Iterator

from tests.checkpoint.safetensors_bytes import blob, spec
from tests.hostile.case import Case, fifo, sparse

from zeropoint.codecs.containers.safetensors import MAX_HEADER_BYTES, MAX_NAME_BYTES

# Why safetensors 0.8 accepts what is refused here: the documented list.
KEEPS_LAST = "of a name that appears twice it keeps the last"
IGNORES_KEYS = "it ignores keys whose meaning it does not know"
TAKES_SEQUENCES = "serde takes a struct as a sequence and a unit variant as an object"
HIDDEN_OVERFLOW = "it multiplies from the left and stops at a 0"
NO_NAME_LIMIT = "it sets no limit to names"
DOCUMENTED = (KEEPS_LAST, IGNORES_KEYS, TAKES_SEQUENCES, HIDDEN_OVERFLOW, NO_NAME_LIMIT)

GOOD = blob({"a": spec(0, 2), "b": spec(2, 10, dtype="F32", shape=[1, 2])}, bytes(10))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


class Bomb:
    """Fail whatever unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1 / 0",)


def _length(length: int, rest: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + rest


def _zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    return buffer.getvalue()


def _truncated() -> Iterator[Case]:
    """The length of the header."""
    for size in range(8):
        yield Case(topic="short", name=f"{size} bytes", content=bytes(size),
                   refusal=f"{size} bytes are too small for a header")  # fmt: skip
    after = "follow its length: the file is truncated"
    yield Case(
        topic="short", name="length alone", content=_length(16), refusal=f"16 bytes, but only 0 {after}"
    )
    yield Case(topic="short", name="header of no bytes", content=bytes(8), refusal="the header is not JSON")
    lengths = (MAX_HEADER_BYTES + 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
    for length in lengths:
        yield Case(topic="length", name=f"header length {length}", content=_length(length, b"{}"),
                   refusal=f"has {length} bytes, above the limit of {MAX_HEADER_BYTES}")  # fmt: skip
    for length in (3, 100, MAX_HEADER_BYTES):
        yield Case(topic="length", name=f"header length {length} of 2", content=_length(length, b"{}"),
                   refusal=f"has {length} bytes, but only 2 {after}")  # fmt: skip
    yield Case(topic="length", name="largest header, all zeros", refusal="the header is not JSON",
               content=sparse(_length(MAX_HEADER_BYTES), MAX_HEADER_BYTES + 8))  # fmt: skip
    yield Case(topic="length", name="length one short", content=_length(len(GOOD) - 19, GOOD[8:]),
               refusal="the header is not JSON")  # fmt: skip


_NOT_JSON = (
    (b"\xff\xfe{}", "not UTF-8 at its byte 0"), (b'{"a\xc0\x80":1}', "not UTF-8 at its byte 3"),
    (b'{"\xed\xa0\x80":1}', "not UTF-8 at its byte 2"), (b"{\0}".decode().encode("utf-16"), "not UTF-8"),
    (b"\xef\xbb\xbf{}", "not JSON"), (b"{", "not JSON"), (b"}", "not JSON"), (b"{}\0", "not JSON"),
    (b"{} {}", "not JSON"), (b"{},", "not JSON"), (b"{'a':1}", "not JSON"), (b'{"a\n":1}', "not JSON"),
    (b'{"a":1,}', "tensor 'a' is 1, but"), (b"{a:1}", "not JSON"), (b"{/**/}", "not JSON"),
    (b'{"\\x61":1}', "not JSON"),
    (b'{"\\u00g0":1}', "not JSON"), (b'{"a":01}', "tensor 'a' is 0, but"), (b'{"a":+1}', "not JSON"),
    (b'{"a":.5}', "not JSON"), (b'{"a":0x1}', "tensor 'a' is 0, but"), (b"[]", "a JSON list, but"),
    (b"7", "a JSON int, but"), (b"1e400", "must be an object"), (b"NaN", "must be an object"),
    (b"-Infinity", "must be an object"), (b"null", "must be an object"), (b"true", "a JSON bool, but"),
    (b'"{}"', "a JSON str, but"), (b'{"a":NaN}', "tensor 'a' is NaN, but"),
    (b'{"a":-Infinity}', "tensor 'a' is -Infinity, but"), (b'{"a":1e400}', "tensor 'a' is 1e400, but"),
    (b'{"a":' + b"9" * 100_000 + b"}", "a value has more than 65536 characters"),
    (b"[" * 100_000, "nested deeper than 3 levels"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested deeper than 3 levels"),
    (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "tensor 'a' is [[[[[[[...]]]]]]], but"),
    (b'{"a":"' + b"x" * 60_000 + b'"}', "tensor 'a' is 'xxx"),
    (b'{"a":"' + b"x" * 100_000 + b'"}', "a value has more than 65536 characters"),
)  # fmt: skip


def _json() -> Iterator[Case]:
    """What the header's text is."""
    for raw, words in _NOT_JSON:
        yield Case(topic="text", name=f"header {raw[:12]!r} of {len(raw)}", content=blob(raw), refusal=words)
    text = json.dumps({"a": spec(0, 2)}).encode()
    for space in (b" ", b"\n\t\r  ", b" " * 5000):
        yield Case(topic="spaces", name=f"{len(space)} spaces around", refusal=None,
                   content=blob(space + text + space, b"12"))  # fmt: skip
    yield Case(topic="spaces", name="no tensors", content=blob({}), refusal=None)
    yield Case(topic="spaces", name="form feed before", content=blob(b"\f" + text, b"12"), refusal="not JSON")


_ONE = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
_METADATA = (
    (b'{"__metadata__":{},"__metadata__":{}}', "'__metadata__' appears twice", None),
    (b'{"__metadata__":{"k":"1","k":"2"}}', "'k' appears twice", KEEPS_LAST),
    (b'{"__metadata__":{"k":1}}', "__metadata__: 'k' is 1, but must be a string", None),
    (b'{"__metadata__":{"k":null}}', "__metadata__: 'k' is None, but must be a string", None),
    (b'{"__metadata__":{"k":{"a":"b"}}}', "'k' is {'a': 'b'}, but must be a string", None),
    (b'{"__metadata__":["k"]}', "is ['k'], but must be an object of strings", None),
    (b'{"__metadata__":"k"}', "is 'k', but must be an object of strings", None),
    (b'{"__metadata__":false}', "is False, but must be an object of strings", None),
    (b'{"__metadata__":{"k":"\\udc00"}}', "'k' holds half a surrogate pair", None),
    (b'{"__metadata__":null}', None, None),
    (b'{"__metadata__":{"\\u0000":"\\u001b[31m"}}', None, None),
)


def _doubles_and_metadata() -> Iterator[Case]:
    """What stands twice, and metadata."""
    for second in (b"U8", b"I8"):
        raw = b"{" + _ONE + b"," + _ONE.replace(b"U8", second) + b"}"
        yield Case(topic="duplicate", name=f"name twice, {second.decode()}", content=blob(raw, b"1"),
                   refusal="'a' appears twice in one object", library=KEEPS_LAST)  # fmt: skip
    escaped = b"{" + _ONE + b"," + _ONE.replace(b'"a"', b'"\\u0061"') + b"}"
    yield Case(topic="duplicate", name="name twice, once escaped", content=blob(escaped, b"1"),
               refusal="'a' appears twice in one object", library=KEEPS_LAST)  # fmt: skip
    inside = b"{" + _ONE.replace(b'"shape"', b'"dtype":"U8","shape"') + b"}"
    yield Case(topic="duplicate", name="key of a tensor twice", content=blob(inside, b"1"),
               refusal="'dtype' appears twice in one object")  # fmt: skip
    for raw, words, library in _METADATA:
        yield Case(topic="metadata", name=f"metadata {raw[16:48]!r}", content=blob(raw), refusal=words,
                   library=library)  # fmt: skip


_ENTRIES = (
    ({**spec(0, 1), "strides": [1]}, "has the unknown keys ['strides']", IGNORES_KEYS),
    ({**spec(0, 1), "": None}, "has the unknown keys ['']", IGNORES_KEYS),
    ({**spec(0, 1), "Dtype": "U8"}, "has the unknown keys ['Dtype']", IGNORES_KEYS),
    ({"dtype": "U8", "shape": [1]}, "lacks the keys ['data_offsets']", None),
    ({"shape": [1], "data_offsets": [0, 1]}, "lacks the keys ['dtype']", None),
    ({"dtype": "U8", "data_offsets": [0, 1]}, "lacks the keys ['shape']", None),
    ({}, "lacks the keys ['data_offsets', 'dtype', 'shape']", None),
    (["U8", [1], [0, 1]], "is ['U8', [1], [0, 1]], but must be an object", TAKES_SEQUENCES),
    (None, "is None, but must be an object", None), (1, "is 1, but must be an object", None),
)  # fmt: skip
_OFFSETS = (
    ("[-1,1]", "[-1, 1], but they must be two unsigned"), ("[-0,2]", "[-0, 2], but they must be two"),
    ("[0.0,2]", "[0.0, 2], but they must be two unsigned"), ("[0,2e0]", "[0, 2e0], but they must be two"),
    ('["0",2]', "['0', 2], but they must be two"), ("[false,2]", "[False, 2], but they must be two"),
    ("[0,2,4]", "must be two unsigned"), ("[0]", "must be two unsigned"), ("[]", "must be two unsigned"),
    ("2", "must be two unsigned"), ("null", "must be two unsigned"), ("{}", "must be two unsigned"),
    ("[2,0]", "[2, 0], which end before they begin"), ("[1,3]", "a hole of 1 bytes after the header"),
    ("[18446744073709551615,18446744073709551617]", "which overflow 63 bits"),
    ("[18446744073709551614,18446744073709551616]", "which overflow 63 bits"),
    ("[9223372036854775807,9223372036854775809]", "which overflow 63 bits"),
    ("[340282366920938463463374607431768211456,2]", "must be two unsigned"),
)  # fmt: skip
_SECOND = (
    ((1, 3), "'b' begins at data offset 1, which overlaps by 1 bytes with tensor 'a'"),
    ((0, 2), "'b' begins at data offset 0, which overlaps by 2 bytes with tensor 'a'"),
    ((3, 5), "'b' begins at data offset 3, which leaves a hole of 1 bytes after tensor 'a'"),
    ((2, 9), "'b' ends at byte"), ((1, 1), "which overlaps by 1 bytes with tensor 'a'"),
    ((2, 2), "has 3 trailing bytes"), ((2, 5), None),
)  # fmt: skip


def _tensors() -> Iterator[Case]:
    """Keys and offsets."""
    for entry, words, library in _ENTRIES:
        yield Case(topic="keys", name=f"entry {json.dumps(entry)}", content=blob({"a": entry}, b"1"),
                   refusal=f"tensor 'a' {words}", library=library)  # fmt: skip
    for offsets, words in _OFFSETS:
        raw = f'{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{offsets}}}}}'.encode()
        yield Case(topic="offsets", name=f"offsets {offsets}", content=blob(raw, b"12"), refusal=words)
    for second, optional in _SECOND:
        yield Case(topic="offsets", name=f"second at {second}", refusal=optional,
                   content=blob({"a": spec(0, 2), "b": spec(*second)}, b"12345"))  # fmt: skip
    empties = {"c": spec(2, 2), "a": spec(0, 2), "b": spec(0, 0), "d": spec(2, 2, dtype="F64", shape=[0, 3])}
    yield Case(
        topic="offsets", name="empty tensors share offsets", content=blob(empties, b"12"), refusal=None
    )
    yield Case(topic="offsets", name="empty tensor past the data", refusal="a hole of 1 bytes",
               content=blob({"a": spec(0, 2), "b": spec(3, 3)}, b"12"))  # fmt: skip


_SHAPES = (
    ([3], "U8", "has 2 bytes of data, but U8 of shape [3] takes 3", None),
    ([2], "F32", "has 2 bytes of data, but F32 of shape [2] takes 8", None),
    ([], "U8", "has 2 bytes of data, but U8 of shape [] takes 1", None),
    ([0], "U8", "has 2 bytes of data, but U8 of shape [0] takes 0", None),
    ([2**63, 2], "U8", "overflows 63 bits", None), ([2**32, 2**32], "U8", "overflows 63 bits", None),
    ([2**33, 2**31, 2], "F4", "overflows 63 bits|has 2 bytes", None),
    ([10**40], "U8", "each size must be an unsigned integer", None),
    ([-2], "U8", "shape [-2], but each size must be an unsigned", None),
    ([-1, -2], "U8", "shape [-1, -2], but each size must be an unsigned", None),
    ([2.0], "U8", "shape [2.0], but each size must be an unsigned", None),
    ([True, 2], "U8", "each size must be an unsigned", None), ([[2]], "U8", "each size must be an", None),
    (["2"], "U8", "each size must be an unsigned", None), ([None], "U8", "each size must be an", None),
    ("2", "U8", "has the shape '2', but it must be an array", None),
    ({"2": 2}, "U8", "but it must be an array", None), (2, "U8", "but it must be an array", None),
    ([3], "F4", "takes 12 bits (F4 of shape [3]), but must end on a whole byte", None),
    ([1], "F6_E2M3", "takes 6 bits (F6_E2M3 of shape [1]), but must end on a whole byte", None),
    ([1] * 5000 + [2], "U8", None, None),
)  # fmt: skip
_EMPTY_SHAPES = (
    ([2**32, 2**32, 0], "U8", "overflows 63 bits", None),
    ([0, 2**32, 2**32], "U8", "overflows 63 bits", HIDDEN_OVERFLOW),
    ([2**62, 0], "F32", "overflows 63 bits", HIDDEN_OVERFLOW),
    ([0, 0, 0], "F64", None, None),
)


def _shapes() -> Iterator[Case]:
    """Shapes against bytes, what follows the data, dtypes."""
    for shapes, size in ((_SHAPES, 2), (_EMPTY_SHAPES, 0)):
        for shape, dtype, words, library in shapes:
            entry = spec(0, size, dtype=dtype, shape=shape)
            label = f"{dtype} of shape {json.dumps(shape)[:40]}, {size} bytes"
            yield Case(topic="shape", name=label, content=blob({"a": entry}, bytes(size)), refusal=words,
                       library=library)  # fmt: skip
    mixed = {"a": spec(0, 3, dtype="F6_E3M2", shape=[4]), "b": spec(3, 4, dtype="F4", shape=[1, 2])}
    yield Case(topic="shape", name="formats below a byte", content=blob(mixed, b"1234"), refusal=None)
    trailers = (b"\0", b"PK\x05\x06" + bytes(18), _zipped(), pickle.dumps({"a": 1}), bytes(4096))
    for trailer in trailers:
        words = f"has {len(trailer)} trailing bytes after the data of its last tensor"
        yield Case(topic="size", name=f"trailer of {len(trailer)}", content=GOOD + trailer, refusal=words)
    yield Case(topic="size", name="no tensors, trailer", content=blob({}, b"\0"), refusal="trailing bytes")
    for missing in (1, 7, 8, 10):
        yield Case(topic="size", name=f"data short of {missing}", content=GOOD[:-missing],
                   refusal="it is truncated")  # fmt: skip
    for dtype in ("F7", "bf16", "", "F8", "F\x1b[31m", "I4", "torch.float32", None, 8, ["U8"]):
        yield Case(topic="dtype", name=f"dtype {dtype!r}", refusal="tensor 'a' has the unknown dtype ",
                   content=blob({"a": spec(0, 2, dtype=dtype)}, b"12"))  # fmt: skip
    yield Case(topic="dtype", name="dtype as an object", refusal="has the unknown dtype {'U8': None}",
               library=TAKES_SEQUENCES,
               content=blob({"a": spec(0, 2, dtype={"U8": None})}, b"12"))  # fmt: skip


NAMES = (
    "", ".", "..", "../../etc/passwd", "/abs", "C:\\x", "a\0b", "a\nb", "\x1b[31mred", "\x9b2J", "__proto__",
    "__class__", "__metadata__ ", "a\u202eb", "e\u0301", "\u00e9", "\U0001f600", "\ufeff", "\ufffe", "%s%n",
    "{0.__class__}", "$(id)", "x" * MAX_NAME_BYTES,
)  # fmt: skip


def _names() -> Iterator[Case]:
    """Names, many tensors, a file larger than any disk, any bytes."""
    for name in NAMES:
        label = ascii(name)[:24]
        yield Case(topic="name", name=f"name {label}", content=blob({name: spec(0, 2)}, b"12"), refusal=None)
        yield Case(topic="name", name=f"name {label}, misplaced", content=blob({name: spec(1, 2)}, b"12"),
                   refusal="leaves a hole of 1 bytes")  # fmt: skip
    for name in ("x" * (MAX_NAME_BYTES + 1), "\u00e9" * (MAX_NAME_BYTES // 2 + 1), "x" * 65536):
        yield Case(topic="name", name=f"name of {len(name)}", content=blob({name: spec(0, 1)}, b"1"),
                   refusal=f"bytes, above the limit of {MAX_NAME_BYTES}", library=NO_NAME_LIMIT)  # fmt: skip
    for name in ("a\ud800", "\udfff", "\udc00\ud800"):
        yield Case(topic="name", name=f"name {name!a}", content=blob({name: spec(0, 1)}, b"1"),
                   refusal="has half a surrogate pair in its name")  # fmt: skip
    together = {name: spec(i, i + 1) for i, name in enumerate(NAMES)}
    yield Case(
        topic="name", name="all names at once", content=blob(together, bytes(len(NAMES))), refusal=None
    )
    for size in (0, 1):
        many = {str(i): spec(i * size, (i + 1) * size) for i in range(3000)}
        yield Case(
            topic="many", name=f"3000 tensors of {size}", content=blob(many, bytes(3000 * size)), refusal=None
        )
    head = blob({"a": spec(0, 2**40, dtype="BF16", shape=[2**20, 2**19])})
    yield Case(topic="sparse", name="a terabyte", content=sparse(head, len(head) + 2**40), refusal=None)
    yield Case(topic="sparse", name="a terabyte, one short", content=sparse(head, len(head) + 2**40 - 1),
               refusal="it is truncated")  # fmt: skip
    yield Case(topic="booleans", name="booleans of any byte", refusal=None,
               content=blob({"a": spec(0, 256, dtype="BOOL")}, bytes(range(256))))  # fmt: skip


_FOREIGN = (
    ("GGUF", "GGUF", b"GGUF\x03\0\0\0" + bytes(16), "a GGUF file; pass the safetensors checkpoint"),
    ("GGUF", "GGUF of 4 bytes", b"GGUF", "a GGUF file"),
    ("other", "LFS pointer", LFS, "a Git LFS pointer"),
    ("other", "gzip", gzip.compress(GOOD), "a gzip archive"),
    ("other", "zstd", b"\x28\xb5\x2f\xfd\x04\0" + bytes(30), "a zstd archive"),
    ("other", "xz", b"\xfd7zXZ\x00" + bytes(30), "a xz archive"),
    ("other", "bzip2", b"BZh9" + bytes(30), "a bzip2"),
    ("other", "numpy", b"\x93NUMPY\x01\0" + bytes(30), "a numpy array file"),
    ("other", "HDF5", b"\x89HDF\r\n\x1a\n" + bytes(30), "a HDF5 file"),
    ("other", "HTML", b"<!DOCTYPE html><html>", "a HTML page"),
)  # fmt: skip


def _foreign() -> Iterator[Case]:
    """Other files under our suffix, and a FIFO."""
    for protocol in range(2, 6):
        yield Case(topic="pickle", name=f"protocol {protocol}",
                   content=pickle.dumps([Bomb(), "x" * 999], protocol),
                   refusal="a Python pickle (.bin, .pt or .ckpt); convert it")  # fmt: skip
    yield Case(topic="pickle", name="zipped", content=_zipped(), refusal="a zip archive, such as torch")
    yield Case(
        topic="pickle", name="empty zip", content=b"PK\x05\x06" + bytes(18), refusal="empty zip archive"
    )
    for topic, name, content, words in _FOREIGN:
        yield Case(topic=topic, name=name, content=content, refusal=words)
    for length in (0x8B1F, 0x0280):  # as gzip and a pickle begin
        text = json.dumps({"a": spec(0, 1)}).encode().ljust(length)
        yield Case(topic="other", name=f"header of {length:#x}", content=blob(text, b"1"), refusal=None)
    yield Case(topic="path", name="FIFO", content=fifo, refusal="is a FIFO, but must be a regular file")


FILES: tuple[Case, ...] = (
    *_truncated(), *_json(), *_doubles_and_metadata(), *_tensors(), *_shapes(), *_names(), *_foreign(),
)  # fmt: skip
