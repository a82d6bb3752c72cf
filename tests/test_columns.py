"""Columns hold what objects would, in a fraction of their memory."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint import columns
from zeropoint.checkpoint.read.tensor_entries import Entries, TensorEntry
from zeropoint.columns import Interned, LazySequence, PackedBytes, StringTable, ordered


@given(st.lists(st.text(max_size=6), max_size=200))
def test_names_have_the_numbers_that_a_dict_would_give_them(texts: list[str]) -> None:
    names, expected = StringTable(), dict[str, int]()
    for text in texts:
        new = text not in expected
        expected.setdefault(text, len(expected))
        assert names.add(text) == (expected[text] if new else None)
    assert list(names) == list(expected)
    assert all(names.number(text) == number for text, number in expected.items())
    assert names.number("no such text") is None


def test_ten_thousand_names_are_found_among_ten_thousand() -> None:
    names = StringTable()
    texts = [f"model.layers.{n % 61}.mlp.experts.{n}.up_proj.weight" for n in range(10_000)]
    for text in texts:
        names.add(text)
    assert [names.number(text) for text in texts] == list(range(10_000))
    assert names.memory < 10_000 * (len(texts[-1]) + 40)


def test_made_items_are_a_sequence_that_equals_its_own_tuple() -> None:
    made = LazySequence(5, str)
    assert made == ("0", "1", "2", "3", "4")
    assert made != ("0", "1")
    assert (made[-1], made[1:3], "3" in made, made.index("2")) == ("4", ("1", "2"), True, 2)
    with pytest.raises(IndexError):
        made[5]


def test_more_indices_than_have_keys_in_memory_are_sorted_and_ties_keep_their_order() -> None:
    keys = [f"layer.{n * 7919 % 1009}" for n in range(20_000)]
    assert list(ordered(range(len(keys)), keys.__getitem__)) == sorted(range(len(keys)), key=keys.__getitem__)
    assert list(ordered([5, 3], keys.__getitem__)) == sorted([5, 3], key=keys.__getitem__)
    assert list(ordered([], keys.__getitem__)) == []


@pytest.mark.parametrize("sizes", [[8, 8, 0, 1], [7, 1, 0], [3, 5, 0, 3], [20, 0, 2], [0, 0]])
def test_blobs_are_what_they_were_wherever_buffers_end(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_PIECE", 8)
    blobs, expected = PackedBytes(len(sizes)), {n: bytes([n]) * size for n, size in enumerate(sizes)}
    blobs.update(expected)
    assert dict(blobs) == expected


def test_equal_kinds_share_a_number() -> None:
    kinds = Interned()
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
