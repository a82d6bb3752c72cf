"""Change ONNX files at random as what they are, messages in messages: fields, numbers, lengths, names."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from tests.hostile.mutations import mutate

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Message to the number of a field to the message that it holds, as in onnx.proto.
SCHEMA = {
    "model": {7: "graph", 8: "opset", 14: "entry"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 15: "sparse"},
    "node": {5: "attribute"}, "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {13: "entry", 14: "", 2: ""}, "sparse": {1: "tensor", 2: "tensor"}, "value": {2: "type"},
    "type": {1: "shape"}, "opset": {}, "entry": {}, "shape": {},
}  # fmt: skip
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    10,
    16,
    21,
    22,
    77,
    127,
    128,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TEXTS = (
    b"", b"0", b"1", b"-1", b"64", b"512", b"9223372036854775808", b"location", b"offset", b"length", b"\0",
    b"model.onnx", b"numbers.bin", b"../numbers.bin", b"/etc/passwd", b"axis", b"block_size", b"transB", b"K",
    b"N", b"bits", b"MatMul", b"Gemm", b"Conv", b"Gather", b"Transpose", b"Constant", b"DequantizeLinear",
    b"MatMulNBits", b"com.microsoft", b"ai.onnx", b"x", b"y", b"w", b"\xff\xfe", b"a\nb", b"int4:g32",
)  # fmt: skip


class Field(NamedTuple):
    """A field of a message. value: the number of a varint, or the bytes of others."""

    number: int
    wire: int
    value: int | bytes


def varint(value: int) -> bytes:
    """Return a number as messages have it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _number(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("no varint")


def fields(content: bytes) -> list[Field]:
    """Return the fields of a message; raises ValueError or IndexError for other bytes."""
    found, at = [], 0
    while at < len(content):
        key, at = _number(content, at)
        if key & 7 == _VARINT:
            value: int | bytes
            value, at = _number(content, at)
        else:
            size, at = _number(content, at) if key & 7 == _BYTES else ({1: 8, 5: 4}[key & 7], at)
            if at + size > len(content):
                raise ValueError("cut")
            value, at = content[at : at + size], at + size
        found.append(Field(key >> 3, key & 7, value))
    return found


def written(message: Sequence[Field], shift: int = 0) -> bytes:
    """Return a message; ``shift`` is added to the length of each field of bytes, which then is wrong."""
    out = bytearray()
    for number, wire, value in message:
        out += varint(number << 3 | wire)
        if isinstance(value, int):
            out += varint(value)
        else:
            out += (varint(max(0, len(value) + shift)) if wire == _BYTES else b"") + value
    return bytes(out)


def mutate_message(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return an ONNX file changed in one to three places, or any bytes changed where it is none."""
    if rng.random() < 0.1:
        return mutate(content, rng, others)
    for _ in range(rng.choice([1, 1, 2, 3])):
        try:
            content = _changed(content, "model", rng, others)
        except (ValueError, IndexError, KeyError):
            return mutate(content, rng, others)
    return content


def _changed(content: bytes, kind: str, rng: random.Random, others: Sequence[bytes]) -> bytes:
    message, inner = fields(content), SCHEMA.get(kind, {})
    below = [at for at, each in enumerate(message) if inner.get(each.number) and each.wire == _BYTES]
    if below and rng.random() < 0.85:
        at = rng.choice(below)
        value = message[at].value
        assert isinstance(value, bytes)
        changed = _changed(value, inner[message[at].number], rng, others)
        message[at] = message[at]._replace(value=changed)
    else:
        _change(message, rng, others)
    return written(message, rng.choice([-1, 1, 100, 2**40]) if rng.random() < 0.01 else 0)


def _change(message: list[Field], rng: random.Random, others: Sequence[bytes]) -> None:
    """Change a field, or which there are."""
    at = rng.randrange(len(message) + 1)
    what = rng.choice(["value"] * 6 + ["drop", "double", "swap", "renumber", "add"])
    if what == "add" or at == len(message):
        wire = rng.choice([_VARINT, _BYTES, _BYTES, _FIXED32, _FIXED64])
        size = {_FIXED32: 4, _FIXED64: 8}.get(wire)
        value = rng.choice(NUMBERS) if wire == _VARINT else bytes(size) if size else rng.choice(TEXTS)
        message.insert(at, Field(rng.choice([*range(1, 30), 2**29 - 1]), wire, value))
    elif what == "drop":
        del message[at]
    elif what == "double":
        message[at:at] = [message[at]] * rng.choice([1, 1, 20])
    elif what == "swap":
        other = rng.randrange(len(message))
        message[at], message[other] = message[other], message[at]
    elif what == "renumber":
        message[at] = message[at]._replace(number=rng.choice([*range(1, 30)]))
    elif isinstance(message[at].value, int):
        message[at] = message[at]._replace(value=rng.choice(NUMBERS))
    elif message[at].wire == _BYTES:
        value = message[at].value
        assert isinstance(value, bytes)
        changed = mutate(value, rng, others) if rng.random() < 0.3 else rng.choice(TEXTS)
        message[at] = message[at]._replace(value=changed)
