"""The tour: twelve modules that there are, in little time, and each after what it needs."""

import re
from pathlib import Path

from docs.make_tables import SOURCE, TOUR

MOST_LINES = 4000


def test_the_tour_is_twelve_files_that_can_be_read_in_a_day() -> None:
    assert len(set(TOUR)) == 12
    assert sum(len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in TOUR) < MOST_LINES


def test_the_page_links_to_each_file() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/tour.md"
    links = re.findall(r"\]\(\.\./src/zeropoint/([^)]+)\)", page.read_text(encoding="utf-8"))
    assert tuple(links) == TOUR
