"""Input statistics on a Ray cluster: files of parts, added in order.

Each part is a run of the model on one node. Parts have the same windows on any cluster and are added in their
order, so that the bytes of the sum do not depend on how many nodes there are.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError, ZeropointError, count, option, printable
from ...progress import counted
from ..model.gathered_statistics import StatisticsResult, gathered, merged, require_free
from ..model.running_model import inputs_without_a_run
from ..model.samples import IDS, Batches
from ..model.tokens import Given, Windows
from ..plan.limits import Limits
from ..read.source import Source, open_source
from ..read.storage import Place, shown
from ..run.executor import ExecutorError
from .ray import RETRIES, connected, failure_of

PART = 32
"""Windows of a part: what a cluster adds depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRun:
    """A run of a model that writes input statistics.

    source: the checkpoint. given: data. file: to write. limits: of the node. gram: whether to sum Gram
    matrices, too.
    """

    source: Place
    given: Given
    file: Path
    limits: Limits
    gram: bool


def gathered_on_cluster(
    source: Source, run: StatisticsRun, address: str | None, *, overwrite: bool, progress: bool
) -> StatisticsResult:
    """Write the sum of a run's statistics over parts of its windows.

    run: of ``source``. address: HOST:PORT, or None for a cluster that Ray finds or starts. overwrite,
    progress: as for :func:`gathered`, which says what is raised; OptionError for tokens that the model
    generates, and ExecutorError where the cluster cannot be used or sees another file system.
    """
    path = run.file
    require_free(path, source, overwrite=overwrite)
    if Windows.of(run.given).is_own:
        raise OptionError(
            f"{option('calibration', 'self')} is what one model generates from its own tokens; run it on "
            f"this machine, or give text to {option('executor', 'ray')}"
        )
    inputs = inputs_without_a_run(source, run.given, run.limits)
    with (
        connected(address) as ray,
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
    ):
        threads = min(run.limits.workers, _smallest_node(ray))
        limits = replace(run.limits, workers=threads)
        parts = [
            replace(run, given=own, file=Path(folder, f"{number}.safetensors"), limits=limits)
            for number, own in enumerate(_in_parts(inputs))
        ]
        run_parts(ray, parts, threads, progress=progress)
        return merged(source, [part.file for part in parts], path, overwrite=overwrite)


def _in_parts(inputs: Batches) -> Iterator[Given]:
    """Yield the data of each part: token ids, or samples by number."""
    for at in range(0, len(inputs), PART):
        own = inputs[at : at + PART]
        if all(batch.keys() == {IDS} for batch in own):
            yield torch.cat([batch[IDS] for batch in own])
        else:
            yield {f"{n}.{name}": x for n, batch in enumerate(own) for name, x in batch.items()}


def _smallest_node(ray: Any) -> int:
    """Return the CPUs of the smallest node that has any."""
    found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if not any(found):
        raise ExecutorError("the Ray cluster has no node with a CPU; add one, and run the same command again")
    return min(filter(None, found))


def run_parts(ray: Any, parts: Sequence[StatisticsRun], threads: int, *, progress: bool) -> None:
    """Write the files of all parts; ExecutorError where a node writes elsewhere."""
    remote = ray.remote(num_cpus=threads, max_retries=RETRIES)(gather_part)
    handles = [remote.remote(part) for part in parts]
    try:
        for number in counted(range(len(parts)), "Observing parts", shown=progress):
            try:
                found = ray.get(handles[number])
            except ray.exceptions.RayError as error:
                raise failure_of(f"part {number + 1} of {count(len(parts), 'part')}", error) from error
            if isinstance(found, ZeropointError):
                raise found
            folder = parts[number].file.parent
            if not parts[number].file.is_file():
                raise ExecutorError(
                    f"host {printable(found)} writes to another {shown(folder.parent)}; the file must lie on "
                    "a file system that every node mounts at the same path"
                )
    finally:
        for handle in handles:
            ray.cancel(handle, force=True)


def gather_part(part: StatisticsRun) -> str | ZeropointError:
    """Write the statistics of a part; return the host, or the failure."""
    try:
        part.file.unlink(missing_ok=True)  # of a process that was lost
        gathered(open_source(part.source), part.given, part.file, part.limits, gram=part.gram)
    except ZeropointError as error:
        return error
    return socket.gethostname()
