"""The commands of ``zeropoint``, groups of their help, and usage errors.

Nothing here imports torch: the layers below come in with their first name (lazy.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from zeropoint import __version__

from ..errors import count
from . import lazy
from .arguments import parse_path, path_option, usage_errors
from .compare import compare
from .conversions import convert, dequantize, kv_scales, rotate
from .distill import distill
from .eval import evaluate
from .gather import statistics
from .machine_commands import bench, demo, doctor, warmup
from .main import fail
from .option_records import given, only, with_records
from .options import READ, AsJson, Display, Machine
from .output import ReaderGoneError as ReaderGoneError
from .output import show, show_json
from .plan import plan as plan_command
from .quantize import quantize
from .report import report
from .search import search

OPTION_GROUPS: dict[str, tuple[str, ...]] = {
    "What to write": (
        "to", "recipe", "plan", "format", "dtype", "include", "ignore", "strict", "fit", "kv-scales",
        "force", "allow-requantize", "dequantize-first", "dequantize-kept", "block",
    ),
    "The method and its data": (
        "method", "quality", "calibration", "samples", "length", "input-range", "imatrix", "statistics",
        "gram", "steps", "learning-rate",
    ),
    "A scheme for each layer": (
        "budget", "candidates", "state", "importance", "text", "refine",
    ),
    "What exists already": ("if-exists", "overwrite", "restart", "break-lock"),
    "The machine": ("workers", "max-memory", "device", "executor", "address", "spool"),
    "What is shown": ("all", "sort", "json", "report", "plot", "out", "help"),
}  # fmt: skip
"""Options of each group, without dashes; required options and ungrouped ones stand before them."""
COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Quantize": ("plan", "quantize", "search", "statistics"),
    "Look": ("report", "verify", "inspect", "compare", "eval", "formats"),
    "Change": ("convert", "dequantize", "rotate", "distill", "kv-scales"),
    "This machine": ("demo", "doctor", "bench", "warmup"),
}
"""Title to the commands of a group."""
_GROUP_OF = {option: title for title, options in OPTION_GROUPS.items() for option in options}
_FEW = 6
"""Options of a command that need no groups."""


class GroupedOptions(TyperCommand):
    """A command whose help groups its options, if they are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each group; click calls it."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Required": [], "Options": []}
        sections |= {title: [] for title in OPTION_GROUPS}
        parameters = self.get_params(ctx)
        many = sum(parameter.param_type_name == "option" for parameter in parameters) > _FEW
        for parameter in parameters:
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            title = "Arguments"
            if parameter.param_type_name == "option":
                long = max(parameter.opts, key=len).removeprefix("--")
                title = _GROUP_OF.get(long, "Options") if many else "Options"
                title = "Required" if parameter.required else title
            name, help_text = row
            sections[title].append((name.partition(" <")[0] if title == "Arguments" else name, help_text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class GroupedCommands(TyperGroup):
    """The commands of ``zeropoint``, whose help has them in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (as click calls it)
        """Write the commands of each group; click calls it."""
        width = max(map(len, self.commands))
        for title, names in COMMAND_GROUPS.items():
            rows = [
                (f"{name:{width}}", self.commands[name].get_short_help_str(formatter.width - width - 6))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


# The base class of all errors about the command line. Newer versions of typer no longer take it from click.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=GroupedCommands,
)
app.command(short_help="Quantize a checkpoint.", cls=GroupedOptions)(quantize)
app.command(short_help="Show what quantize would do.", cls=GroupedOptions)(plan_command)
app.command(short_help="Choose a scheme for each layer within a budget.", cls=GroupedOptions)(search)
app.command(short_help="Write a quantized checkpoint as floats.", cls=GroupedOptions)(dequantize)
app.command(short_help="Compare the values of two checkpoints.", cls=GroupedOptions)(compare)
app.command("eval", short_help="Measure how far models are from a reference.", cls=GroupedOptions)(evaluate)
app.command(short_help="Add scales for a float8 cache of keys and values.", cls=GroupedOptions)(kv_scales)
app.command(short_help="Write statistics of the inputs of layers to a file.", cls=GroupedOptions)(statistics)
app.command(
    short_help="Write a quantized checkpoint in another layout, its values unchanged.", cls=GroupedOptions
)(convert)
app.command(
    short_help="Write the same model in a rotated space, to quantize it from there.", cls=GroupedOptions
)(rotate)
app.command(short_help="Write an HTML page about checkpoints.", cls=GroupedOptions)(report)
app.command(short_help="Train the scales of a quantized checkpoint on data.", cls=GroupedOptions)(distill)
app.command(short_help="Compile the kernels for this machine.", cls=GroupedOptions)(warmup)
app.command(short_help="Quantize a real model in six ways, and compare them.", cls=GroupedOptions)(demo)
app.command(short_help="Say what is installed, and which kernels run.", cls=GroupedOptions)(doctor)
app.command(short_help="Time each kernel next to a copy.", cls=GroupedOptions)(bench)


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
      zeropoint search MODEL --budget 4.5bpw -o recipe.yaml
      zeropoint verify OUT --against MODEL
      zeropoint inspect OUT
      zeropoint compare MODEL OUT
      zeropoint convert Llama-AWQ OUT --format FORMAT
      zeropoint formats float8_e4m3fn
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    if version:
        print(f"zeropoint {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command(short_help="Show what a checkpoint holds.", cls=GroupedOptions)
@with_records
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", parser=parse_path, help=READ)],
    *,
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Show what a checkpoint holds.

    Tensors, dtypes, sizes, and how it is quantized are shown.

    \b
    Examples:
      zeropoint inspect MODEL
      zeropoint inspect MODEL --all --json
    """  # noqa: D301
    inspection = lazy.inspect_checkpoint(path)
    if display.as_json:
        show_json(inspection.to_dict())
    else:
        show(lazy.inspection_report(inspection, everything=display.everything))


@app.command(short_help="Check a quantized checkpoint against its original.", cls=GroupedOptions)
@with_records
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", parser=parse_path, help="The quantized checkpoint.")],
    *,
    against: Annotated[
        str | None, path_option("The original; without it, OUT is checked by itself.", metavar="SRC")
    ] = None,
    statistics: Annotated[
        list[str] | None,
        path_option(
            "File of `zeropoint statistics --gram`: the output errors of weights that were solved on "
            "it are checked, too. Repeatable: files are added."
        ),
    ] = None,
    require_manifest: Annotated[
        bool, typer.Option("--require-manifest", help="Count a missing manifest as a problem.")
    ] = False,
    machine: Annotated[Machine, only("workers", "max_memory")],
    display: Annotated[Display, only("everything", "sort", "as_json")],
) -> None:
    """Check a quantized checkpoint against the proven bounds of its schemes.

    Every value is decoded and compared with the original, and every tensor with its hash in OUT's manifest.
    Kept tensors, files next to the weights and the rest of config.json must equal the original's. Without
    --against, all that needs no original is checked. The exit status is 1 when anything is wrong.

    A manifest that somebody wrote anew can hide changes within the bounds. To compare every byte, repeat the
    command that wrote OUT.

    \b
    Examples:
      zeropoint verify OUT
      zeropoint verify OUT --against SRC
      zeropoint verify OUT --against SRC --json
      zeropoint verify OUT --against SRC --statistics gram.safetensors
    """  # noqa: D301
    start = time.perf_counter()
    found = lazy.verify_checkpoint(
        out,
        against,
        statistics=statistics or (),
        require_manifest=require_manifest,
        **given(machine),
        progress=True,
    )
    seconds = time.perf_counter() - start
    if display.as_json:
        show_json({**found.to_dict(), "seconds": seconds})
    else:
        order = lazy.Order(display.sort)
        show(lazy.verification_report(found, seconds=seconds, everything=display.everything, order=order))
    if not found.ok:  # the report lists them all
        fail(f"{count(len(found.problems), 'problem')} found in {out!r}, the first: {found.problems[0]}")
        raise typer.Exit(1)


@app.command(short_help="List number formats and presets, or explain one.", cls=GroupedOptions)
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
    if name is None:
        show_json(lazy.formats_document()) if as_json else show(lazy.formats_table())
        return
    with usage_errors("'NAME'"):
        show_json(lazy.page_document(name)) if as_json else show(lazy.page_table(name))


def call(arguments: Sequence[str]) -> int | None:
    """Run a command line; raises UsageError where it makes no sense."""
    status: int | None = app(args=list(arguments), prog_name="zeropoint", standalone_mode=False)
    return status


_INSTEAD = {
    "quantize": "--to", "plan": "--to", "verify": "--against", "inspect": "", "dequantize": "",
    "kv-scales": "--calibration", "distill": "--calibration", "statistics": "--calibration",
    "convert": "--format", "search": "--budget",
}  # fmt: skip
"""The option that a word too many was most likely meant for, by command."""


def usage(error: typer.BadParameter) -> str:
    """Return the message of a usage error, and where to look."""
    said = error.format_message()
    command = error.ctx.command_path if error.ctx is not None else "zeropoint"
    extra = re.search(r"unexpected extra arguments? ?(?:\(s\) )?\((\S+)", said)
    option = _INSTEAD.get(command.rpartition(" ")[2], "")
    if extra is not None and option:
        return f"unexpected argument {extra[1].rstrip(')')!r}; did you mean {option} {extra[1].rstrip(')')}?"
    said = said.replace("Missing argument 'SRC...'", "Missing argument 'SRC' or 'OUT'").replace(
        "SRC...", "SRC"
    )
    said = said.replace("Value error, ", "")  # words of the library that newer versions of typer convert with
    return said if said.startswith("Invalid value") else f"{said.rstrip('.')}; see {command} --help"
