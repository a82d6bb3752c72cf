"""The command ``zeropoint quantize``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import layers
from .arguments import candidates_in, one_of, parse_plan, require_no_data
from .options import (
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
    Sort,
    SortOrder,
    Strict,
    To,
    Workers,
    important,
    planned,
    selected,
)
from .search import (
    BudgetOption,
    Candidates,
    ImportanceName,
    ImportanceOption,
    ModelRuns,
    RefineOption,
    State,
    TextOption,
    state_of,
    under_budget,
)
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
    show_run,
    write,
)

if TYPE_CHECKING:
    from ..codecs.protocol import Codec


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
    budget: BudgetOption = None,
    candidates: Candidates = None,
    state: State = None,
    importance: ImportanceOption = ImportanceName.EQUAL,
    text: TextOption = None,
    refine: RefineOption = 0,
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
    sort: Sort = SortOrder.FILE,
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
      zeropoint quantize SRC OUT --budget 4.5bpw --candidates mxfp4a16,w4a16,w8a16
      zeropoint quantize SRC OUT --budget 4.5bpw --importance linearity --text wiki.txt
      zeropoint quantize SRC OUT --budget 4.5bpw --method mse_weighted --calibration random
      zeropoint quantize DeepSeek-V3 OUT --to nvfp4a16 --dequantize-first
      zeropoint quantize s3://BUCKET/MODEL s3://BUCKET/OUT --to w4a16
      zeropoint quantize SRC OUT --to nvfp4a16 --executor ray --address HEAD:6379
    """  # noqa: D301
    start = time.perf_counter()
    asked = one_of({"--to": to, "--recipe": recipe, "--plan": plan, "--budget": budget})
    selection = selected(include, ignore, strict=strict, first=dequantize_first, kept=dequantize_kept)
    if calibration is None:
        _require_no_data(to, candidates, format)
    if calibration is not None and imatrix is not None:
        raise typer.BadParameter("--calibration and --imatrix both say what inputs are; give one of them")
    limits = layers.Limits.default(workers, max_memory)
    runs = ModelRuns(importance, text, refine)
    if budget is None:
        _require_no_budget(candidates, state, runs)
        made = planned(source, asked, selection, limits, format, method)
    else:
        runs = runs._replace(calibration=calibration, imatrix=imatrix)
        wanted = layers.asked(
            budget, candidates, layers.DEFAULT if format is None else format, method=method,
            selection=selection, limits=limits,
        )  # fmt: skip
        made = under_budget(layers.open_source(source), wanted, _state(state, out), runs).plan
    if not force:
        layers.require_loadable(made)
    if budget is not None:
        made = layers.with_ranges(made, calibration, progress=True)
    elif calibration is not None:
        made = layers.calibrated(made, calibration, progress=True)
    elif imatrix is not None:
        made = important(made, imatrix)
    way = Way(
        overwrite=overwrite, restart=restart, break_lock=unlock, spool=spool,
        executor=executor_of(executor, address),
    )  # fmt: skip
    show_run(write(made, out, way, "quantizing"), start, everything=everything, order=sort, as_json=as_json)


def _state(given: str | None, out: str) -> Path | None:
    """Return where the search of a budget keeps what it measured: next to a local output."""
    place = layers.place(out)
    return state_of(given, place if isinstance(place, Path) else None)


def _require_no_data(to: str | None, candidates: str | None, codec: Codec | None) -> None:
    if to is not None:
        require_no_data(to, codec)
    for name in candidates_in(candidates or ""):
        require_no_data(name, codec, "--candidates")


def _require_no_budget(candidates: str | None, state: str | None, runs: ModelRuns) -> None:
    if candidates is not None or state is not None or runs != ModelRuns():
        raise typer.BadParameter(
            "--candidates, --state, --importance, --text and --refine go with --budget; add one, or leave "
            "them out"
        )
