"""Bandwidth of each kernel, next to a plain copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError, option
from ..installation import machine
from ..own_files import OwnFile
from ..progress import Progress
from ..results import Result
from ..shown import PICTURE
from .cases import Case, job, operator_cases, weights
from .timing import Copies, in_turns

SIDE = 4096
"""Rows and columns: 32 MiB of bfloat16; smaller matrices time the cache and the dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Best times of a kernel and of a copy.

    label: name of the kernel. nbytes: bytes read plus written. seconds, copy_seconds: the best times.
    """

    label: str
    nbytes: int
    seconds: float
    copy_seconds: float

    @property
    def gigabytes(self) -> float:
        """Bandwidth of the kernel, in GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def copy_gigabytes(self) -> float:
        """Bandwidth of a plain copy of as many bytes, in GB/s."""
        return self.nbytes / self.copy_seconds / 1e9

    @property
    def of_copy(self) -> float:
        """Bandwidth of the kernel divided by the bandwidth of the copy."""
        return self.copy_seconds / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KernelSpeeds(Result):
    """The speeds of kernels on this machine, with ``threads`` threads."""

    speeds: Sequence[Speed]
    threads: int

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        return tuple(f"{s.label}: {s.gigabytes:.1f} GB/s, {s.of_copy:.2f} of a copy" for s in self.speeds)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return {
            "machine": machine(),
            "threads": self.threads,
            "rows": SIDE,
            "columns": SIDE,
            "kernels": [
                {"kernel": s.label, "bytes": s.nbytes, "seconds": s.seconds, "gb_per_s": s.gigabytes}
                | {"copy_gb_per_s": s.copy_gigabytes, "of_copy": s.of_copy}
                for s in self.speeds
            ],
        }


def kernel_speeds(
    only: str = "",
    *,
    rounds: int = 7,
    threads: int | None = None,
    plot: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> KernelSpeeds:
    """Time each operator in turns with a copy of as many bytes.

    only: part of the names of timed kernels. rounds: of each, of which the best counts. threads: of torch and
    the kernels; torch's own number if None. plot: a new SVG file. progress: a callback. Raises OptionError
    where no name has ``only``, and CheckpointError where the plot cannot be written.
    """
    cases = [case for case in operator_cases() if only in case.label]
    if not cases:
        raise OptionError(f"{option('only', only)} is in the name of no kernel; try int4 or dequantize")
    file = None if plot is None else OwnFile(plot, PICTURE)
    if file is not None:
        file.require_free(overwrite=overwrite)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        found = KernelSpeeds(speeds=tuple(_timed(cases, rounds, progress)), threads=torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    if file is not None:
        file.write([found.plot().svg.encode()], overwrite=overwrite)
    return found


def _timed(cases: Sequence[Case], rounds: int, progress: Progress | None) -> Iterable[Speed]:
    x = weights(SIDE, SIDE)
    sources = {torch.float32: x, torch.bfloat16: x.bfloat16()}
    copies = Copies(3 * x.nbytes)
    for done, case in enumerate(cases, 1):
        work = job(case, sources[case.dtype])
        seconds = in_turns({"kernel": work.again, "copy": copies.of(work.nbytes)}, rounds)
        yield Speed(
            label=case.label,
            nbytes=work.nbytes,
            seconds=min(seconds["kernel"]),
            copy_seconds=min(seconds["copy"]),
        )
        if progress is not None:
            progress(done, len(cases), case.label)
