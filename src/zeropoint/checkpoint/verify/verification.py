"""Verification of a quantized checkpoint, with all problems collected.

- Every byte has the hash that the manifest gives for it, where there is a manifest (integrity.py).
- Every layer decodes; its scales are finite and not 0; each element is within the proven bound of the
  original, where that is given (proofs.py).
- Kept tensors equal the original's to the byte; none is missing or new (comparisons.py).
- Index, configuration and files agree with each other (consistency.py).
- onnxruntime, where it is installed, loads an ONNX model (consistency.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ...codecs.registry import claiming, codec_of
from ...errors import CheckpointError, RecipeError, ZeropointError, count, option, printable
from ...methods import OF_CODES, Bound, method_named
from ...methods.registry import DISTILLED
from ...progress import Progress
from ...results import PROBLEMS, Result
from ..measure.tensor_error import TensorError
from ..measure.workers import done_tasks
from ..plan.as_loaded import as_loaded
from ..plan.config_and_index import MANIFEST
from ..plan.identity import SHARD, shard_fields
from ..plan.limits import Limits
from ..plan.rescaled import corrected_note, folds_of
from ..read.problems import Problem, listed
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration, find_layers
from ..read.source import CONFIG, Source, open_source
from ..read.storage import OpenFiles, Place, exists, shown
from .comparisons import (
    Accounts,
    companions,
    comparisons,
    configuration_differences,
    kept_problems,
    layer_problems,
)
from .consistency import (
    ExtraScaleCheck,
    cache_problems,
    claims_of_files,
    contradictions,
    idle_targets,
    index_problems,
    is_extra_scale,
    require_readable,
    runtime_problems,
    unlisted,
)
from .documents import verification_document
from .integrity import (
    Digest,
    Manifest,
    damaged_files,
    file_checks,
    manifest_or_problem,
    read_manifest,
    tensor_checks,
)
from .proofs import Check, LayerCheck, LayerPart, Proofs
from .source_weights import Original, open_original

if TYPE_CHECKING:  # it loads statistics
    from .outputs import OutputChecks

_CHUNK = 1 << 23
"""Most bytes of a file that are looked at together where no rows are: long enough for the disk, in cache."""


OutputCheck: TypeAlias = """Callable[
    [StoredLayers, Original, Manifest | None, OpenFiles, Limits], tuple[OutputChecks, list[Problem]]
]"""
"""See :func:`~.outputs.check_outputs`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Result):
    """The outcome of :func:`verify`; empty problems mean that everything holds.

    kept: tensors that are not quantized. hashed: whether there was a manifest, with whose hashes every byte
    was compared. outputs: what was checked on statistics, or None without any.
    """

    layers: Proofs
    kept: int
    hashed: bool
    outputs: OutputChecks | None = None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def values(self) -> int:
        """Quantized numbers that were decoded."""
        return self.layers.values

    @property
    def error(self) -> TensorError | None:
        """The joint error of all layers, or None without an original."""
        return self.layers.error

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines about the checks, and the verdict."""
        layers, kept = count(len(self.layers), "layer"), count(self.kept, "other tensor")
        hashed = ", every byte hashed" if self.hashed else ""
        verdict = f"{count(len(self.problems), 'problem')} found"
        if self.ok:
            verdict = "no problem found"
            if self.error is not None:
                verdict = self._within
        return f"{layers} decoded ({count(self.values, 'value')}), {kept}{hashed}", verdict

    @property
    def _within(self) -> str:
        """The sentence about errors, with the largest share of a bound."""
        measured = sum(proof.of_bound is None for proof, _ in self.layers.measured)
        most = self.layers.of_bound
        if most is None:
            return "no problem found; errors are measured, since the methods prove no bound of weights"
        said = f"all within the proven bound (the largest error is {most:.1%} of its bound)"
        return f"{said}, but {count(measured, 'layer')} measured alone, without one" if measured else said

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return (*map(str, self.problems[:PROBLEMS]), *self.summary)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return verification_document(self)

    def require(self) -> None:
        """Raise CheckpointError, with every problem, unless all is well."""
        if self.problems:
            problems = listed([*map(str, self.problems)], mark=";")
            remedy = "copy the files or quantize the original again"
            raise CheckpointError(f"{len(self.problems)} problems: {problems}; {remedy}")


def verify(
    path: Place | str,
    against: Place | str | None = None,
    *,
    limits: Limits | None = None,
    require_manifest: bool = False,
    of_outputs: OutputCheck | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Return the verification of ``path``, compared with the original when given.

    Args:
        path: the quantized checkpoint: a directory or URL.
        against: the source checkpoint, to compare with; None for checks of the output alone.
        limits: bounds of memory and threads.
        require_manifest: whether a checkpoint without a manifest is a problem, not a note.
        of_outputs: checks outputs of solved weights.
        on_progress: called with bytes done and bytes in all.

    Raises:
        CheckpointError: when files are damaged so that they cannot be read, the checkpoint is not quantized
            or not in a layout that is read here, ``against`` is not its original, or ``limits`` are too small
            for the number of its tensors; everything else is in the result.
    """
    limits = limits or Limits.default()
    source = open_source(path)
    original = None if against is None else _placed(open_original(against).changed(source), source)
    notes = list(source.notes)
    if original is not None:
        _require_order(source, original)
        notes += filter(None, (corrected_note(folds_of(source)),))
    manifest, problems = manifest_or_problem(source)
    if manifest is None and not problems:
        notes.append(
            f"there is no {MANIFEST}: without its hashes, a change is found where it breaks a layer, a rule "
            f"or a bound; {option('require_manifest', True)} makes this an error"
        )
        if require_manifest:
            problems.append(Problem(where=MANIFEST, what="it is missing"))
    stored = _layers(source, original)
    limits = limits.reserve(source.entries, None if original is None else original.source.entries)
    problems += [
        *stored.problems,
        *index_problems(source),
        *unlisted(source, stored),
        *idle_targets(source, stored),
        *cache_problems(source, stored),
        *contradictions(source, stored),
        *claims_of_files(source),
    ]
    if original is not None:
        if manifest is not None and any(manifest.method(m) in OF_CODES for m in stored.modules):
            original = original.converted(stored)
        apart = _structure(stored, original)
        if apart and manifest is not None and not _made_of(manifest, original.source):
            raise CheckpointError(
                f"{shown(original.source.given)} is not the original of {shown(source.given)}, whose "
                f"manifest names files with other tensors ({len(apart)} differ, such as {apart[0]}); pass "
                "the checkpoint that it was made from"
            )
        problems += apart
        found, more = _configuration(source, original.source, strict=manifest is not None)
        problems, notes = [*problems, *found], [*notes, *more]
    found, more = runtime_problems(source, stored, None if original is None else original.source, limits)
    problems, notes = [*problems, *found], [*notes, *more]
    outputs: OutputChecks | None = None
    with OpenFiles() as files:
        work = _Work(stored, original, manifest, limits, files)
        problems += work.begin(source)
        work.run(on_progress)
        if of_outputs is not None and original is not None:
            outputs, found = of_outputs(stored, original, manifest, files, limits)
            problems, notes = [*problems, *found], [*notes, *outputs.notes]
    source.check_unchanged()
    if original is not None:
        original.source.check_unchanged()
    return Verification(
        layers=work.proofs,
        kept=len(stored.others),
        hashed=work.hashed > 0,
        outputs=outputs,
        notes=tuple(notes),
        problems=tuple(dict.fromkeys([*problems, *work.problems])),
    )


