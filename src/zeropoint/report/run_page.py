"""The report page of a run, next to its manifest."""

from dataclasses import replace

from ..architectures import classes_of
from ..checkpoint.read import object_store
from ..checkpoint.read.file_names import REPORT
from ..checkpoint.read.object_store import RemotePath
from ..checkpoint.run.loop import RunResult
from ..checkpoint.verify.overview import Overview, overview
from ..errors import ZeropointError, count
from ..own_files import OwnFile
from ..shown import PAGE
from .page import CheckpointReport
from .wording import short_scheme

_MOST = 8000
"""Tensors from which on a page takes more memory, and more time, than a run may without being asked."""


def with_page(result: RunResult) -> RunResult:
    """Return a run's result with the written page about its output.

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


_NAMED = 3


def _without(result: RunResult, reason: str) -> RunResult:
    return replace(result, notes=(*result.notes, f"no report was written: {reason}"))
