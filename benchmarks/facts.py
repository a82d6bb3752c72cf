"""The machine and the versions behind a figure, and the commit of this tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from zeropoint import __version__, installation


def machine() -> dict[str, Any]:
    """Return the facts without which a figure means nothing, with the commit of this tree."""
    return installation.machine() | {"zeropoint": {"version": __version__, "commit": _commit()}}


def describe(facts: dict[str, Any]) -> str:
    """Return the facts in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    processor = f"{facts['cpu']}, {facts['cores']} cores, {' '.join(facts['simd'])}"
    load = f"{facts['memory_gib']} GiB, load {facts['load_average'][0]}"
    return f"{processor}, {load}; Python {facts['python']}, {packages}; commit {facts['zeropoint']['commit']}"


def record(path: Path | None, facts: dict[str, Any], **figures: Any) -> None:
    """Write figures from the machine of ``facts``, with its load by now; nothing without a path."""
    if path is not None:
        document = {"machine": facts | {"load_average_after": machine()["load_average"]}, **figures}
        path.write_text(json.dumps(document, indent=1) + "\n")


def _commit() -> str | None:
    """Return the commit of this tree, with ``+`` when tracked files have been changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        asked = [*git, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        asked = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def fail(message: str) -> None:
    """Print one line to standard error and exit with 1."""
    print(message, file=sys.stderr)
    raise SystemExit(1)