def _placed(original: Original, source: Source) -> Original:
    """Return an original with the tensors of files like ``source``."""
    codec = codec_of(source.container.name, source.metadata[source.shards[0]])
    floats = as_loaded(original.floats.in_pieces(codec), source.entries)
    return replace(original, floats=floats.without(floats.omitted(codec)))


def _require_order(source: Source, original: Original) -> None:
    """Raise CheckpointError where output and original are exchanged, by the manifest."""
    if configuration(source) is not None or exists(source.root / MANIFEST):
        return
    try:
        manifest = read_manifest(original.source)
    except CheckpointError:
        return
    if manifest is not None and _made_of(manifest, source):
        ours, theirs = shown(source.given), shown(original.source.given)
        raise CheckpointError(
            f"{ours} is the original of {theirs}, not its result; pass the result first: zeropoint verify "
            f"{theirs} --against {ours}"
        )


def _made_of(manifest: Manifest, source: Source) -> bool:
    """Return whether a manifest names the shards of ``source``."""
    named = {key: value for key, value in manifest.identity.items() if key.startswith(SHARD)}
    return named == dict(shard_fields(source))


def _layers(source: Source, original: Original | None) -> StoredLayers:
    """Return the quantized layers, of which what was dequantized has none.

    Where they cannot be determined, the error names the file that was damaged.
    """
    if original is not None and original.floats.config is not None and configuration(source) is None:
        return StoredLayers.none(source.entries)
    try:
        require_readable(source)
        return find_layers(source, None if original is None else original.known)
    except ZeropointError as error:
        damaged = damaged_files(source)
        if not damaged:
            raise
        raise CheckpointError(f"{'; '.join(map(str, damaged))}; therefore {error}") from error


def _structure(stored: StoredLayers, original: Original) -> list[Problem]:
    """Return problems of tensors on one side only, or reshaped."""
    accounts = Accounts(original)
    problems = []
    for layer in stored.layers:
        weight = original.weight_of(layer)
        if weight is None:
            problems.append(Problem(where=layer.module, what="the original has no such weight of its shape"))
        else:
            accounts.add(weight.entry.name, split=layer.experts is None)
    problems += layer_problems(stored, accounts)
    return problems + kept_problems(
        stored, original, accounts, needless=lambda name: is_extra_scale(name, stored)
    )


