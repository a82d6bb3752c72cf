"""The pictures of docs/how-to/find-the-worst-layers.md: its commands, run, and pages in headless Chromium.

    python docs/make_how_to_pictures.py FOLDER

FOLDER has a model under the name SmolLM2; results of the commands that are there are taken as they are.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from zeropoint.cli.main import main

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "how-to" / "find-the-worst-layers.md", DOCS / "images"
PICTURES = {"worst-layers.png": ("SmolLM2-int4.html", 1020), "side-by-side.png": ("all.html", 620)}
"""Picture to the page that it is of, and how much of it in pixels."""
WIDTH = 1100


def blocks(language: str) -> list[str]:
    """Return the blocks of the page in a language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run(folder: Path) -> None:
    """Run the commands of the page in a folder, but for the evaluation, which makes no picture.

    Raises RuntimeError for one that fails.
    """
    (recipe,) = blocks("yaml")
    (folder / "mend.yaml").write_text(recipe, encoding="utf-8")
    for line in "".join(blocks("sh")).splitlines():
        _, command, *words = shlex.split(line)
        if command == "eval":
            continue
        again = {"quantize": ["--if-exists", "skip"], "report": ["--overwrite"]}[command]
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            if main([command, *words, *again]):
                raise RuntimeError(f"{line} failed")


def take(folder: Path, images: Path) -> None:
    """Take the pictures of the pages in a folder. Raises RuntimeError without Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("there is no chromium on PATH; apt-get install chromium")
    for name, (page, height) in PICTURES.items():
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{height}"]
        target, url = f"--screenshot={images / name}", (folder / page).resolve().as_uri()
        subprocess.run([browser, *options, target, url], check=True, capture_output=True)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    run(given)
    take(given, IMAGES)
