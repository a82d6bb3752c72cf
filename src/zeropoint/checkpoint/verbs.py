"""Functions for the commands about checkpoints, with the same options."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from ..errors import DtypeError, OptionError, option, require_one, size_of
from ..methods.rotate import ModelRotation
from ..progress import bars
from ..recipes import one_name
from ..signatures import by_signature
from .call_options import (
    LOCAL,
    RESUME,
    AnyRecipe,
    Paths,
    Patterns,
    Shown,
    Writing,
    paths,
    patterns,
    planned,
    selection_of,
)
from .model.saved_solving import PooledGrams, require_gram
from .model.statistics_file import SavedStatistics
from .plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from .plan.file import write_plan
from .plan.limits import Limits
from .plan.recipe import KEEP, codec_for
from .plan.rotation_plan import rotation_plan
from .plan.selection import FLOATS, DequantizePolicy, Selection
from .plan.verdicts import require_loadable
from .read.source import open_source
from .read.storage import Place
from .run.executor import Executor
from .run.loop import RunResult
from .verify.compare import Comparison, compare
from .verify.outputs import check_outputs
from .verify.verification import Verification, verify

__all__ = [
    "compare_checkpoints",
    "convert_checkpoint",
    "dequantize_checkpoint",
    "plan_checkpoint",
    "rotate_checkpoint",
    "verify_checkpoint",
]


@by_signature
def plan_checkpoint(
    source: Place | str, to: AnyRecipe | None = None,
    *, recipe: AnyRecipe | None = None, format: str | None = None,  # noqa: A002 (the option's name)
    method: str | None = None, quality: str | None = None,
    include: Patterns = (), ignore: Patterns = (), strict: bool = False, fit: bool = False,
    kv_scales: bool = False,
    dequantize_first: bool = False, dequantize_kept: bool = False, out: Path | str | None = None,
    workers: int | None = None, max_memory: int | str | None = None,
) -> CheckpointPlan:  # fmt: skip
    """Return the plan of :func:`quantize_checkpoint`, from the headers alone.

    This is ``zeropoint plan``: actions, sizes and memory.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        to: a preset or scheme, such as ``"w4a16"``.
        recipe, format, include, ignore, strict, fit: as for :func:`quantize_checkpoint`.
        method: likewise. Rules that name a method keep it.
        quality, kv_scales: likewise; data are asked for where the plan is carried out.
        dequantize_first, dequantize_kept: likewise.
        out: a new file for the plan, which :func:`quantize_checkpoint` takes as ``plan``.
        workers: threads; one for each core if None.
        max_memory: most memory of the process of the run, as bytes or a text such as ``"1G"``; 2 GiB if None.

    Raises:
        CheckpointError: for a source that is damaged, quantized already, or without weights to quantize, for
            too little ``max_memory``, and where ``out`` exists.
        OptionError: unless one of ``to`` and ``recipe`` is given.
        RecipeError: for a malformed recipe, and an unknown method.
        SchemeError: for an unknown preset, a malformed scheme, and an integer without blocks, such as
            ``"int4"``.
        UnsupportedError: when the file layout cannot hold the scheme.
    """
    require_one(to=to, recipe=recipe)
    plan = planned(
        open_source(source),
        to,
        recipe=recipe,
        format=format,
        method=one_name(method, quality, has_data=True),
        selection=selection_of(
            include,
            ignore,
            strict=strict,
            fit=fit,
            kv_scales=kv_scales,
            dequantize_first=dequantize_first,
            dequantize_kept=dequantize_kept,
        ),
        limits=Limits.default(workers, max_memory),
    )
    if out is not None:
        write_plan(plan, Path(out))
    return plan


@by_signature
def convert_checkpoint(
    source: Place | str, out: Place | str, format: str | None = None,  # noqa: A002 (the option's name)
    *, to: str | None = None, allow_requantize: bool = False, ignore: Patterns = (), force: bool = False,
    workers: int | None = None, max_memory: int | str | None = None, overwrite: bool = False,
    restart: bool = False, break_lock: bool = False, if_exists: str = RESUME,
    executor: str | Executor = LOCAL,
    address: str | None = None, spool: Path | str | None = None, report: bool = True,
    progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Write a quantized checkpoint in another file layout, its values unchanged.

    This is ``zeropoint convert``. What was written is decoded and compared with the values of the source,
    number for number in float32.

    Args:
        source: a quantized checkpoint's directory, one .safetensors or .gguf file, or the URL of either.
        out: the output directory or URL.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`; None for floats alone.
        to: a preset or scheme that holds the same values, such as ``"nvfp4a16"`` for MXFP4; that which stores
            what each layer does if None; ``"bfloat16"``, ``"float16"`` or ``"float32"`` for floats.
        allow_requantize: quantize anew what the layout cannot hold, with the error in the result.
        ignore: patterns of tensors that keep the codes which they have.
        force: write it even if no engine is known to load the result.
        workers, max_memory, report, progress: as for :func:`~zeropoint.quantize_checkpoint`.
        overwrite, restart, break_lock, if_exists, executor, address, spool: likewise.

    Returns:
        A summary of the run: tensors, bytes, errors and time.

    Raises:
        OptionError: without ``format``, unless ``to`` names floats.
        UnsupportedError: for layers whose values the layout cannot hold, with the reason.
        CheckpointError: for a source that is damaged or not quantized, when ``out`` cannot be written, and
            when no engine is known to load the result.
        ZeropointError: as :func:`plan_checkpoint`.
    """
    if format is None and to not in FLOATS:
        raise OptionError(
            f"{option('format')} names the layout to write; give one, or {option('to', 'bfloat16')} for "
            "floats"
        )
    writing = Writing(
        overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists,
        executor=executor, address=address, spool=spool, report=report, progress=progress,
    )  # fmt: skip
    writing.require_target(out)
    plan = conversion_plan(
        open_source(source),
        to,
        codec_for(format),
        requantize=allow_requantize,
        ignore=patterns(ignore),
        limits=Limits.default(workers, max_memory),
    )
    if plan.weights and not force:
        require_loadable(plan)
    return writing.write(plan, out, "converting")


