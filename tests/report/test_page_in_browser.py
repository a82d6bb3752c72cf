"""The page in headless Chromium: fast, silent, sortable, at 200 %, printed, and without scripts."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.test_page import HOSTILE, many, runs

from zeropoint.report.page import CheckpointReport, report_checkpoint

__all__ = ["runs"]
CHROMIUM = shutil.which("chromium")
LAYERS = 2000
PAINT_SECONDS = 2.0
pytestmark = [
    pytest.mark.slow,  # a browser
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
PAINTS = """new PerformanceObserver((list) => { for (const each of list.getEntries()) console.log(
  "paint", each.name, Math.round(each.startTime), document.documentElement.scrollWidth, innerWidth);
}).observe({type: "paint", buffered: true});"""


@pytest.fixture(scope="module")
def large(runs: dict[str, Path]) -> str:
    """The page of a run of many layers."""
    run = report_checkpoint(runs["int4"]).runs[0]
    return CheckpointReport(runs=(replace(run, layers=many(run.layers[0], LAYERS)),)).to_html()


def browser(page: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Show a page and return what the browser says."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(page)
    given = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options)
    return subprocess.run(
        [CHROMIUM, *given, path.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )


def title_after(page: str, script: str, folder: Path) -> str:
    """Return the title after a script ran behind the page's own; fails for messages of the console."""
    done = browser(page.replace("</body>", f"<script>{script}</script></body>"), folder, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search("<title>(.*?)</title>", done.stdout)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("width", [1280, 640])  # 640 is 200 % of a window of 1280
def test_it_is_painted_at_once_and_is_no_wider_than_the_window(
    large: str, tmp_path: Path, width: int
) -> None:
    page = large.replace("</body>", f"<script>{PAINTS}</script></body>")
    shot = tmp_path / "page.png"
    done = browser(page, tmp_path, f"--window-size={width},800", f"--screenshot={shot}")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    paints = [re.search(r'"paint [\w-]+ (\d+) (\d+) (\d+)"', line) for line in console]
    assert paints
    assert all(paints), f"the page itself says nothing: {console}"
    for found in filter(None, paints):
        milliseconds, wide, window = map(int, found.groups())
        assert milliseconds < 1000 * PAINT_SECONDS
        assert wide <= window == width
    assert shot.stat().st_size > 10_000


def test_rows_are_sorted_and_filtered(large: str, tmp_path: Path) -> None:
    script = """
      const table = document.querySelector("section > .wide > table.sortable"), body = table.tBodies[0];
      const head = [...table.tHead.rows[0].cells].find((cell) => cell.textContent === "relative error");
      const button = head.querySelector("button"), found = [];
      const first = () => body.rows[0].cells[0].textContent;
      button.focus(); found.push(document.activeElement === button);
      button.click(); found.push(head.getAttribute("aria-sort"), first());
      button.click(); found.push(head.getAttribute("aria-sort"), first());
      const filter = table.closest("section").querySelector("input[type=search]");
      filter.value = "layers.7.MLP"; filter.dispatchEvent(new Event("input"));
      found.push([...body.rows].filter((row) => !row.hidden).length, filter.nextSibling.textContent.trim());
      filter.value = ""; filter.dispatchEvent(new Event("input"));
      found.push([...body.rows].filter((row) => !row.hidden).length);
      document.title = found.join("|");
    """
    assert title_after(large, script, tmp_path) == "|".join((
        "true", "descending", "model.layers.499.self_attn.o_proj",
        "ascending", "model.layers.0.mlp.down_proj", "2", f"2 of {LAYERS} rows", str(LAYERS),
    ))  # fmt: skip


def test_names_run_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    run = report_checkpoint(runs["int4"]).runs[0]
    layers = tuple(replace(run.layers[0], module=name) for name in HOSTILE)
    kept = tuple(replace(run.kept[0], name=name, reason=name) for name in HOSTILE)
    page = CheckpointReport(runs=(replace(run, name=HOSTILE[1], layers=layers, kept=kept),)).to_html()
    page = page.replace("<head>", "<head><script>var said = 0; window.alert = () => { said += 1 }</script>")
    assert title_after(page, "document.title = `${said} alerts`", tmp_path) == "0 alerts"


def test_without_scripts_all_of_it_is_there(large: str, tmp_path: Path) -> None:
    # Scripts of the page, not of the browser, whose option to print the document is one.
    policy = """<head><meta http-equiv="Content-Security-Policy" content="script-src 'none'">"""
    done = browser(large.replace("<head>", policy), tmp_path, "--dump-dom")
    assert "<input" not in done.stdout, "scripts are off"
    (every,) = re.findall("<h2>All layers</h2>(.*?)</section>", done.stdout, re.DOTALL)
    assert every.count("<tr>") == LAYERS + 1
    assert done.stdout.count("<svg") > 3


def test_it_prints(large: str, tmp_path: Path) -> None:
    printed = tmp_path / "page.pdf"
    browser(large, tmp_path, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert 20 < pages < 200, "all layers, some tens on a page"
