"""The stream reads what json reads, wherever the pieces are cut, and refuses what json refuses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.checkpoint.read.json_stream import JsonError, JsonStream

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=20)


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def taken(stream: JsonStream, limit: int | None = None) -> dict[str, Any]:
    return {key: stream.value(limit) for key in stream.members()}


def whole(raw: bytes, size: int) -> Any:
    """Return the value of a text; the members of an object are taken one by one."""
    stream = JsonStream(pieces(raw, size))
    found = taken(stream) if stream.is_object else stream.value()
    stream.end()
    return found


@given(VALUES, st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_a_text_in_pieces_is_the_value_that_json_reads(
    value: Any, size: int, indent: int | None, plain: bool
) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        with pytest.raises(UnicodeDecodeError):
            whole(raw, size)
        return
    assert whole(raw, size) == value


@given(VALUES, st.integers(1, 40), st.data())
def test_a_damaged_text_is_refused_where_json_refuses_it(value: Any, size: int, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from(["", "}", '"', ",", "x", "\\", "0"])) + text[at + 1 :]
    try:
        expected = json.loads(broken)
    except ValueError:
        with pytest.raises(JsonError):
            whole(broken.encode(), size)
        return
    assert whole(broken.encode(), size) == expected


def test_an_error_is_found_without_the_rest_of_the_text() -> None:
    def endless() -> Any:
        yield b'{"a": 1, "b": ?' + b" " * 64
        raise AssertionError("nothing more is needed")

    with pytest.raises(JsonError, match="Expecting value at its character 14"):
        taken(JsonStream(endless()))


def test_a_value_above_its_limit_is_refused_before_it_is_read_to_its_end() -> None:
    def endless() -> Any:
        yield b'{"a": ['
        while True:
            yield b"0, " * 1000

    with pytest.raises(JsonError, match="a value has more than 5000 characters at its character 6"):
        taken(JsonStream(endless()), 5000)


def test_what_is_no_unicode_is_refused_with_its_byte() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        whole(b'{"a": "' + b"x" * 90 + b"\xff" + b'"}', 10)
    assert caught.value.start == 97
