"""The page that a run leaves beside its manifest: what ``zeropoint report OUT`` would write."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint.read import object_store
from ..checkpoint.read.file_names import REPORT
from ..checkpoint.read.object_store import RemotePath
from ..checkpoint.run.loop import RunResult
from ..checkpoint.verify.overview import overview
from ..errors import ZeropointError, count
from ..own_files import OwnFile
from ..search.searching import SearchResult
from ..shown import PAGE
from .page import CheckpointReport

_MOST = 8000
"""Tensors from which on a page takes more memory, and more time, than a run may without being asked."""


def with_page(result: RunResult, *, search: SearchResult | None = None) -> RunResult:
    """Return the result of a run with the page about its output, which is written.

    Of an output behind a URL no rows are decoded, which would take a request for each layer. A run does not
    fail for its page: what is in the way is said in a note.

    Args:
        result: of a run that ended well.
        search: what chose the schemes of layers, or None.
    """
    tensors = len(result.plan.placements.by_name)
    if tensors > _MOST:
        return _without(result, f"it has {count(tensors, 'tensor')}; zeropoint report OUT makes one")
    remote = isinstance(result.path, RemotePath)
    try:
        found = CheckpointReport(runs=(overview(result.path, sampled=not remote),), search=search)
        page = found.to_html().encode()
        if isinstance(result.path, RemotePath):
            object_store.write(result.path / REPORT, page)
        else:
            OwnFile(result.path / REPORT, PAGE).write([page], overwrite=True)
    except ZeropointError as error:
        return _without(result, str(error))
    return replace(result, page=result.path / REPORT)


def _without(result: RunResult, reason: str) -> RunResult:
    return replace(result, notes=(*result.notes, f"no report was written: {reason}"))
