"""One HTML page about checkpoints: sizes, errors, the worst layers, charts, and a table of all layers.

The page is a file of its own that needs no network. It is complete without scripts; a script adds sorting and
filtering. All that it shows, and more, stands in it as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ..checkpoint.read.storage import Place
from ..checkpoint.verify.overview import LayerFacts, Overview, overview
from ..errors import CheckpointError, count, option, size_of
from ..own_files import FileKind, OwnFile
from ..results import Result
from ..signatures import by_signature
from .charts import COLORS, Area, depth_chart, histogram, treemap
from .wording import decibels, pattern, shape, share, short_scheme

_MARK = "zeropoint report"
PAGE = FileKind("report", _MARK.encode())
ROWS = 4000
"""Most layers that the table has, the largest errors first; the JSON has all."""
_WORST, _LINES = 8, 12


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointReport(Result):
    """A report about checkpoints, which stand side by side.

    Args:
        runs: the checkpoints, in the order in which they were given.
        path: of the page, or None where none was written.
    """

    runs: tuple[Overview, ...]
    path: Path | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`."""
        where = () if self.path is None else (f"written to {self.path}",)
        return (*(line for run in self.runs for line in run.lines), *where)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`."""
        return {"runs": [run.to_dict() for run in self.runs]}

    def to_html(self) -> str:
        """Return the page."""
        first, *others = self.runs
        title = first.name if not others else f"{first.name} and {count(len(others), 'other')}"
        data = json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        body = [*_side_by_side(self.runs)] if others else [*_about(first)]
        return "\n".join((
            "<!doctype html>", f"<!-- {_MARK} -->", '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)} - zeropoint</title><style>{_resource('page.css')}</style></head><body>",
            f"<h1>{_text(title)}</h1>", *body,
            f'<script type="application/json" id="zeropoint">{data}</script>',
            f"<script>{_resource('page.js')}</script>", "</body></html>", "",
        ))  # fmt: skip


@by_signature
def report_checkpoint(
    path: Place | str, *, others: Sequence[Place | str] = (), out: Path | str | None = None,
    overwrite: bool = False,
) -> CheckpointReport:  # fmt: skip
    """Return a report about checkpoints, and write its page.

    Args:
        path: a directory, a file, or the URL of either: quantized by zeropoint or others, or floats.
        others: other checkpoints that are shown next to it.
        out: a file for the page; none is written if None.
        overwrite: whether a report that is there may be replaced.

    Raises:
        CheckpointError: when files are damaged or hostile, and where the page cannot be written.

    Example:
        >>> zp.report_checkpoint("MODEL-w4a16", out="report.html")  # doctest: +SKIP
    """
    if out is not None and not overwrite and Path(out).exists():
        raise CheckpointError(
            f"{str(out)!r} exists; add {option('overwrite', True)} to replace it, or name a new file"
        )
    runs = tuple(overview(each) for each in (path, *others))
    if out is None:
        return CheckpointReport(runs=runs)
    apart = [place for run in runs for place in run.inspection.source.places]
    file = OwnFile(Path(out), PAGE, apart)
    file.require_free(overwrite=overwrite)
    found = CheckpointReport(runs=runs, path=Path(out))
    file.write([found.to_html().encode()], overwrite=overwrite)
    return found


def page_of(path: Place | str) -> Path:
    """Return the file of the page about a checkpoint where none is named: next to it, or here for a URL.

    >>> page_of("models/tiny-w4a16")
    PosixPath('models/tiny-w4a16.html')
    """
    folder = Path() if "://" in str(path) else Path(str(path)).parent
    return folder / f"{Path(str(path)).name}.html"


def _about(run: Overview) -> Iterator[str]:
    """Yield the parts of a page about one checkpoint."""
    yield _cards(run)
    yield from (f"<p>{_text(line)}</p>" for line in run.inspection.problems)
    yield from _worst(run.layers)
    yield from _by_depth(run.layers)
    yield from _losses(run.layers)
    yield from _sizes(run)
    yield from _codes(run.layers)
    yield from _layers_table((run,))
    yield from _kept(run)
    yield from _made_of(run)


def _side_by_side(runs: Sequence[Overview]) -> Iterator[str]:
    """Yield the parts of a page about several checkpoints."""
    yield "<h2>Side by side</h2>"
    yield from _table(
        ("checkpoint", "size", "bits a value", "relative error", "quantized layers", "schemes"),
        (
            (
                _text(run.name), _number(run.inspection.nbytes, size_of(run.inspection.nbytes)),
                _number(run.inspection.bits_per_value, _bits(run.inspection.bits_per_value)),
                _number(run.relative, _relative(run.relative)), _number(len(run.layers)),
                _text(", ".join(dict.fromkeys(short_scheme(each.scheme) for each in run.layers)) or "floats"),
            )
            for run in runs
        ),
    )  # fmt: skip
    yield from _layers_table(runs)
    for run in runs:
        yield f"<details><summary>{_text(run.name)}</summary>"
        yield from _about(run)
        yield "</details>"


def _cards(run: Overview) -> str:
    """Return the cards with size, bits, error, and bytes of tensors that are not quantized."""
    found, kept = run.inspection, sum(each.nbytes for each in run.kept)
    cards = [
        (size_of(found.nbytes), f"from {size_of(run.float_bytes)} as floats"),
        (_bits(found.bits_per_value), "bits a value of the model"),
        (_relative(run.relative), "relative error of quantized layers, root mean square"),
        (f"{len(run.layers):,}", "quantized layers"),
        (size_of(kept), f"in {count(len(run.kept), 'tensor')} that stay as they are"),
    ]
    made = (f"<div><b>{_text(head)}</b><span>{_text(said)}</span></div>" for head, said in cards)
    return f'<div class="cards">{"".join(made)}</div>'


def _worst(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Yield the table of layers with the largest errors: the reason, and the bytes that keeping one costs."""
    known = sorted((e, n) for n, layer in enumerate(layers) if (e := layer.relative))[::-1][:_WORST]
    if not known:
        return
    yield "<h2>The worst layers</h2>"
    yield (
        '<p class="dim">To keep one as floats, ignore it in the command, or give it a rule of the recipe.</p>'
    )
    worst = [layers[n] for _, n in known]
    yield from _table(
        ("layer", "relative error", "what is seen", "keeping it costs"),
        (
            (
                _text(layer.module), _number(layer.relative, _relative(layer.relative)),
                _text(_seen(layer)),
                _number(layer.float_bytes - layer.nbytes, _more(layer.float_bytes - layer.nbytes)),
            )
            for layer in worst
        ),
    )  # fmt: skip


def _more(nbytes: int) -> str:
    return f"{size_of(abs(nbytes))}{' less' if nbytes < 0 else ''}"


def _seen(layer: LayerFacts) -> str:
    """Return the reasons of an error, or what a sample of the layer is like."""
    if layer.reasons or layer.sample is None:
        return "; ".join(layer.reasons)
    return f"nothing unusual: the largest value is {layer.sample.peak:.1f} times the root mean square"


def _by_depth(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Yield the errors of each kind of layer over the depth of the model."""
    series = _series((layer.module, layer.relative) for layer in layers)
    if series:
        yield "<h2>Error by depth</h2>"
        yield f"<figure>{depth_chart(series, label='relative error')}{_legend(series)}</figure>"


def _losses(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Yield the chart of losses of outputs, on calibration data and on held-out data."""
    seen, held = (
        _series((layer.module, layer.loss.get(key)) for layer in layers) for key in ("seen", "held_out")
    )
    if seen:
        yield "<h2>Loss of outputs</h2>"
        yield (
            '<p class="dim">The share of their squares that the outputs of layers are off by, on data that '
            "were learned from and, dashed, on held-out ones. Where these do much worse, more data help.</p>"
        )
        yield f"<figure>{depth_chart(seen, held, label='loss of outputs')}{_legend(seen)}</figure>"


def _series(pairs: Iterable[tuple[str, float | None]]) -> dict[str, list[tuple[int, float]]]:
    """Return values by kind of layer, over depth; layers without a number in their name have none.

    Several values of one depth, such as those of experts, are their mean.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for module, value in pairs:
        depth = next((int(part) for part in module.split(".") if part.isdecimal()), None)
        if value is not None and depth is not None:
            found.setdefault(_kind(module), {}).setdefault(depth, []).append(value)
    return {
        kind: [(depth, sum(values) / len(values)) for depth, values in sorted(line.items())]
        for kind, line in list(found.items())[:_LINES]
    }


def _kind(module: str) -> str:
    """Return the part of a name that layers of one kind share.

    >>> _kind("model.layers.3.mlp.down_proj")
    'mlp.down_proj'
    """
    return pattern(module).rsplit("*.", 1)[-1]


def _legend(kinds: Iterable[str]) -> str:
    items = (f'<li class="c{n % COLORS}">{_text(kind)}</li>' for n, kind in enumerate(kinds))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _sizes(run: Overview) -> Iterator[str]:
    """Yield the bytes of all floats and of the files, as areas."""
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for layer in run.layers:
        kind = _kind(layer.module)
        before[kind] = before.get(kind, 0) + layer.float_bytes
        after[kind] = after.get(kind, 0) + layer.nbytes
    for kept in run.kept:
        kind = _kind(kept.name.removesuffix(".weight"))
        before[kind] = before.get(kind, 0) + kept.nbytes
        after[kind] = after.get(kind, 0) + kept.nbytes
    if not before:
        return
    color = {kind: n for n, kind in enumerate(sorted(before, key=lambda kind: -before[kind]))}
    smaller = min(1.0, (sum(after.values()) / max(1.0, sum(before.values()))) ** 0.5)
    yield "<h2>Where the bytes are</h2><div class='pair'>"
    for title, sizes, scale in (("as floats", before, 1.0), ("in these files", after, smaller)):
        areas = [
            Area(kind, size, color[kind], f"{kind}: {size_of(int(size))}") for kind, size in sizes.items()
        ]
        total = size_of(int(sum(sizes.values())))
        yield f"<figure><figcaption>{title}: {total}</figcaption>"
        yield treemap(areas, scale=scale, label=f"bytes {title}")
        yield "</figure>"
    yield "</div>"


def _codes(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Yield histograms of codes, of the first layer of each kind and scheme."""
    first: dict[tuple[str, str], LayerFacts] = {}
    for layer in layers:
        if layer.sample is not None:
            first.setdefault((_kind(layer.module), layer.scheme), layer)
    if not first:
        return
    yield "<h2>Codes</h2>"
    yield (
        '<p class="dim">Of some rows of one layer of each kind: how often each code is used, from the lowest '
        "to the highest, and how far block scales are apart.</p>"
    )
    yield from _table(
        ("layer", "scheme", "codes", "at the ends", "zeros", "largest / rms", "scales, octaves"),
        (
            (
                _text(layer.module), _text(short_scheme(layer.scheme)), histogram(own.bars, label="codes"),
                _number(own.ends, share(own.ends)), _number(own.zeros, share(own.zeros)),
                _number(own.peak, f"{own.peak:.1f}"), _number(own.octaves, f"{own.octaves:.1f}"),
            )
            for layer in list(first.values())[:ROWS]
            if (own := layer.sample) is not None
        ),
    )  # fmt: skip


def _layers_table(runs: Sequence[Overview]) -> Iterator[str]:
    """Yield the table of all layers, with a column of errors for each checkpoint that has some."""
    runs = [run for run in runs if run.layers]
    by_name: dict[str, list[LayerFacts | None]] = {}
    for n, run in enumerate(runs):
        for layer in run.layers:
            by_name.setdefault(layer.module, [None] * len(runs))[n] = layer
    if not by_name:
        return
    rows = sorted(by_name.items(), key=lambda item: -max(_known(layer) for layer in item[1]))
    yield "<h2>All layers</h2>"
    if len(rows) > ROWS:
        yield f"<p>The {ROWS:,} of the largest error of {len(rows):,}; the JSON in this file has all.</p>"
        rows = rows[:ROWS]
    if len(runs) > 1:
        heads = ("layer", *(f"{run.name}: error" for run in runs))
        cells: Iterable[Sequence[_Cell]] = (
            (_text(module), *(_error_cell(layer) for layer in found)) for module, found in rows
        )
    else:
        heads = (
            "layer",
            "scheme",
            "method",
            "shape",
            "size",
            "bits a value",
            "relative error",
            "SQNR dB",
            "clipped",
        )
        cells = (_row(layer) for _, found in rows for layer in found if layer is not None)
    yield from _table(heads, cells, sortable=True)


def _row(layer: LayerFacts) -> Sequence[_Cell]:
    sqnr = layer.record.get("sqnr_db")
    return (
        _text(layer.module), _text(short_scheme(layer.scheme)), _text(layer.method or "unknown"),
        _text(shape(layer.shape)), _number(layer.nbytes, size_of(layer.nbytes)),
        _number(layer.bits, _bits(layer.bits)), _error_cell(layer),
        _number(sqnr, "" if sqnr is None else decibels(sqnr)), _number(layer.clipped, share(layer.clipped)),
    )  # fmt: skip


def _kept(run: Overview) -> Iterator[str]:
    """Yield the table of tensors that are not quantized, one row for each kind."""
    groups: dict[tuple[str, str], list[int]] = {}
    for each in run.kept:
        groups.setdefault((pattern(each.name), each.dtype), []).append(each.nbytes)
    if not groups:
        return
    yield "<h2>What stays as it is</h2>"
    rows = sorted(groups.items(), key=lambda item: -sum(item[1]))[:ROWS]
    yield from _table(
        ("tensors", "dtype", "how many", "size"),
        (
            (_text(label), _text(dtype), _number(len(sizes)), _number(sum(sizes), size_of(sum(sizes))))
            for (label, dtype), sizes in rows
        ),
        sortable=True,
    )


def _made_of(run: Overview) -> Iterator[str]:
    """Yield versions and hashes from the manifest."""
    yield "<h2>To reproduce it</h2>"
    items = run.identity.items() or [("manifest", "there is none, so that errors and origin are not known")]
    yield f"<dl>{''.join(f'<dt>{_text(key)}</dt><dd>{_text(value)}</dd>' for key, value in items)}</dl>"


@dataclass(frozen=True, slots=True)
class _Number:
    """A cell with a number. value: by which rows are sorted."""

    text: str
    value: float | None


_Cell = str | _Number


def _number(value: float | None, text: str | None = None) -> _Number:
    return _Number(f"{value:,}" if text is None else text, value)


def _error_cell(layer: LayerFacts | None) -> _Number:
    found = None if layer is None else layer.relative
    return _Number(_relative(found) if layer is not None else "", found)


def _known(layer: LayerFacts | None) -> float:
    return -1.0 if layer is None or layer.relative is None else layer.relative


def _table(heads: Sequence[str], rows: Iterable[Sequence[_Cell]], *, sortable: bool = False) -> Iterator[str]:
    """Yield a table; cells of text are HTML, and the first column has names."""
    body = list(rows)
    numeric = [bool(body) and isinstance(body[0][n], _Number) for n in range(len(heads))]
    kind = ' class="sortable"' if sortable else ""
    names = "".join(
        f"<th scope='col'{' class=n' if number else ''}>{_text(head)}</th>"
        for head, number in zip(heads, numeric, strict=True)
    )
    yield f'<div class="wide"><table{kind}><thead><tr>{names}</tr></thead><tbody>'
    for row in body:
        yield f"<tr>{''.join(_cell(cell, first=n == 0) for n, cell in enumerate(row))}</tr>"
    yield "</tbody></table></div>"


def _cell(cell: _Cell, *, first: bool) -> str:
    if isinstance(cell, _Number):
        value = "" if cell.value is None else f"{cell.value:.6g}"
        return f"<td class=n data-v='{value}'>{_text(cell.text)}</td>"
    # Long names may break behind their dots, and nowhere else.
    return f"<td class=name>{cell.replace('.', '.<wbr>')}</td>" if first else f"<td>{cell}</td>"


def _relative(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _bits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _text(text: str) -> str:
    return escape(text)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
