"""Functions for the commands that run a model on data."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import OptionError, RangeError, option, require_one
from ..models.block_training import TrainingSteps
from ..signatures import by_signature
from .call_options import (
    LOCAL,
    RAY,
    RESUME,
    Paths,
    Shown,
    Writing,
    paths,
    requested_windows,
    require_executor,
)
from .cluster.statistics_parts import StatisticsRun, gathered_on_cluster
from .model.cache_scales import with_cache_scales
from .model.distillation import Distillation, copying, distilled
from .model.gathered_statistics import StatisticsResult, gathered, merged, require_ending
from .model.solved_weights import folder_for
from .model.tokens import Data, Windows
from .plan.limits import Limits
from .read.source import open_source
from .read.storage import Place
from .run.loop import RunResult, require_free

__all__ = ["add_kv_scales", "distill_checkpoint", "gather_statistics"]


@by_signature
def add_kv_scales(
    source: Place | str, out: Place | str, calibration: Data,
    *, samples: int | None = None, length: int | None = None, workers: int | None = None,
    max_memory: int | str | None = None, device: torch.device | str | None = None, overwrite: bool = False,
    restart: bool = False, break_lock: bool = False, if_exists: str = RESUME, progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Add scales for a float8 cache to a copied quantized checkpoint.

    This is ``zeropoint kv-scales``. The model runs on data, a block in memory at a time. The scales of an
    attention layer are the largest magnitudes of its keys, after rotary embeddings, and of its values, over
    the largest float8_e4m3fn. All other tensors are copied byte for byte.

    Args:
        source: the directory of a quantized checkpoint whose layout has a place for such scales, or its URL.
        out: the output directory or URL.
        calibration: a file of text, token ids (windows, length) or (tokens,), a .safetensors file that holds
            them, or ``"self"`` for tokens that the model generates.
        samples, length: of windows of it, as for :func:`~zeropoint.quantize_checkpoint`.
        workers, max_memory, device, progress: as for :func:`~zeropoint.quantize_checkpoint`.
        overwrite, restart, break_lock, if_exists: likewise.

    Returns:
        A summary of the run; its notes say how large the scales are.

    Raises:
        UnsupportedError: when the layout has no place for scales, or the model is not run here.
        CalibrationError: when there are too few data, or some layer gets no scale from them.
        CheckpointError: when ``source`` is not quantized or has scales of a cache, ``out`` cannot be written
            or ``max_memory`` is too little.
    """
    writing = Writing(
        overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists, progress=progress
    )
    writing.require_target(out)
    limits = Limits.default(workers, max_memory, device)
    data = Windows(given=calibration, samples=samples, length=length)
    plan = with_cache_scales(open_source(source), data, limits=limits, progress=progress is True)
    return writing.write(plan, out, "copying")


