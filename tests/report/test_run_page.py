"""Each run leaves a page next to its manifest, which no other command takes for a part of the checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import digests
from tests.cli.checkpoints import write_llama

import zeropoint as zp
from zeropoint.checkpoint.read.file_names import REPORT
from zeropoint.cli.main import main
from zeropoint.report import page as pages

pytestmark = pytest.mark.rotating

MANIFEST = "zeropoint_manifest.json"
CANDIDATES = "int4:g32,int8:g32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("page") / "model")


def quantize(model: Path, out: Path, **options: object) -> zp.checkpoint.run.loop.RunResult:
    return zp.quantize_checkpoint(model, out, "int4:g32", **options)


@pytest.fixture(scope="module")
def out(model: Path) -> Path:
    quantize(model, model.with_name("int4"))
    return model.with_name("int4")


def test_the_page_is_that_of_the_report_under_a_title_of_its_own(out: Path) -> None:
    page, title = (out / REPORT).read_text(), "LlamaForCausalLM: int4:g32"
    rebuilt = zp.report_checkpoint(out).to_html()
    assert f"<h1>{title}</h1>" in page
    assert page.replace(title, "int4") == rebuilt
    reasons = {kept["reason"] for kept in zp.report_checkpoint(out).to_dict()["runs"][0]["kept"]}
    assert reasons == {"an embedding", "a head", "1-D, not a matrix"}


@pytest.mark.parametrize("more", [{"workers": 1}, {"workers": 2}, {"overwrite": True}])
def test_equal_runs_have_equal_pages_wherever_they_lie(
    model: Path, out: Path, tmp_path: Path, more: dict[str, object]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if more.get("workers") == 2 else 1)
    try:
        quantize(model, tmp_path / "another", **more)
    finally:
        torch.set_num_threads(threads)
    assert digests(tmp_path / "another") == digests(out)


def test_no_page_is_written_where_none_is_asked_for(model: Path, tmp_path: Path) -> None:
    result = quantize(model, tmp_path / "out", report=False)
    assert result.page is None
    assert not (tmp_path / "out" / REPORT).exists()
    again = quantize(model, tmp_path / "out")
    assert again.page == tmp_path / "out" / REPORT, "the same run without --no-report adds it"
    assert again.page.exists()


def test_a_run_that_writes_no_page_removes_the_one_of_the_run_before(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out")
    zp.quantize_checkpoint(model, tmp_path / "out", "int8:g32", overwrite=True, report=False)
    assert not (tmp_path / "out" / REPORT).exists()


def test_what_has_the_name_and_is_no_page_stays_and_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / REPORT).write_text("mine")
    result = quantize(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / REPORT).read_text() == "mine"
    assert "is no report of zeropoint" in result.notes[-1]
    assert result.page is None
    assert zp.verify_checkpoint(tmp_path / "out", model).ok


def test_a_run_that_ended_before_its_page_gets_it_from_the_same_command(
    model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pages, "overview", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, tmp_path / "out")
    assert not (tmp_path / "out" / REPORT).exists()
    assert zp.verify_checkpoint(tmp_path / "out", model).ok, "the output is whole without it"
    quantize(model, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(out)


def test_no_command_takes_the_page_for_a_part_of_the_checkpoint(
    model: Path, out: Path, tmp_path: Path
) -> None:
    assert zp.verify_checkpoint(out, model).ok
    assert REPORT not in json.loads((out / MANIFEST).read_text())["files"]
    (out / REPORT).write_text((out / REPORT).read_text() + "<!-- another word -->")
    assert zp.verify_checkpoint(out, model).ok
    quantize(model, out, overwrite=True)
    zp.dequantize_checkpoint(out, tmp_path / "floats")
    assert not (tmp_path / "floats" / REPORT).exists()
    converted = zp.convert_checkpoint(out, tmp_path / "gguf", "gguf", to="q4_0", allow_requantize=True)
    assert converted.page is not None
    for name in ("floats", "gguf"):
        assert REPORT not in json.loads((tmp_path / name / MANIFEST).read_text())["files"]
    assert zp.verify_checkpoint(tmp_path / "gguf").ok
    page = converted.page.read_text()
    assert "q4_0" in page
    assert page != (out / REPORT).read_text()


def test_the_command_prints_in_short_what_the_page_says(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(out), "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    assert [part in printed for part in ("The worst layers", "What stays as it is", "All layers")] == [
        True, True, False,
    ]  # fmt: skip
    assert printed.endswith(f"written to {page}\n")
    assert main(["report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(zp.report_checkpoint(out).to_json())
    assert main(["quantize", str(out), str(tmp_path / "no"), "--to", "w4a16", "--no-report"]) == 1
    assert main(["report", str(out), "-o", str(page)]) == 1
    assert "add --overwrite to replace it" in capsys.readouterr().err


def test_many_tensors_have_a_page_only_where_it_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MOST", 3)
    result = quantize(model, tmp_path / "out")
    assert not (tmp_path / "out" / REPORT).exists()
    assert "no report was written: it has" in result.notes[-1]


def test_a_finished_output_is_left_with_its_page(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(model, out)
    (out / REPORT).write_text((out / REPORT).read_text() + "<!-- another word -->")
    before = digests(out)
    quantize(model, out, if_exists="skip")
    quantize(model, out, if_exists="skip", report=False)
    assert digests(out) == before


def test_a_search_leaves_a_page_next_to_its_recipe(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    found = zp.search_checkpoint(model, "6bpw", CANDIDATES, out=recipe)
    page = (tmp_path / "recipe.yaml.html").read_text()
    assert "Loss over bits" in page
    assert f"{found.allocation.loss:.6g}" in page
    zp.search_checkpoint(model, "6bpw", CANDIDATES, out=tmp_path / "bare.yaml", report=False)
    assert not (tmp_path / "bare.yaml.html").exists()
    zp.quantize_checkpoint(model, tmp_path / "out", budget="6bpw", candidates=CANDIDATES)
    assert (tmp_path / "out.search.html").read_text() == page


@pytest.mark.parametrize("name", ["recipe.yaml.html", "out.search.html"])
def test_the_page_of_a_search_takes_the_place_of_no_file(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    calls = {
        "recipe.yaml.html": lambda: zp.search_checkpoint(
            model, "6bpw", CANDIDATES, out=tmp_path / "recipe.yaml"
        ),
        "out.search.html": lambda: zp.quantize_checkpoint(
            model, tmp_path / "out", budget="6bpw", candidates=CANDIDATES
        ),
    }
    with pytest.raises(zp.CheckpointError, match=r"is no report of zeropoint"):
        calls[name]()
    assert (tmp_path / name).read_text() == "mine"
