"""What notebooks show, and the pages that runs leave: the one door to the layer of reports from below.

Reports know every type, and no type knows reports: they are imported when something is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .own_files import FileKind, OwnFile

PAGE = FileKind("report", b"zeropoint report")
"""An HTML page of zeropoint."""
_MARK = "zeropoint picture"
_PICTURE = FileKind("picture", _MARK.encode())
_STYLE = (
    "svg{font:12px system-ui,sans-serif}text{fill:#767c84}.grid{stroke:#767c84;stroke-opacity:.3}"
    "polyline{fill:none;stroke-width:1.6;stroke:var(--own)}circle{fill:var(--own)}"
    "rect{fill:var(--own);fill-opacity:.6}.bars path{fill:#3f7fe0}"
    ".c0{--own:#3f7fe0}.c1{--own:#d9730d}.c2{--own:#1a9a5c}.c3{--own:#c9478f}.c4{--own:#7d68e0}"
    ".c5{--own:#0b93a5}.c6{--own:#a87a1c}.c7{--own:#7a828c}"
)
"""Colors that can be read on white and on black: a file does not know what it is shown on."""


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture in SVG, which a notebook shows.

    Args:
        inline: an ``<svg>`` element in the colors of the page around it.
        label: what it shows, in words.
    """

    inline: str
    label: str

    @property
    def svg(self) -> str:
        """The picture as a file of its own."""
        head = f"<svg xmlns='http://www.w3.org/2000/svg'><!-- {_MARK} --><style>{_STYLE}</style>"
        start, _, rest = self.inline.partition(">")
        attributes = start.removeprefix("<svg")
        return f"{head.replace('<svg', f'<svg{attributes}', 1)}{rest}\n"

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the picture to a file.

        Args:
            path: of the file, usually ``.svg``.
            overwrite: whether a picture of zeropoint that is there may be replaced.

        Raises:
            CheckpointError: where the file exists, or cannot be written.
        """
        OwnFile(Path(path), _PICTURE).write([self.svg.encode()], overwrite=overwrite)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture: {self.label}>"


def repr_html(shown: object) -> str:
    """Return what a notebook shows of an object, folded: its text first."""
    found: str = _report("notebook").html_of(shown)
    return found


def plot(shown: object) -> Picture:
    """Return a picture, which a notebook shows and :meth:`Picture.save` writes to a file.

    Raises:
        UnsupportedError: where there is nothing to draw.
    """
    found: Picture = _report("notebook").picture_of(shown)
    return found


def with_page(result: Any, *, search: Any = None) -> Any:
    """Return the result of a run with the page about it, which is written beside the manifest.

    search: what chose the schemes of layers, or None.
    """
    return _report("run_page").with_page(result, search=search)


def page_of_results(**results: Any) -> bytes:
    """Return a page; results: those of :class:`zeropoint.report.page.CheckpointReport`."""
    html: str = _report("page").CheckpointReport(**results).to_html()
    return html.encode()


def _report(name: str) -> Any:
    return import_module(f".report.{name}", __package__)