def _configuration(source: Source, original: Source, *, strict: bool) -> tuple[list[Problem], list[str]]:
    """Return differences of config.json, and a note on possible defaults."""
    added = _added(source, original)
    found = [d for d in configuration_differences(source, original) if d.key not in added]
    loose = [] if strict else [difference for difference in found if difference.is_default]
    problems = [Problem(where=CONFIG, what=str(d)) for d in found if d not in loose]
    keys = listed([difference.key for difference in loose])
    rule = "only one side has, which may be defaults that a tool added or left out"
    return problems, [f"{CONFIG} was not compared in keys that {rule}: {keys}"] if loose else []


def _added(source: Source, original: Source) -> set[str]:
    """Return the config.json keys that the codec sets for engines."""
    said = configuration(source)
    codec = None if said is None else claiming(said)
    if codec is None or source.config is None or original.config is None:
        return set()
    config, values = source.config, codec.model_format.config_values(original.config)
    return {printable(key) for key, value in values.items() if config.get(key) == value}


class _Work:
    """Data checks, made one after the other, and their findings.

    hashed: hashes that were compared.
    """

    def __init__(
        self,
        stored: StoredLayers,
        original: Original | None,
        manifest: Manifest | None,
        limits: Limits,
        files: OpenFiles,
    ) -> None:
        self.proofs = Proofs(stored.layers)
        self.problems: list[Problem] = []
        self.hashed = 0
        self._stored, self._original, self._manifest = stored, original, manifest
        self._limits, self._files = limits, files
        self._file_checks: list[Check] = []
        self._chunk = _chunk(limits)

    def begin(self, source: Source) -> list[Problem]:
        """Prepare the checks of whole files; return problems found so far."""
        problems: list[Problem] = []
        if self._manifest is not None:
            found, checks = file_checks(source, self._manifest, self._files)
            problems += found
            self._file_checks += checks
        if self._original is not None:
            found, checks = companions(source, self._original, self._files)
            problems += found
            self._file_checks += checks
        return problems

    def run(self, on_progress: Progress | None) -> None:
        """Run all checks; raises CheckpointError when limits are too small."""
        layers = self._checks()
        buffer = max([2 * self._chunk, *(check.buffer_bytes(self._limits) for check in layers)])
        done, total = 0, self._bytes()
        tasks = done_tasks(self._tasks(), workers=self._limits.workers, buffer_bytes=buffer)
        with contextlib.closing(tasks) as finished:
            for task in finished:
                done += task.nbytes
                self._add_result(task)
                if on_progress is not None:
                    on_progress(done, total, task.name)

    def _checks(self) -> Iterator[LayerCheck]:
        original, manifest = self._original, self._manifest
        for number, layer in enumerate(self._stored.layers):
            weight = None if original is None else original.weight_of(layer)
            method = None if manifest is None else manifest.method(layer.module)
            yield LayerCheck(number, layer, weight, _bound_of(method, layer))

    def _tasks(self) -> Iterator[Check]:
        """Yield all checks, a layer's hashes right before its parts."""
        for check in self._checks():
            for entry in check.layer.tensors.values():
                yield from tensor_checks(entry, self._manifest, self._files)
            yield from check.tasks(self._limits, self._files)
        for entry in self._stored.others:
            if is_extra_scale(entry.name, self._stored):
                yield ExtraScaleCheck(entry, self._files)
            yield from tensor_checks(entry, self._manifest, self._files)
        for entry in self._stored.unread:
            yield from tensor_checks(entry, self._manifest, self._files)
        yield from self._file_checks
        if self._original is not None:
            yield from comparisons(self._stored, self._original, self._files, chunk=self._chunk)

    def _bytes(self) -> int:
        """Return the bytes of all work, which progress counts."""
        found = sum(layer.values * layer.dtype.itemsize for layer in self._stored.layers)
        found += sum(task.nbytes for task in self._file_checks)
        if self._manifest is not None:
            found += self._manifest.nbytes
        if self._original is not None:
            found += sum(entry.nbytes for entry in self._stored.others)
        return found

    def _add_result(self, task: Check) -> None:
        self.problems += task.problems
        self.hashed += isinstance(task, Digest)
        if isinstance(task, LayerPart) and task.check.end():
            self.proofs.keep(task.check.number, task.check.proof())


def _chunk(limits: Limits) -> int:
    """Return the bytes of each file that a thread compares at once."""
    share = (limits.max_memory - limits.base_memory) // limits.workers
    return max(1, min(_CHUNK, share // 2))


def _bound_of(method: str | None, layer: StoredLayer) -> Bound:
    """Return the error bound of a layer, by the manifest's method."""
    if method is None:
        return Bound.SCHEME
    if method == DISTILLED:
        return Bound.NONE
    try:
        return method_named(method).bound(layer.weight)
    except RecipeError:  # of a version that has more of them
        return Bound.ROUNDING
