"""Parts of a report about a checkpoint, as nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..checkpoint.run.advice import ExpertTokens, tokens_by_layer
from ..checkpoint.verify.overview import LayerFacts, Overview
from ..errors import count, size_of
from .charts import Area, depth_chart, histogram, treemap
from .nodes import Cell, DataTable, FactList, Figure, FigureRow, Node, Part, Sentence, number_cell, row
from .wording import decibels, pattern, shape, share, short_scheme

ROWS = 4000
"""Most layers that the table has, the largest errors first; the JSON has all."""
_WORST, _LINES = 8, 12
_GAP = 1.5
"""Ratio of held-out to calibration loss above which more data are recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers whose names differ in numbers only.

    layers: how many. relative: root mean square of their relative errors, each as often as it has values, and
    worst: the largest; None where no manifest has them.
    """

    name: str
    layers: int
    values: int
    float_bytes: int
    nbytes: int
    relative: float | None
    worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """Unquantized tensors of one kind, and the manifest's reason, if any."""

    name: str
    dtype: str
    reason: str | None
    tensors: int
    nbytes: int


def kinds_of(layers: Sequence[LayerFacts]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, largest error first."""
    groups: dict[str, list[LayerFacts]] = {}
    for layer in layers:
        groups.setdefault(kind_of(layer.module), []).append(layer)
    found = [_kind(name, group) for name, group in groups.items()]
    return tuple(sorted(found, key=lambda kind: -1.0 if kind.relative is None else kind.relative)[::-1])


def _kind(name: str, group: Sequence[LayerFacts]) -> LayerKind:
    known = [(layer.relative, layer.values) for layer in group if layer.relative is not None]
    total = sum(values for _, values in known)
    squares = math.fsum(error * error * values for error, values in known)
    return LayerKind(
        name=name,
        layers=len(group),
        values=sum(layer.values for layer in group),
        float_bytes=sum(layer.float_bytes for layer in group),
        nbytes=sum(layer.nbytes for layer in group),
        relative=math.sqrt(squares / total) if total else None,
        worst=max((error for error, _ in known), default=None),
    )


def stays_of(run: Overview) -> tuple[Stays, ...]:
    """Return unquantized tensors by kind and reason, largest first."""
    groups: dict[tuple[str, str, str | None], list[int]] = {}
    for each in run.kept:
        groups.setdefault((pattern(each.name), each.dtype, each.reason), []).append(each.nbytes)
    found = (
        Stays(name=name, dtype=dtype, reason=reason, tensors=len(sizes), nbytes=sum(sizes))
        for (name, dtype, reason), sizes in groups.items()
    )
    return tuple(sorted(found, key=lambda each: -each.nbytes))


def experts_of(layers: Sequence[LayerFacts]) -> tuple[ExpertTokens, ...]:
    """Return the calibration tokens of experts, of each layer that has some."""
    own = ((layer.module, layer.loss.get("own")) for layer in layers)
    return tokens_by_layer((module, int(tokens)) for module, tokens in own if tokens is not None)


def kind_of(module: str) -> str:
    """Return the part of a name that layers of one kind share.

    >>> kind_of("model.layers.3.mlp.down_proj")
    'mlp.down_proj'
    """
    return pattern(module).rsplit("*.", 1)[-1]


def about(run: Overview) -> Iterator[Node]:
    """Yield the nodes about one checkpoint."""
    yield cards(run)
    yield from map(Sentence, run.inspection.problems)
    yield from worst_part(run.layers)
    yield from depth_part(run.layers)
    yield from _kinds(run.layers)
    yield from _losses(run.layers)
    yield from _experts(run.layers)
    yield from _stays(run)
    yield from _sizes(run)
    yield from _codes(run.layers)
    yield from layers_part((run,))
    yield _made_of(run)


def side_by_side(runs: Sequence[Overview]) -> Iterator[Node]:
    """Yield the nodes about several checkpoints."""
    rows = tuple(
        row(
            run.name,
            number_cell(run.inspection.nbytes, size_of(run.inspection.nbytes)),
            number_cell(run.inspection.bits_per_value, _bits(run.inspection.bits_per_value)),
            number_cell(run.relative, relative(run.relative)),
            len(run.layers),
            ", ".join(dict.fromkeys(short_scheme(each.scheme) for each in run.layers)) or "floats",
        )
        for run in runs
    )
    heads = ("checkpoint", "size", "bits a value", "relative error", "quantized layers", "schemes")
    yield Part("Side by side", (DataTable(heads, rows),))
    yield from layers_part(runs)
    for run in runs:
        yield Part(run.name, tuple(about(run)), folded=True, long=True)


def cards(run: Overview) -> FactList:
    """Return size, bits, error, and bytes of tensors that are not quantized."""
    found, kept = run.inspection, sum(each.nbytes for each in run.kept)
    values, nbytes = (sum(getattr(layer, each) for layer in run.layers) for each in ("values", "nbytes"))
    return FactList(
        (
            (f"from {size_of(run.float_bytes)} as floats", size_of(found.nbytes)),
            ("bits a value of quantized layers", _bits(8 * nbytes / values if values else None)),
            ("bits a value of the model", _bits(found.bits_per_value)),
            ("relative error of quantized layers (rms)", relative(run.relative)),
            ("quantized layers", f"{len(run.layers):,}"),
            (f"in {count(len(run.kept), 'tensor')} that stay as they are", size_of(kept)),
        ),
        large=True,
    )


def worst_part(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield the layers with the largest errors, reasons, and keeping costs."""
    known = sorted((e, n) for n, layer in enumerate(layers) if (e := layer.relative))[::-1][:_WORST]
    rows = tuple(
        row(
            layer.module,
            number_cell(layer.relative, relative(layer.relative)),
            _seen(layer),
            number_cell(layer.keeping_bytes, _more(layer.keeping_bytes)),
        )
        for layer in (layers[n] for _, n in known)
    )
    if rows:
        how = "To keep one as floats, ignore it in the command, or give it a rule of the recipe."
        heads = ("layer", "relative error", "what is seen", "keeping it costs")
        yield Part("The worst layers", (Sentence(how, quiet=True), DataTable(heads, rows)))


def _more(nbytes: int) -> str:
    return f"{size_of(abs(nbytes))}{' less' if nbytes < 0 else ''}"


def _seen(layer: LayerFacts) -> str:
    """Return the reasons of an error, or facts of a sample."""
    if layer.reasons or layer.sample is None:
        return "; ".join(layer.reasons)
    return f"nothing unusual: largest value {layer.sample.peak:.1f} times the rms"


def depth_part(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield the error of each layer kind over the depth."""
    series = series_of((layer.module, layer.relative) for layer in layers)
    if series:
        picture = depth_chart(series, label="relative error")
        yield Part("Error by depth", (Figure(picture, legend=tuple(series)),), long=True)


def _kinds(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield sizes and errors of each kind of layer."""
    rows = tuple(
        row(
            kind.name,
            kind.layers,
            number_cell(kind.nbytes, size_of(kind.nbytes)),
            number_cell(8 * kind.nbytes / max(1, kind.values), _bits(8 * kind.nbytes / max(1, kind.values))),
            number_cell(kind.relative, relative(kind.relative)),
            number_cell(kind.worst, relative(kind.worst)),
        )
        for kind in kinds_of(layers)
    )
    if rows:
        heads = ("kind of layer", "layers", "size", "bits a value", "relative error", "largest")
        yield Part("Error by kind of layer", (DataTable(heads, rows[:ROWS]),))


def _losses(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield output losses on calibration and held-out data, and overfitting."""
    seen, held = (
        series_of((layer.module, layer.loss.get(key)) for layer in layers) for key in ("seen", "held_out")
    )
    if not seen:
        return
    what = (
        "The share of their squares that the outputs of layers are off by, on data that were learned from "
        "and, dashed, on held-out ones. Where these do much worse, more data help."
    )
    picture = depth_chart(seen, held, label="loss of outputs")
    apart = [
        (held_out / own, layer)
        for layer in layers
        if (own := layer.loss.get("seen")) and (held_out := layer.loss.get("held_out")) is not None
    ]
    far = [layer for times, layer in sorted(apart, key=lambda pair: -pair[0]) if times > _GAP]
    after: list[Node] = []
    if held:
        said = (
            f"Held-out loss is more than {_GAP} times that of calibration data in {len(far):,} of "
            f"{count(len(apart), 'layer')}."
        )
        rows = tuple(
            row(
                layer.module,
                _number(layer.loss.get("seen")),
                _number(layer.loss.get("held_out")),
                _number(layer.loss.get("vectors"), "{:,.0f}"),
            )
            for layer in far[:_WORST]
        )
        heads = ("layer", "on calibration data", "on held-out data", "inputs")
        after = [Sentence(said), *([DataTable(heads, rows)] if rows else ())]
    yield Part("Loss of outputs", (Sentence(what, quiet=True), Figure(picture, legend=tuple(seen)), *after))


def _number(value: float | None, spelled: str = "{:.4g}") -> Cell:
    return number_cell(value, "" if value is None else spelled.format(value))


def _experts(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield the calibration tokens per expert of each layer."""
    rows = tuple(
        row(
            each.layer,
            *(
                number_cell(n, f"{n:,.12g}")
                for n in (each.experts, each.fewest, each.median, each.most, each.without)
            ),
        )
        for each in experts_of(layers)
    )
    if rows:
        heads = ("tokens per expert", "experts", "fewest", "median", "most", "none")
        yield Part("Tokens per expert", (DataTable(heads, rows),))


def series_of(pairs: Iterable[tuple[str, float | None]]) -> dict[str, list[tuple[int, float]]]:
    """Return values by layer kind over depth.

    Layers without a number in their name have none. Several values of one depth, such as experts',
    are their mean.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for module, value in pairs:
        depth = next((int(part) for part in module.split(".") if part.isdecimal()), None)
        if value is not None and depth is not None:
            found.setdefault(kind_of(module), {}).setdefault(depth, []).append(value)
    return {
        kind: [(depth, sum(values) / len(values)) for depth, values in sorted(line.items())]
        for kind, line in list(found.items())[:_LINES]
    }


def _stays(run: Overview) -> Iterator[Node]:
    """Yield unquantized tensors: bytes by reason, then by kind."""
    found = stays_of(run)
    if not found:
        return
    reasons: dict[str, tuple[int, int]] = {}
    for each in found:
        tensors, nbytes = reasons.get(each.reason or _UNKNOWN, (0, 0))
        reasons[each.reason or _UNKNOWN] = tensors + each.tensors, nbytes + each.nbytes
    why = tuple(
        row(reason, tensors, number_cell(nbytes, size_of(nbytes)))
        for reason, (tensors, nbytes) in sorted(reasons.items(), key=lambda item: -item[1][1])
    )
    rows = tuple(
        row(
            each.name,
            each.dtype,
            each.reason or _UNKNOWN,
            each.tensors,
            number_cell(each.nbytes, size_of(each.nbytes)),
        )
        for each in found[:ROWS]
    )
    every = DataTable(("tensors", "dtype", "why", "how many", "size"), rows, sortable=True)
    each_kind = Part("Each kind of tensor", (every,), folded=True, long=True)
    yield Part("What stays as it is", (DataTable(("why", "tensors", "size"), why), each_kind))


_UNKNOWN = "not known: no manifest says why"


def _sizes(run: Overview) -> Iterator[Node]:
    """Yield the bytes of all floats and of the files, as areas."""
    every = [(layer.module, layer.float_bytes, layer.nbytes) for layer in run.layers]
    every += [(kept.name.removesuffix(".weight"), kept.nbytes, kept.nbytes) for kept in run.kept]
    before, after = Counter[str](), Counter[str]()
    for name, floats, nbytes in every:
        before[kind_of(name)] += floats
        after[kind_of(name)] += nbytes
    if not before:
        return
    color = {kind: n for n, kind in enumerate(sorted(before, key=lambda kind: -before[kind]))}
    smaller = min(1.0, (sum(after.values()) / max(1.0, sum(before.values()))) ** 0.5)
    figures = []
    for title, sizes, scale in (("as floats", before, 1.0), ("in these files", after, smaller)):
        areas = [
            Area(kind, size, color[kind], f"{kind}: {size_of(int(size))}") for kind, size in sizes.items()
        ]
        picture = treemap(areas, scale=scale, label=f"bytes {title}")
        figures.append(Figure(picture, caption=f"{title}: {size_of(int(sum(sizes.values())))}"))
    yield Part("Where the bytes are", (FigureRow(tuple(figures)),), long=True)


def _codes(layers: Sequence[LayerFacts]) -> Iterator[Node]:
    """Yield histograms of codes and scales, one layer per kind and scheme."""
    first: dict[tuple[str, str], LayerFacts] = {}
    for layer in layers:
        if layer.sample is not None:
            first.setdefault((kind_of(layer.module), layer.scheme), layer)
    rows = tuple(
        row(
            layer.module,
            short_scheme(layer.scheme),
            Cell("", picture=histogram(own.bars, label="codes")),
            number_cell(own.ends, share(own.ends)),
            number_cell(own.zeros, share(own.zeros)),
            number_cell(own.peak, f"{own.peak:.1f}"),
            Cell("", picture=histogram(own.scales, label="scales") if own.scales else None),
            number_cell(own.octaves, f"{own.octaves:.1f}"),
        )
        for layer in list(first.values())[:ROWS]
        if (own := layer.sample) is not None
    )
    if not rows:
        return
    what = (
        "Of some rows of one layer of each kind: how often each code is used, from the lowest to the "
        "highest; how often each range of block scales, by their logarithm, and how many octaves these span."
    )
    heads = ("layer", "scheme", "codes", "at the ends", "zeros", "largest / rms", "scales", "octaves")
    yield Part("Codes and scales", (Sentence(what, quiet=True), DataTable(heads, rows)), long=True)


def layers_part(runs: Sequence[Overview]) -> Iterator[Node]:
    """Yield the table of layers, with an error column per checkpoint."""
    runs = [run for run in runs if run.layers]
    by_name: dict[str, list[LayerFacts | None]] = {}
    for n, run in enumerate(runs):
        for layer in run.layers:
            by_name.setdefault(layer.module, [None] * len(runs))[n] = layer
    if not by_name:
        return
    rows = sorted(by_name.items(), key=lambda item: -max(_known(layer) for layer in item[1]))
    cut: tuple[Node, ...] = ()
    if len(rows) > ROWS:
        cut = (Sentence(f"{ROWS:,} of {len(rows):,}, those of the largest error; the JSON here has all."),)
        rows = rows[:ROWS]
    if len(runs) > 1:
        heads: tuple[str, ...] = ("layer", *(f"{run.name}: error" for run in runs))
        cells: Iterable[tuple[Cell, ...]] = (
            row(module, *(_error_cell(layer) for layer in found)) for module, found in rows
        )
    else:
        heads = (
            "layer", "scheme", "method", "shape", "size", "bits a value", "relative error", "SQNR dB",
            "clipped", "what is seen",
        )  # fmt: skip
        cells = (_row(layer) for _, found in rows for layer in found if layer is not None)
    yield Part("All layers", (*cut, DataTable(heads, tuple(cells), sortable=True)), long=True)


def _row(layer: LayerFacts) -> tuple[Cell, ...]:
    sqnr = layer.record.get("sqnr_db")
    return row(
        layer.module,
        short_scheme(layer.scheme),
        layer.method or "unknown",
        shape(layer.shape),
        number_cell(layer.nbytes, size_of(layer.nbytes)),
        number_cell(layer.bits, _bits(layer.bits)),
        _error_cell(layer),
        number_cell(sqnr, "" if sqnr is None else decibels(sqnr)),
        number_cell(layer.clipped, share(layer.clipped)),
        ", ".join(reason.partition(":")[0] for reason in layer.reasons),
    )


def _made_of(run: Overview) -> Node:
    """Return versions and hashes from the manifest."""
    items = run.identity.items() or [("manifest", "there is none, so that errors and origin are not known")]
    return Part("To reproduce it", (FactList(tuple(items)),), long=True)


def _error_cell(layer: LayerFacts | None) -> Cell:
    found = None if layer is None else layer.relative
    return number_cell(found, relative(found) if layer is not None else "")


def _known(layer: LayerFacts | None) -> float:
    return -1.0 if layer is None or layer.relative is None else layer.relative


def relative(value: float | None) -> str:
    """Return a relative error in words."""
    return "unknown" if value is None else f"{value:.4f}"


def _bits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
