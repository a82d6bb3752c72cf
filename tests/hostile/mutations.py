"""Change bytes at random, from a seed: bits, pieces, lengths, numbers, and tokens of JSON for others."""

import random
import re
from collections.abc import Callable, Sequence

NUMBERS = (
    b"0", b"1", b"2", b"3", b"8", b"10", b"-1", b"-0", b"1.0", b"1e0", b"1e400", b"4294967296",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616",
)  # fmt: skip
TOKENS = (
    *NUMBERS,
    *(b'{ } [ ] , : " \\ NaN null true false Infinity "a" "b" "x" \\u0000 "\\ud800" a:'.split()),
    *(b'"__metadata__" "dtype" "shape" "data_offsets" "U8" "F4" "BF16" "weight_map" "re:" "Linear"'.split()),
    *(b'"a":1, "x":{}, "k":"v", [0,0] [0,2] "shape":[1], *a &a !!x - | > %TAG'.split()),
    *(b"\xff", b"\xc3\xa9", b"\n", b"\n  ", b"\0", b"\xef\xbb\xbf", b"  ", b"\t", b"\x1b[31m"),
)  # fmt: skip

# One token becomes another of its kind, so that many mutants stay JSON and reach the deeper rules.
KINDS = (
    (re.compile(rb'"[^"]*"(?=:)'), [t for t in TOKENS if t.startswith(b'"') and t.endswith(b'"')]),
    (re.compile(rb'(?<=:)"[^"]*"'), [b'"U8"', b'"I8"', b'"F4"', b'"F7"', b'"BF16"', b'{"U8":null}', b"1"]),
    (re.compile(rb"\d+"), list(NUMBERS)),
    (re.compile(rb"\[[^\[\]]*\]"), [b"[]", b"[0]", b"[0,0]", b"[0,2]", b"[2,0]", b"[1,2]", b"{}", b"null"]),
    (re.compile(rb"\{[^{}]*\}"), [b"{}", b'["U8",[2],[0,2]]', b"null", b'{"k":"v"}', b'{"k":1}']),
    (
        re.compile(rb'(?<=[{,])(?=")'),
        [b'"x":1,', b'"a":{},', b'"a":["U8",[0],[0,0]],', b'"__metadata__":{},'],
    ),
    (re.compile(rb'(?<=[{,])"[^"]*":(\{[^{}]*\}|\[[^\[\]]*\])'), [b""]),  # doubled below
)


def _bits(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _cut(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    del content[rng.randrange(len(content) + 1) :]


def _splice(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    begin, at = rng.randrange(len(other) + 1), rng.randrange(len(content) + 1)
    size = rng.choice([1, 4, 16, 64, len(other)])
    content[at : at + rng.choice([0, size])] = other[begin : begin + size]


def _double(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    begin = rng.randrange(len(content) + 1)
    end = min(len(content), begin + rng.choice([1, 5, 30, 200]))
    content[end:end] = content[begin:end] * rng.choice([1, 1, 2, 50])


def _token(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(content) + 1)
    content[at : at + rng.choice([0, 0, 1, 9])] = rng.choice([*TOKENS, b""])


def _kind(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    pattern, choices = rng.choice(KINDS)
    spots = [found.span() for found in pattern.finditer(content)]
    if spots:
        begin, end = rng.choice(spots)
        old = bytes(content[begin:end])
        content[begin:end] = rng.choice([*choices, old + b"," + old])


_CHANGES: tuple[Callable[[bytearray, random.Random, Sequence[bytes]], None], ...] = (
    _bits, _cut, _splice, _double, _token, _token, _kind, _kind, _kind, _kind,
)  # fmt: skip


def mutate(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return ``content`` changed in one to three places; ``others`` are what pieces are taken from."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_CHANGES)(changed, rng, others)
    return bytes(changed)


def mutate_file(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a safetensors file changed: mostly its header, with the length that then is right."""
    if rng.random() < 0.1 or len(content) < 8:
        return mutate(content, rng, others)
    length = int.from_bytes(content[:8], "little")
    raw, data = content[8 : 8 + length], content[8 + length :]
    raw = mutate(raw, rng, [other[8:] for other in others])
    if rng.random() < 0.1:
        data = data[:-1] if rng.random() < 0.5 else data + b"\0"
    shift = rng.choice([-1, 1, 8, 2**40]) if rng.random() < 0.05 else 0
    return max(0, len(raw) + shift).to_bytes(8, "little") + raw + data


def mutate_numbers(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a file of little-endian numbers changed, in half of the cases one of its numbers."""
    if rng.random() < 0.5 or len(content) < 8:
        return mutate(content, rng, others)
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2])):
        size = rng.choice([1, 4, 4, 4, 8, 8])
        at = rng.randrange(len(changed) - size + 1)
        changed[at : at + size] = (rng.choice(BINARY) & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(changed)


BINARY = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    16,
    30,
    32,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    -1,
    -2,
)
