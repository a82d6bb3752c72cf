"""Notebook display of each type, as nodes, and pictures of :meth:`plot`.

The first nodes are the text that ``repr`` has; what is folded below it adds to that. Ink and typeface are
the surrounding page's, which may be white or black.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import singledispatch
from importlib import resources

from ..bench.speeds import KernelSpeeds
from ..checkpoint.measure.tensor_error import TensorError
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.verdicts import verdicts
from ..checkpoint.run.loop import RunResult
from ..checkpoint.verify.compare import Comparison
from ..checkpoint.verify.inspection import Inspection
from ..checkpoint.verify.overview import Overview, sample_of
from ..checkpoint.verify.verification import Verification
from ..errors import UnsupportedError, size_of
from ..eval import Evaluation
from ..formats.catalog import format_name
from ..formats.spec import Format
from ..methods.scheme_comparison import HEADS, SchemeComparison
from ..models.conversion import Conversion
from ..params import QuantizationParams
from ..prepared import Plan
from ..schemes import Scheme
from ..search.search_result import SearchResult
from ..shown import Picture
from ..tensor import QuantizedTensor
from .charts import Spot, codes_chart, depth_chart, number_line, scatter, share_bars
from .formats import facts_in_words, facts_of_format, in_words, number_text, parts_of_scheme
from .measured import evaluation_nodes, evaluation_picture, search_nodes, search_picture
from .nodes import Cell, DataTable, FactList, Figure, Node, Part, Sentence, as_html, number_cell, row
from .page import CheckpointReport
from .sections import about, series_of
from .wording import decibels, shape, share, short_scheme

_ROWS = 200
"""Most rows of a table in a notebook."""
_PLAIN = 1 << 22
"""Values of a tensor up to which its codes are counted unasked."""
_LISTED_BITS = 5
_DRAWN_BITS = 8


def html_of(shown: object) -> str:
    """Return the notebook's HTML of an object."""
    style = resources.files(__package__).joinpath("notebook.css").read_text(encoding="utf-8")
    return f"<div class=zeropoint><style>{style}</style>{as_html(nodes_of(shown), level=4)}</div>"


@singledispatch
def nodes_of(shown: object) -> tuple[Node, ...]:
    """Return the nodes of an object: its ``repr``, then folded parts."""
    return (*map(Sentence, repr(shown).splitlines()), *_parts_of(shown))


@singledispatch
def _parts_of(_: object) -> Iterable[Node]:
    return ()


@singledispatch
def picture_of(shown: object) -> Picture:
    """Return a picture of an object; raises UnsupportedError without one."""
    raise UnsupportedError(
        f"plot() of a {type(shown).__name__} has nothing to draw; it has numbers as text alone"
    )


def _folded(title: str, heads: tuple[str, ...], rows: Iterable[tuple[Cell, ...]], many: int) -> Part:
    """Return a folded table of the first of ``many`` rows."""
    grid = DataTable(heads, tuple(itertools.islice(rows, _ROWS)))
    rest = (Sentence(f"and {many - _ROWS:,} more; to_dict() has all"),) if many > _ROWS else ()
    return Part(f"{title} ({many:,})", (grid, *rest), folded=True)


@_parts_of.register
def _(shown: QuantizedTensor) -> Iterator[Node]:
    facts: list[tuple[str, str]] = [
        ("scheme", str(shown.scheme)),
        ("shape", shape(shown.shape)),
        ("dtype", str(shown.dtype)),
        ("bytes", f"{shown.nbytes:,}"),
        ("smaller than it was", f"{shown.compression_ratio:.2f} times"),
        ("device", str(shown.device)),
        ("parameters", shown.params.numbers),
    ]
    small = 0 < math.prod(shown.shape) <= _PLAIN
    drawn = (Figure(picture_of(shown), caption="how often each code is used"),) if small else ()
    yield Part("Codes and parameters", (FactList(tuple(facts)), *drawn), folded=True)


@picture_of.register
def _(shown: QuantizedTensor) -> Picture:
    sample = sample_of(shown.to("cpu"))
    if sample is None:
        raise UnsupportedError("plot() of a tensor without finite values has nothing to draw; pass another")
    element = shown.scheme.element
    ends = number_text(element.min), number_text(element.max)
    return codes_chart(sample.bars, ends, label=f"codes of {shown.scheme}")


