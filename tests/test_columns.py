"""Columns hold what objects would, in a fraction of their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.checkpoint.read.tensor_entries import Entries, TensorEntry
from zeropoint.columns import Kinds, Made, Names


@given(st.lists(st.text(max_size=6), max_size=200))
def test_names_have_the_numbers_that_a_dict_would_give_them(texts: list[str]) -> None:
    names, expected = Names(), dict[str, int]()
    for text in texts:
        new = text not in expected
        expected.setdefault(text, len(expected))
        assert names.add(text) == (expected[text] if new else None)
    assert list(names) == list(expected)
    assert all(names.number(text) == number for text, number in expected.items())
    assert names.number("no such text") is None


def test_ten_thousand_names_are_found_among_ten_thousand() -> None:
    names = Names()
    texts = [f"model.layers.{n % 61}.mlp.experts.{n}.up_proj.weight" for n in range(10_000)]
    for text in texts:
        names.add(text)
    assert [names.number(text) for text in texts] == list(range(10_000))
    assert names.memory < 10_000 * (len(texts[-1]) + 40)


def test_made_items_are_a_sequence_that_equals_its_own_tuple() -> None:
    made = Made(5, str)
    assert made == ("0", "1", "2", "3", "4")
    assert made != ("0", "1")
    assert (made[-1], made[1:3], "3" in made, made.index("2")) == ("4", ("1", "2"), True, 2)
    with pytest.raises(IndexError):
        made[5]


def test_equal_kinds_share_a_number() -> None:
    kinds = Kinds()
    assert [kinds.number(value) for value in ("a", ("b", 1), "a")] == [0, 1, 0]
    assert (len(kinds), kinds[1]) == (2, ("b", 1))


def test_a_table_of_entries_gives_back_what_went_in_and_no_name_twice() -> None:
    entries = [
        TensorEntry(name=f"t{n}", dtype="U8", shape=(n,), begin=9 - n, nbytes=n, file=Path("f"))
        for n in range(9)
    ]
    table = Entries(entries)
    assert list(table.values()) == entries
    assert table == {entry.name: entry for entry in entries}
    assert not table.add(entries[3])
    assert [entry.begin for entry in table.in_file_order().values()] == list(range(1, 10))
    assert table.values()[-1] == entries[-1]
    assert table.values()[2:4] == tuple(entries[2:4])
