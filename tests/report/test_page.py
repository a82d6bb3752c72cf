"""The page about checkpoints: what it says is what its JSON says, whatever tensors are called."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.checkpoints import write_llama
from tests.report.screens import as_text

import zeropoint as zp
from zeropoint.checkpoint.verify.overview import NUMBERS, LayerFacts
from zeropoint.report.nodes import Cell, DataTable, every
from zeropoint.report.page import CheckpointReport, page_of, report_checkpoint

HOSTILE = (
    "\x1b[31mred", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>", "${alert(1)}", "<!-- x", "]]>", "&lt;b&gt;", "a\u2028b", "-->",
    "javascript:alert(1)",
)  # fmt: skip


class Texts(HTMLParser):
    """The cells of a page, its tags, and the text of its JSON."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.data = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "wbr":
            return
        self._inside = "json" if ("id", "zeropoint") in attrs else tag
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "json":
            self.data += data
        elif self._inside == "td":
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 (as the class says)
        self._inside = ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    floats = write_llama(folder / "floats")
    zp.quantize_checkpoint(floats, folder / "int4", "int4:g32", method="mse")
    zp.quantize_checkpoint(floats, folder / "gguf", "q4_0", format="gguf")
    return {name: folder / name for name in ("floats", "int4", "gguf")}


def test_cells_and_json_of_a_page_say_the_same(runs: dict[str, Path]) -> None:
    report = report_checkpoint(runs["int4"])
    found = Texts(report.to_html())
    assert json.loads(found.data) == json.loads(report.to_json())
    (run,) = report.to_dict()["runs"]
    known = json.loads((runs["int4"] / "zeropoint_manifest.json").read_text())["weights"]
    assert {layer["module"]: layer["record"] for layer in run["layers"]} == {
        module: {name: record[name] for name in NUMBERS} for module, record in known.items()
    }
    for layer in run["layers"]:
        at = [n for n, cell in enumerate(found.cells) if cell == layer["module"]][-1]
        row = found.cells[at : at + 9]
        assert row[1:3] == ["int4:g32", "mse"]
        assert row[5:7] == [f"{layer['bits']:.3f}", f"{layer['record']['relative']:.4f}"]
    assert run["bytes"] == zp.inspect_checkpoint(runs["int4"]).nbytes
    assert run["float_bytes"] == zp.inspect_checkpoint(runs["floats"]).nbytes
    squares = sum(record["values"] * record["relative"] ** 2 for record in known.values())
    values = sum(record["values"] for record in known.values())
    assert run["relative"] == pytest.approx((squares / values) ** 0.5, rel=1e-12)
    (every,) = re.findall("<h2>All layers</h2>(.*?)</section>", report.to_html(), re.DOTALL)
    errors = [float(cell) for cell in Texts(every).cells[6::10]]
    assert len(errors) == len(known)
    assert errors == sorted(errors, reverse=True)


def values_in(data: object) -> Iterator[object]:
    """Yield all values of a document, and its keys."""
    if isinstance(data, dict):
        yield from data
        data = list(data.values())
    if isinstance(data, list):
        yield from (inner for each in data for inner in values_in(each))
    else:
        yield data


def cells_of(report: CheckpointReport) -> list[Cell]:
    grids = [node for node in every(report.nodes) if isinstance(node, DataTable)]
    return [cell for grid in grids for row in grid.rows for cell in row]


def test_every_number_and_name_of_text_and_page_stands_in_the_json(runs: dict[str, Path]) -> None:
    for report in (report_checkpoint(runs["int4"]), report_checkpoint(runs["int4"], others=[runs["gguf"]])):
        known = list(values_in(report.to_dict()))
        numbers = {each for each in known if isinstance(each, int | float)}
        totals = {len(run.layers) for run in report.runs}
        for run in report.runs:  # the sums of each reason
            for reason in {kept.reason for kept in run.kept}:
                sizes = [kept.nbytes for kept in run.kept if kept.reason == reason]
                totals |= {len(sizes), sum(sizes)}
        cells = cells_of(report)
        assert len(cells) > 100
        assert {cell.value for cell in cells if cell.value is not None} <= numbers | totals
        page, text = Texts(report.to_html()).cells, as_text(report.nodes, whole=True, width=10_000)
        shown = [cell.text for cell in cells if cell.picture is None]
        assert sorted(each for each in page if each) == sorted(each for each in shown if each)
        assert all(" ".join(each.split()) in " ".join(text.split()) for each in shown)


def test_samples_are_those_of_the_decoded_rows(runs: dict[str, Path]) -> None:
    (run,) = report_checkpoint(runs["int4"]).runs
    for layer in run.layers:
        assert layer.sample is not None
        assert len(layer.sample.bars) == 16
        assert sum(layer.sample.bars) == pytest.approx(1, abs=1e-3)
        assert layer.sample.ends == pytest.approx(layer.sample.bars[0] + layer.sample.bars[-1], abs=1e-3)
        assert layer.sample.zeros == pytest.approx(layer.sample.bars[8], abs=1e-3)


def test_checkpoints_stand_side_by_side(runs: dict[str, Path]) -> None:
    report = report_checkpoint(runs["int4"], others=[runs["gguf"], runs["floats"]])
    page = report.to_html()
    assert [run["name"] for run in json.loads(Texts(page).data)["runs"]] == ["int4", "gguf", "floats"]
    assert "int4: error" in page
    assert "gguf: error" in page
    assert "floats: error" not in page, "it has no quantized layer"
    assert report.runs[2].relative is None


