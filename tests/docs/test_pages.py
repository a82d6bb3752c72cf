"""Pages say what the code says, are short, and hold no fact twice."""

import csv
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from docs.make_layout_pages import fields
from docs.make_pages import FOLDER, MAKERS, REGION, by_hand, pages, renewed
from docs.make_pictures import PICTURES
from docs.make_site import CSV_LINK, csv_table

from zeropoint.schemes import PRESETS

TEXTS = {page.relative_to(FOLDER).as_posix(): page.read_text(encoding="utf-8") for page in pages()}


def test_regions_are_what_the_code_makes() -> None:
    assert [name for name, text in TEXTS.items() if renewed(text) != text] == [], "python -m docs.make_pages"


def test_every_maker_of_regions_is_used_and_every_region_ends() -> None:
    made = {found[1].partition(": ")[0] for text in TEXTS.values() for found in REGION.finditer(text)}
    assert made == set(MAKERS)
    assert [
        name for name, text in TEXTS.items() if re.search("^<!-- made", by_hand(text), re.MULTILINE)
    ] == []


def test_a_region_is_renewed_and_what_is_by_hand_stays() -> None:
    page = "# A\n\n<!-- made: roundings -->\nold\n<!-- end -->\n\nby hand\n"
    made = renewed(page)
    assert "old" not in made
    assert "| `half_even` |" in made
    assert by_hand(made) == by_hand(page) == "# A\n\n\n\nby hand\n"
    with pytest.raises(KeyError):
        renewed("<!-- made: nothing -->\n<!-- end -->")


def test_code_is_fenced_where_it_is_run() -> None:
    assert [name for name, text in TEXTS.items() if len(re.findall("^```", text, re.MULTILINE)) % 2] == []


MOST_WORDS, ALL_WORDS, LINES_OF_A_GUIDE = 1500, 35_000, 120


def words(text: str) -> int:
    """Count the words of a page that are written by hand, code and tables included."""
    return len(by_hand(text).split())


def test_no_page_is_long_and_all_of_them_are_short() -> None:
    counts = {name: words(text) for name, text in TEXTS.items()}
    assert {name: count for name, count in counts.items() if count > MOST_WORDS} == {}
    assert sum(counts.values()) < ALL_WORDS
    guides = {name: text.count("\n") for name, text in TEXTS.items() if name.startswith("how-to/")}
    assert {name: lines for name, lines in guides.items() if lines > LINES_OF_A_GUIDE} == {}


SCHEMES = {name: p.weight for name, p in PRESETS.items() if p.weight.count(":") > 2}
"""The texts of schemes that nobody writes by chance."""


def prose(text: str) -> str:
    """Return what a page says by hand, without blocks of code."""
    return re.sub(r"^```.*?^```$|^    .*$", "", by_hand(text), flags=re.DOTALL | re.MULTILINE)


def defined_twice(texts: dict[str, str]) -> list[str]:
    """Return presets that a page defines by hand, and tensors of layouts that several pages describe by hand.

    A preset is defined by a row of a table that begins with it, or by the text of its scheme; a tensor is
    described by its name as code. Names that are plain words, such as ``weight`` and ``scale``, are left out.
    """
    found = []
    for page, text in texts.items():
        cells = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", prose(text), flags=re.MULTILINE)
        found += [
            f"{name} in {page}" for cell in cells for name in re.findall(r"[\w-]+", cell) if name in PRESETS
        ]
        found += [f"{name} in {page}" for name, scheme in SCHEMES.items() if scheme in prose(text)]
    counts = Counter[str]()
    named = {
        suffix for suffix in fields() if "_" in suffix.strip("_") or suffix in {"qweight", "qzeros", "SCB"}
    }
    for text in texts.values():
        counts.update(set(re.findall(r"`([\w.]+)`", prose(text))) & named)
    return found + [f"{suffix} in {count} pages" for suffix, count in counts.items() if count > 1]


def test_no_preset_is_defined_by_hand_and_no_tensor_of_a_layout_on_two_pages() -> None:
    # Pages for people of other tools say of each preset and tensor which bytes are those of the tool.
    assert (
        defined_twice({name: text for name, text in TEXTS.items() if not name.startswith("migration/")}) == []
    )


def test_what_is_said_twice_is_found() -> None:
    twice = {"a.md": "`weight_packed` holds codes", "b.md": "see `weight_packed`"}
    assert defined_twice(twice) == ["weight_packed in 2 pages"]
    assert defined_twice({"a.md": "| `w4a16` | integers |\n"}) == ["w4a16 in a.md"]
    assert defined_twice({"a.md": f"is {PRESETS['w4a16_asym'].weight}"}) == ["w4a16_asym in a.md"]
    assert defined_twice({"a.md": "```\n| `w4a16` | integers |\n```\n"}) == []


def test_tables_are_on_pages_and_have_a_cell_for_each_column() -> None:
    tables = {path.resolve() for path in FOLDER.rglob("*.csv")}
    shown = {
        (FOLDER / name).parent / link for name, text in TEXTS.items() for _, link in CSV_LINK.findall(text)
    }
    assert {path.resolve() for path in shown} == tables
    for path in tables:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        assert {len(row) for row in rows} == {len(rows[0])}, path.name
        assert csv_table(path).count("\n") == len(rows) + 1


def test_tests_that_tables_name_are_there() -> None:
    named = [
        each
        for path in FOLDER.rglob("*.csv")
        for each in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text())
    ]
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (FOLDER.parent / file).read_text(), test


def test_pictures_are_there_and_have_titles() -> None:
    for draw in PICTURES:
        root = ElementTree.fromstring(
            (FOLDER / "images" / f"{draw.__name__}.svg").read_text(encoding="utf-8")
        )
        assert root[0].tag.endswith("title")
        assert root[0].text == ElementTree.fromstring(draw().svg())[0].text
