"""The commands of ``zeropoint``: their options and help, and the errors of a command line.

Nothing here imports torch: the layers below come in with their first name (layers.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from zeropoint import __version__

from ..errors import count
from . import layers
from .arguments import one_of, parse_path, parse_plan, require_no_data
from .compare import compare
from .convert import convert
from .dequantize import dequantize
from .kv_scales import kv_scales
from .main import fail, let_scipy_in
from .options import (
    READ,
    AsJson,
    Calibration,
    Checkpoint,
    DequantizeFirst,
    DequantizeKept,
    Everything,
    Force,
    Format,
    Ignore,
    Imatrix,
    Include,
    Memory,
    Method,
    Recipe,
    Strict,
    To,
    Workers,
    important,
    planned,
    selected,
)
from .output import ReaderGoneError as ReaderGoneError
from .output import progress, show, show_json
from .plan import plan as plan_command
from .warmup import warmup
from .writing import (
    Address,
    BreakLock,
    ExecutorName,
    ExecutorOption,
    Overwrite,
    Restart,
    Spool,
    Target,
    Way,
    executor_of,
    write,
)

# The base class of all errors about the command line. Newer versions of typer no longer take it from click.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.command(short_help="Show what quantize would do.")(plan_command)
app.command(short_help="Write a quantized checkpoint as floats.")(dequantize)
app.command(short_help="Compare the values of two checkpoints.")(compare)
app.command(short_help="Add scales for a float8 cache of keys and values.")(kv_scales)
app.command(short_help="Write a quantized checkpoint in another layout, its values unchanged.")(convert)
app.command(short_help="Compile the kernels for this machine.")(warmup)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Write the version and exit.")] = False,
) -> None:
    """Quantize checkpoints for PyTorch: exact, at memory speed, in bounded memory.

    \b
    Examples:
      zeropoint plan MODEL --to w4a16
      zeropoint quantize MODEL OUT --to w4a16
      zeropoint verify OUT --against MODEL
      zeropoint inspect OUT
      zeropoint compare MODEL OUT
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
    source: Checkpoint,
    out: Target,
    to: To = None,
    recipe: Recipe = None,
    format: Format = None,  # noqa: A002 (the option's name)
    method: Method = None,
    calibration: Calibration = None,
    imatrix: Imatrix = None,
    plan: Annotated[
        Any,
        typer.Option(metavar="FILE", parser=parse_plan, help="A plan of `zeropoint plan`, in place of --to."),
    ] = None,
    include: Include = None,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    unlock: BreakLock = False,
    executor: ExecutorOption = ExecutorName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    strict: Strict = False,
    force: Force = False,
    dequantize_first: DequantizeFirst = False,
    dequantize_kept: DequantizeKept = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Quantize the linear weights of a checkpoint and write the result for the engines of a format.

    Embeddings, norms, routers and the head are kept unless --include names them. The report says of each
    tensor what happened and why. OUT is all or nothing: if the command is interrupted, run it again
    to resume.

    \b
    Examples:
      zeropoint quantize Llama-3.2-1B Llama-3.2-1B-W4A16 --to w4a16
      zeropoint quantize SRC OUT --to mxfp4 --ignore '*.down_proj' --max-memory 1G
      zeropoint quantize SRC OUT --to int4:g64:asym --workers 2 --json
      zeropoint quantize SRC OUT --to w4a16 --method mse
      zeropoint quantize SRC OUT --to w4a16 --method mse_weighted --calibration TEXT.txt
      zeropoint quantize SRC OUT --to w4a16 --method mse_weighted --imatrix imatrix.dat
      zeropoint quantize SRC OUT --recipe mixed.yaml --strict
      zeropoint quantize SRC OUT --plan plan.json
      zeropoint quantize DeepSeek-V3 OUT --to nvfp4a16 --dequantize-first
      zeropoint quantize s3://BUCKET/MODEL s3://BUCKET/OUT --to w4a16
      zeropoint quantize SRC OUT --to nvfp4a16 --executor ray --address HEAD:6379
    """  # noqa: D301
    start = time.perf_counter()
    asked = one_of({"--to": to, "--recipe": recipe, "--plan": plan})
    selection = selected(include, ignore, strict=strict, first=dequantize_first, kept=dequantize_kept)
    if calibration is None and to is not None:
        require_no_data(to, format)
    made = planned(source, asked, selection, layers.Limits.default(workers, max_memory), format, method)
    if not force:
        layers.require_loadable(made)
    if calibration is not None and imatrix is not None:
        raise typer.BadParameter("--calibration and --imatrix both say what inputs are; give one of them")
    if calibration is not None:
        let_scipy_in()
        made = layers.calibrated(made, calibration, progress=True)
    made = made if imatrix is None else important(made, imatrix)
    way = Way(
        overwrite=overwrite, restart=restart, break_lock=unlock, spool=spool,
        executor=executor_of(executor, address),
    )  # fmt: skip
    result = write(made, out, way, "quantizing")
    seconds = time.perf_counter() - start
    if as_json:
        show_json(layers.run_document(result, seconds=seconds))
    else:
        show(layers.run_report(result, seconds=seconds, everything=everything))


@app.command(short_help="Show what a checkpoint holds.")
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", parser=parse_path, help=READ)],
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: tensors, dtypes, sizes, and how it is quantized.

    \b
    Examples:
      zeropoint inspect MODEL
      zeropoint inspect MODEL --all --json
    """  # noqa: D301
    inspection = layers.inspect(path)
    if as_json:
        show_json(layers.inspection_document(inspection))
    else:
        show(layers.inspection_report(inspection, everything=everything))


