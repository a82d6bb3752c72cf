"""Names of all codecs, for help texts without loading codecs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r'^    name = "(.+)"$', re.MULTILINE)


def _names() -> Iterator[str]:
    """Yield the names in the modules of codecs, the default first."""
    folder = Path(__file__).parent
    for path in (*folder.glob("*/__init__.py"), *sorted(folder.glob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if "\nCODEC = " in text:
            yield _NAME.findall(text)[0]


_FIRST, *_OTHERS = _names()
NAMES = (_FIRST, *sorted(_OTHERS))
"""The usual one, then the others in the order of the alphabet."""
