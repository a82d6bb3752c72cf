"""Detection of a complete output, when a finished command is run again.

A manifest says what was made of what, but knows of the source only its headers. So where all files are there
with their sizes, headers and texts, the numbers are made once more, without being written, and every byte is
compared: a retrained model of the same shapes is never taken for the one that was quantized.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...progress import Progress
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import ASKED, identity
from ..plan.texts import Text
from ..read.storage import Place, failures, open_file, stamp
from .directory import Partials
from .executor import Job, local
from .manifest import last_files
from .read_back import holds, unproven
from .unit_results import UnitResult, UnitResults
from .units import Units, groups


def done_already(
    plan: CheckpointPlan, units: Units, path: Place, on_progress: Progress | None
) -> UnitResults | None:
    """Return a run's results if ``path`` holds its bytes, else None.

    Raises as a run does for data that cannot be quantized.
    """
    heads = {str(path): (Text.of(""), size) for path, size in plan.companions.items()}
    heads |= {shard.name: (shard.head, shard.size) for shard in plan.shards}
    heads |= {name: (text, text.size) for name, text in plan.texts.items()}
    try:
        if not all(holds(path / name, head.pieces(), size=size) for name, (head, size) in heads.items()):
            return None
    except CheckpointError:  # one is missing, or cannot be read
        return None
    done = UnitResults(len(units))
    nowhere = _Nowhere(path=Path(), needed=0)
    job = Job(plan=plan, partials=nowhere, todo=units, groups=groups(units), scanned={})
    total, finished = sum(unit.nbytes for unit in units), 0
    with closing(local(job)) as results:
        for result in results:
            if isinstance(result, UnitResult):
                done[result.number] = result
                finished += units[result.number].nbytes
                if on_progress is not None:
                    on_progress(finished, total, units[result.number].name)
    plan.source.check_unchanged()
    if unproven(done, units, plan, where=lambda name: path / name):
        return None
    try:
        last = last_files(plan, identity(plan), units, done).items()
        same = all(holds(path / name, text.pieces(), size=text.size) for name, text in last)
    except CheckpointError:  # the manifest is missing
        return None
    return done if same else None


_MOST_HEAD = 1 << 26
"""Bytes of a manifest in which what was made of what, and all files, must stand."""


def finished(plan: CheckpointPlan, path: Place) -> bool:
    """Return whether an output's manifest has the identity of a plan.

    The identity of the run and the sizes of all files are compared, of a plan whose weights are still to be
    solved what it was asked for; no weight is read. A source with the headers of the one that was quantized,
    and other numbers, is taken for it.
    """
    of_text = (CheckpointError, ValueError, KeyError, TypeError, AttributeError)
    with (
        contextlib.suppress(*of_text, *failures(path)),
        contextlib.closing(open_file(path / MANIFEST)) as file,
    ):
        head = bytearray(min(file.stamp.size, _MOST_HEAD))
        file.read_into(memoryview(head), 0)
        said = json.loads(head.partition(b',\n"tensors"')[0] + b"}")
        sizes = {name: about["size"] for name, about in said["files"].items()}
        unsolved = plan.asked and not plan.solved
        wanted = {ASKED: plan.asked} if unsolved else identity(plan)
        known = {name: text for name, text in said["identity"].items() if name in wanted or not unsolved}
        return known == wanted and all(stamp(path / name).size == size for name, size in sizes.items())
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nowhere(Partials):
    """Partial files that take everything and hold nothing."""

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        """See :class:`Partials`."""
        with self.io(name):
            descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
