"""Names and containers of all codecs, found without loading codecs.

A codec's class writes its name, and a container other than safetensors, as lines of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r'^    name = "(.+)"$', re.MULTILINE)
_CONTAINER = re.compile(r'^    container = "(.+)"$', re.MULTILINE)


class CodecModule(NamedTuple):
    """A module that defines ``CODEC``: names of codec and module, container."""

    name: str
    module: str
    container: str


def _modules() -> Iterator[CodecModule]:
    """Yield the modules of codecs, the default first."""
    folder = Path(__file__).parent
    for path in (*folder.glob("*/__init__.py"), *sorted(folder.glob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if "\nCODEC = " in text:
            module = path.parent.name if path.stem == "__init__" else path.stem
            yield CodecModule(_NAME.findall(text)[0], module, (*_CONTAINER.findall(text), "safetensors")[0])


_FIRST, *_OTHERS = _modules()
MODULES = {found.name: found for found in (_FIRST, *sorted(_OTHERS))}
"""Name to module: the usual one, then the others in the order of the alphabet."""
NAMES = tuple(MODULES)
