"""Self-contained HTML page about checkpoints, a search or an evaluation.

The page needs no network, and is complete without scripts; a script adds sorting and filtering. All that it
shows, and more, stands in it as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..architectures import classes_of
from ..checkpoint.read import object_store
from ..checkpoint.read.file_names import REPORT
from ..checkpoint.read.object_store import RemotePath
from ..checkpoint.read.storage import Place
from ..checkpoint.run.loop import RunResult
from ..checkpoint.verify.overview import Overview, overview
from ..errors import ZeropointError, count
from ..own_files import OwnFile
from ..results import Result
from ..search.search_result import SearchResult
from ..shown import PAGE, new_page
from ..signatures import by_signature
from .measured import evaluation_nodes, search_nodes
from .nodes import Node, as_html, on_screen
from .sections import about, experts_of, kinds_of, side_by_side, stays_of
from .wording import name, short_scheme

if TYPE_CHECKING:  # it loads models
    from ..eval import Evaluation


_MOST = 8000
"""Most tensors of a run that writes its page without being asked; larger pages take much time and memory."""
_NAMED = 3
"""Schemes that the title of a run's page names."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointReport(Result):
    """Report about checkpoints side by side, with a search or evaluation.

    runs: the checkpoints, in the order in which they were given. path: of the page, or None where none was
    written. search: the search that chose schemes, or None. evaluation: how far models are from a reference,
    or None.
    """

    runs: tuple[Overview, ...] = ()
    path: Path | None = None
    search: SearchResult | None = None
    evaluation: Evaluation | None = None

    @property
    def title(self) -> str:
        """The heading of the page."""
        if not self.runs:
            return "Search" if self.search is None else f"Search: {self.search.budget}"
        first, *others = self.runs
        named = first.name if not others else f"{first.name} and {count(len(others), 'other')}"
        return named if self.evaluation is None else f"Evaluation: {named}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes of page and text."""
        return tuple(self._nodes())

    def _nodes(self) -> Iterator[Node]:
        if len(self.runs) > 1 and self.evaluation is None:
            yield from side_by_side(self.runs)
            return
        if self.evaluation is not None:
            yield from evaluation_nodes(self.evaluation)
        if self.search is not None:
            yield from search_nodes(self.search)
        yield from side_by_side(self.runs) if len(self.runs) > 1 else about(self.runs[0]) if self.runs else ()

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        where = () if self.path is None else (f"written to {self.path}",)
        found = [result for result in (self.search, self.evaluation) if result is not None]
        return (
            *(line for run in self.runs for line in run.lines),
            *(line for result in found for line in result.lines),
            *where,
        )

    def on_screen(self) -> RenderableType:
        """Return the page's summary for rich: sizes, errors, kept tensors."""
        where = () if self.path is None else (Text(f"\nwritten to {self.path}"),)
        return Group(Text(name(self.title), style="bold"), on_screen(self.nodes), *where)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return {
            "runs": [_document(run) for run in self.runs],
            **({} if self.search is None else {"search": self.search.to_dict()}),
            **({} if self.evaluation is None else {"evaluation": self.evaluation.to_dict()}),
        }

    def to_html(self) -> str:
        """Return the page."""
        data = json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        title = escape(self.title)
        return "\n".join((
            "<!doctype html>", f"<!-- {PAGE.mark.decode()} -->",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title} - zeropoint</title><style>{_resource('page.css')}</style></head><body><main>",
            f"<h1>{title}</h1>", f"{as_html(self.nodes)}</main>",
            f'<script type="application/json" id="zeropoint">{data}</script>',
            f"<script>{_resource('page.js')}</script>", "</body></html>", "",
        ))  # fmt: skip


def _document(run: Overview) -> dict[str, Any]:
    return {
        **run.to_dict(),
        "kinds": [
            {**asdict(kind), "bits": 8 * kind.nbytes / max(1, kind.values)} for kind in kinds_of(run.layers)
        ],
        "stays": [asdict(each) for each in stays_of(run)],
        "experts": [asdict(each) for each in experts_of(run.layers)],
    }


@by_signature
def report_checkpoint(
    path: Place | str,
    *,
    others: Sequence[Place | str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
) -> CheckpointReport:
    """Return a report about checkpoints, and write its page.

    Args:
        path: a directory, a file, or the URL of either: quantized by zeropoint or others, or floats.
        others: other checkpoints that are shown next to it.
        out: a file for the page; none is written if None.
        overwrite: whether a report that is there may be replaced.

    Raises:
        CheckpointError: when files are damaged or hostile, and where the page cannot be written.

    Example:
        >>> zp.report_checkpoint("MODEL-w4a16", out="report.html")  # doctest: +SKIP
    """
    runs = tuple(overview(each) for each in (path, *others))
    if out is None:
        return CheckpointReport(runs=runs)
    apart = [place for run in runs for place in run.inspection.source.places]
    file = new_page(Path(out), apart, overwrite=overwrite)
    found = CheckpointReport(runs=runs, path=Path(out))
    file.write([found.to_html().encode()], overwrite=overwrite)
    return found


def with_page(result: RunResult) -> RunResult:
    """Return a run's result with the page about its output, written there.

    Of an output behind a URL no rows are decoded, which would take a request for each layer. A run does not
    fail for its page: what is in the way is said in a note.
    """
    tensors = len(result.plan.outputs.by_name)
    if tensors > _MOST:
        return _without(result, f"it has {count(tensors, 'tensor')}; zeropoint report OUT makes one")
    remote = isinstance(result.path, RemotePath)
    try:
        found = overview(result.path, sampled=not remote)
        page = CheckpointReport(runs=(replace(found, name=_title(found)),)).to_html().encode()
        if isinstance(result.path, RemotePath):
            object_store.write(result.path / REPORT, page)
        else:
            OwnFile(result.path / REPORT, PAGE).write([page], overwrite=True)
    except ZeropointError as error:
        return _without(result, str(error))
    return replace(result, page=result.path / REPORT)


def _title(found: Overview) -> str:
    """Return an output's title from its content alone, not its folder."""
    model = next(iter(classes_of(found.inspection.source.config or {})), "model")
    schemes = list(dict.fromkeys(short_scheme(layer.scheme) for layer in found.layers))
    rest = f" and {len(schemes) - _NAMED} more" if len(schemes) > _NAMED else ""
    return f"{model}: {', '.join(schemes[:_NAMED]) or 'floats'}{rest}"


def _without(result: RunResult, reason: str) -> RunResult:
    return replace(result, notes=(*result.notes, f"no report was written: {reason}"))


def page_of(path: Place | str) -> Path:
    """Return a page's default file: next to its checkpoint, or here.

    >>> page_of("models/tiny-w4a16")
    PosixPath('models/tiny-w4a16.html')
    """
    folder = Path() if "://" in str(path) else Path(str(path)).parent
    return folder / f"{Path(str(path)).name}.html"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
