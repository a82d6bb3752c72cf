"""Read a quantized checkpoint back and prove it, with what is wrong collected, so that one run names it all.

- Every byte has the hash that the manifest gives for it, where there is a manifest (integrity.py).
- Every layer decodes; its scales are finite and positive; each element is within the proven bound of the
  original, where that is given (proofs.py).
- Kept tensors are those of the original to the byte; none is missing or new (comparisons.py).
- Index, configuration and files agree with each other (consistency.py).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..errors import CheckpointError, ZeropointError
from .comparisons import configuration_problems, kept_tensors
from .consistency import (
    AttendantCheck,
    attendants,
    idle_targets,
    index_problems,
    require_readable,
    unlisted,
)
from .documents import MANIFEST
from .integrity import Digest, damaged_files, hash_checks, read_manifest
from .limits import Limits
from .measure import TensorError
from .originals import Original, open_original
from .problems import Problem
from .proofs import Check, LayerCheck, LayerProof, OpenFiles
from .source import Source, open_source
from .storage import Place, exists
from .stored import Stored, configuration, find_layers
from .workers import Progress, run_tasks

_LISTED = 50
_NO_MANIFEST = (
    f"there is no {MANIFEST}: without its hashes, a change is found where it breaks a layer, a rule or a "
    "bound"
)
_CHUNK = 1 << 23
"""Most bytes of a file that are looked at together where no rows are: long enough for the disk, in cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of :func:`verify`; empty problems mean that everything holds.

    kept: tensors that are not quantized. hashed: whether there was a manifest, with whose hashes every byte
    was compared.
    """

    layers: tuple[LayerProof, ...]
    kept: int
    hashed: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def values(self) -> int:
        """Quantized numbers that were decoded."""
        return sum(proof.layer.values for proof in self.layers)

    @property
    def error(self) -> TensorError | None:
        """The error of all layers taken as one, or None without an original."""
        errors = [proof.error for proof in self.layers if proof.error is not None]
        return TensorError.merge(errors) if errors else None

    def require(self) -> None:
        """Raise CheckpointError, with every problem, unless all is well."""
        if self.problems:
            listed = "; ".join(map(str, self.problems[:_LISTED]))
            rest = len(self.problems) - _LISTED
            more = f"; and {rest} more" if rest > 0 else ""
            remedy = "copy the files or quantize the original again"
            raise CheckpointError(f"{len(self.problems)} problems: {listed}{more}; {remedy}")


def verify(
    path: Place | str, against: Place | str | None = None, *, limits: Limits | None = None,
    on_progress: Progress | None = None,
) -> Verification:  # fmt: skip
    """Return what is wrong with the quantized checkpoint at ``path``, compared with the original when given.

    Raises CheckpointError when files are damaged so that they cannot be read, or the checkpoint is not
    quantized or not in a layout that is read here; everything else is in the result.
    """
    limits = limits or Limits.default()
    source = open_source(path)
    original = None if against is None else open_original(against)
    stored = _layers(source, original)
    problems = [*stored.problems, *index_problems(source), *unlisted(source, stored), *idle_targets(stored)]
    if original is not None:
        problems += configuration_problems(source, original.source)
    with contextlib.ExitStack() as stack:
        files = OpenFiles(stack)
        layers = [
            LayerCheck(layer, None if original is None else original.weight_of(layer), files)
            for layer in stored.layers
        ]
        found, hashes = _hashes(source, files)
        problems += found
        tasks: list[Check] = [task for layer in layers for task in _of_layer(layer, hashes, limits)]
        beside = attendants(stored)
        tasks += [AttendantCheck(entry, files) for entry in beside.values()]
        tasks += [task for checks in hashes.values() for task in checks]
        chunk = _chunk(limits)
        if original is not None:
            found, comparisons = kept_tensors(stored, original, beside, files, chunk=chunk)
            problems += found
            tasks += comparisons
        buffer = max([2 * chunk, *(layer.buffer_bytes(limits) for layer in layers)])
        run_tasks(tasks, workers=limits.workers, buffer_bytes=buffer, on_progress=on_progress)
    source.check_unchanged()
    hashed = any(isinstance(task, Digest) for task in tasks)
    problems += [problem for task in tasks for problem in task.problems]
    return Verification(
        layers=tuple(layer.proof() for layer in layers),
        kept=len(stored.others),
        hashed=hashed,
        problems=tuple(dict.fromkeys(problems)),
        notes=source.notes if exists(source.root / MANIFEST) else (*source.notes, _NO_MANIFEST),
    )


def _layers(source: Source, original: Original | None) -> Stored:
    """Return the quantized layers, of which what was dequantized has none.

    Where they cannot be told, the error names the file that was damaged.
    """
    if original is not None and original.floats.origins and configuration(source) is None:
        return Stored(layers=(), others=tuple(source.entries.values()), groups=(), ignore=(), problems=())
    try:
        require_readable(source)
        return find_layers(source, None if original is None else original.known())
    except ZeropointError as error:
        damaged = damaged_files(source)
        if not damaged:
            raise
        raise CheckpointError(f"{'; '.join(map(str, damaged))}; therefore {error}") from error


def _hashes(source: Source, files: OpenFiles) -> tuple[list[Problem], dict[str, list[Check]]]:
    """Return what is wrong with the manifest, and the checks of hashes by tensor or file."""
    try:
        manifest = read_manifest(source)
    except CheckpointError as error:
        return [Problem(where=MANIFEST, what=str(error))], {}
    return ([], {}) if manifest is None else hash_checks(source, manifest, files)


def _of_layer(layer: LayerCheck, hashes: dict[str, list[Check]], limits: Limits) -> list[Check]:
    """Return the checks of a layer: the hashes of its tensors, then its parts, in the cache by then."""
    own = [task for entry in layer.layer.tensors.values() for task in hashes.pop(entry.name, [])]
    return [*own, *layer.tasks(limits)]


def _chunk(limits: Limits) -> int:
    """Return how many bytes of each of two files a thread looks at within its share of the memory."""
    share = (limits.max_memory - limits.base_memory) // limits.workers
    return max(1, min(_CHUNK, share // 2))
