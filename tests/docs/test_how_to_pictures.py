"""The pictures on pages: the chart shows its figures, and screenshots come from the commands shown."""

import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from tests.architectures.trial import save
from tests.architectures.zoo import ZOO

from docs import make_divergence_chart, make_how_to_pictures

DOCS = Path(make_how_to_pictures.__file__).parent


def test_the_chart_on_disk_is_made_from_the_figures() -> None:
    found = make_divergence_chart.figures()
    assert make_divergence_chart.CHART.read_text(encoding="utf-8") == make_divergence_chart.chart(found)
    assert {f.data for f in found} == {"none", "text"}


def test_each_figure_of_the_chart_is_in_a_table() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.csv")]
    tables = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    figures = [f"{f.kl:.4f}" for f in make_divergence_chart.figures()]
    assert [figure for figure in figures if figure not in tables] == []


def test_the_pictures_of_the_page_are_those_that_are_made() -> None:
    text = make_how_to_pictures.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"\.\./images/([\w-]+\.png)", text)) == make_how_to_pictures.PICTURES.keys()
    assert all((make_how_to_pictures.IMAGES / name).is_file() for name in make_how_to_pictures.PICTURES)


def size_of(path: Path) -> tuple[int, int]:
    """Return the width and height of a PNG file."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


@pytest.mark.slow
def test_the_commands_of_the_page_run_and_their_reports_are_seen(tmp_path: Path) -> None:
    save(next(animal for animal in ZOO if animal.name == "Llama"), tmp_path / "SmolLM2", torch.bfloat16)
    make_how_to_pictures.run(tmp_path)
    if shutil.which("chromium") is None:
        pytest.skip("there is no Chromium on this machine")
    make_how_to_pictures.take(tmp_path, tmp_path)
    for name, (_, height) in make_how_to_pictures.PICTURES.items():
        assert size_of(tmp_path / name) == (make_how_to_pictures.WIDTH, height)
        assert (tmp_path / name).stat().st_size > 20_000  # an empty page of this size has some 5,000 bytes
