"""GGUF files that are damaged or lie, each of a few bytes: heads, values, directories and data."""

import struct

from tests.hostile.case import Case

_U8, _U32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 0, 4, 6, 7, 8, 9, 10
_F32_TYPE, _Q8_0 = 0, 8
_MOST = 2**64 - 1


def text(value: str | bytes) -> bytes:
    """Return a string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(key: str | bytes, kind: int, raw: bytes) -> bytes:
    """Return a value of the head."""
    return text(key) + struct.pack("<I", kind) + raw


def row(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return a line of the directory; ``shape`` has the innermost axis first."""
    extents = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + extents + struct.pack("<IQ", kind, offset)


NAME = value("general.architecture", _STRING, text("x"))
ROWS = (row("a", (3,), _F32_TYPE, 0), row("b.weight", (32, 2), _Q8_0, 32))
DATA = bytes(range(12)) + bytes(20) + bytes([0, 60] + [1] * 32) * 2


def file(
    values: tuple[bytes, ...] = (NAME,), rows: tuple[bytes, ...] = ROWS, data: bytes = DATA, *,
    magic: bytes = b"GGUF", version: int = 3, counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """Return a file, a right one by default; ``counts`` are those of tensors and values."""
    tensors, keys = (len(rows), len(values)) if counts is None else counts
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(values) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data + bytes(-len(data) % 32)


GOOD_GGUF = file()
_ITEMS = struct.pack("<IQ", _U32, 3) + struct.pack("<3I", 1, 2, 3)


def _array(inner: int, count: int, raw: bytes = b"") -> bytes:
    return file((NAME, value("k", _ARRAY, struct.pack("<IQ", inner, count) + raw)))


def _alignment(kind: int, raw: bytes) -> bytes:
    return file((NAME, value("general.alignment", kind, raw)))


def _first(shape: tuple[int, ...], kind: int = _F32_TYPE) -> bytes:
    return file(rows=(row("a", shape, kind, 0), ROWS[1]))


def _second(offset: int, shape: tuple[int, ...] = (32, 2), data: bytes = DATA) -> bytes:
    return file(rows=(ROWS[0], row("b.weight", shape, _Q8_0, offset)), data=data)


_CASES: tuple[tuple[str, bytes, str], ...] = (
    ("no byte", b"", "it ends at byte 0, before its head does: it is"),
    ("the magic alone", b"GGUF", "it ends at byte 4, before its head does: it is"),
    ("a magic of its own", file(magic=b"GGUX"), "it does not begin as a GGUF file of version 3"),
    ("ggml, its ancestor", file(magic=b"lmgg"), "it does not begin as a GGUF file of version 3"),
    ("version 1", file(version=1), "it does not begin as a GGUF file of version 3"),
    ("version 2", file(version=2), "it does not begin as a GGUF file of version 3"),
    ("version 4", file(version=4), "it does not begin as a GGUF file of version 3"),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 2, 1) + GOOD_GGUF[24:], "it does not begin as a GGUF"),
    ("2**64 - 1 tensors", file(counts=(_MOST, 1)), "its head names 18446744073709551615 tensors and 1"),
    ("2**64 - 1 values", file(counts=(2, _MOST)), "its head names 2 tensors and 18446744073709551615"),
    ("a value more than there is", file(counts=(2, 2)), "a text of its head has 7594607387726577664 bytes,"),
    ("a tensor more than there is", file(counts=(3, 1)), "tensor '' has the type 16777216, which is unknown"),
    ("a tensor less than there is", file(counts=(1, 1)), "the padding before 'a' is not 0"),
    ("a value less than there is", file(counts=(2, 0)), "tensor 'general.architecture' has 8 axes, above"),
    ("a key of 2**63 bytes", file((struct.pack("<Q", 2**63),)), "a text of its head has 9223372036854775808"),
    ("a key of 5000 bytes", file((value("k" * 5000, _U8, b"\1"),)), "a text of its head has 5000 bytes,"),
    ("a key that is no UTF-8", file((value(b"\xff\xfe", _U8, b"\1"),)), "a text of its head is not UTF-8"),
    ("a key twice", file((NAME, NAME)), "the key 'general.architecture' appears twice"),
    (
        "a value of 2**40 bytes",
        file((value("k", _STRING, struct.pack("<Q", 2**40)),)),
        "a text of its head has 1099511627776 bytes, above",
    ),
    ("a value of type 13", file((value("k", 13, b"\0" * 8),)), "a value of its head has the unknown type 13"),
    ("a value of type 2**32 - 1", file((value("k", 2**32 - 1, b""),)), "a value of its head has the unknown"),
    ("an array of arrays", _array(_ARRAY, 1, struct.pack("<IQ", _U8, 0)), "an array of its head has 1"),
    ("an array of 2**60 items", _array(_U8, 2**60), "an array of its head has 1152921504606846976"),
    ("an array longer than the file", _array(_U64, 10_000), "it ends at byte 320, before its head"),
    ("an array of type 77", _array(77, 2, b"\0" * 64), "a value of its head has the unknown type 77"),
    ("an array of long texts", _array(_STRING, 2, struct.pack("<Q", 2**50)), "head has 1125899906842624"),
    ("an alignment of 0", _alignment(_U32, struct.pack("<I", 0)), "general.alignment is 0, but must"),
    ("an alignment of 3", _alignment(_U32, struct.pack("<I", 3)), "general.alignment is 3, but must"),
    ("an alignment of 2**63", _alignment(_U64, struct.pack("<Q", 2**63)), "tensor 'a' ends at byte"),
    ("an alignment of text", _alignment(_STRING, text("32")), "general.alignment is '32', but must be"),
    ("an alignment that is a list", _alignment(_ARRAY, _ITEMS), "general.alignment is [1, 2, 3], but"),
    ("an alignment of NaN", _alignment(_F32, struct.pack("<f", float("nan"))), "alignment is nan, but must"),
    ("a name of 5000 bytes", file(rows=(row("a" * 5000, (3,), 0, 0),)), "a text of its head has 5000 bytes,"),
    ("a name that is no UTF-8", file(rows=(row(b"\xff", (3,), 0, 0),)), "a text of its head is not UTF-8"),
    ("a name twice", file(rows=(ROWS[0], row("a", (32, 2), _Q8_0, 32))), "a tensor's name appears twice"),
    ("five axes", _first((1, 1, 1, 1, 3)), "tensor 'a' has 5 axes, above the"),
    (
        "2**32 - 1 axes",
        file(rows=(text("a") + struct.pack("<I", 2**32 - 1), ROWS[1])),
        "tensor 'a' has 4294967295 axes, above the limit",
    ),
    ("an extent of 2**63", _first((2**63,)), "tensor 'a' ends at byte 36893488147419103392"),
    ("extents whose product overflows", _first((2**32, 2**32, 2**32)), "tensor 'a' ends at byte"),
    ("a type that was removed", _first((32,), 4), "tensor 'a' has the type 4,"),
    ("type 999", _first((3,), 999), "tensor 'a' has the type 999, which is"),
    ("a row of half a block", _second(32, (16, 4)), "tensor 'b.weight': a row of 16 values does not"),
    ("an offset past the end", _second(2**40), "tensor 'b.weight' ends at byte 1099511628004, but"),
    ("an offset of 2**64 - 1", _second(_MOST), "tensor 'b.weight' ends at byte"),
    ("an offset that is not aligned", _second(16), "tensor 'b.weight' lies at byte 176, but what"),
    ("tensors that overlap", _second(0), "tensor 'b.weight' lies at byte 160, but what"),
    ("a hole", _second(96, data=DATA[:32] + bytes(64) + DATA[32:]), "tensor 'b.weight' lies at byte 256,"),
    ("padding that is not 0", file(data=DATA[:12] + b"\1" * 20 + DATA[32:]), "the padding before 'b.weight'"),
    ("the last byte missing", GOOD_GGUF[: len(GOOD_GGUF) - 32], "tensor 'b.weight' ends at byte 260, but"),
    ("bytes behind the end", GOOD_GGUF + bytes(64), "tensor 'the end' lies at byte 352, but what comes"),
    ("no data", file(data=b""), "tensor 'a' ends at byte 172, but the file at byte"),
    ("another file before it", b"PK\3\4" + GOOD_GGUF, "it does not begin as a GGUF file of version 3"),
    ("a pickle", b"\x80\x04]\x94.", "it does not begin as a GGUF file of version 3"),
)


def _case(name: str, content: bytes, words: str) -> Case:
    return Case(topic="quantized", name=f"GGUF: {name}", content={"model.gguf": content}, refusal=words)


GGUF_FILES: tuple[Case, ...] = tuple(_case(*each) for each in _CASES)