@_parts_of.register
def _(shown: QuantizationParams) -> Iterator[Node]:
    named = [*((f"scales{f' of level {n}' if n else ''}", each) for n, each in enumerate(shown.scales))]
    named += [("zero points", shown.zero_point)] if shown.zero_point is not None else []
    named += [(f"offsets of level {n}", each) for n, each in enumerate(shown.offsets)]
    rows = [
        row(
            name,
            shape(tuple(each.shape)),
            str(each.dtype),
            number_cell(float(each.double().min()), f"{float(each.double().min()):.4g}"),
            number_cell(float(each.double().max()), f"{float(each.double().max()):.4g}"),
        )
        for name, each in named
        if each.numel()
    ]
    heads = ("parameters", "shape", "dtype", "smallest", "largest")
    yield _folded("Tensors", heads, rows, len(rows))


@_parts_of.register
def _(shown: Scheme) -> Iterator[Node]:
    found = ((key.replace("_", " "), in_words(value)) for key, value in parts_of_scheme(shown).items())
    yield Part("Its parts", (FactList(tuple(found)),), folded=True)


@_parts_of.register
def _(shown: Format) -> Iterator[Node]:
    document = facts_of_format(format_name(shown), shown)
    facts = [*facts_in_words(document, shown)]
    yield Part("Its values", (FactList(tuple(facts)), *_values(shown)), folded=True)


def _values(shown: Format) -> Iterator[Node]:
    if shown.per_scale > 1 or shown.bits > _DRAWN_BITS:
        return
    if shown.bits <= _LISTED_BITS:
        each = (" ".join(map(number_text, shown.numbers(code))) for code in range(shown.code_count))
        yield FactList((("values of codes", ", ".join(each)),))
    yield Figure(picture_of(shown), caption="values on a line")


@picture_of.register
def _(shown: Format) -> Picture:
    if shown.per_scale > 1 or shown.bits > _DRAWN_BITS:
        raise UnsupportedError(
            f"plot() of {format_name(shown)} has {shown.code_count:,} codes, more than a line can show; "
            "plot formats of at most 8 bits"
        )
    values = [value for value in shown.all_values() if math.isfinite(value)]
    return number_line(values, label=f"values of {format_name(shown)}")


@_parts_of.register
def _(shown: Conversion) -> Iterator[Node]:
    rows = (
        row(
            each.name or "model",
            each.type,
            shape(each.shape),
            str(each.gives) if each.gives is not None else f"kept, {each.reason}",
            number_cell(each.nbytes[0], size_of(each.nbytes[0])),
            number_cell(each.nbytes[1], size_of(each.nbytes[1])),
            number_cell(None, "") if math.isnan(each.error) else number_cell(each.error, f"{each.error:.4f}"),
        )
        for each in shown.layers
    )
    heads = ("layer", "type", "shape", "becomes", "before", "now", "error")
    yield _folded("Layers", heads, rows, len(shown.layers))


@_parts_of.register
def _(shown: Plan) -> Iterator[Node]:
    facts = (
        ("guarantee", str(shown.guarantee)),
        ("workspace", f"{shown.workspace_bytes:,} bytes"),
        ("parameters", f"{shown.parameter_bytes:,} bytes"),
        ("allocates", shown.allocates or "nothing"),
    )
    yield Part("What it takes", (FactList(facts),), folded=True)


@nodes_of.register
def _(shown: SchemeComparison) -> tuple[Node, ...]:
    rows = tuple(
        row(each.cells[0], *(number_cell(None, cell) for cell in each.cells[1:])) for each in shown.schemes
    )
    drawn = Part("Error over bits", (Figure(picture_of(shown)),), folded=True)
    return (DataTable(HEADS, rows), drawn)


@picture_of.register
def _(shown: SchemeComparison) -> Picture:
    spots = [Spot(each.bits, each.error.relative, each.cells[0], n) for n, each in enumerate(shown.schemes)]
    return scatter(spots, axes=("bits of a value", "relative error"), label="error over bits")


@_parts_of.register
def _(shown: CheckpointPlan) -> Iterator[Node]:
    rows = (
        row(
            each.entry.name,
            "kept" if each.layer is None else short_scheme(str(each.layer)),
            each.reason,
            each.entry.dtype,
            shape(tuple(each.entry.shape)),
        )
        for each in shown.decisions
    )
    found = [*verdicts(shown)] if shown.weights else []
    engines = (row(each.engine, each.loads.value, each.reason) for each in found)
    yield _folded("Tensors", ("tensor", "becomes", "why", "dtype", "shape"), rows, len(shown.decisions))
    yield _folded("Engines", ("engine", "loads", "why"), engines, len(found))


