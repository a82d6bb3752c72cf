"""Renew what pages take from the code: regions between ``<!-- made: ... -->`` and ``<!-- end -->``.

    python -m docs.make_pages

A test compares the pages on disk with what this writes, so that a table cannot differ from the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.make_architecture_table import (
    every_counts,
    every_other,
    every_reason,
    every_total,
    layouts_table,
    notes_list,
    presets_table,
)
from docs.make_engine_table import engine_figures
from docs.make_format_table import format_table, specials_table
from docs.make_gguf_families import families_table
from docs.make_layout_pages import engine_matrix, layout_page, layout_table
from docs.make_tables import (
    dialect_table,
    layer_table,
    method_table,
    part,
    preset_table,
    rounding_table,
    step_table,
    tour_table,
)

FOLDER = Path(__file__).parent
REGION = re.compile(r"^<!-- made: ([^\n]*?) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
MAKERS: Mapping[str, Callable[..., str]] = {
    "formats": format_table,
    "special codes": specials_table,
    "presets": preset_table,
    "roundings": rounding_table,
    "dialects": dialect_table,
    "methods": method_table,
    "steps": step_table,
    "method": part,
    "layers": layer_table,
    "tour": tour_table,
    "layouts": layout_table,
    "layout": layout_page,
    "engines": engine_matrix,
    "engines that ran": engine_figures,
    "architectures": presets_table,
    "architectures of layouts": layouts_table,
    "notes of architectures": notes_list,
    "families of GGUF": families_table,
    "total of all architectures": every_total,
    "counts of all architectures": every_counts,
    "reasons of all architectures": every_reason,
    "other architectures": every_other,
}
"""What a region is called -> the function that writes it. An argument follows after a colon."""


def renewed(text: str) -> str:
    """Return a page with its regions made anew."""

    def made(found: re.Match[str]) -> str:
        name, _, argument = found[1].partition(": ")
        content = MAKERS[name](argument) if argument else MAKERS[name]()
        return f"<!-- made: {found[1]} -->\n\n{content.strip()}\n\n<!-- end -->"

    return REGION.sub(made, text)


def by_hand(text: str) -> str:
    """Return a page without its regions."""
    return REGION.sub("", text)


def pages() -> list[Path]:
    """Return the pages of the site that are in the repository, in order."""
    return sorted(FOLDER.rglob("*.md"))


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            page.write_text(after, encoding="utf-8")
