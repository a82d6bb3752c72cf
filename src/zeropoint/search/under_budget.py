"""The commands ``search`` and ``quantize`` as functions with equal options."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.call_options import (
    LOCAL,
    RESUME,
    AnyRecipe,
    Paths,
    Patterns,
    Shown,
    Writing,
    paths,
    planned,
    requested_windows,
    selection_of,
)
from ..checkpoint.model.tokens import Data
from ..checkpoint.plan.file import PlanFile
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.recipe import codec_for
from ..checkpoint.plan.selection import Selection
from ..checkpoint.plan.verdicts import require_loadable
from ..checkpoint.read.source import Source, open_source
from ..checkpoint.read.storage import Place
from ..checkpoint.run.executor import Executor
from ..checkpoint.run.loop import RunResult
from ..codecs.containers import CONTAINERS
from ..codecs.protocol import Codec
from ..errors import OptionError, all_of, option, require_one
from ..own_files import OwnFile
from ..progress import bars
from ..recipes import learns_from_data, one_name
from ..shown import PAGE, PICTURE, page_of_results
from ..signatures import by_signature
from . import deferred
from .budgets import Budget
from .inputs import InputSource, with_ranges
from .search_result import SearchResult
from .searching import EQUAL, RECIPE, SearchRequest, search, search_request

__all__ = ["quantize_checkpoint", "search_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budgeted:
    """Options of a search under a budget, with common defaults."""

    budget: Budget | str | None = None
    candidates: Iterable[str] | str | None = None
    state: Path | str | None = None
    importance: str = EQUAL
    text: Path | str | None = None
    refine: int = 0

    def __post_init__(self) -> None:
        unused = self.text is not None and self.importance == EQUAL and not self.refine
        plain = (self.candidates, self.state, self.text, self.refine, self.importance)
        if self.budget is None and plain != (None, None, None, 0, EQUAL):
            words = ("candidates", "state", "importance", "text", "refine")
            raise OptionError(
                f"{all_of(map(option, words))} go with {option('budget')}; add one, or leave them out"
            )
        if self.refine < 0:
            raise OptionError(f"{option('refine', self.refine)} must be at least 0")
        if unused:
            raise OptionError(
                f"{option('text')} is what the model runs on; add {option('importance', 'linearity')} or "
                f"divergence, or {option('refine', metavar='N')}"
            )

    @property
    def runs_model(self) -> bool:
        """Whether the model runs to weigh layers, or choices."""
        return self.importance != EQUAL or self.refine > 0

    def state_of(self, out: Path | None) -> Path:
        """Return the state's file, next to the output by default."""
        if self.state is not None:
            return Path(self.state)
        assert out is not None
        return out.with_name(f"{out.name}.search")

    def request(
        self, codec: Codec, method: str | None, selection: Selection, limits: Limits
    ) -> SearchRequest:
        """Return the request of a search for these options of weights."""
        assert self.budget is not None
        return search_request(
            self.budget, self.candidates, codec, method=method, selection=selection, limits=limits
        )

    def search(
        self, source: Source, request: SearchRequest, *, out: Path | None, page: OwnFile | None = None,
        progress: Shown,
    ) -> SearchResult:  # fmt: skip
        """Return the best choice.

        out: where the state lies next to, unless it has a place of its own. page: takes the report.
        """
        limits = request.limits
        assert limits is not None
        found = search(
            source,
            request,
            bar=bars(progress),
            state=None if out is None and self.state is None else self.state_of(out),
            weigh=deferred.weigh_by(self.importance, self.text, limits),
            improve=deferred.by_evolution(self.text, limits, self.refine) if self.refine else None,
        )
        if page is not None:
            page.write([page_of_results(search=found)], overwrite=True)
        return found


