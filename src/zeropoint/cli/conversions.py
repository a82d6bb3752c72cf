"""Commands that write a checkpoint anew, without choosing schemes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .arguments import parse_float_dtype, path_option
from .option_records import given, only, with_records
from .options import Checkpoint, Content, Display, Existing, Machine, Quantization
from .writing import Sources, Target, run_each, run_one

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


@with_records
def convert(  # noqa: PLR0913 (arguments, and records of options)
    source: Sources,
    out: Target,
    *,
    content: Annotated[Content, only("to", "format", "ignore", "force")],
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Quantize anew what cannot be kept, and report the error."),
    ] = False,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "executor", "address", "spool")],
    display: Display,
) -> None:
    """Write a quantized checkpoint in another file layout, without quantizing it again.

    Values do not change: the result is decoded and compared, and a layer that the layout cannot hold is
    refused with the reason. --to names another scheme, such as nvfp4a16 for MXFP4, or bfloat16, float16 or
    float32 for floats. OUT is all or nothing: if the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint convert Llama-AWQ OUT --format FORMAT
      zeropoint convert SRC-MXFP4 OUT --format FORMAT --to nvfp4a16
      zeropoint convert SRC OUT --format FORMAT --to q4_1 --allow-requantize
      zeropoint convert MODEL.gguf OUT --to bfloat16
    """  # noqa: D301

    def write(one: str, target: str) -> RunResult:
        return lazy.convert_checkpoint(
            one,
            target,
            **given(content),
            allow_requantize=allow_requantize,
            **given(existing, machine),
            report=display.report,
            progress=True,
        )

    run_each(source, out, write, display)


@with_records
def dequantize(
    source: Sources,
    out: Target,
    *,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: the dtype in config.json, or bfloat16.",
        ),
    ] = None,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "executor", "address", "spool")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Write a quantized checkpoint as floats.

    SRC may have FP8 blocks, be a GGUF file, or have any layout that zeropoint writes. config.json loses its
    quantization and keeps all else, byte for byte. OUT is all or nothing: if the command is interrupted, run
    it again to resume.

    \b
    Examples:
      zeropoint dequantize DeepSeek-V3 DeepSeek-V3-bf16
      zeropoint dequantize SRC OUT --dtype float32 --max-memory 1G
    """  # noqa: D301

    def write(one: str, target: str) -> RunResult:
        return lazy.dequantize_checkpoint(one, target, dtype=dtype, **given(existing, machine), progress=True)

    run_each(source, out, write, display)


@with_records
def rotate(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    out: Target,
    *,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random signs.")] = 0,
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Size of the Hadamard blocks, a power of two; default: the largest that divides the width.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: each tensor keeps its dtype.",
        ),
    ] = None,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "spool")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Write a float checkpoint as the same model in a rotated space.

    Quantize the result: rotations spread outliers over many channels. Block Hadamard matrices with random
    signs rotate the residual stream and the values of heads, and are folded into the weights, as norms'
    weights are: engines load an ordinary model with the same logits, up to rounding. A head that is tied to
    the embedding gets a tensor of its own. OUT is all or nothing: if the command is interrupted, run it again
    to resume.

    \b
    Examples:
      zeropoint rotate Llama-3.2-1B Llama-rotated
      zeropoint rotate SRC OUT --seed 7 --block 256 --dtype float32
    """  # noqa: D301
    run_one(
        out,
        lambda: lazy.rotate_checkpoint(
            source, out, seed=seed, block=block, dtype=dtype, **given(existing, machine), progress=True
        ),
        display,
    )


@with_records
def kv_scales(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    out: Target,
    *,
    calibration: Annotated[
        str,
        path_option(
            "What the model runs on: a text, token ids in .safetensors, or tokens that it generates.",
            metavar="FILE|self",
        ),
    ],
    windows: Annotated[Quantization, only("samples", "length")],
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "device")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Add scales for a float8 cache of keys and values.

    The model runs on the data, a block in memory at a time. Each attention layer gets k_scale and v_scale:
    the largest magnitude of its keys, after rotary embeddings, and of its values, divided by 448. All other
    tensors are copied byte for byte. Nothing is written if a layer gets no scale. OUT is all or nothing: if
    the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint kv-scales Llama-3.2-1B-W4A16 OUT --calibration TEXT.txt
      zeropoint kv-scales SRC OUT --calibration ids.safetensors --max-memory 8G
    """  # noqa: D301
    run_one(
        out,
        lambda: lazy.add_kv_scales(
            source, out, calibration, **given(windows, existing, machine), progress=True
        ),
        display,
    )