def _errors(title: str, head: str, found: Iterable[tuple[str, TensorError]]) -> Part:
    """Return the errors of weights, the largest first."""
    known = sorted(found, key=lambda pair: -pair[1].relative)
    rows = (
        row(
            name,
            number_cell(error.relative, f"{error.relative:.4f}"),
            number_cell(error.sqnr_db, decibels(error.sqnr_db)),
            number_cell(error.largest, f"{error.largest:.3g}"),
            number_cell(error.clipped_share, share(error.clipped_share)),
        )
        for name, error in known
    )
    return _folded(title, (head, "rel.err", "SQNR dB", "largest", "clipped"), rows, len(known))


def _by_depth(found: Iterable[tuple[str, float | None]], what: str) -> Picture:
    series = series_of(found)
    if not series:
        raise UnsupportedError(f"plot() of this {what} has no errors by depth to draw; print it")
    return depth_chart(series, label="relative error")


@_parts_of.register
def _(shown: RunResult) -> Iterator[Node]:
    if shown.page is not None:
        yield Sentence(f"report: {shown.page}")
    yield _errors("Weights", "weight", ((o.weight.module, o.error) for o in shown.outcomes))


@picture_of.register
def _(shown: RunResult) -> Picture:
    return _by_depth(((o.weight.module, o.error.relative) for o in shown.outcomes), "run")


@_parts_of.register
def _(shown: Comparison) -> Iterator[Node]:
    yield _errors("Tensors", "tensor", ((c.pair.name, c.error) for c in shown.tensors.measured))


@picture_of.register
def _(shown: Comparison) -> Picture:
    return _by_depth(((c.pair.name, c.error.relative) for c in shown.tensors.measured), "comparison")


@_parts_of.register
def _(shown: Verification) -> Iterator[Node]:
    found = ((proof.layer.module, error) for proof, error in shown.layers.measured)
    yield _errors("Layers", "layer", found)


@_parts_of.register
def _(shown: Inspection) -> Iterator[Node]:
    dtypes = (
        row(each.dtype, each.tensors, each.values, number_cell(each.nbytes, size_of(each.nbytes)))
        for each in shown.dtypes
    )
    schemes = (
        row(
            short_scheme(each.scheme),
            each.method or "unknown",
            each.layers,
            each.values,
            number_cell(each.bits_per_value, f"{each.bits_per_value:.3f}"),
        )
        for each in shown.schemes
    )
    yield _folded("Dtypes", ("dtype", "tensors", "values", "size"), dtypes, len(shown.dtypes))
    heads = ("scheme", "method", "layers", "values", "bits")
    yield _folded("Schemes", heads, schemes, len(shown.schemes))


def _short(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes shortened for a notebook cell: first rows of tables."""
    for node in nodes:
        if isinstance(node, Part):
            yield replace(node, nodes=tuple(_short(node.nodes)))
        elif isinstance(node, DataTable) and len(node.rows) > _OF_PAGES:
            yield replace(node, rows=node.rows[:_OF_PAGES], sortable=False)
            yield Sentence(f"and {len(node.rows) - _OF_PAGES:,} more, on the page")
        else:
            yield node


_OF_PAGES = 20


@_parts_of.register
def _(shown: Overview) -> Iterator[Node]:
    yield Part("Report", tuple(_short(about(shown))), folded=True)


@picture_of.register
def _(shown: Overview) -> Picture:
    return _by_depth(((layer.module, layer.relative) for layer in shown.layers), "checkpoint")


@_parts_of.register
def _(shown: CheckpointReport) -> Iterator[Node]:
    yield Part("Report", tuple(_short(shown.nodes)), folded=True)


@picture_of.register
def _(shown: CheckpointReport) -> Picture:
    return _by_depth(((layer.module, layer.relative) for run in shown.runs for layer in run.layers), "report")


@_parts_of.register
def _(shown: SearchResult) -> Iterator[Node]:
    yield Part("What was found", tuple(_short(search_nodes(shown))), folded=True)


picture_of.register(SearchResult, search_picture)


@_parts_of.register
def _(shown: Evaluation) -> Iterator[Node]:
    yield Part("Statistics", tuple(evaluation_nodes(shown)), folded=True)


@picture_of.register
def _(shown: Evaluation) -> Picture:
    found = evaluation_picture(shown)
    if found is None:
        raise UnsupportedError("plot() of an evaluation needs two models or more to draw; evaluate another")
    return found


@picture_of.register
def _(shown: KernelSpeeds) -> Picture:
    rows = [(each.label, each.of_copy, f"{each.gigabytes:.1f} GB/s") for each in shown.speeds]
    return share_bars(rows, label=f"bandwidth of kernels in copies, threads: {shown.threads}")
