"""Methods in the stream: identical bytes however a weight is cut, named by plan, report and manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import digests
from tests.oracles import synthetic_llama
from typer.testing import CliRunner

from zeropoint import plan_checkpoint, quantize_checkpoint
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.file import PlanFile, write_plan
from zeropoint.checkpoint.plan.identity import identity
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.cli.app import app
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, RecipeError
from zeropoint.methods import method_named

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_llama.write(tmp_path_factory.mktemp("source") / "in")


def plan_of(source: Path, to: str, limits: Limits | None = None) -> CheckpointPlan:
    return make_plan(open_source(source), RecipeText.of(to).by("mse"), limits=limits)


@pytest.mark.parametrize("to", ["w4a16_asym", "nvfp4a16", "fp8_block", "float8_e4m3fn:tensor"])
def test_every_file_has_the_same_bytes_for_any_tile_thread_and_stop(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 40_000)
    run(plan_of(source, to), tmp_path / "golden")
    golden = digests(tmp_path / "golden")
    for name, limits in {"threads": Limits(workers=3, tile_values=3000), "one": Limits(workers=1)}.items():
        stop_after(plan_of(source, to, limits), tmp_path / name, 5)
        run(plan_of(source, to, limits), tmp_path / name)
        assert digests(tmp_path / name) == golden


def test_a_written_weight_is_what_the_method_makes_of_the_whole(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source, "w4a16")
    result = run(plan, tmp_path / "out")
    weight = plan.weights[0]
    files = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
    whole = next(tensors[weight.source.name] for tensors in files if weight.source.name in tensors)
    q = method_named(weight.method).quantize(whole, weight.layer.weight).q
    written = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    for suffix, tensor in weight.layer.codec.encode(weight.layer, q).items():
        name = f"{weight.module}.{suffix}"
        assert torch.equal(next(tensors[name] for tensors in written if name in tensors), tensor)
    plain = run(make_plan(open_source(source), "w4a16"), tmp_path / "plain")
    assert result.error.relative < plain.error.relative


def test_plan_report_and_manifest_name_the_method(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = CliRunner().invoke(app, ["plan", str(source), "--to", "w4a16", "--method", "mse"])
    assert "quantized to w4a16 by mse:" in shown.output
    document = CliRunner().invoke(app, ["plan", str(source), "--to", "w4a16", "--method", "mse", "--json"])
    tensors = json.loads(document.output)["tensors"]
    assert {t["method"] for t in tensors} == {"mse", None}
    done = CliRunner().invoke(app, ["quantize", str(source), str(out), "--to", "w4a16", "--method", "mse"])
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "zeropoint_manifest.json").read_text())
    assert {weight["method"] for weight in manifest["weights"].values()} == {"mse"}
    assert manifest["identity"]["recipe"] == 'default: "w4a16"\nmethod: "mse"'


def test_a_run_is_not_resumed_by_another_method(source: Path, tmp_path: Path) -> None:
    stop_after(plan_of(source, "w4a16"), tmp_path / "out", 2)
    with pytest.raises(CheckpointError, match="recipe"):
        run(make_plan(open_source(source), "w4a16"), tmp_path / "out")
    ours, plain = identity(plan_of(source, "w4a16")), identity(make_plan(open_source(source), "w4a16"))
    assert ours["output"] != plain["output"]


def test_a_plan_file_makes_the_plan_with_its_method_again(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source, "w4a16")
    write_plan(plan, tmp_path / "plan.json")
    again = PlanFile.read(tmp_path / "plan.json").remake(open_source(source))
    assert (
        [w.method for w in again.weights] == [w.method for w in plan.weights] == ["mse"] * len(plan.weights)
    )


def test_each_rule_of_a_recipe_gives_its_own_method(source: Path) -> None:
    text = "default: w4a16\nmethod: mse\nrules: [{name: '*.down_proj', preset: w4a16, method: nearest}]"
    plan = make_plan(open_source(source), RecipeText(text=text))
    found = {weight.module.rpartition(".")[2]: weight.method for weight in plan.weights}
    assert found.pop("down_proj") == "nearest"
    assert set(found.values()) == {"mse"}


def test_a_scale_of_all_rows_takes_the_weight_as_a_whole(source: Path) -> None:
    plan = plan_of(source, "float8_e4m3fn:tensor")
    assert {weight.alignment for weight in plan.weights} == {w.shape[0] for w in plan.weights}
    small = Limits(workers=1, max_memory=BASE_MEMORY + (1 << 20))
    with pytest.raises(CheckpointError, match=r"too little for 128 rows of 256 columns"):
        plan_of(source, "float8_e4m3fn:tensor", small)


def test_three_lines_quantize_by_a_method(source: Path, tmp_path: Path) -> None:
    result = quantize_checkpoint(source, tmp_path / "out", "mxfp4", method="mse")
    assert {weight.method for weight in result.plan.weights} == {"mse"}
    with pytest.raises(RecipeError, match="did you mean mse"):
        plan_checkpoint(source, "w4a16", method="msee")


@pytest.mark.parametrize(
    "text",
    [
        "default: w4a16\nrules: [{name: '*.down_proj', preset: w4a16, method: nearest}]\n",
        "method: hqq  # most\ndefault: w4a16\nrules: [{name: '*.down_proj', preset: w4a16, method: nearest}]",
        "{default: w4a16, rules: [{name: '*.down_proj', preset: w4a16, method: nearest}]}",
        "  default: w4a16\n  rules: [{name: '*.down_proj', preset: w4a16, method: nearest}]",
    ],
)
def test_a_method_takes_the_place_of_that_of_a_recipe_but_not_of_its_rules(text: str, source: Path) -> None:
    plan = plan_checkpoint(source, RecipeText(text=text), method="mse")
    found = {weight.module.rpartition(".")[2]: weight.method for weight in plan.weights}
    assert found.pop("down_proj") == "nearest"
    assert set(found.values()) == {"mse"}


def test_a_recipe_that_is_none_keeps_its_lines_under_another_method(source: Path) -> None:
    for text, line in (("default: w4a16\nrules:\n  - nme: x\n", 3), ("default: [", 2), ("w4a16", 2)):
        with pytest.raises(RecipeError, match=rf"mixed with method mse, line {line}: "):
            plan_checkpoint(source, RecipeText(text=text, name="mixed"), method="mse")


def test_a_family_by_another_method_on_the_command_line(source: Path) -> None:
    command = ["plan", str(source), "--recipe", "llama", "--method", "mse_weighted", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert {tensor["method"] for tensor in json.loads(done.output)["tensors"]} == {"mse_weighted", None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "w4a16", "--method", "msee"], "did you mean mse"),
        (["--recipe", "RECIPE", "--method", "msee"], "did you mean mse"),
    ],
)
def test_a_method_that_means_nothing_is_a_slip_of_the_command_line(
    options: list[str], message: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "RECIPE").write_text("default: w4a16")
    words = [str(tmp_path / "RECIPE") if word == "RECIPE" else word for word in options]
    result = CliRunner().invoke(app, ["plan", str(source), *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_layout_that_is_cut_along_inputs_takes_methods_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 40_000)
    found = []
    for name, limits in (("small", Limits(workers=2, tile_values=5000)), ("large", Limits(workers=1))):
        plan = make_plan(
            open_source(source), RecipeText.of("int4:g128").by("mse"), codec=get_codec("gptq"), limits=limits
        )
        found.append(run(plan, tmp_path / name).error.relative)
    plain = run(make_plan(open_source(source), "int4:g128", codec=get_codec("gptq")), tmp_path / "plain")
    assert digests(tmp_path / "small") == digests(tmp_path / "large")
    assert found[0] == found[1] < plain.error.relative
