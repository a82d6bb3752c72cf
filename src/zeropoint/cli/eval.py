"""The command ``zeropoint eval``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from . import lazy
from .arguments import parse_path, path_option
from .option_records import OptionRecord, given, only, with_records
from .options import READ, AsJson, Machine
from .output import show, show_json


@dataclass(frozen=True, kw_only=True)
class Measures(OptionRecord):
    """Options of an evaluation: windows, tasks, and the reference cache."""

    context: Annotated[
        int, typer.Option(metavar="N", min=4, help="Tokens of a window, half of them scored.")
    ] = 512
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Windows at most (16), or sentences of an embedding model (1000)."
        ),
    ] = None
    continuations: Annotated[
        int, typer.Option(metavar="N", min=0, help="Prompts that the reference continues; 0 for none.")
    ] = 16
    cloze: Annotated[
        str | None, path_option("Tagged text (word/tag), from which cloze choices are made.")
    ] = None
    cache: Annotated[
        str | None, path_option("Save the outputs of the reference, to use them again for other models.")
    ] = None
    noise_floor: Annotated[
        bool, typer.Option("--noise-floor/--no-noise-floor", help="Run the reference in bfloat16, too.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class Page(OptionRecord):
    """The page about an evaluation."""

    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write a page with the results.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False


@with_records
def evaluate(  # noqa: PLR0913 (arguments, and records of options)
    models: Annotated[list[str], typer.Argument(metavar="MODEL", parser=parse_path, help=READ)],
    against: Annotated[
        str, path_option("The checkpoint that models are compared with.", metavar="REFERENCE")
    ],
    text: Annotated[str, path_option("Text, or token ids in .safetensors.")],
    *,
    measures: Measures,
    machine: Annotated[Machine, only("max_memory", "device")],
    page: Page,
    everything: Annotated[bool, typer.Option("--all", help="All statistics, percentiles too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how far models are from a reference.

    Measures perplexity, KL divergence, cloze choices and greedy continuations, with the windows, the scoring
    and the statistics of llama-perplexity. Models run on their decoded weights in float32, a block in memory
    at a time, and inputs of layers are quantized where the checkpoint says so. The noise floor is the
    reference in bfloat16. Embedding models, such as BERT, are compared by their embeddings.

    \b
    Examples:
      zeropoint eval MODEL-w4a16 --against MODEL --text wiki.txt
      zeropoint eval A B model-Q4_K_M.gguf --against MODEL --text wiki.txt --cache reference.safetensors
      zeropoint eval OUT --against MODEL --text wiki.txt --cloze brown.txt --windows 32 --json
    """  # noqa: D301
    start = time.perf_counter()
    found = lazy.evaluate_checkpoint(models, against, text, **given(measures, page, machine), progress=True)
    seconds = time.perf_counter() - start
    if as_json:
        show_json({**found.to_dict(), "seconds": seconds})
    else:
        show(lazy.evaluation_report(found, seconds=seconds, everything=everything))
