"""The tables of quality: peers' models, what is paired with what, and runs that resume."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import tiny_models
from tests.oracles.tiny_tokenizers import TEXT

import zeropoint as zp
from zeropoint.checkpoint.read.source import open_source

pytestmark = pytest.mark.rotating

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDED = ("facts", "peer_accuracy", "quality", "quality_draws")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The programs, which import each other by bare names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: __import__(name) for name in NEEDED}
    for name in NEEDED:
        sys.modules.pop(name, None)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    tiny_models.write(tmp_path / "bert", "bert", dtype=torch.float32)
    return tmp_path / "bert"


def test_a_search_rewrites_the_named_weights_and_nothing_else(
    modules: dict[str, ModuleType], bert: Path, tmp_path: Path
) -> None:
    peers = modules["peer_accuracy"]
    names = [f"{weight.module}.weight" for weight in zp.plan_checkpoint(bert, "int4:g32").weights]
    peers.rewrite(bert, tmp_path / "out", names, peers.ours("int4:g32"))
    before, after = (load_file(folder / "model.safetensors") for folder in (bert, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert 0 < len(names) < len(before)
    for name, values in before.items():
        expected = zp.quantize(values, "int4:g32").dequantize() if name in names else values
        assert torch.equal(after[name], expected), name
    assert open_source(tmp_path / "out").config == open_source(bert).config


def test_a_weight_that_the_model_has_not_is_an_error(
    modules: dict[str, ModuleType], bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"has no weights \['absent'\]"):
        modules["peer_accuracy"].rewrite(bert, tmp_path / "out", ["absent"], torch.clone)
    with pytest.raises(SystemExit, match="search 'other' is none of llm-compressor, auto-round"):
        modules["peer_accuracy"].search_named("int4:g32", "other")


def test_a_draw_moves_the_named_weights_by_a_twentieth_of_a_step_at_most(
    modules: dict[str, ModuleType], bert: Path, tmp_path: Path
) -> None:
    names = [f"{weight.module}.weight" for weight in zp.plan_checkpoint(bert, "int4:g32").weights]
    draws = [modules["quality_draws"].moved(bert, tmp_path / str(seed), names, seed) for seed in (0, 1)]
    before, first, second = (load_file(folder / "model.safetensors") for folder in (bert, *draws))
    for name, values in before.items():
        if name in names:
            # The step of int4 is the largest magnitude over 7.5; an ulp of float32 besides.
            most = values.reshape(-1, 32).abs().amax(1, keepdim=True) / 7.5 * 0.05 + 1e-7
            change = (first[name] - values).reshape(-1, 32).abs()
            assert (change <= most).all()
            assert change.mean() > 0.3 * most.mean()
            assert not torch.equal(first[name], second[name])
        else:
            assert torch.equal(first[name], values)


def test_a_table_pairs_rows_with_nearest_and_ours_with_peers(
    modules: dict[str, ModuleType], bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, peers = modules["quality"], modules["peer_accuracy"]

    def rewritten(source: Path, row: Any, folder: Path, _: str) -> Path:
        names = [f"{module}.weight" for module in quality.layers(source, row)]
        peers.rewrite(source, folder, names, peers.ours(row.to))
        return folder

    mse = quality.Row(to="int4:g32", method="mse")
    of = [
        *quality.rows("int4:g32", "mse", None),
        *quality.peers("int4:g32", mse, "ModelOpt"),
        quality.Row(to="bert:g32"),
    ]
    monkeypatch.setattr(quality, "rewritten", rewritten)
    monkeypatch.setitem(quality.TABLES, "encoder", of)
    sentences = tmp_path / "sentences.txt"
    words = TEXT.split()
    sentences.write_text("\n".join(" ".join(words[n : n + 5]) for n in range(20)))
    texts = {"sentences": sentences, "calibration": sentences}
    args = Namespace(only=["nearest"], peers="python")
    assert [row["name"] for row in quality.measure("encoder", bert, tmp_path, texts, args)] == [
        "bfloat16 (noise floor)", "int4:g32 compressed-tensors nearest"
    ]  # fmt: skip
    # What was measured is not measured again, and comes at its place in the table.
    nearest = json.loads((tmp_path / "encoder.json").read_text())[1]
    args.only = [""]
    found = quality.measure("encoder", bert, tmp_path, texts, args)
    assert [row["method"] for row in found] == ["", "mse", "nearest", "ModelOpt", "mse"]
    assert found[2] == nearest
    quality.paired(found, "encoder")
    _, by_mse, by_nearest, peer, recipe = found
    assert by_nearest["paired"] == recipe["paired"] == {}
    # The peer here is nearest under another name.
    assert peer["paired"]["less nearest"].value == pytest.approx(0, abs=1e-6)
    gain = by_mse["paired"]["less nearest"].value
    assert peer["paired"]["ours less it"].value == pytest.approx(gain, abs=1e-6)
    key = "Mean cosine"
    assert gain == pytest.approx(by_mse["statistics"][key]["value"] - nearest["statistics"][key]["value"])
    lines = quality.markdown("encoder", found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| `int4:g32` | *ModelOpt* |" in lines[5]
    assert all("samples" not in quality.recorded(row) for row in found)


def test_every_row_has_a_name_and_a_counterpart_of_its_own(modules: dict[str, ModuleType]) -> None:
    for table in modules["quality"].TABLES.values():
        names = [row.name for row in table]
        assert len(set(names)) == len(names)
        assert {row.ours for row in table if row.peer} <= set(names)
        assert {row.nearest for row in table if row.peer} <= set(names)
