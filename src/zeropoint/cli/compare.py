"""The command ``zeropoint compare``."""

from __future__ import annotations

import enum
import time
from typing import Annotated

import typer

from ..errors import count
from . import lazy
from .arguments import parse_path
from .main import fail
from .option_records import given, only, with_records
from .options import READ, Display, Machine
from .output import show, show_json


class Requirement(enum.StrEnum):
    """Condition of --require on the values."""

    EQUAL = "equal"


@with_records
def compare(
    a: Annotated[str, typer.Argument(metavar="A", parser=parse_path, help=READ)],
    b: Annotated[
        str, typer.Argument(metavar="B", parser=parse_path, help="The checkpoint that is compared with A.")
    ],
    *,
    require: Annotated[
        Requirement | None, typer.Option("--require", help="Fail where decoded values are not equal.")
    ] = None,
    machine: Annotated[Machine, only("workers", "max_memory")],
    display: Annotated[Display, only("everything", "sort", "as_json")],
) -> None:
    """Compare the decoded values of two checkpoints in any layouts.

    Either may hold floats. Tensors are matched by name, and fused experts matrix by matrix; errors are those
    of B relative to A. Only weights are compared, no other files. The exit status is 1 when a tensor could
    not be compared, such as one that only one side has.

    \b
    Examples:
      zeropoint compare MODEL MODEL-w4a16
      zeropoint compare MODEL-GPTQ MODEL-compressed-tensors --require equal
      zeropoint compare MODEL model-Q4_K_M.gguf --all --json
    """  # noqa: D301
    start = time.perf_counter()
    found = lazy.compare_checkpoints(a, b, **given(machine), progress=True)
    seconds = time.perf_counter() - start
    if display.as_json:
        show_json({**found.to_dict(), "seconds": seconds})
    else:
        order = lazy.Order(display.sort)
        show(lazy.comparison_report(found, seconds=seconds, everything=display.everything, order=order))
    if not found.ok:  # the report lists them all
        problems = count(len(found.problems), "tensor", "tensors")
        fail(f"{problems} of {a!r} and {b!r} could not be compared, the first: {found.problems[0]}")
        raise typer.Exit(1)
    if require is Requirement.EQUAL and found.equality.unequal:
        fail(f"{found.summary[1]}, but --require equal was given")
        raise typer.Exit(1)
