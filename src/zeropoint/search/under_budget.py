"""Searches from Python: what the command line does, as functions of one line each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..checkpoint.choose.selection import Selection
from ..checkpoint.plan.limits import Limits
from ..checkpoint.read.source import open_source
from ..checkpoint.read.storage import Place
from ..codecs.registry import DEFAULT, get_codec
from .budgets import Budget
from .searching import SearchResult, asked, search

__all__ = ["search_checkpoint"]


def search_checkpoint(
    source: Place | str, budget: Budget | str, candidates: Iterable[str] | str | None = None,
    *, format: str = DEFAULT.name, method: str | None = None,  # noqa: A002 (the option's name)
    include: Iterable[str] = (), ignore: Iterable[str] = (), state: Path | str | None = None,
    max_memory: int | None = None,
) -> SearchResult:  # fmt: skip
    """Choose a scheme for each layer, so that the least is lost within a budget.

    This is ``zeropoint search``. One pass over the weights measures each layer under every candidate; the
    choice has the least loss of all within the budget.

    Args:
        source: a checkpoint's directory, one .safetensors file, or the URL of either.
        budget: ``"4.5bpw"`` for bits of each weight, or ``"3.2G"`` for bytes of all files.
        candidates: presets, schemes and ``"keep"``; the usual ones of the format if None.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`.
        method: how weights are quantized, such as ``"mse"``; ``nearest`` if None.
        include: patterns of tensors to quantize although they are kept by default.
        ignore: patterns of tensors to keep.
        state: file in which the errors of layers are kept, for another budget; none if None.
        max_memory: bytes that the process may take; 2 GiB if None.

    Returns:
        The choice of each layer, its loss, and the recipe, which ``quantize_checkpoint`` takes as ``to``.

    Raises:
        RangeError: for a budget that no choice meets.
        RecipeError: for no candidate, or one that is named twice.
        CheckpointError: for a source that is damaged or quantized already, and the state of another one.
        UnsupportedError: for a candidate that the layout does not hold.
    """
    wanted = asked(
        budget, candidates, get_codec(format), method=method,
        selection=Selection(include=tuple(include), ignore=tuple(ignore)),
        limits=Limits.default(max_memory=max_memory),
    )  # fmt: skip
    return search(open_source(source), wanted, state=None if state is None else Path(state))
