"""Searches from Python: what the command line does, as functions of one line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoint import verbs
from ..checkpoint.choose.recipe import RecipeText
from ..checkpoint.choose.selection import Selection
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.verdicts import require_loadable
from ..checkpoint.read.source import open_source
from ..checkpoint.read.storage import Place
from ..checkpoint.run.loop import RunResult, run
from ..codecs.registry import DEFAULT, get_codec
from ..errors import RecipeError
from .budgets import Budget
from .evolution import by_evolution
from .inputs import inputs_by, with_ranges
from .searching import EQUAL, SearchResult, asked, search
from .weighing import weigh_by

__all__ = ["quantize_checkpoint", "search_checkpoint"]


def search_checkpoint(
    source: Place | str, budget: Budget | str, candidates: Iterable[str] | str | None = None,
    *, format: str = DEFAULT.name, method: str | None = None,  # noqa: A002 (the option's name)
    include: Iterable[str] = (), ignore: Iterable[str] = (), state: Path | str | None = None,
    importance: str = EQUAL, text: Path | str | None = None,
    calibration: torch.Tensor | Path | str | None = None, imatrix: Path | str | None = None,
    refine: int = 0, max_memory: int | None = None,
) -> SearchResult:  # fmt: skip
    """Choose a scheme for each layer, so that the least is lost within a budget.

    This is ``zeropoint search``. One pass over the weights measures each layer under every candidate; the
    choice has the least loss of all within the budget.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        budget: ``"4.5bpw"`` for bits of each weight, or ``"3.2G"`` for bytes of all files.
        candidates: presets, schemes and ``"keep"``; the usual ones of the format if None.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`.
        method: how weights are quantized, such as ``"mse"``; ``nearest`` if None.
        include: patterns of tensors to quantize although they are kept by default.
        ignore: patterns of tensors to keep.
        state: file in which the errors of layers are kept, for another budget; none if None.
        importance: how much layers matter: ``"equal"``; ``"linearity"``, for which noise in one layer at a
            time is run through the model; or ``"divergence"``, for which each candidate in one layer is.
        text: a file of text, or of token ids, that the model runs on; random tokens if None.
        calibration: text, token ids or ``"random"``, as for :func:`quantize_checkpoint`: the errors of
            columns count by the mean squares of their inputs on it, and so does the search of methods that
            take these, such as ``"mse_weighted"``.
        imatrix: an importance matrix of llama.cpp, in its place.
        refine: generations of an evolution by the measured KL divergence of the model.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        The choice of each layer, its loss, and the recipe, which ``quantize_checkpoint`` takes as ``to``.

    Raises:
        RangeError: for a budget that no choice meets.
        RecipeError: for no candidate, or one that is named twice.
        CheckpointError: for a source that is damaged or quantized already, and the state of another one.
        CalibrationError: for a text, calibration data or importance matrix that does not fit the model, and
            for a method that needs one of these.
        UnsupportedError: for a candidate that the layout does not hold.
    """
    limits = Limits.default(max_memory=max_memory)
    wanted = asked(
        budget, candidates, get_codec(format), method=method,
        selection=Selection(include=tuple(include), ignore=tuple(ignore)), limits=limits,
    )  # fmt: skip
    return search(
        open_source(source), replace(wanted, inputs=inputs_by(imatrix, calibration, limits)),
        state=None if state is None else Path(state), weigh=weigh_by(importance, text, limits),
        improve=by_evolution(text, limits, refine) if refine else None,
    )  # fmt: skip


def quantize_checkpoint(
    source: Place | str, out: Place | str, to: str | RecipeText | None = None,
    *, budget: Budget | str | None = None, candidates: Iterable[str] | str | None = None,
    format: str = DEFAULT.name, method: str | None = None,  # noqa: A002 (the option's name)
    include: Iterable[str] = (), ignore: Iterable[str] = (), overwrite: bool = False,
    calibration: torch.Tensor | Path | str | None = None, imatrix: Path | str | None = None,
    importance: str = EQUAL, text: Path | str | None = None, refine: int = 0,
    max_memory: int | None = None,
) -> RunResult:  # fmt: skip
    """Quantize a checkpoint into ``out``, a directory or URL, as ``zeropoint quantize`` does.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        out: the output directory or URL.
        to: a preset or scheme, or a recipe (``RecipeText.read(path)``, ``RecipeText.named("llama")``).
        budget: in its place, ``"4.5bpw"`` for bits of each weight, or ``"3.2G"`` for bytes of all files:
            each layer gets the scheme that :func:`search_checkpoint` finds.
        candidates: of the budget, as for :func:`search_checkpoint`.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`.
        method: how weights are quantized, such as ``"mse"``, in place of the method of a recipe; ``nearest``
            if neither says.
        include: patterns of tensors to quantize although they are kept by default.
        ignore: patterns of tensors to keep.
        overwrite: write into a directory that is not empty.
        calibration: for methods that need data, and for a budget: a file of text, token ids (windows,
            length), a .safetensors file that holds them, or ``"random"`` for random tokens. The model runs on
            it, a block in memory at a time.
        imatrix: an importance matrix of llama.cpp, .dat or GGUF, in its place; weights that it does not name
            have none.
        importance, text, refine: of the budget, as for :func:`search_checkpoint`.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        A summary of the run: tensors, bytes, errors and time.

    Raises:
        ZeropointError: as ``plan_checkpoint``, and as :func:`search_checkpoint` for a budget.
        RecipeError: unless one of ``to`` and ``budget`` is given, and for what goes with a budget alone.
        CalibrationError: when the method needs data and there are none, or too few, or it needs none.
        CheckpointError: when ``out`` cannot be written or no engine is known to load the result, which
            ``run`` of the plan writes.
    """
    of_budget = candidates is not None or text is not None or refine or importance != EQUAL
    if to is not None and budget is None and not of_budget:
        return verbs.quantize_checkpoint(
            source, out, to, format=format, method=method, include=include, ignore=ignore,
            overwrite=overwrite, calibration=calibration, imatrix=imatrix, max_memory=max_memory,
        )  # fmt: skip
    if to is not None or budget is None:
        raise RecipeError(
            "quantize_checkpoint takes a scheme or recipe (to=), or budget= with candidates=, importance=, "
            "text= and refine=; give one of them"
        )
    result = search_checkpoint(
        source, budget, candidates, format=format, method=method, include=include, ignore=ignore,
        calibration=calibration, imatrix=imatrix, importance=importance, text=text, refine=refine,
        max_memory=max_memory,
    )  # fmt: skip
    require_loadable(result.plan)
    return run(with_ranges(result.plan, calibration), out, overwrite=overwrite)
