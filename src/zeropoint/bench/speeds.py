"""The bandwidth of every kernel next to a copy's, as a result with a table's lines and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError, option
from ..installation import machine, processor
from ..own_files import FileKind, OwnFile
from ..progress import Progress
from ..results import Result
from .cases import Case, job, operator_cases, weights
from .timing import Copies, in_turns

SIDE = 4096
"""Rows and columns: 32 MiB of bfloat16; smaller matrices time the cache and the dispatch."""
_MARK = "zeropoint bench"
_WIDTH, _LABEL, _ROW = 960, 400, 20
_MOST = 1.1
"""Where the axis ends, in bandwidths of a copy: some kernels are as fast as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One kernel: its name, bytes that it reads and writes, and the best seconds of it and of a copy."""

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
        """Bandwidth of the kernel over the copy's."""
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
    only: str = "", *, rounds: int = 7, threads: int | None = None, plot: Path | None = None,
    overwrite: bool = False, progress: Progress | None = None,
) -> KernelSpeeds:  # fmt: skip
    """Time every operator in turns with a plain copy of the bytes that it reads and writes.

    only: part of the names of those that are timed. rounds: of each, of which the best counts. threads: of
    torch and the kernels; as many as torch has if None. plot: a new SVG file. progress: called with what is
    done. Raises OptionError where no name has ``only``, and CheckpointError where the plot cannot be written.
    """
    cases = [case for case in operator_cases() if only in case.label]
    if not cases:
        raise OptionError(f"{option('only', only)} is in the name of no kernel; try int4 or dequantize")
    file = None if plot is None else OwnFile(plot, FileKind("plot", _MARK.encode()))
    if file is not None:
        file.require_free(overwrite=overwrite)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        found = KernelSpeeds(speeds=tuple(_timed(cases, rounds, progress)), threads=torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    if file is not None:
        file.write([picture(found).encode()], overwrite=overwrite)
    return found


def _timed(cases: Sequence[Case], rounds: int, progress: Progress | None) -> Iterable[Speed]:
    x = weights(SIDE, SIDE)
    sources = {torch.float32: x, torch.bfloat16: x.bfloat16()}
    copies = Copies(3 * x.nbytes)
    for done, case in enumerate(cases, 1):
        work = job(case, sources[case.dtype])
        seconds = in_turns({"kernel": work.again, "copy": copies.of(work.nbytes)}, rounds)
        yield Speed(
            label=case.label, nbytes=work.nbytes, seconds=min(seconds["kernel"]),
            copy_seconds=min(seconds["copy"]),
        )  # fmt: skip
        if progress is not None:
            progress(done, len(cases), case.label)


def picture(found: KernelSpeeds) -> str:
    """Return bars of bandwidths over a copy's, as SVG."""
    height = 56 + _ROW * len(found.speeds)
    scale = (_WIDTH - _LABEL - 60) / _MOST
    title = f"Bandwidth of kernels over a copy's: {processor()}, threads: {found.threads}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>",
        "<style>text{font:12px sans-serif}rect.bar{fill:steelblue}</style>",
        f"<!-- {_MARK} --><title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{height}' fill='white'/>",
        f"<text x='10' y='20' font-weight='bold'>{escape(title)}</text>",
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LABEL + tick * scale
        parts.append(f"<path d='M{x:.1f} 44V{height - 8}' stroke='{'#888' if tick == 1 else '#ddd'}'/>")
        parts.append(f"<text x='{x:.1f}' y='38' text-anchor='middle'>{tick:g}</text>")
    for number, each in enumerate(found.speeds):
        y = 48 + _ROW * number
        end = _LABEL + min(each.of_copy, _MOST) * scale
        parts.append(
            f"<text x='{_LABEL - 8}' y='{y + 13}' text-anchor='end'>{escape(each.label)}</text>"
            f"<rect class='bar' x='{_LABEL}' y='{y + 2}' width='{end - _LABEL:.1f}' height='{_ROW - 6}'/>"
            f"<text x='{end + 5:.1f}' y='{y + 13}'>{each.gigabytes:.1f} GB/s</text>"
        )
    return "\n".join((*parts, "</svg>", ""))
