"""``zeropoint quantize --budget``: a search and its recipe in one command, and from Python."""

import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import digests
from tests.cli.conftest import Call
from tests.oracles import tiny_llama

import zeropoint as zp

CANDIDATES = "w4a16,mxfp8a16,w8a16"


def test_one_command_writes_what_search_and_quantize_write(model: Path, tmp_path: Path, call: Call) -> None:
    asked = ("--budget", "5.5bpw", "--candidates", CANDIDATES)
    assert call("quantize", model, tmp_path / "one", *asked, "--strict").status == 0
    assert (tmp_path / "one.search").exists()
    assert call("search", model, *asked, "-o", tmp_path / "recipe.yaml").status == 0
    assert call("quantize", model, tmp_path / "two", "--recipe", tmp_path / "recipe.yaml").status == 0
    result = zp.quantize_checkpoint(
        model, tmp_path / "three", budget="5.5bpw", candidates=CANDIDATES.split(",")
    )
    files = [digests(tmp_path / name) for name in ("one", "two", "three")]
    for found in files:
        del found["zeropoint_manifest.json"], found["zeropoint_report.html"]  # they have the recipe's name
    assert files[0] == files[1] == files[2]
    assert result.plan.bits_per_value <= 5.5
    assert call("verify", tmp_path / "one", "--against", model).status == 0


def test_the_same_command_resumes(model: Path, tmp_path: Path, call: Call) -> None:
    command = ("quantize", model, tmp_path / "out", "--budget", "5bpw", "--candidates", CANDIDATES)
    first = call(*command, "--json")
    again = call(*command, "--overwrite", "--json")
    assert json.loads(first.out)["weights"] == json.loads(again.out)["weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "5bpw", "--to", "w4a16"), "give exactly one of --to, --recipe, --plan, --budget"),
        (("--to", "w4a16", "--candidates", "w8a16"), "--candidates, --state, --importance, --text"),
        (("--to", "w4a16", "--refine", "2"), "and --refine go with --budget; add one, or leave them out"),
        (("--budget", "5bpw", "--text", "x.txt"), "--text is what the model runs on; add --importance"),
        (("--budget", "5bpw", "--calibration", "x.txt", "--imatrix", "x"), "both say what inputs are"),
        (("--budget", "5bpw", "--method", "mse_weighted"), "pass --calibration FILE with text, or random"),
        (("--budget", "9bpw", "--candidates", "w4a16,fp8"), "scales observed on data; use fp8_dynamic"),
        (("--budget", "1bpw",), "budget 1bpw is less than the smallest choice"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_write_nothing(
    model: Path, tmp_path: Path, call: Call, arguments: tuple[str, ...], message: str
) -> None:
    found = call("quantize", model, tmp_path / "out", *arguments)
    assert found.status in (1, 2)
    assert message in found.err
    assert not (tmp_path / "out").exists()


def test_python_takes_a_scheme_or_a_budget(model: Path, tmp_path: Path) -> None:
    with pytest.raises(zp.OptionError, match=r"exactly one of to=, recipe=, plan=, budget=; none is given"):
        zp.quantize_checkpoint(model, tmp_path / "out")
    with pytest.raises(zp.OptionError, match="to= and budget= are given"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", budget="5bpw")
    with pytest.raises(zp.OptionError, match="and refine= go with budget=; add one, or leave them out"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w4a16", refine=1)


def test_calibration_goes_with_a_budget(tmp_path: Path, call: Call) -> None:
    source = tmp_path / "model"
    tiny_llama.save(source, torch.float32)
    asked = ("--budget", "6bpw", "--candidates", "int4:g32,int8:g32", "--method", "mse_weighted")
    asked += ("--calibration", "random")
    assert call("quantize", source, tmp_path / "one", *asked).status == 0
    recipe = tmp_path / "recipe.yaml"
    found = call("search", source, *asked, "-o", recipe)
    assert found.status == 0, found.err
    assert "importance calibration" in recipe.read_text()
    again = ("quantize", source, tmp_path / "two", "--recipe", recipe)
    assert "needs the mean_square of its inputs; pass --calibration" in call(*again).err
    assert call(*again, "--calibration", "random").status == 0
    assert digests(tmp_path / "one")["model.safetensors"] == digests(tmp_path / "two")["model.safetensors"]