@by_signature
def dequantize_checkpoint(
    source: Place | str, out: Place | str,
    *, dtype: str | None = None, workers: int | None = None, max_memory: int | str | None = None,
    overwrite: bool = False, restart: bool = False, break_lock: bool = False, if_exists: str = RESUME,
    executor: str | Executor = LOCAL, address: str | None = None, spool: Path | str | None = None,
    progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Write a quantized checkpoint as floats.

    This is ``zeropoint dequantize``. The configuration loses its quantization and keeps all else.

    Args:
        source: a quantized checkpoint's directory, one file, or the URL of either.
        out: the output directory or URL.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``; what config.json names, or bfloat16, if None.
        workers, max_memory, progress: as for :func:`~zeropoint.quantize_checkpoint`.
        overwrite, restart, break_lock, if_exists, executor, address, spool: likewise.

    Returns:
        A summary of the run: tensors, bytes and time.

    Raises:
        CheckpointError: for a source that is damaged or not quantized, and when ``out`` cannot be written.
        DtypeError: for another dtype.
    """
    writing = Writing(
        overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists,
        executor=executor, address=address, spool=spool, progress=progress,
    )  # fmt: skip
    writing.require_target(out)
    selection = Selection(dequantize=DequantizePolicy.EVERY, floats=_float(dtype))
    limits = Limits.default(workers, max_memory)
    plan = make_plan(open_source(source), KEEP, selection=selection, limits=limits)
    return writing.write(plan, out, "dequantizing")


@by_signature
def rotate_checkpoint(
    source: Place | str, out: Place | str,
    *, seed: int = 0, block: int | None = None, dtype: str | None = None, workers: int | None = None,
    max_memory: int | str | None = None, overwrite: bool = False, restart: bool = False,
    break_lock: bool = False, if_exists: str = RESUME, spool: Path | str | None = None,
    progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Write a float checkpoint as the same model in a rotated space.

    This is ``zeropoint rotate``. Any engine loads it as before. The residual stream is rotated by a block
    Hadamard matrix with random signs (QuaRot, SpinQuant R1), and so are the values of heads (R2); both are
    folded into the matrices on either side, with the weights of norms. Logits equal the source's up to
    rounding, and outliers spread over the channels of a block, which helps quantization. A head that is tied
    to the embedding becomes a tensor of its own.

    Args:
        source: a checkpoint's directory, or the URL of one.
        out: the output directory or URL.
        seed: for the random signs.
        block: size of the Hadamard blocks, a power of two that divides the hidden size; the largest if
            None.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"`` for all floats; kept if None.
        workers, max_memory, progress: as for :func:`~zeropoint.quantize_checkpoint`.
        overwrite, restart, break_lock, if_exists, spool: likewise.

    Returns:
        A summary of the run: tensors, bytes and time.

    Raises:
        UnsupportedError: for a family whose residual stream is not known here or cannot be rotated.
        CheckpointError: for a source that is damaged or quantized, a block that does not divide the stream,
            and when ``out`` cannot be written.
        DtypeError: for another dtype.
        SchemeError: for a seed that is negative or has more than 64 bits.
    """
    writing = Writing(
        overwrite=overwrite,
        restart=restart,
        break_lock=break_lock,
        if_exists=if_exists,
        spool=spool,
        progress=progress,
    )
    writing.require_target(out)
    plan = rotation_plan(
        open_source(source),
        ModelRotation(seed=seed, block=block),
        dtype=_float(dtype),
        limits=Limits.default(workers, max_memory),
    )
    return writing.write(plan, out, "rotating")


def _float(dtype: str | None) -> str | None:
    """Return the safetensors name of a dtype; raises DtypeError if unknown."""
    if dtype is not None and dtype not in FLOATS:
        raise DtypeError(f"dtype (={dtype!r}) must be one of {', '.join(FLOATS)}")
    return None if dtype is None else FLOATS[dtype]


@by_signature
def verify_checkpoint(
    out: Place | str, against: Place | str | None = None,
    *, statistics: Paths = (), require_manifest: bool = False, workers: int | None = None,
    max_memory: int | str | None = None, progress: Shown = False,
) -> Verification:  # fmt: skip
    """Return the verification of a checkpoint, against the original when given.

    This is ``zeropoint verify``: each number is checked against the proven bound of its scheme, and each byte
    against the hash in the manifest.

    Args:
        out: the quantized checkpoint: a directory or URL.
        against: the source checkpoint, to compare with; None for checks of the output alone.
        statistics: files of :func:`~zeropoint.gather_statistics` with Gram matrices, added where there are
            several: where weights were solved on these, what the manifest says of their outputs, and its
            bound, are checked.
        require_manifest: whether a checkpoint without a manifest is a problem, not a note.
        workers, max_memory, progress: as for :func:`~zeropoint.quantize_checkpoint`.

    Raises:
        CheckpointError: when files are damaged so that they cannot be read, the checkpoint is not quantized
            or not in a layout that is read here, ``against`` is not its original, or ``max_memory`` is too
            little; everything else is in the result.
        OptionError: for ``statistics`` without ``against``.
        CalibrationError: for statistics of another checkpoint, and for those without Gram matrices.
    """
    limits, files = Limits.default(workers, max_memory), paths(statistics)
    if files and against is None:
        raise OptionError(
            f"{option('statistics')} tell how far outputs are from those of the original; add "
            f"{option('against', metavar='SRC')}"
        )
    with contextlib.ExitStack() as stack:
        of_outputs = None
        if files and against is not None:
            saved = stack.enter_context(SavedStatistics(files, open_source(against)))
            require_gram(saved)
            of_outputs = functools.partial(check_outputs, grams=PooledGrams(saved))
        move = stack.enter_context(bars(progress)("verifying", size_of))
        return verify(
            out,
            against,
            limits=limits,
            require_manifest=require_manifest,
            of_outputs=of_outputs,
            on_progress=move,
        )


@by_signature
def compare_checkpoints(
    a: Place | str,
    b: Place | str,
    *,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Shown = False,
) -> Comparison:
    """Compare the decoded values of two checkpoints in any layouts.

    This is ``zeropoint compare``; ``found.equality.of_bits`` says whether all values are equal.

    Args:
        a: a checkpoint's directory, file or URL; errors are relative to it.
        b: the other checkpoint.
        workers, max_memory, progress: as for :func:`~zeropoint.quantize_checkpoint`.

    Returns:
        Equality and error of each tensor, and what could not be compared and why.

    Raises:
        CheckpointError: when files are damaged, both are one checkpoint, they have no tensor in common, or
            ``max_memory`` is too little.
        UnsupportedError: when a layout is not read here.
    """
    with bars(progress)("comparing", size_of) as move:
        return compare(a, b, limits=Limits.default(workers, max_memory), on_progress=move)
