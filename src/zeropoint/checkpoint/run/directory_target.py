"""A directory as a run's target: hidden files, a journal, then renames."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, MutableMapping, Sequence
from pathlib import Path

from ...codecs.containers import container_of
from ...errors import CheckpointError
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.config_and_index import MANIFEST
from ..plan.texts import Text
from ..read.file_names import JOURNAL
from ..read.problems import is_of_data
from ..read.storage import shown
from .commit import Commit
from .directory import OutputDirectory
from .executor import Job
from .folder import write_at
from .manifest import last_files
from .read_back import holds, read_back
from .resume import State, begin
from .unit_results import ScanResult, UnitResult
from .units import Groups, Unit, Units, left_of

_RECORD_BYTES = 1 << 10
"""Room for a unit in the journal and in the manifest together: four digests and its statistics."""


class DirectoryTarget:
    """A :class:`~zeropoint.checkpoint.run.executor.Target` on a file system, whose lock it holds.

    overwrite: whether it may hold files; those with other names stay.
    """

    def __init__(self, plan: CheckpointPlan, all_units: Units, out: Path, *, overwrite: bool) -> None:
        self._plan, self._units = plan, all_units
        source = plan.source
        self._directory = OutputDirectory(
            out, source.root, _sizes(plan, all_units), overwrite=overwrite, below=source.given != source.root
        )
        self._begun: tuple[State, Commit] | None = None

    def __enter__(self) -> DirectoryTarget:
        self._directory.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._directory.__exit__)
            if self._begun is not None:
                state, commit = self._begun
                commit.close()
                state.journal.close()
                if failure[0] is None:
                    self._directory.finish()

    @property
    def path(self) -> Path:
        """The directory, without links."""
        return self._directory.path

    @property
    def done(self) -> MutableMapping[int, UnitResult]:
        """See :class:`Target`."""
        return self._run[0].done

    @property
    def notes(self) -> list[str]:
        """See :class:`Target`."""
        return self._run[0].notes

    @property
    def sync_seconds(self) -> float:
        """See :class:`Target`."""
        return self._run[1].seconds

    @property
    def _run(self) -> tuple[State, Commit]:
        assert self._begun is not None
        return self._begun

    def may_be_complete(self) -> bool:
        """See :class:`Target`; a complete output has no journal."""
        return not self._directory.overwrite and not os.path.lexists(self.path / JOURNAL)

    def require_free(self) -> None:
        """See :class:`Target`."""
        if not os.path.lexists(self.path / JOURNAL) and not os.path.lexists(self.path / MANIFEST):
            self._directory.require_free(published=False)

    def begin(self, *, restart: bool) -> None:
        """See :class:`Target`."""
        state = begin(self._directory, self._plan, self._units, restart=restart)
        self._begun = state, Commit(state.journal, self._directory.partials, self._units)

    def jobs(self) -> Generator[Job, None, None]:
        """Yield all that is left as one job."""
        yield Job(
            plan=self._plan,
            partials=self._directory.partials,
            groups=Groups(self._units),
            scanned={},
            todo=left_of(self._units, self.done),
        )

    def add(self, result: ScanResult | UnitResult) -> None:
        """See :class:`Target`."""
        if isinstance(result, UnitResult):
            state, commit = self._run
            commit.add(result)
            state.done[result.number] = result

    def publish(self) -> None:
        """Prove all bytes, write the closing files, and rename every file."""
        state, commit = self._run
        directory = self._directory
        commit.start()  # the last bytes go to the disk while all are read back from memory
        read_back(state.done, directory, self._plan, self._units, published=state.published)
        commit.flush()
        texts = last_files(self._plan, state.identity, self._units, state.done)
        for name, text in texts.items():
            path = directory.path / name
            if state.publishing and directory.published(name) and holds(path, text.pieces(), size=text.size):
                directory.adopt(name)
                state.published.add(name)
            else:
                directory.prepare(name, text.size)
                _write(text, name, directory)
        states = directory.sync(skip=state.published)
        with directory.partials.io("."):
            state.journal.append([{"publish": {} if directory.overwrite else states}])
        # A file without an index is what loaders look for: after companions, before what tells of it.
        shards = () if container_of(self._plan.shards[0].name).indexed else self._plan.shards
        last = [name for name in (*(shard.name for shard in shards), *texts) if name not in state.published]
        directory.publish(last, skip=state.published)

    def leave(self, error: BaseException) -> None:
        """See :class:`Target`."""
        state, commit = self._run
        if is_of_data(error):
            self._directory.discard()
            return
        with contextlib.suppress(CheckpointError):
            commit.flush()
        if len(state.journal) > 1:
            error.add_note(
                f"the work so far is kept in {shown(self.path)}; run the same command again to resume"
            )
        else:
            self._directory.discard()


def _sizes(plan: CheckpointPlan, all_units: Sequence[Unit]) -> dict[str, int]:
    """Return the size of each output file; the manifest's from above."""
    return {
        **{shard.name: shard.size for shard in plan.shards},
        **{str(path): size for path, size in plan.companions.items()},
        **{name: text.size for name, text in plan.texts.items()},
        MANIFEST: _RECORD_BYTES * (len(all_units) + len(plan.outputs.all)),
    }


def _write(text: Text, name: str, directory: OutputDirectory) -> None:
    """Write a text into a file that was prepared for it."""
    at = 0
    with directory.partials.open(name) as descriptor:
        for piece in text.pieces():
            write_at(descriptor, memoryview(piece), at)
            at += len(piece)