@by_signature
def search_checkpoint(
    source: Place | str, budget: Budget | str, candidates: Iterable[str] | str | None = None,
    *, out: Path | str | None = None, state: Path | str | None = None,
    format: str | None = None,  # noqa: A002 (the option's name)
    method: str | None = None, importance: str = EQUAL, text: Path | str | None = None,
    calibration: Data | None = None, samples: int | None = None,
    length: int | None = None, imatrix: Path | str | None = None, statistics: Paths = (), refine: int = 0,
    include: Patterns = (), ignore: Patterns = (), fit: bool = False, dequantize_first: bool = False,
    workers: int | None = None, max_memory: int | str | None = None,
    device: torch.device | str | None = None, overwrite: bool = False,
    plot: Path | str | None = None, report: bool = True, progress: Shown = False,
) -> SearchResult:  # fmt: skip
    """Choose a scheme for each layer, of least loss within a budget.

    This is ``zeropoint search``. One pass over the weights measures each layer under every candidate; the
    choice has the least loss of all within the budget.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        budget: ``"4.5bpw"`` for bits of each weight, or ``"3.2G"`` for bytes of all files.
        candidates: presets, schemes and ``"keep"``; the usual ones of the format if None.
        out: a file for the recipe.
        state: file in which the errors of layers are kept, for another budget; if None, the file next to
            ``out`` with ``.search`` behind its name, or none.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`; compressed-tensors if None.
        method: how weights are quantized, such as ``"mse"``; ``nearest`` if None.
        importance: how much layers matter: ``"equal"``; ``"linearity"``, for which noise in one layer at a
            time is run through the model; or ``"divergence"``, for which each candidate in one layer is.
        text: a file of text, or of token ids, that the model runs on; random tokens if None.
        calibration: text, token ids, ``"random"`` or ``"self"``, as for :func:`quantize_checkpoint`: errors
            of columns count by the mean squares of their inputs on it, and so does the search of methods that
            take these, such as ``"mse_weighted"``.
        samples, length: of windows of it, as there.
        imatrix: an importance matrix of llama.cpp, in its place.
        statistics: files of :func:`~zeropoint.gather_statistics` in its place, added where there are several.
        refine: generations of an evolutionary search by the measured KL divergence of the model.
        include, ignore, dequantize_first, workers, max_memory: as for :func:`quantize_checkpoint`.
        fit, device, progress: likewise; the recipe of a search with ``fit`` is for ``quantize_checkpoint``
            with it, too.
        overwrite: replace an existing recipe and plot.
        plot: a file for a picture of loss over bits, in SVG.
        report: whether to write a page next to ``out``, with ``.html`` behind its name.

    Returns:
        The choice of each layer, its loss, and the recipe, which ``quantize_checkpoint`` takes as ``recipe``.

    Raises:
        RangeError: for a budget that no choice meets.
        RecipeError: for no candidate, or one that is named twice.
        CheckpointError: for a source that is damaged or quantized already, the state of another one, and a
            file that cannot be written.
        OptionError: for a text that nothing runs on, and where the recipe exists without ``overwrite``.
        CalibrationError: for a text, calibration data or importance matrix that does not fit the model, and
            for a method that needs one of these.
        UnsupportedError: for a candidate that the layout does not hold.
    """
    what = _Budgeted(
        budget=budget, candidates=candidates, state=state, importance=importance, text=text, refine=refine
    )
    data = requested_windows(calibration, samples, length)
    inputs = InputSource(calibration=data, imatrix=imatrix, statistics=paths(statistics))
    page = None if out is None or not report else Path(out).with_name(f"{Path(out).name}.html")
    _require_apart(out=out, plot=plot, state=state, report=page)
    limits = Limits.default(workers, max_memory, device)
    limits.require_model(runs=data is not None or what.runs_model)
    opened, written = open_source(source), None if out is None else Path(out)
    drawn = None if plot is None else OwnFile(Path(plot), PICTURE, opened.places)
    recipe = None if written is None else OwnFile(written, RECIPE, opened.places)
    paged = None if page is None else OwnFile(page, PAGE, opened.places)
    # The recipe comes last: where it is there already, so is all else.
    last = plot if written is None else written
    if last is not None and os.path.lexists(last) and not overwrite:
        raise OptionError(
            f"{str(last)!r} exists; add {option('overwrite', True)} to replace it, or name a new file"
        )
    for file in filter(None, (drawn, paged, recipe)):
        file.require_free(overwrite=True)
    selection = selection_of(include, ignore, fit=fit, dequantize_first=dequantize_first)
    request = what.request(codec_for(format), method, selection, limits)
    request = replace(request, inputs=inputs.reader(limits, progress=progress is True))
    result = what.search(opened, request, out=written, page=paged, progress=progress)
    if drawn is not None:
        drawn.write([result.plot().svg.encode()], overwrite=overwrite)
    if recipe is not None:
        recipe.write([f"{result.recipe.text}\n".encode()], overwrite=overwrite)
    return result


def _require_apart(**files: Path | str | None) -> None:
    """Raise OptionError where two options name one file."""
    named = [(name, Path(file)) for name, file in files.items() if file is not None]
    for (one, file), (other, same) in itertools.combinations(named, 2):
        if file.absolute() == same.absolute():
            raise OptionError(
                f"{option(one)} and {option(other)} both name {str(same)!r}; give each a file of its own"
            )


