"""A text that is kept packed comes back to the byte, with its size and digest."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from zeropoint.checkpoint.plan.texts import Text


@given(st.lists(st.text(max_size=20)))
def test_a_packed_text_is_what_its_parts_are_in_a_row(parts: list[str]) -> None:
    raw = "".join(parts).encode("utf-8", "surrogatepass")
    text = Text.of(raw)
    assert (bytes(text), text.size, text.sha256) == (raw, len(raw), hashlib.sha256(raw).hexdigest())


def test_a_long_text_comes_in_pieces_and_takes_little() -> None:
    text = Text.of(f"model.layers.{n % 61}.mlp.experts.{n}.up_proj.weight\n" for n in range(100_000))
    pieces = list(text.pieces())
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == text.size
    assert b"".join(pieces) == bytes(text)
    assert 4 * len(text._packed[0]) < len(pieces[0])
