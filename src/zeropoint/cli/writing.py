"""Where and how commands write: a directory or a URL, by threads or on a Ray cluster."""

from __future__ import annotations

import contextlib
import enum
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError, ZeropointError, count
from . import layers
from .arguments import parse_output, parse_path
from .main import fail, said_by
from .options import READ, SortOrder
from .output import note, show, show_json

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


class IfExistsName(enum.StrEnum):
    """What to do with an output that is there; its values are those of ``checkpoint.call_options``."""

    RESUME = "resume"
    SKIP = "skip"
    ERROR = "error"


IfExists = Annotated[
    IfExistsName,
    typer.Option(
        "--if-exists",
        help="Where OUT holds something: resume finishes an interrupted run of this command, and compares a "
        "finished one; skip leaves a finished one as it is; error stops.",
    ),
]


Report = Annotated[bool, typer.Option("--report/--no-report", help="Write a page about the result into OUT.")]


class ExecutorName(enum.Enum):
    """What does the work."""

    LOCAL = "local"
    RAY = "ray"


Sources = Annotated[
    list[str],
    typer.Argument(metavar="SRC...", parser=parse_path, help=f"{READ} Several are written one by one."),
]
Target = Annotated[
    str,
    typer.Argument(metavar="OUT", parser=parse_output, help="Directory, or s3:// or gs:// URL, to write."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a directory that is not empty.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an interrupted run in OUT and start over.")]
BreakLock = Annotated[
    bool, typer.Option("--break-lock", help="Remove the lock of a run that you know has died.")
]
ExecutorOption = Annotated[
    ExecutorName, typer.Option("--executor", help="What does the work: this machine, or a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The Ray cluster; without it, the one that Ray finds or starts."),
]
Spool = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Scratch directory for uploads (holds at most two files)."),
]


@contextlib.contextmanager
def parent_noted(out: str) -> Iterator[None]:
    """Write a note when the block made the directory of an output: a mistake would look the same."""
    target = layers.place(out)
    absent = isinstance(target, Path) and not target.parent.exists()
    yield
    if absent and isinstance(target, Path):
        note(f"the directory {str(target.parent)!r} did not exist and was created")


def show_run(
    result: RunResult, start: float, *, everything: bool, as_json: bool, order: SortOrder = SortOrder.FILE
) -> None:
    """Show the report of a run that began at ``start``, of the clock ``time.perf_counter``."""
    seconds = time.perf_counter() - start
    if as_json:
        show_json({**result.to_dict(), "seconds": seconds})
    else:
        show(layers.run_report(result, seconds=seconds, everything=everything, order=layers.Order(order)))
        if result.page is not None and sys.stdout.isatty():
            note(f"{result.page} has the report")


def run_each(
    sources: Sequence[str], out: str, call: Callable[[str, str], RunResult],
    *, everything: bool, as_json: bool, order: SortOrder = SortOrder.FILE,
) -> None:  # fmt: skip
    """Write each source, and show the report of a single one, or a line for each of several.

    call: what writes a source to an output. Several go to ``out``, each under its own name; one that fails
    does not stop the others, and the exit status is 1 then.
    """
    start = time.perf_counter()
    if len(sources) == 1:
        with parent_noted(out):
            result = call(sources[0], out)
        show_run(result, start, everything=everything, order=order, as_json=as_json)
        return
    for source in sources:
        if "://" not in source and not Path(source).exists():
            raise typer.BadParameter(f"{source!r} does not exist; check the path", param_hint="'SRC'")
    targets = targets_of(sources, out)
    results: dict[str, RunResult | str] = {}
    for source, target in targets.items():
        try:
            results[source] = call(source, target)
        except (OptionError, typer.BadParameter):
            raise  # of the command line, which is the same for all
        except (ZeropointError, OSError) as error:
            results[source] = said_by(error)
    seconds = time.perf_counter() - start
    if as_json:
        documents = [
            {"source": source, "output": targets[source], "error": found} if isinstance(found, str)
            else found.to_dict()
            for source, found in results.items()
        ]  # fmt: skip
        show_json({"runs": documents, "seconds": seconds})
    else:
        show(layers.runs_report(results, seconds=seconds))
    failed = [source for source, found in results.items() if isinstance(found, str)]
    if failed:
        fail(f"{count(len(failed), 'checkpoint')} of {len(results)} failed, the first: {results[failed[0]]}")
        raise typer.Exit(1)


def run_pipeline(
    source: str, out: str, call: Callable[[str, str], RunResult], *, overwrite: bool, as_json: bool
) -> None:
    """Write the parts of a pipeline of diffusers, and show a line for each.

    call: what writes a part to an output. overwrite: whether files that are copied replace others.
    """
    start = time.perf_counter()
    results = layers.each_part(Path(source), Path(out), call, overwrite=overwrite)
    seconds = time.perf_counter() - start
    if as_json:
        show_json({"runs": [found.to_dict() for found in results.values()], "seconds": seconds})
    else:
        show(layers.runs_report({**results}, seconds=seconds))


def targets_of(sources: Sequence[str], out: str) -> dict[str, str]:
    """Return where each of several sources goes: into ``out``, under its own name.

    >>> targets_of(["models/a", "s3://bucket/b.gguf"], "out")
    {'models/a': 'out/a', 's3://bucket/b.gguf': 'out/b'}
    """
    targets: dict[str, str] = {}
    for source in sources:
        path = source if "://" in source else str(Path(source).resolve())
        name = PurePosixPath(path.rstrip("/")).name
        name = name.removesuffix(".gguf").removesuffix(".safetensors").removesuffix(".onnx")
        target = f"{out.rstrip('/')}/{name}"
        if target in targets.values():
            raise typer.BadParameter(
                f"two sources have the name {name!r} and would both be written to {target!r}; write them "
                "one by one"
            )
        targets[source] = target
    return targets
