"""Several sources in one command: each goes into OUT under its name, and one that fails stops no other."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.checkpoints import write_llama
from tests.cli.conftest import Call

import zeropoint as zp


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [write_llama(tmp_path / "models" / name) for name in ("a", "b")]


def test_each_is_written_under_its_name_with_the_bytes_of_a_run_of_its_own(
    call: Call, models: list[Path], tmp_path: Path
) -> None:
    called = call("quantize", *models, tmp_path / "out", "--to", "w4a16")
    assert called.status == 0, called.err
    assert [line.split()[0] for line in called.out.splitlines()[2:4]] == [str(model) for model in models]
    assert "2 checkpoints, " in called.out.splitlines()[-1]
    zp.quantize_checkpoint(models[1], tmp_path / "one", "w4a16")
    name = "model.safetensors"
    assert (tmp_path / "out" / "b" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_warnings_of_each_are_shown(call: Call, models: list[Path], tmp_path: Path) -> None:
    called = call("quantize", *models, tmp_path / "out", "--to", "w4a16:g256")
    alone = call("quantize", models[0], tmp_path / "one", "--to", "w4a16:g256")
    (warning,) = re.findall(r"^warning: (.*)$", alone.out, flags=re.MULTILINE)
    assert called.out.count(f"warning: {warning}") == len(models)


def test_one_that_fails_is_named_and_the_others_are_written(
    call: Call, models: list[Path], tmp_path: Path
) -> None:
    (models[0] / "config.json").write_text("{")
    called = call("quantize", *models, tmp_path / "out", "--to", "w8a16", "--json")
    first, second = json.loads(called.out)["runs"]
    assert (called.status, (tmp_path / "out" / "b" / "config.json").is_file()) == (1, True)
    assert first["source"] == str(models[0])
    assert "config.json" in first["error"]
    assert second["error"]["relative"] > 0
    assert called.err.startswith("error: 1 checkpoint of 2 failed, the first: ")
    table = call("quantize", *models, tmp_path / "out", "--to", "w8a16", "--if-exists", "skip")
    assert (table.status, "failed" in table.out) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["models/a", "models/a", "out", "--to", "w4a16"], "two sources have the name 'a'"),
        (["models/a", "models/b", "out", "--plan", "p.json"], "plan"),
        (["models/a", "models/b", "out", "--budget", "5bpw", "--state", "s"], "is of one checkpoint"),
        (["models/a", "out", "w4a16"], "did you mean --to w4a16?"),
        (["models/a", "models/b", "out", "--to", "w4a16", "--samples", "4"], "--samples"),
    ],
)
def test_what_makes_no_sense_for_several_is_refused_before_anything_is_written(
    call: Call, models: list[Path], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(models[0].parents[1])
    called = call("quantize", *words)
    assert (called.status, said in called.err) == (2, True), called.err
    assert not Path("out").exists()


def test_conversions_take_several_too(call: Call, models: list[Path], tmp_path: Path) -> None:
    assert call("quantize", *models, tmp_path / "q", "--to", "w4a16").status == 0
    sources = [tmp_path / "q" / name for name in ("a", "b")]
    assert call("convert", *sources, tmp_path / "gptq", "--format", "gptq").status == 0
    called = call("dequantize", *sources, tmp_path / "floats", "--dtype", "float32")
    assert called.status == 0, called.err
    assert zp.compare_checkpoints(tmp_path / "gptq" / "b", tmp_path / "floats" / "b").equality.of_bits
