"""What the command line does, as functions of one line each: the verbs of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ..codecs.registry import DEFAULT, get_codec
from ..errors import CalibrationError, DtypeError
from .choose.recipe import RecipeText
from .choose.selection import FLOATS, Selection
from .model.cache_scales import with_cache_scales
from .model.calibration import calibrated
from .model.importance import with_importance
from .plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from .plan.limits import Limits
from .plan.rotation_plan import Rotations, rotation_plan
from .plan.verdicts import require_loadable
from .read.source import open_source
from .read.storage import Place
from .run.loop import RunResult, run
from .verify.compare import compare as compare_checkpoints
from .verify.inspection import inspect as inspect_checkpoint
from .verify.verification import verify as verify_checkpoint

__all__ = [
    "compare_checkpoints",
    "convert_checkpoint",
    "add_kv_scales",
    "inspect_checkpoint",
    "plan_checkpoint",
    "quantize_checkpoint",
    "rotate_checkpoint",
    "verify_checkpoint",
]


def plan_checkpoint(
    source: Place | str, to: str | RecipeText,
    *, format: str = DEFAULT.name, method: str | None = None,  # noqa: A002 (the option's name)
    include: Iterable[str] = (), ignore: Iterable[str] = (), max_memory: int | None = None,
) -> CheckpointPlan:  # fmt: skip
    """Return what :func:`quantize_checkpoint` would do, from the headers alone: actions, sizes, memory.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        to: a preset or scheme, or a recipe (``RecipeText.read(path)``, ``RecipeText.named("llama")``).
        format: what files are written in, a name of :mod:`zeropoint.codecs.registry`.
        method: how weights are quantized, such as ``"mse"``, in place of the method of a recipe; ``nearest``
            unless given. Rules that name a method keep it.
        include, ignore: patterns of tensors to quantize although they are kept by default, and of tensors to
            keep.
        max_memory: bytes that the process of the run may take; 2 GiB if None.

    Raises:
        CheckpointError: for a source that is damaged, quantized already, or without weights to quantize, and
            for too little ``max_memory``.
        RecipeError: for a malformed recipe, and an unknown method.
        SchemeError: for an unknown preset or a malformed scheme.
        UnsupportedError: when the file layout cannot hold the scheme.
    """
    selection = Selection(include=tuple(include), ignore=tuple(ignore))
    asked = to if method is None else (RecipeText.of(to) if isinstance(to, str) else to).by(method)
    limits = Limits.default(max_memory=max_memory)
    return make_plan(open_source(source), asked, selection=selection, limits=limits, codec=get_codec(format))


def quantize_checkpoint(
    source: Place | str, out: Place | str, to: str | RecipeText,
    *, format: str = DEFAULT.name, method: str | None = None,  # noqa: A002 (the option's name)
    include: Iterable[str] = (), ignore: Iterable[str] = (), overwrite: bool = False,
    calibration: torch.Tensor | Path | str | None = None, imatrix: Path | str | None = None,
    max_memory: int | None = None,
) -> RunResult:  # fmt: skip
    """Quantize a checkpoint into ``out``, a directory or URL, as ``zeropoint quantize`` does.

    The other arguments are those of :func:`plan_checkpoint`.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        out: the output directory or URL.
        to: a preset or scheme, or a recipe (``RecipeText.read(path)``).
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`.
        method: how weights are quantized, such as ``"mse"``, in place of the method of a recipe; ``nearest``
            if neither says.
        include: patterns of tensors to quantize although they are kept by default.
        ignore: patterns of tensors to keep.
        overwrite: write into a directory that is not empty.
        calibration: for methods that need data: a file of text, token ids (windows, length), a .safetensors
            file that holds them, or ``"random"`` for random tokens. The model runs on it, a block in memory
            at a time.
        imatrix: an importance matrix of llama.cpp, .dat or GGUF, in its place; weights that it does not name
            have none.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        A summary of the run: tensors, bytes, errors and time.

    Raises:
        ZeropointError: as :func:`plan_checkpoint`.
        CalibrationError: when the method needs data and there are none, or too few, or it needs none.
        CheckpointError: when ``out`` cannot be written or no engine is known to load the result, which
            ``run`` of the plan writes.
    """
    plan = plan_checkpoint(
        source, to, format=format, method=method, include=include, ignore=ignore, max_memory=max_memory
    )
    require_loadable(plan)
    if calibration is not None and imatrix is not None:
        raise CalibrationError("calibration and imatrix both say what inputs are; give one of them")
    plan = plan if calibration is None else calibrated(plan, calibration)
    plan = plan if imatrix is None else with_importance(plan, imatrix)[0]
    return run(plan, out, overwrite=overwrite)


def add_kv_scales(
    source: Place | str, out: Place | str, calibration: torch.Tensor | Path | str,
    *, overwrite: bool = False, max_memory: int | None = None,
) -> RunResult:  # fmt: skip
    """Copy a quantized checkpoint and add scales for a float8 cache of keys and values.

    The model runs on data, a block in memory at a time. The scales of an attention layer are the largest
    magnitudes of its keys, after rotary embeddings, and of its values, over that of float8_e4m3fn. All other
    tensors are copied byte for byte.

    Args:
        source: the directory of a quantized checkpoint whose layout has a place for such scales.
        out: the output directory or URL.
        calibration: a file of text, token ids (windows, length), or a .safetensors file that holds them.
        overwrite: write into a directory that is not empty.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        A summary of the run; its notes say how large the scales are.

    Raises:
        UnsupportedError: when the layout has no place for scales, or the model is not run here.
        CalibrationError: when there are too few data, or some layer gets no scale from them.
        CheckpointError: when ``source`` is not quantized or has scales of a cache, ``out`` cannot be written
            or ``max_memory`` is too little.
    """
    limits = Limits.default(max_memory=max_memory)
    return run(with_cache_scales(open_source(source), calibration, limits=limits), out, overwrite=overwrite)


def convert_checkpoint(
    source: Place | str, out: Place | str, format: str = DEFAULT.name,  # noqa: A002 (the option's name)
    *, to: str | None = None, requantize: bool = False, ignore: Iterable[str] = (), overwrite: bool = False,
    max_memory: int | None = None,
) -> RunResult:  # fmt: skip
    """Write a quantized checkpoint in another file layout, its values unchanged.

    This is ``zeropoint convert``. What was written is decoded and compared with the values of the source,
    number for number in float32.

    Args:
        source: a quantized checkpoint's directory, one .safetensors or .gguf file, or the URL of either.
        out: the output directory or URL.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`.
        to: a preset or scheme that holds the same values, such as ``"nvfp4a16"`` for MXFP4; that which stores
            what each layer does if None; ``"bfloat16"``, ``"float16"`` or ``"float32"`` for floats.
        requantize: quantize anew what the layout cannot hold, with the error in the result.
        ignore: patterns of tensors that keep the codes which they have.
        overwrite: write into a directory that is not empty.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        A summary of the run: tensors, bytes, errors and time.

    Raises:
        UnsupportedError: for layers whose values the layout cannot hold, with the reason.
        CheckpointError: for a source that is damaged or not quantized, when ``out`` cannot be written, and
            when no engine is known to load the result.
        ZeropointError: as :func:`plan_checkpoint`.
    """
    plan = conversion_plan(
        open_source(source), to, get_codec(format), requantize=requantize, ignore=tuple(ignore),
        limits=Limits.default(max_memory=max_memory),
    )  # fmt: skip
    if plan.weights:
        require_loadable(plan)
    return run(plan, out, overwrite=overwrite)


def rotate_checkpoint(
    source: Place | str, out: Place | str,
    *, seed: int = 0, block: int | None = None, dtype: str | None = None, overwrite: bool = False,
    max_memory: int | None = None,
) -> RunResult:  # fmt: skip
    """Write a checkpoint of floats as the same model in a rotated space, which any engine loads as before.

    This is ``zeropoint rotate``. The residual stream is rotated by a block Hadamard matrix with random signs
    (QuaRot, SpinQuant R1), and so are the values of heads (R2); both are folded into the matrices on their
    sides, with the weights of norms. Logits are those of the source but for rounding, and outliers are spread
    over their block before the result is quantized. A head that is tied to the embedding becomes a tensor of
    its own.

    Args:
        source: a checkpoint's directory, or the URL of one.
        out: the output directory or URL.
        seed: of the random signs.
        block: numbers of the stream that are mixed, a power of two that divides it; the largest if None.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"`` for all floats; that which each has if None.
        overwrite: write into a directory that is not empty.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        A summary of the run: tensors, bytes and time.

    Raises:
        UnsupportedError: for a family whose residual stream is not known here or cannot be rotated.
        CheckpointError: for a source that is damaged or quantized, a block that does not divide the stream,
            and when ``out`` cannot be written.
        DtypeError: for another dtype.
        SchemeError: for a seed that is negative or has more than 64 bits.
    """
    if dtype is not None and dtype not in FLOATS:
        raise DtypeError(f"dtype (={dtype!r}) must be one of {', '.join(FLOATS)}")
    asked = Rotations(seed=seed, block=block, dtype=None if dtype is None else FLOATS[dtype])
    limits = Limits.default(max_memory=max_memory)
    return run(rotation_plan(open_source(source), asked, limits=limits), out, overwrite=overwrite)