@by_signature
def distill_checkpoint(
    source: Place | str, quantized: Place | str, out: Place | str,
    calibration: Data,
    *, steps: int = 40, learning_rate: float = 0.01, seed: int = 0, samples: int | None = None,
    length: int | None = None, workers: int | None = None, max_memory: int | str | None = None,
    device: torch.device | str | None = None, overwrite: bool = False, restart: bool = False,
    break_lock: bool = False, if_exists: str = RESUME, spool: Path | str | None = None,
    progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Train the scales of a quantized checkpoint against the float model.

    This is ``zeropoint distill``. Both models run on the data, a block in memory at a time, and training
    brings the outputs of each quantized block closer to the float block's. Only values of scales change, in
    the dtype they are stored in: engines load the result as they load ``quantized``. Each block keeps the
    scales with the least error on held-out windows, which may be those it had.

    Args:
        source: the float checkpoint that was quantized: a directory, or the URL of one.
        quantized: the result, in a layout with tensors of scales.
        out: the output directory or URL.
        calibration: what the models run on, as for :func:`~zeropoint.quantize_checkpoint`.
        steps: training steps of each block, on two windows each.
        learning_rate: size of the first step, relative to each scale; it falls to zero.
        seed: for the order of windows.
        samples, length: of windows of ``calibration``, as for :func:`~zeropoint.quantize_checkpoint`.
        workers, max_memory, device, progress, overwrite, restart, break_lock, if_exists, spool: likewise.

    Returns:
        A summary of the run; its notes say how far blocks were off, and are.

    Raises:
        UnsupportedError: for a layout or schemes whose scales cannot be trained, and a model that is not run
            here.
        CheckpointError: when ``quantized`` is not quantized or of another model, ``out`` cannot be written,
            or ``max_memory`` is too little for a block.
        CalibrationError: when there are too few data.
        RangeError: for steps, a rate or a seed that make no sense.
    """
    if steps < 1 or not 0 < learning_rate < 1 or not 0 <= seed < 1 << 63:
        raise RangeError(
            f"{option('steps', steps)} must be at least 1, {option('learning_rate', learning_rate)} between "
            f"0 and 1, and {option('seed', seed)} not negative and below 2**63"
        )
    writing = Writing(
        overwrite=overwrite,
        restart=restart,
        break_lock=break_lock,
        if_exists=if_exists,
        spool=spool,
        progress=progress,
    )
    target = writing.require_target(out)
    asked = Distillation(
        source=open_source(source),
        quantized=open_source(quantized),
        given=Windows(given=calibration, samples=samples, length=length),
        rate=learning_rate,
        steps=TrainingSteps(count=steps, seed=seed),
    )
    plan = copying(asked, Limits.default(workers, max_memory, device))
    require_free(plan, target, overwrite=overwrite, spool=None if spool is None else Path(spool))
    with folder_for(target, spool, restart=restart) as folder:
        plan = distilled(asked, plan, folder, progress=progress is True)
        return writing.write(plan, out, "copying")


@by_signature
def gather_statistics(
    source: Place | str, file: Path | str, calibration: Data | None = None,
    *, samples: int | None = None, length: int | None = None, statistics: Paths = (), gram: bool = False,
    workers: int | None = None, max_memory: int | str | None = None,
    device: torch.device | str | None = None, executor: str = LOCAL, address: str | None = None,
    overwrite: bool = False, progress: Shown = False,
) -> StatisticsResult:  # fmt: skip
    """Write input statistics of a checkpoint's layers, for quantizing its weights.

    This is ``zeropoint statistics``. The float model runs once, a block in memory at a time. Of each input
    there are the sums of squares and, on request, the Gram matrix; layers that read one input share them.

    Args:
        source: a checkpoint's directory, or the URL of one.
        file: a new file: .safetensors, or with ``statistics`` an importance matrix of llama.cpp, .gguf or
            .dat.
        calibration: what the model runs on, as for :func:`~zeropoint.quantize_checkpoint`.
        samples, length: of windows of it, likewise.
        statistics: files of this function in its place, which are added in their order.
        gram: whether to sum Gram matrices, which method gptq takes.
        workers, max_memory, device, progress: as for :func:`~zeropoint.quantize_checkpoint`.
        executor, address: ``"local"``, or ``"ray"`` for a cluster, whose nodes observe 32 windows each and
            write next to ``file``; the first two limits are of a node.
        overwrite: replace an existing file of statistics.

    Returns:
        The sites with their readers and counts.

    Raises:
        OptionError: unless one of ``calibration`` and ``statistics`` is given, and where the name of ``file``
            says no kind of file.
        CalibrationError: for bad data, and for files of another checkpoint or of the same data.
        CheckpointError: for damaged files, when ``file`` exists or cannot be written, and for too little
            ``max_memory``.
        ExecutorError: where the cluster cannot be used.
        UnsupportedError: for a model that is not run here.
    """
    require_executor(executor, address)
    parts, path = paths(statistics), Path(file)
    require_one(calibration=calibration, statistics=parts or None)
    require_ending(path, of_files=bool(parts))
    data = requested_windows(calibration, samples, length)
    limits = Limits.default(workers, max_memory, device)
    limits.require_model(runs=data is not None)
    if data is None:
        if gram:
            raise OptionError(f"{option('gram', True)} is for a run of the model; leave it out")
        if executor == RAY:
            raise OptionError(f"{option('executor', RAY)} is for a run of the model; leave it out")
        return merged(open_source(source), parts, path, overwrite=overwrite)
    checkpoint, shown = open_source(source), progress is True
    if executor == LOCAL:
        return gathered(checkpoint, data, path, limits, gram=gram, overwrite=overwrite, progress=shown)
    if limits.on_gpu:
        raise OptionError(f"{option('executor', RAY)} runs models on CPUs; leave {option('device')} out")
    run = StatisticsRun(source=checkpoint.given, given=data, file=path, limits=limits, gram=gram)
    return gathered_on_cluster(checkpoint, run, address, overwrite=overwrite, progress=shown)
