"""The command ``zeropoint compare``."""

from __future__ import annotations

import enum
import time
from typing import Annotated

import typer

from ..errors import count
from . import layers
from .arguments import parse_path
from .main import fail
from .options import READ, AsJson, Everything, Memory, Sort, SortOrder, Workers
from .output import show, show_json


class Requirement(enum.StrEnum):
    """What --require asks of the values."""

    EQUAL = "equal"


def compare(  # noqa: PLR0913 (typer makes an option of each parameter)
    a: Annotated[str, typer.Argument(metavar="A", parser=parse_path, help=READ)],
    b: Annotated[str, typer.Argument(metavar="B", parser=parse_path, help="What is compared with it.")],
    require: Annotated[
        Requirement | None, typer.Option("--require", help="Fail where decoded values are not equal.")
    ] = None,
    workers: Workers = None,
    max_memory: Memory = None,
    everything: Everything = False,
    sort: Sort = SortOrder.FILE,
    as_json: AsJson = False,
) -> None:
    """Compare the values that two checkpoints decode to, each in any layout that is read, or in floats.

    Tensors of one name are compared, of fused experts each matrix; errors are those of B against A. Files
    next to the weights are not looked at. The exit status is 1 when a tensor could not be compared, such as
    one that only one side has.

    \b
    Examples:
      zeropoint compare MODEL MODEL-w4a16
      zeropoint compare MODEL-GPTQ MODEL-compressed-tensors --require equal
      zeropoint compare MODEL model-Q4_K_M.gguf --all --json
    """  # noqa: D301
    start = time.perf_counter()
    found = layers.compare_checkpoints(a, b, workers=workers, max_memory=max_memory, progress=True)
    seconds = time.perf_counter() - start
    if as_json:
        show_json({**found.to_dict(), "seconds": seconds})
    else:
        show(
            layers.comparison_report(found, seconds=seconds, everything=everything, order=layers.Order(sort))
        )
    if not found.ok:  # the report lists them all
        problems = count(len(found.problems), "tensor", "tensors")
        fail(f"{problems} of {a!r} and {b!r} could not be compared, the first: {found.problems[0]}")
        raise typer.Exit(1)
    if require is Requirement.EQUAL and found.equality.unequal:
        fail(f"{found.summary[1]}, but --require equal was given")
        raise typer.Exit(1)
