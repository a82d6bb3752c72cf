"""Counts of the sources that may only fall: long parameter lists, unformatted lines, long first lines."""

import pytest
from tests.meta.counts import STATIC, read_sources, recorded, static_counts


def test_no_count_rises_above_the_recorded_one() -> None:
    known, counts = recorded(), static_counts(read_sources())
    risen = {
        STATIC[name]: f"{known[name]} -> {number}" for name, number in counts.items() if number > known[name]
    }
    assert not risen, f"counts rose: {risen}; `make counts RECORD=1` records lower ones, never higher ones"


@pytest.mark.parametrize("name", ["return what", "long first lines"])
def test_a_first_line_names_the_thing_in_at_most_twelve_words(name: str) -> None:
    texts = read_sources()
    assert [path for path, text in texts.items() if static_counts({path: text})[name]] == []


PLANTED = {
    "parameters": "def f(self, a, b, c, d, e, *f, g, h, **i): ...\n",
    "parameters outside kernels": "def f(a, b, c, d, e, f, g, h, i): ...\n",
    "fmt: skip": "x = 1  # fmt: skip\n",
    "return what": 'def f():\n    """Return what a sum is."""\n',
    "that of": "# Those of\n",
    "long first lines": '"""a b c d e f g h i j k l m\n\n"""\n',
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_case_is_counted(name: str) -> None:
    assert static_counts({"zeropoint/room/m.py": PLANTED[name]})[name] == 1
    assert static_counts({"zeropoint/room/m.py": "def f(a, b):\n    x = 'that one'\n"})[name] == 0


def test_a_small_module_that_one_neighbor_imports_is_counted() -> None:
    sources = {"zeropoint/room/__init__.py": "", "zeropoint/room/a.py": "x = 1\n"}
    neighbor = {"zeropoint/room/b.py": "def f():\n    from .a import x\n"}
    other = {"zeropoint/hall/c.py": "from zeropoint.room import a\n"}
    assert static_counts(sources)["small modules"] == 0
    assert static_counts(sources | neighbor)["small modules"] == 1
    assert static_counts(sources | neighbor | other)["small modules"] == 0
    assert static_counts(sources | other)["small modules"] == 0