@app.command(short_help="Check a quantized checkpoint against its original.")
def verify(  # noqa: PLR0913 (typer makes an option of each parameter)
    out: Annotated[str, typer.Argument(metavar="OUT", parser=parse_path, help="The quantized checkpoint.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="SRC", parser=parse_path, help="The original; without it, OUT is decoded only."),
    ] = None,
    require_manifest: Annotated[
        bool, typer.Option("--require-manifest", help="Without a manifest, OUT is wrong.")
    ] = False,
    workers: Workers = None,
    max_memory: Memory = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Decode a quantized checkpoint and check each number against the proven bound of its scheme.

    Every byte must have the hash in OUT's manifest; kept tensors, files next to the weights and the rest of
    config.json must be those of the original. Without an original, everything else is still checked. The exit
    status is 1 when anything is wrong.

    A manifest that was made anew hides changes inside the bound: only the command that wrote OUT,
    repeated on SRC, compares every byte with what comes out of it.

    \b
    Examples:
      zeropoint verify OUT
      zeropoint verify OUT --against SRC
      zeropoint verify OUT --against SRC --json
    """  # noqa: D301
    start = time.perf_counter()
    limits = layers.Limits.default(workers, max_memory)
    with progress("verifying") as on_progress:
        found = layers.verify(
            out, against, limits=limits, require_manifest=require_manifest, on_progress=on_progress
        )
    seconds = time.perf_counter() - start
    if as_json:
        show_json(layers.verification_document(found, seconds=seconds))
    else:
        show(layers.verification_report(found, seconds=seconds, everything=everything))
    if not found.ok:  # the report lists them all
        fail(f"{count(len(found.problems), 'problem')} found in {out!r}, the first: {found.problems[0]}")
        raise typer.Exit(1)


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
        show_json(layers.formats_document() if name is None else layers.page_document(name))
    else:
        show(layers.formats_table() if name is None else layers.page_table(name))


def call(arguments: Sequence[str]) -> int | None:
    """Carry out a command line; raises UsageError where it makes no sense, and what the command raises."""
    status: int | None = app(args=list(arguments), prog_name="zeropoint", standalone_mode=False)
    return status


_INSTEAD = {
    "quantize": "--to", "plan": "--to", "verify": "--against", "inspect": "", "dequantize": "",
    "kv-scales": "--calibration",
}  # fmt: skip
"""The option that a word too many was most likely meant for, by command."""


def usage(error: typer.BadParameter) -> str:
    """Return what is wrong with a command line, and where to look."""
    said = error.format_message()
    command = error.ctx.command_path if error.ctx is not None else "zeropoint"
    extra = re.search(r"unexpected extra arguments? ?(?:\(s\) )?\((\S+)", said)
    option = _INSTEAD.get(command.rpartition(" ")[2], "")
    if extra is not None and option:
        return f"unexpected argument {extra[1].rstrip(')')!r}; did you mean {option} {extra[1].rstrip(')')}?"
    said = said.replace("Value error, ", "")  # words of the library that newer versions of typer convert with
    return said if said.startswith("Invalid value") else f"{said.rstrip('.')}; see {command} --help"