def test_without_a_manifest_errors_are_unknown(runs: dict[str, Path], tmp_path: Path) -> None:
    bare = shutil.copytree(runs["int4"], tmp_path / "bare")
    (bare / "zeropoint_manifest.json").unlink()
    (run,) = report_checkpoint(bare).runs
    assert run.relative is None
    assert {layer.method for layer in run.layers} == {None}
    assert "there is none, so that errors and origin are not known" in CheckpointReport(runs=(run,)).to_html()


@pytest.mark.parametrize(
    "value", ['"x"', "1e999", "NaN", "1" + "0" * 400, "[1]", "true", '{"a": NaN}', "null"]
)
def test_what_is_no_number_in_a_manifest_is_none(runs: dict[str, Path], tmp_path: Path, value: str) -> None:
    forged = shutil.copytree(runs["int4"], tmp_path / "forged")
    path = forged / "zeropoint_manifest.json"
    text = path.read_text()
    for name in NUMBERS:
        text = re.sub(rf'"{name}": [^,}}]+', f'"{name}": {value}', text, count=1)
    text = text[: text.rindex('"sha256": "')]
    path.write_text(f'{text}"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')
    report = report_checkpoint(forged)
    assert dict.fromkeys(NUMBERS) in [dict(layer.record) for layer in report.runs[0].layers]
    assert json.loads(Texts(report.to_html()).data) == json.loads(report.to_json())


def test_names_stay_text_whatever_they_hold(runs: dict[str, Path], tmp_path: Path) -> None:
    plain = report_checkpoint(runs["int4"])
    run = plain.runs[0]
    layers = tuple(replace(run.layers[0], module=name, method=name, scheme=name) for name in HOSTILE)
    kept = tuple(replace(run.kept[0], name=name, dtype=name) for name in HOSTILE)
    identity = {name: name for name in HOSTILE}
    hostile = replace(run, name=HOSTILE[0], layers=layers, kept=kept, identity=identity)
    report = CheckpointReport(runs=(hostile, hostile))
    page = report.to_html()
    found = Texts(page)
    assert json.loads(found.data) == json.loads(report.to_json())
    assert found.tags <= Texts(plain.to_html()).tags | {"details", "summary", "h3"}
    assert page.count("</script>") == 2
    assert all(each.isprintable() for each in as_text(report.nodes, whole=True).splitlines())
    for name in HOSTILE:
        assert escape(name) in page


def test_a_file_with_hostile_names_has_a_page(tmp_path: Path) -> None:
    floats = tmp_path / "floats.safetensors"
    save_file({f"{name}.weight": torch.randn(8, 8) for name in HOSTILE}, floats)
    report = report_checkpoint(floats)
    assert {kept.name for kept in report.runs[0].kept} == {f"{name}.weight" for name in HOSTILE}
    assert json.loads(Texts(report.to_html()).data) == json.loads(report.to_json())


def test_reasons_are_what_is_seen(runs: dict[str, Path]) -> None:
    layer = report_checkpoint(runs["int4"]).runs[0].layers[0]
    assert layer.sample is not None
    record = {**layer.record, "clipped": layer.values / 10, "zero_blocks": 3.0}
    odd = replace(layer, record=record, loss={"own": 5.0}, sample=replace(layer.sample, peak=30.0))
    assert [each.split(":")[0] for each in odd.reasons] == ["outliers", "range", "underflow", "few tokens"]
    assert replace(odd, record={}, loss={}, sample=None).reasons == ()


def many(layer: LayerFacts, count: int) -> tuple[LayerFacts, ...]:
    """Return layers as those of a deep model."""
    kinds = ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj")
    return tuple(
        replace(
            layer, module=f"model.layers.{n // 4}.{kinds[n % 4]}",
            record={**layer.record, "relative": 0.1 + n / count / 10},
        )
        for n in range(count)
    )  # fmt: skip


def test_a_page_of_two_thousand_layers_is_small(runs: dict[str, Path]) -> None:
    run = report_checkpoint(runs["int4"]).runs[0]
    page = CheckpointReport(runs=(replace(run, layers=many(run.layers[0], 2000)),)).to_html()
    assert len(page.encode()) < 3_000_000
    assert not re.search(r"https?://(?!www\.w3\.org)", page), "it needs no network"


def test_what_is_not_a_report_is_not_replaced(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    report_checkpoint(runs["int4"], out=out)
    with pytest.raises(zp.CheckpointError, match=r"report\.html.* exists"):
        report_checkpoint(runs["int4"], out=out)
    report_checkpoint(runs["floats"], out=out, overwrite=True)
    assert "floats" in out.read_text()
    out.write_text("mine")
    with pytest.raises(zp.CheckpointError, match="no report of zeropoint"):
        report_checkpoint(runs["int4"], out=out, overwrite=True)
    assert out.read_text() == "mine"
    with pytest.raises(zp.CheckpointError):
        report_checkpoint(runs["int4"], out=runs["int4"] / "report.html")
    assert page_of("s3://bucket/model-w4a16") == Path("model-w4a16.html")
