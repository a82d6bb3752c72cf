"""A quality of a checkpoint: its bytes are those of the method, and the report says what it fell back on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeropoint as zp
from zeropoint.checkpoint.plan.qualities import offered_quality
from zeropoint.recipes import Quality
from zeropoint.recipes.quality import LADDER

GOOD = next((alone, with_inputs) for own, alone, with_inputs in LADDER if own is Quality.GOOD)


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the files of weights; the manifest has the recipe, with the word that was asked for."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def ids() -> torch.Tensor:
    return torch.randint(0, 512, (8, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("scheme", "method"), [("int4:g64", GOOD[0]), ("w4a8", GOOD[1])])
def test_a_quality_writes_the_bytes_of_its_method(
    source: Path, tmp_path: Path, scheme: str, method: str
) -> None:
    for name, asked in (("a", {"quality": "good"}), ("b", {"method": method})):
        zp.quantize_checkpoint(source, tmp_path / name, scheme, calibration=ids(), ignore="lm_head", **asked)
    written = [weights_of(tmp_path / name) for name in "ab"]
    assert written[0] == written[1] != {}


def test_a_scheme_that_the_chain_refuses_falls_back_and_the_report_says_so(
    source: Path, tmp_path: Path
) -> None:
    options = {"format": "gguf", "calibration": ids()}
    result = zp.quantize_checkpoint(source, tmp_path / "a", "tq1_0", quality="best", **options)
    zp.quantize_checkpoint(source, tmp_path / "b", "tq1_0", method="ggml", **options)
    written = [[path.read_bytes() for path in (tmp_path / name).glob("*.gguf")] for name in "ab"]
    assert written[0] == written[1] != []
    (fell,) = (note for note in result.notes if "falls back" in note)
    assert fell.startswith("quality='best' falls back on ggml for tq1_0: method ")
    assert fell.endswith("several together")


def test_data_without_use_are_said_to_be(source: Path, tmp_path: Path) -> None:
    options = {"quality": "fast", "calibration": tmp_path / "absent.txt"}
    result = zp.quantize_checkpoint(source, tmp_path / "out", "int4:g64", **options)
    assert "no method takes calibration data, which are not read" in result.notes


def test_a_rule_keeps_its_method_and_is_no_fall(source: Path, tmp_path: Path) -> None:
    recipe = "rules: [{name: '*.down_proj', weight: 'int4:g64', method: mse}]\ndefault: w8a16"
    result = zp.quantize_checkpoint(source, tmp_path / "out", recipe=recipe, quality="fast")
    assert {weight.method for weight in result.plan.weights} == {"mse"}
    assert not any("falls back" in note for note in result.notes)


@pytest.mark.parametrize(
    ("scheme", "options", "offered"),
    [
        ("w4a16", {}, True),
        ("w8a16", {}, False),
        ("w4a16", {"method": "nearest"}, False),
        ("w4a16", {"quality": "fast"}, False),
        ("w4a16", {"method": "mse_weighted", "calibration": "random"}, False),
    ],
)
def test_few_bits_rounded_to_nearest_by_default_get_a_line_about_data(
    source: Path, tmp_path: Path, scheme: str, options: dict[str, str], offered: bool
) -> None:
    result = zp.quantize_checkpoint(source, tmp_path / "out", scheme, **options)
    said = list(offered_quality(result.plan))
    assert bool(said) == offered
    assert not said or said[0].startswith("with quality='good' and calibration=DATA outputs come closer")


def test_a_quality_of_a_plan_is_refused(source: Path, tmp_path: Path) -> None:
    plan = zp.plan_checkpoint(source, "w4a16", out=tmp_path / "plan.json")
    assert plan.recipe.quality is None
    with pytest.raises(
        zp.OptionError, match=r"^quality='fast' picks methods for to=SCHEME or recipe=FILE; le"
    ):
        zp.quantize_checkpoint(source, tmp_path / "out", plan=tmp_path / "plan.json", quality="fast")
