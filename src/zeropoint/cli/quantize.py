"""The command ``zeropoint quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..architectures import PIPELINE_INDEX
from ..errors import require_one
from . import layers
from .arguments import candidates_in, parse_plan, require_no_data
from .options import (
    AsJson,
    Calibration,
    DequantizeFirst,
    DequantizeKept,
    Device,
    Everything,
    Fit,
    Force,
    Format,
    Ignore,
    Imatrix,
    Include,
    Length,
    Memory,
    Method,
    Quality,
    Recipe,
    Samples,
    Sort,
    SortOrder,
    StatisticsFiles,
    Strict,
    To,
    Workers,
    require_meaning,
)
from .search import (
    BudgetOption,
    Candidates,
    ImportanceName,
    ImportanceOption,
    RefineOption,
    State,
    TextOption,
)
from .writing import (
    Address,
    BreakLock,
    ExecutorName,
    ExecutorOption,
    IfExists,
    IfExistsName,
    Overwrite,
    Report,
    Restart,
    Sources,
    Spool,
    Target,
    run_each,
    run_pipeline,
)

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


def quantize(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Sources,
    out: Target,
    to: To = None,
    recipe: Recipe = None,
    format: Format = None,  # noqa: A002 (the option's name)
    method: Method = None,
    quality: Quality = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    imatrix: Imatrix = None,
    statistics: StatisticsFiles = None,
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
    device: Device = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    executor: ExecutorOption = ExecutorName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    report: Report = True,
    strict: Strict = False,
    fit: Fit = False,
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
    to resume. Of several sources, each is written to OUT/its name; one that fails does not stop the others.
    Of a pipeline of diffusers, the parts are quantized but the autoencoder, and all else is copied.

    \b
    Examples:
      zeropoint quantize Llama-3.2-1B Llama-3.2-1B-W4A16 --to w4a16
      zeropoint quantize SRC OUT --to mxfp4 --ignore '*.down_proj' --max-memory 1G
      zeropoint quantize SRC OUT --to int4:g64:asym --workers 2 --json
      zeropoint quantize SRC OUT --to w4a16 --quality good --calibration TEXT.txt
      zeropoint quantize SRC OUT --to w4a16 --method mse
      zeropoint quantize SRC OUT --to w4a16 --method shift+gptq --calibration TEXT.txt
      zeropoint quantize SRC OUT --to w4a16 --method mse_weighted --calibration random
      zeropoint quantize SRC OUT --to w4a16 --method gptq --calibration self --samples 16 --length 256
      zeropoint quantize SRC OUT --to w4a16 --method mse_weighted --imatrix imatrix.dat
      zeropoint quantize SRC OUT --to w4a16 --method gptq --statistics gram.safetensors
      zeropoint quantize models/* OUT --to w4a16 --if-exists skip
      zeropoint quantize SRC OUT --recipe mixed.yaml --strict
      zeropoint quantize SRC OUT --plan plan.json
      zeropoint quantize SRC OUT --budget 4.5bpw --candidates mxfp4a16,w4a16,w8a16
      zeropoint quantize SRC OUT --budget 4.5bpw --importance linearity --text wiki.txt
      zeropoint quantize SRC OUT --budget 4.5bpw --method mse_weighted --calibration random
      zeropoint quantize DeepSeek-V3 OUT --to nvfp4a16 --dequantize-first
      zeropoint quantize s3://BUCKET/MODEL s3://BUCKET/OUT --to w4a16
      zeropoint quantize SRC OUT --to nvfp4a16 --executor ray --address HEAD:6379
    """  # noqa: D301
    of_pipeline = _require_target(source, out, plan=plan, state=state)
    require_one(to=to, recipe=recipe, plan=plan, budget=budget)
    if calibration is None:
        _require_no_data(to, candidates, format)
    require_meaning(to, recipe, format)

    def write(one: str, target: str) -> RunResult:
        return layers.quantize_checkpoint(
            one, target, to, recipe=recipe, plan=plan, budget=budget, candidates=candidates, state=state,
            importance=importance.value, text=text, refine=refine, format=format, method=method,
            quality=None if quality is None else quality.value, calibration=calibration, samples=samples,
            length=length, imatrix=imatrix,
            statistics=statistics or (), include=include or (), ignore=ignore or (), strict=strict,
            fit=fit, force=force, dequantize_first=dequantize_first, dequantize_kept=dequantize_kept,
            workers=workers, max_memory=max_memory, device=device, overwrite=overwrite, restart=restart,
            break_lock=break_lock,
            if_exists=if_exists.value, executor=executor.value, address=address, spool=spool,
            report=report, progress=True,
        )  # fmt: skip

    if of_pipeline:
        run_pipeline(source[0], out, write, overwrite=overwrite, as_json=as_json)
    else:
        run_each(source, out, write, everything=everything, order=sort, as_json=as_json)


def _require_target(sources: list[str], out: str, **files: Any) -> bool:
    """Return whether a pipeline of diffusers is quantized.

    Raises typer.BadParameter where OUT is a scheme, which most likely lacks its --to, and where an option
    names a file of one checkpoint, and there are several.
    """
    if len(sources) > 1 and out.partition(":")[0].lower() in (*layers.PRESETS, *layers.OF_LAYOUTS):
        raise typer.BadParameter(f"{out} is a scheme; did you mean --to {out}?", param_hint="'OUT'")
    whole = len(sources) == 1 and (Path(sources[0]) / PIPELINE_INDEX).is_file()
    given = next((name for name, file in files.items() if file is not None), None)
    if given is not None and (whole or len(sources) > 1):
        raise typer.BadParameter("is of one checkpoint; give one SRC", param_hint=f"'--{given}'")
    return whole


def _require_no_data(to: str | None, candidates: str | None, format: str | None) -> None:  # noqa: A002 (the option's name)
    codec = layers.codec_for(format, to)
    if to is not None:
        require_no_data(to, codec)
    for name in candidates_in(candidates or ""):
        require_no_data(name, codec, "--candidates")
