"""The command ``zeropoint demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import lazy


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page at its end.")] = Path(
        "zeropoint-demo.html"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that is there.")] = False,
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
