"""The command ``zeropoint``: its options, and what becomes of errors."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from zeropoint import __version__

from ..checkpoint.inspect import inspect as inspect_checkpoint
from ..checkpoint.limits import Limits
from ..checkpoint.plan_file import PlanFile
from ..checkpoint.selection import Selection
from ..checkpoint.verify import verify as verify_checkpoint
from ..errors import ZeropointError
from ..report.documents import inspection_document, run_document, verification_document
from ..report.formats import formats_document, formats_table, page_document, page_table
from ..report.tables import inspection_report, run_report, verification_report
from .dequantize import dequantize
from .options import (
    READ,
    AsJson,
    DequantizeFirst,
    DequantizeKept,
    Everything,
    Ignore,
    Include,
    Memory,
    Recipe,
    Strict,
    To,
    Workers,
    dequantized,
    planned,
)
from .output import ReaderGoneError, fail, progress, show, show_json
from .plan import plan as plan_command
from .signals import Interrupted, interruptible
from .values import one_of, parse_plan
from .writing import (
    Address,
    BreakLock,
    EngineName,
    EngineOption,
    Overwrite,
    Restart,
    Spool,
    Target,
    Way,
    engine_of,
    write,
)

# The base class of all errors about the command line. Newer versions of typer no longer take it from click.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(short_help="Show what quantize would do.")(plan_command)
app.command(short_help="Write a quantized checkpoint as floats.")(dequantize)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Write the version and exit.")] = False,
) -> None:
    """Quantize checkpoints for PyTorch: exact, at memory speed, in bounded memory.

    \b
    Examples:
      zeropoint plan MODEL --to w4a16
      zeropoint quantize MODEL OUT --to w4a16
      zeropoint verify OUT --against MODEL
      zeropoint inspect OUT
      zeropoint formats float8_e4m3fn
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    if version:
        print(f"zeropoint {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command(short_help="Quantize a checkpoint.")
def quantize(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Annotated[str, typer.Argument(metavar="SRC", help=READ)],
    out: Target,
    to: To = None,
    recipe: Recipe = None,
    plan: Annotated[
        PlanFile | None,
        typer.Option(metavar="FILE", parser=parse_plan, help="A plan of `zeropoint plan`, in place of --to."),
    ] = None,
    include: Include = None,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    unlock: BreakLock = False,
    engine: EngineOption = EngineName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    strict: Strict = False,
    dequantize_first: DequantizeFirst = False,
    dequantize_kept: DequantizeKept = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Quantize the linear weights of a checkpoint and write the result as compressed-tensors.

    Embeddings, norms, routers and the head are kept unless --include names them. The report says of each
    tensor what happened and why. OUT is all or nothing: if the command is interrupted, run it again
    to resume.

    \b
    Examples:
      zeropoint quantize Llama-3.2-1B Llama-3.2-1B-W4A16 --to w4a16
      zeropoint quantize SRC OUT --to mxfp4 --ignore '*.down_proj' --max-memory 1G
      zeropoint quantize SRC OUT --to int4:g64:asym --workers 2 --json
      zeropoint quantize SRC OUT --recipe mixed.yaml --strict
      zeropoint quantize SRC OUT --plan plan.json
      zeropoint quantize DeepSeek-V3 OUT --to nvfp4a16 --dequantize-first
      zeropoint quantize s3://BUCKET/MODEL s3://BUCKET/OUT --to w4a16
      zeropoint quantize SRC OUT --to nvfp4a16 --engine ray --address HEAD:6379
    """  # noqa: D301
    selection = Selection(
        include=tuple(include or ()), ignore=tuple(ignore or ()), strict=strict,
        dequantize=dequantized(first=dequantize_first, kept=dequantize_kept),
    )  # fmt: skip
    start = time.perf_counter()
    asked = one_of({"--to": to, "--recipe": recipe, "--plan": plan})
    made = planned(source, asked, selection, Limits.default(workers, max_memory))
    way = Way(
        overwrite=overwrite, restart=restart, break_lock=unlock, spool=spool,
        engine=engine_of(engine, address),
    )  # fmt: skip
    with progress("quantizing") as on_progress:
        result = write(made, out, way, on_progress)
    seconds = time.perf_counter() - start
    if as_json:
        show_json(run_document(result, seconds=seconds))
    else:
        show(run_report(result, seconds=seconds, everything=everything))


@app.command(short_help="Show what a checkpoint holds.")
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help=READ)],
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: tensors, dtypes, sizes, and how it is quantized.

    \b
    Examples:
      zeropoint inspect MODEL
      zeropoint inspect MODEL --all --json
    """  # noqa: D301
    inspection = inspect_checkpoint(path)
    if as_json:
        show_json(inspection_document(inspection))
    else:
        show(inspection_report(inspection, everything=everything))


@app.command(short_help="Check a quantized checkpoint against its original.")
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="The quantized checkpoint.")],
    against: Annotated[
        str | None, typer.Option(metavar="SRC", help="The original; without it, OUT is decoded only.")
    ] = None,
    workers: Workers = None,
    max_memory: Memory = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Decode a quantized checkpoint and check each number against the proven bound of its scheme.

    Every byte must have the hash in OUT's manifest, and kept tensors must be those of the original. Without
    an original, everything else is still checked. The exit status is 1 when anything is wrong.

    \b
    Examples:
      zeropoint verify OUT
      zeropoint verify OUT --against SRC
      zeropoint verify OUT --against SRC --json
    """  # noqa: D301
    start = time.perf_counter()
    with progress("verifying") as on_progress:
        verification = verify_checkpoint(
            out, against, limits=Limits.default(workers, max_memory), on_progress=on_progress
        )
    seconds = time.perf_counter() - start
    if as_json:
        show_json(verification_document(verification, seconds=seconds))
    else:
        show(verification_report(verification, seconds=seconds, everything=everything))
    verification.require()


@app.command(short_help="List number formats and presets, or explain one.")
def formats(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A format, an alias, a spelling, a preset or a scheme."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List number formats and presets, or every fact of one.

    \b
    Examples:
      zeropoint formats
      zeropoint formats fp8
      zeropoint formats e3m4 --json
      zeropoint formats int4:g64:asym
    """  # noqa: D301
    if as_json:
        show_json(formats_document() if name is None else page_document(name))
    else:
        show(formats_table() if name is None else page_table(name))


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status; an error is one line on stderr, no traceback.

    0: done. 1: failed. 2: the command line makes no sense. 130, 143: interrupted by Ctrl-C or SIGTERM. 141:
    the reader of stdout went away.
    """
    try:
        with interruptible():
            status = app(args=list(arguments), prog_name="zeropoint", standalone_mode=False)
    except _UsageError as error:
        fail(error.format_message())
        return 2
    except Interrupted as interruption:
        fail(_said(interruption))
        return interruption.status
    except ReaderGoneError:
        return 128 + signal.SIGPIPE
    except (ZeropointError, OSError) as error:
        fail(_said(error))
        return 1
    except MemoryError:
        fail("out of memory; use --max-memory or fewer --workers")
        return 1
    return int(status or 0)


def _said(error: BaseException) -> str:
    """Return the message of an error with what was noted on its way."""
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def run() -> None:
    """Carry out this process's command line."""
    # Where scipy is installed, numba loads its BLAS in a third of a second, and no kernel calls it. None
    # makes that import fail (Python's reference, "The module cache"), as where scipy is not installed.
    sys.modules.setdefault("scipy.linalg", None)  # type: ignore[arg-type]
    gc.freeze()  # what was imported is no garbage, and looking through it takes a tenth of a second
    sys.exit(main(sys.argv[1:]))
