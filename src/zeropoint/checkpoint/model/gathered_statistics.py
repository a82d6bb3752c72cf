"""Input statistics of a float model, written to a statistics file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, OptionError, count, option, size_of
from ...models.input_sums import sum_inputs
from ...own_files import FileKind, OwnFile
from ...results import Result
from ..plan.limits import Limits
from ..read.source import Source
from ..read.storage import shown
from .imatrix_writing import GGUF_ENDING, imatrix_pieces
from .running_model import running
from .samples import digest_of
from .statistics_file import STATISTICS, SavedStatistics, SiteRecord, StatisticsDraft, mark_of
from .tokens import Given

OURS, OLDER = ".safetensors", (".dat", ".imatrix")
_IMATRIX = FileKind("importance matrix")
_REMEDY = "its statistics are not taken here"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StatisticsResult(Result):
    """Content of a statistics file.

    path: of the file. nbytes: its size. sites: by name. has_gram: whether it has Gram matrices. notes:
    sentences about what is not there.
    """

    path: Path
    nbytes: int
    sites: dict[str, SiteRecord]
    has_gram: bool
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> Sequence[str]:
        """Sentences about the file, one per line."""
        layers = sum(len(site.readers) for site in self.sites.values())
        most = max(site.vectors for site in self.sites.values())
        what = "mean squares and Gram matrices" if self.has_gram else "mean squares"
        return [
            f"{what} of {count(len(self.sites), 'input')} of {count(layers, 'layer')}, of up to "
            + count(most, "vector"),
            *(f"note: {note}" for note in self.notes),
            f"{size_of(self.nbytes)} in {shown(self.path)}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return path, size, and the sites with their readers and counts."""
        return {
            "path": str(self.path),
            "bytes": self.nbytes,
            "gram": self.has_gram,
            "sites": [
                {
                    "readers": list(site.readers),
                    "features": site.features,
                    "vectors": site.vectors,
                    "left_out": site.left_out,
                }
                for site in self.sites.values()
            ],
            "notes": list(self.notes),
        }


def gathered(  # noqa: PLR0913 (what a user asks for, and how it is written)
    source: Source, given: Given, path: Path, limits: Limits,
    *, gram: bool = False, overwrite: bool = False, progress: bool = False,
) -> StatisticsResult:  # fmt: skip
    """Run a model on data and write its layers' input statistics.

    given, progress: as for :func:`~.calibration.calibrated`, which says what is raised. path: see
    :func:`require_ending`. gram: whether to sum Gram matrices, too. overwrite: whether a file of statistics
    that is there is replaced.
    """
    file = require_free(path, source, overwrite=overwrite)
    with running(source, given, limits, remedy=_REMEDY) as model:
        modules = defaultdict[str, list[str]](list)
        for rows in model.rows:
            modules[rows.layer].append(rows.module)
        features = {name: model.root.get_parameter(f"{name}.weight").shape[1] for name in modules}
        with StatisticsDraft(path.parent, mark_of(source), [digest_of(model.given)]) as draft:
            steps = model.steps
            for sums in sum_inputs(model.root, model.batches, features, steps, gram=gram, progress=progress):
                for own in sums:
                    readers = [module for reader in own.readers for module in modules[reader]]
                    draft.add(readers, own.squares, own.gram)
            nbytes = draft.write(file, overwrite=overwrite)
    return _result(path, nbytes, draft.sites, has_gram=gram)


def merged(
    source: Source, paths: Iterable[Path | str], path: Path, *, overwrite: bool = False
) -> StatisticsResult:
    """Write the sum of statistics files, or an importance matrix of llama.cpp.

    paths: at least one, added in this order. path: see :func:`require_ending`.
    """
    file = require_free(path, source, overwrite=overwrite)
    with SavedStatistics(paths, source) as saved:
        if path.suffix == OURS:
            with StatisticsDraft(path.parent, saved.model, saved.tokens) as draft:
                saved.copy_to(draft)
                nbytes = draft.write(file, overwrite=overwrite)
            return _result(path, nbytes, draft.sites, has_gram=saved.has_gram)
        pieces, without = imatrix_pieces(saved, source, as_gguf=path.suffix == GGUF_ENDING)
        file.write(pieces, overwrite=overwrite)
        found = _result(path, sum(map(len, pieces)), saved.sites, has_gram=False)
    if not without:
        return found
    note = f"{count(len(without), 'weight')} without vectors, such as {without[0]}, left out"
    return replace(found, notes=(*found.notes, note))


def require_ending(path: Path, *, of_files: bool) -> None:
    """Raise OptionError for an output name without a known suffix.

    of_files: whether files of statistics are read, of which an importance matrix can be made.
    """
    endings = (OURS, GGUF_ENDING, *OLDER) if of_files else (OURS,)
    if path.suffix not in endings:
        more = (
            ""
            if of_files
            else f"; {GGUF_ENDING} and {OLDER[0]} are made of such a file by {option('statistics')}"
        )
        raise OptionError(f"{str(path)!r} must end in {' or '.join(endings)}{more}")


def require_free(path: Path, source: Source, *, overwrite: bool) -> OwnFile:
    """Return the file to write; CheckpointError where it cannot be."""
    file = OwnFile(path, STATISTICS if path.suffix == OURS else _IMATRIX, source.places)
    file.require_free(overwrite=overwrite)
    if not path.parent.is_dir():
        raise CheckpointError(f"{shown(path.parent)} is no folder; make it first")
    return file


def _result(path: Path, nbytes: int, sites: dict[str, SiteRecord], *, has_gram: bool) -> StatisticsResult:
    without = [name for name, site in sites.items() if not site.vectors]
    notes = [f"no token reached {count(len(without), 'input')}, such as {without[0]}"] if without else []
    return StatisticsResult(path=path, nbytes=nbytes, sites=sites, has_gram=has_gram, notes=tuple(notes))
