"""Checks of file names from listings, indexes and journals, before their use.

This is the first of two walls: what enters is checked here, and what is created, renamed or removed goes
through run/folder.py, which checks again and follows no link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ...errors import CheckpointError, printable

JOURNAL = ".zeropoint.journal"
"""The journal of a run, which lies in an output that is not complete (run/journal.py)."""
REPORT = "zeropoint_report.html"
"""The page about an output, next to its manifest: no part of the checkpoint, and written anew for each."""
LONGEST_NAME = 255
"""Bytes of a name on the file systems of Linux."""
_OWN = re.compile(r"\.zeropoint.*|\..+\.partial", re.DOTALL)
_LISTED = 10


def is_plain(name: str) -> bool:
    r"""Return whether ``name`` is a plain file name on every system.

    >>> [is_plain(name) for name in ("a.txt", "..", "a/b", "a\\b", "")]
    [True, False, False, False, False]
    """
    try:
        short = len(os.fsencode(name)) <= LONGEST_NAME
    except UnicodeEncodeError:
        short = False
    return short and name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def is_own(name: str) -> bool:
    """Return whether runs leave a file or folder of this name.

    >>> is_own(".zeropoint.journal"), is_own(".config.json.partial"), is_own("config.json")
    (True, True, False)
    """
    return _OWN.fullmatch(name) is not None


def is_inside(name: object) -> bool:
    """Return whether ``name`` is a relative path of plain names.

    >>> [is_inside(name) for name in ("1_Pooling/config.json", "../a", "/a", "a//b", 7)]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and all(map(is_plain, name.split("/")))


def require_outputs(names: Iterable[str]) -> None:
    """Raise CheckpointError unless ``names`` can be files of one output.

    None leads out of it, names a file of the run itself, or is the folder of another.
    """
    files = list(names)
    every = set(files)
    bad = [name for name in files if not is_inside(name) or any(map(is_own, name.split("/")))]
    bad += [str(folder) for name in files for folder in PurePosixPath(name).parents if str(folder) in every]
    if bad:
        listed = ", ".join(map(printable, bad[:_LISTED]))
        raise CheckpointError(
            f"the output would have files named {listed}, which lead out of it, or get in the way of others; "
            "rename them in the source, or remove them"
        )
