"""The command ``zeropoint quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..architectures import PIPELINE_INDEX
from ..errors import require_one
from . import lazy
from .arguments import candidates_in, require_no_data
from .option_records import given, with_records
from .options import Content, Display, Existing, LayerBudget, Machine, Quantization
from .writing import Sources, Target, run_each, run_pipeline

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


@with_records
def quantize(  # noqa: PLR0913 (arguments, and records of options)
    source: Sources,
    out: Target,
    *,
    content: Content,
    quantization: Quantization,
    budget: LayerBudget,
    existing: Existing,
    machine: Machine,
    display: Display,
) -> None:
    """Quantize the linear weights of a checkpoint for a format's engines.

    Embeddings, norms, routers and the head are kept unless --include names them. The report says of each
    tensor what happened and why. OUT is all or nothing: if the command is interrupted, run it again
    to resume. Of several sources, each is written to OUT/its name; one that fails does not stop the others.
    Of a pipeline of diffusers, all parts but the autoencoder are quantized, and the rest is copied.

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
    of_pipeline = _require_target(source, out, plan=content.plan, state=budget.state)
    require_one(to=content.to, recipe=content.recipe, plan=content.plan, budget=budget.budget)
    if quantization.calibration is None:
        _require_no_data(content, budget.candidates)
    content.require_meaning()

    def write(one: str, target: str) -> RunResult:
        return lazy.quantize_checkpoint(
            one,
            target,
            **given(content, quantization, budget, existing, machine),
            report=display.report,
            progress=True,
        )

    if of_pipeline:
        run_pipeline(source[0], out, write, overwrite=existing.overwrite, as_json=display.as_json)
    else:
        run_each(source, out, write, display)


def _require_target(sources: list[str], out: str, **files: Any) -> bool:
    """Return whether a pipeline of diffusers is quantized.

    Raises typer.BadParameter where OUT is a scheme, which most likely lacks its --to, and where an option
    names a file of one checkpoint, and there are several.
    """
    if len(sources) > 1 and out.partition(":")[0].lower() in (*lazy.PRESETS, *lazy.OF_LAYOUTS):
        raise typer.BadParameter(f"{out} is a scheme; did you mean --to {out}?", param_hint="'OUT'")
    whole = len(sources) == 1 and (Path(sources[0]) / PIPELINE_INDEX).is_file()
    given = next((name for name, file in files.items() if file is not None), None)
    if given is not None and (whole or len(sources) > 1):
        raise typer.BadParameter("is of one checkpoint; give one SRC", param_hint=f"'--{given}'")
    return whole


def _require_no_data(content: Content, candidates: str | None) -> None:
    codec = lazy.codec_for(content.format, content.to)
    if content.to is not None:
        require_no_data(content.to, codec)
    for name in candidates_in(candidates or ""):
        require_no_data(name, codec, "--candidates")
