"""Writing commands: sources, outputs, and reports of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError, ZeropointError, count
from . import lazy
from .arguments import parse_output, parse_path
from .main import fail, message_of
from .options import READ, Display
from .output import note, show, show_json

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


Sources = Annotated[
    list[str],
    typer.Argument(metavar="SRC...", parser=parse_path, help=f"{READ} Several are written one by one."),
]
Target = Annotated[
    str,
    typer.Argument(metavar="OUT", parser=parse_output, help="Directory, or s3:// or gs:// URL, to write."),
]


def run_one(out: str, call: Callable[[], RunResult], display: Display) -> None:
    """Write one output, and show the report of the run.

    A parent directory that the run creates is noted: a mistake would look the same.
    """
    start, target = time.perf_counter(), lazy.place(out)
    absent = isinstance(target, Path) and not target.parent.exists()
    result = call()
    if absent and isinstance(target, Path):
        note(f"the directory {str(target.parent)!r} did not exist and was created")
    seconds = time.perf_counter() - start
    if display.as_json:
        show_json({**result.to_dict(), "seconds": seconds})
        return
    order = lazy.Order(display.sort)
    show(lazy.run_report(result, seconds=seconds, everything=display.everything, order=order))
    if result.page is not None and sys.stdout.isatty():
        note(f"{result.page} has the report")


def run_each(
    sources: Sequence[str], out: str, call: Callable[[str, str], RunResult], display: Display
) -> None:
    """Write each source; show one report, or a line for each.

    call: what writes a source to an output. Several go to ``out``, each under its own name; one that fails
    does not stop the others, and the exit status is 1 then.
    """
    if len(sources) == 1:
        run_one(out, lambda: call(sources[0], out), display)
        return
    start = time.perf_counter()
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
            results[source] = message_of(error)
    seconds = time.perf_counter() - start
    if display.as_json:
        documents = [
            {"source": source, "output": targets[source], "error": found}
            if isinstance(found, str)
            else found.to_dict()
            for source, found in results.items()
        ]
        show_json({"runs": documents, "seconds": seconds})
    else:
        show(lazy.runs_report(results, seconds=seconds))
    failed = [source for source, found in results.items() if isinstance(found, str)]
    if failed:
        fail(f"{count(len(failed), 'checkpoint')} of {len(results)} failed, the first: {results[failed[0]]}")
        raise typer.Exit(1)


def run_pipeline(
    source: str, out: str, call: Callable[[str, str], RunResult], *, overwrite: bool, as_json: bool
) -> None:
    """Write the parts of a diffusers pipeline; show a line for each.

    call: what writes a part to an output. overwrite: whether files that are copied replace others.
    """
    start = time.perf_counter()
    results = lazy.each_part(Path(source), Path(out), call, overwrite=overwrite)
    seconds = time.perf_counter() - start
    if as_json:
        show_json({"runs": [found.to_dict() for found in results.values()], "seconds": seconds})
    else:
        show(lazy.runs_report({**results}, seconds=seconds))


def targets_of(sources: Sequence[str], out: str) -> dict[str, str]:
    """Return the output of each source: in ``out``, under its own name.

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
