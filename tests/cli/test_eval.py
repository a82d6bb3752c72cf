"""``zeropoint eval`` on the command line: its table, its document, its mistakes."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Call
from tests.cli.test_commands import document
from tests.cli.test_errors import assert_one_line
from tests.oracles import tiny_models
from tests.oracles.tiny_tokenizers import TEXT

import zeropoint as zp

OPTIONS = ("--context", "32", "--windows", "4", "--continuations", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    tiny_models.write(root / "llama", "llama", dtype=torch.float32)
    zp.quantize_checkpoint(root / "llama", root / "w8", "w8a8")
    zp.quantize_checkpoint(root / "llama", root / "w4", "int4:g32")
    words = TEXT.split()
    (root / "text.txt").write_text(" ".join(words[(7 * n * n) % len(words)] for n in range(200)))
    return root


def test_a_table_has_a_line_for_each_statistic_and_a_column_for_each_model(call: Call, folder: Path) -> None:
    given = "--against", folder / "llama", "--text", folder / "text.txt", *OPTIONS
    called = call("eval", folder / "w8", folder / "w4", *given)
    assert (called.status, called.err) == (0, "")
    lines = called.out.splitlines()
    assert lines[0].split() == ["noise", "floor", "w8", "w4"]
    shown = [line.split("  ")[0] for line in lines[2:12]]
    assert shown == [
        "size of weights", "Mean PPL(Q)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "99.9% KLD", "RMS Δp",
        "Same top p", "Bits per byte", "Median divergence length", "",
    ]  # fmt: skip
    assert all(line.count("±") == 3 for line in lines if line.startswith(("Mean", "RMS", "Same top")))
    assert "note: w8: inputs of 14 layers are quantized to int8:token" in called.out
    assert f"reference: {folder / 'llama'} (" in called.out
    assert "4 windows of 32 tokens, 60 of them scored (" in called.out
    assert "3 continuations of 16 tokens by the reference" in called.out
    everything = call("eval", folder / "w4", *given, "--all", "--no-noise-floor").out
    assert "0.1% Δp" in everything
    assert "noise" not in everything


def test_the_document_has_every_statistic_with_its_error(call: Call, folder: Path, tmp_path: Path) -> None:
    given = "--against", folder / "llama", "--text", folder / "text.txt", *OPTIONS
    cache = "--cache", tmp_path / "cache.safetensors"
    found = document(call("eval", folder / "w4", *given, *cache, "--json"))
    floor, model = found["models"]
    assert (floor["noise_floor"], model["noise_floor"]) == (True, False)
    assert model["name"] == str(folder / "w4")
    assert floor["statistics"].keys() == model["statistics"].keys()
    assert 0 < model["statistics"]["Mean KLD"]["error"] < model["statistics"]["Mean KLD"]["value"]
    assert model["statistics"]["Median KLD"]["error"] is None
    assert 0 < model["statistics"]["Same top p"]["value"] <= 1
    again = document(call("eval", folder / "w4", *given, *cache, "--json", "--max-memory", "4G"))
    assert again["models"] == found["models"]
    assert (found["encoder"], found["notes"]) == (False, [])


def test_a_page_has_what_was_measured_and_the_models(call: Call, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "eval.html"
    given = "--against", folder / "llama", "--text", folder / "text.txt", *OPTIONS, "-o", page
    found = document(call("eval", folder / "w8", folder / "w4", *given, "--json"))
    shown = page.read_text()
    data = json.loads(re.findall('<script type="application/json" id="zeropoint">(.*?)</script>', shown)[0])
    assert data["evaluation"] == {key: value for key, value in found.items() if key != "seconds"}
    assert [run["name"] for run in data["runs"]] == ["w8", "w4"]
    cells = re.findall(r"<td class=name>Mean KLD</td><td class=n>(.*?)</td><td class=n>(.*?)</td>", shown)
    assert [float(cell.split()[0]) for cell in cells[0]] == pytest.approx(
        [model["statistics"]["Mean KLD"]["value"] for model in found["models"][:2]], rel=0.1
    )
    assert "Divergence over size" in shown
    refused = call("eval", folder / "w4", *given)
    assert_one_line(refused, 1)
    assert "exists; add --overwrite to replace it" in refused.err
    inside = call("eval", folder / "w4", *given[:-1], folder / "w4" / "eval.html")
    assert_one_line(inside, 1)
    assert "lies in the checkpoint that is read" in inside.err


def test_a_model_as_near_as_the_noise_floor_is_named(call: Call, folder: Path) -> None:
    given = "--against", folder / "llama", "--text", folder / "text.txt", *OPTIONS
    called = call("eval", folder / "llama", *given)
    assert "llama is no further from the reference than this is from itself in bfloat16" in called.out


def test_mistakes_are_one_line(call: Call, folder: Path, tmp_path: Path) -> None:
    given = "--against", folder / "llama", "--text", folder / "text.txt"
    assert_one_line(call("eval", folder / "w4", *given), 1, "two windows of 512 are needed", "--context 1")
    assert_one_line(call("eval", folder / "absent", *given), 1, "absent' cannot be opened")
    assert_one_line(call("eval", *given), 2, "Missing argument 'MODEL'; see zeropoint eval --help")
    assert_one_line(
        call("eval", folder / "w4", "--text", folder / "text.txt"), 2, "Missing option '--against'"
    )
    assert_one_line(call("eval", folder / "w4", *given, "--windows", "0"), 2, "'--windows'", "1")
    other = folder / "w4", "--against", folder / "llama", "--text", tmp_path / "none.txt", *OPTIONS
    assert_one_line(call("eval", *other), 1, "none.txt' cannot be read", "token ids in a .safetensors file")
    cache = "--cache", tmp_path / "no/where"
    assert_one_line(
        call("eval", folder / "w4", *given, *OPTIONS, *cache), 1, "where' does not exist; create it"
    )
    tagged = "--cloze", folder / "text.txt"
    assert_one_line(
        call("eval", folder / "w4", *given, *OPTIONS, *tagged), 1, "has no sentence of 8 to 24 words"
    )