@by_signature
def quantize_checkpoint(
    source: Place | str, out: Place | str, to: AnyRecipe | None = None,
    *, recipe: AnyRecipe | None = None, plan: PlanFile | Path | str | None = None,
    budget: Budget | str | None = None, candidates: Iterable[str] | str | None = None,
    state: Path | str | None = None, importance: str = EQUAL, text: Path | str | None = None,
    refine: int = 0, format: str | None = None, method: str | None = None,  # noqa: A002 (the option's name)
    quality: str | None = None, calibration: Data | None = None,
    samples: int | None = None, length: int | None = None, input_range: str | None = None,
    imatrix: Path | str | None = None, statistics: Paths = (),
    include: Patterns = (), ignore: Patterns = (), strict: bool = False, fit: bool = False,
    kv_scales: bool = False, force: bool = False, dequantize_first: bool = False,
    dequantize_kept: bool = False, workers: int | None = None, max_memory: int | str | None = None,
    device: torch.device | str | None = None, overwrite: bool = False, restart: bool = False,
    break_lock: bool = False, if_exists: str = RESUME, executor: str | Executor = LOCAL,
    address: str | None = None,
    spool: Path | str | None = None, report: bool = True, progress: Shown = False,
) -> RunResult:  # fmt: skip
    """Quantize a checkpoint into ``out``, as ``zeropoint quantize`` does.

    Args:
        source: a directory, one .safetensors, .gguf or .onnx file, or the URL of any of these.
        out: the output directory or URL.
        to: a preset or scheme, such as ``"w4a16"``.
        recipe: in its place, rules: a file of YAML, its text, a :class:`~zeropoint.recipes.Recipe`, the
            recipe of a search, or the name of a family, such as ``"llama"``.
        plan: in its place, a file of :func:`~zeropoint.plan_checkpoint`, which has its own recipe, format
            and patterns.
        budget: in its place, ``"4.5bpw"`` for bits of each weight, or ``"3.2G"`` for bytes of all files:
            each layer gets the scheme that :func:`search_checkpoint` finds.
        candidates, state, importance, text, refine: of the budget, as for :func:`search_checkpoint`; the
            state lies next to a local output if None.
        format: the file layout, a name of :mod:`zeropoint.codecs.registry`; the only one with the scheme,
            or compressed-tensors, if None.
        method: how weights are quantized, such as ``"mse"``, in place of the method of a recipe; ``nearest``
            if neither says.
        quality: in its place, ``"fast"``, ``"good"`` or ``"best"``: picks the method for each scheme, the
            last two with ``calibration`` (:data:`zeropoint.recipes.quality.LADDER`).
        calibration: for methods that need data, and for a budget: a file of text, token ids (windows,
            length) or (tokens,), a .safetensors file that holds them, ``"random"`` for random tokens, or
            ``"self"`` for tokens that the model generates; or inputs such as ``pixel_values`` by the names of
            the arguments of the model's ``forward``, (samples, ...) each, in a mapping or a .safetensors
            file. The model runs on it, a block in memory at a time.
        samples: windows of it; at most 128 of a file, 8 random ones and 32 of the model's own if None. Or
            samples of inputs; all if None.
        length: tokens of a window; 512, or what the model takes at most, if None.
        input_range: how static inputs get their range from ``calibration``: a name of
            :func:`~zeropoint.stats.statistic_named`; the extremes if None.
        imatrix: an importance matrix of llama.cpp, .dat or GGUF, in its place; weights that it does not name
            have none.
        statistics: files of :func:`~zeropoint.gather_statistics` in its place, added where there are several:
            weights are solved from their Gram matrices without running the model.
        include: patterns of tensors to quantize although they are kept by default: globs, or ``re:`` and a
            regular expression.
        ignore: patterns of tensors to keep.
        strict: whether a linear weight that stays although no pattern says so is an error.
        fit: give weights whose inputs are no multiple of the group a smaller one, half or a quarter of it.
        kv_scales: write scales for a float8 cache of keys and values, too, which the same run of the model on
            ``calibration`` gives: of the weights as they are solved, or of the float model where no method
            solves any; see :func:`~zeropoint.add_kv_scales`.
        force: write it even if no engine is known to load the result.
        dequantize_first: dequantize layers that are quantized already, then quantize them.
        dequantize_kept: write quantized layers that are not requantized as floats, too.
        workers: threads; one for each core if None.
        max_memory: most memory of the process, as bytes or a text such as ``"1G"``; 2 GiB if None.
        device: where weights are quantized, and the model runs on ``calibration``: the processor if None, or
            ``"cuda"``, which takes the memory of a block at a time there. Kernels give the same bytes; sums
            of torch are rounded otherwise, so that solved codes differ in few places.
        overwrite: write into a directory that is not empty.
        restart: discard an interrupted run in ``out`` and start over; it is resumed otherwise.
        break_lock: remove the lock of a run that has died.
        if_exists: what to do where ``out`` holds something: ``"resume"`` an interrupted run of this call, and
            compare a finished one with what it would write; ``"skip"`` leaves a finished one as it is, by its
            manifest, so that the result has no errors, and resumes an interrupted one; ``"error"`` raises.
        executor: what does the work: ``"local"`` for the threads of this machine, or ``"ray"``.
        address: of the Ray cluster, HOST:PORT; the one that Ray finds or starts if None.
        spool: scratch directory for uploads, for an output behind a URL.
        report: whether to write a page about the result, ``zeropoint_report.html``, next to the manifest, and
            of a budget one about the search next to its state, with ``.html`` behind its name.
        progress: whether to show bars on stderr, or a function that is called with bytes done, bytes in all
            and a tensor's name.

    Returns:
        A summary of the run: tensors, bytes, errors and time.

    Raises:
        ZeropointError: as :func:`~zeropoint.plan_checkpoint`, and as :func:`search_checkpoint` for a budget.
        OptionError: unless one of ``to``, ``recipe``, ``plan`` and ``budget`` is given, and for options that
            exclude each other or mean nothing for such an output.
        CalibrationError: when the method needs data and there are none, or too few, or it needs none.
        CheckpointError: when ``out`` cannot be written or no engine is known to load the result, unless
            ``force`` is given.
    """
    require_one(to=to, recipe=recipe, plan=plan, budget=budget)
    _require_schemes(quality, to, recipe)
    method = one_name(method, quality, has_data=calibration is not None)
    what = _Budgeted(
        budget=budget, candidates=candidates, state=state, importance=importance, text=text, refine=refine
    )
    data, files = requested_windows(calibration, samples, length), paths(statistics)
    inputs = InputSource(calibration=data, imatrix=imatrix, statistics=files, input_range=input_range)
    writing = Writing(
        overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists,
        executor=executor, address=address, spool=spool, report=report, progress=progress,
    )  # fmt: skip
    target, limits = writing.require_target(out), Limits.default(workers, max_memory, device)
    limits.require_model(runs=(runs := data is not None or what.runs_model) or budget is None)
    selection = selection_of(
        include,
        ignore,
        strict=strict,
        fit=fit,
        kv_scales=kv_scales,
        dequantize_first=dequantize_first,
        dequantize_kept=dequantize_kept,
    )
    inputs.require_keys(selection)
    learns = runs and (budget is not None or learns_from_data(method))
    with _with_graph(open_source(source), codec_for(format, to), target, spool, limits, learns) as opened:
        if budget is None:
            made = planned(
                opened, to, recipe=recipe, plan=plan, format=format, method=method, selection=selection,
                limits=limits,
            )  # fmt: skip
            inputs.require_static(made)
            inputs.require_keys(made.selection)
        else:
            request = what.request(codec_for(format), method, selection, limits)
            request = replace(request, inputs=inputs.reader(limits, progress=progress is True))
            local = target if isinstance(target, Path) else None
            page = _page_of_search(what, target) if report else None
            made = what.search(opened, request, out=local, page=page, progress=progress).plan
        if not force:
            require_loadable(made)
        if budget is not None:
            made = with_ranges(made, data, ranges=input_range, progress=progress is True)
        elif inputs.given:
            return deferred.written_by_data(made, inputs, out, writing)
        return writing.write(made, out, "quantizing")


def _with_graph(
    source: Source, codec: Codec, out: Place, spool: Path | str | None, limits: Limits, learns: bool
) -> AbstractContextManager[Source]:
    """Return a context with a writable source: itself, or an ONNX export."""
    if not CONTAINERS[codec.container].has_graph or source.graph or source.config is None:
        return nullcontext(source)
    return deferred.exported_graph(source, codec, out, spool, limits, learns=learns)


def _require_schemes(quality: str | None, *schemes: AnyRecipe | None) -> None:
    """Raise OptionError for a quality without schemes to pick methods for."""
    if quality is not None and schemes == (None, None):
        words = f"{option('to', metavar='SCHEME')} or {option('recipe', metavar='FILE')}"
        raise OptionError(f"{option('quality', quality)} picks methods for {words}; leave it out")


def _page_of_search(what: _Budgeted, target: Place) -> OwnFile | None:
    """Return the report page next to a search's state, or None."""
    if not isinstance(target, Path) and what.state is None:
        return None
    state = what.state_of(target if isinstance(target, Path) else None)
    page = OwnFile(state.with_name(f"{state.name}.html"), PAGE)
    page.require_free(overwrite=True)
    return page
