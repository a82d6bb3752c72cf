"""Whether an output is there already: what a command finds that is run once more after it ended well.

A manifest says what was made of what, but knows of the source only its headers. So where all files are there
with their sizes, headers and texts, the numbers are made once more, without being written, and every byte is
compared: a retrained model of the same shapes is never taken for the one that was quantized.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from ...errors import CheckpointError
from ..plan.checkpoint_plan import Plan
from ..plan.texts import Text
from ..read.storage import Place
from .directory import Partials
from .executor import Job, local
from .resume import holds, unproven
from .units import Unit, groups
from .work import Done, Results
from .workers import Progress


def done_already(
    plan: Plan, units: Sequence[Unit], where: Callable[[str], Place], partials: Partials,
    on_progress: Progress | None,
) -> Results | None:  # fmt: skip
    """Return what a run would do, where the files at ``where`` hold all of it but the manifest, else None.

    partials: of the output, for messages. Raises as a run does for data that cannot be quantized.
    """
    heads = {str(path): (Text.of(""), size) for path, size in plan.companions.items()}
    heads |= {shard.name: (shard.head, shard.size) for shard in plan.shards}
    heads |= {name: (text, text.size) for name, text in plan.texts.items()}
    try:
        if not all(holds(where(name), head.pieces(), size=size) for name, (head, size) in heads.items()):
            return None
    except CheckpointError:  # one is missing, or cannot be read
        return None
    done = Results(len(units))
    nowhere = _Nowhere(path=partials.path, needed=partials.needed)
    job = Job(plan=plan, partials=nowhere, todo=units, groups=groups(units), scanned={})
    total, finished = sum(unit.nbytes for unit in units), 0
    with closing(local(job)) as results:
        for result in results:
            if isinstance(result, Done):
                done[result.number] = result
                finished += units[result.number].nbytes
                if on_progress is not None:
                    on_progress(finished, total, units[result.number].name)
    plan.source.check_unchanged()
    return None if unproven(done, units, plan, where=where) else done


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
