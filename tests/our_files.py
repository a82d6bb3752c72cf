"""Files of the tree, without what environments, caches and other hidden folders hold."""

import os
from pathlib import Path


def files_below(folder: Path) -> list[Path]:
    """Sorted files below a folder; hidden folders are not entered, since environments hold 100,000 files."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found += [Path(place, name) for name in files]
    return sorted(found)
