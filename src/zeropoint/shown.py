"""Notebook output and report pages: the only access to reports from below.

Reports know every type, and no type knows reports: they are imported when something is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from .errors import CheckpointError, option
from .own_files import FileKind, OwnFile

PAGE = FileKind("report", b"zeropoint report")
"""An HTML page of zeropoint."""
_MARK = "zeropoint picture"
PICTURE = FileKind("plot", _MARK.encode())
"""An SVG file of zeropoint."""


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture in SVG, which a notebook shows.

    inline: an ``<svg>`` element in the colors of the page around it. label: what it shows, in words.
    """

    inline: str
    label: str

    @property
    def svg(self) -> str:
        """The picture as a file of its own."""
        style = resources.files(f"{__package__}.report").joinpath("picture.css").read_text(encoding="utf-8")
        head = f"<svg xmlns='http://www.w3.org/2000/svg'><!-- {_MARK} --><style>{style}</style>"
        start, _, rest = self.inline.partition(">")
        attributes = start.removeprefix("<svg")
        return f"{head.replace('<svg', f'<svg{attributes}', 1)}{rest}\n"

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the picture to a file.

        path: of the file, usually ``.svg``. overwrite: whether a picture of zeropoint that is there may be
        replaced. Raises CheckpointError where the file exists, or cannot be written.
        """
        OwnFile(Path(path), PICTURE).write([self.svg.encode()], overwrite=overwrite)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture: {self.label}>"


def repr_html(self: object) -> str:
    """Return an object's folded HTML for notebooks."""
    found: str = _report("notebook").html_of(self)
    return found


def plot(self: object) -> Picture:
    """Return a picture for notebooks, saved by :meth:`Picture.save`.

    Raises UnsupportedError where there is nothing to draw.
    """
    found: Picture = _report("notebook").picture_of(self)
    return found


def with_page(result: Any) -> Any:
    """Return a run's result after writing its page next to the manifest."""
    return _report("page").with_page(result)


def new_page(path: Path, apart: Sequence[Path], *, overwrite: bool) -> OwnFile:
    """Return the file of a page that is to be written.

    apart: as :class:`OwnFile` has it. overwrite: whether a page that is there may be replaced. Raises
    CheckpointError for anything else that has the name.
    """
    if not overwrite and path.exists():
        raise CheckpointError(
            f"{str(path)!r} exists; add {option('overwrite', True)} to replace it, or name a new file"
        )
    file = OwnFile(path, PAGE, apart)
    file.require_free(overwrite=overwrite)
    return file


def page_of_results(**results: Any) -> bytes:
    """Return a page; results: fields of :class:`zeropoint.report.page.CheckpointReport`."""
    html: str = _report("page").CheckpointReport(**results).to_html()
    return html.encode()


def _report(name: str) -> Any:
    return import_module(f".report.{name}", __package__)
