"""A plan file makes the same plan again, or says what became different."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import LINEAR, ONE, digests, save, weight
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.file import PlanFile, write_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.plan_document import plan_document
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import DEFAULT
from zeropoint.errors import CheckpointError, RecipeError

RECIPE = RecipeText(text="default: w4a16\nrules: [{name: '*.self_attn.*_proj', preset: w8a8}]", name="r.yaml")


def planned(source: Path, **selection: Any) -> CheckpointPlan:
    return make_plan(open_source(source), RECIPE, selection=Selection(**selection), limits=ONE)


def file_of(source: Path, path: Path, **selection: Any) -> PlanFile:
    write_plan(planned(source, **selection), path)
    return PlanFile.read(path)


def test_a_plan_file_makes_the_same_plan_with_the_same_bytes(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    selection = {"include": ("lm_head",), "ignore": ("re:.*o_proj",)}
    first = planned(source, **selection)
    again = file_of(source, tmp_path / "plan.json", **selection).remake(open_source(source), limits=ONE)
    assert again == first
    run(first, tmp_path / "a")
    run(again, tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_limits_are_no_part_of_a_plan_file(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = file_of(source, tmp_path / "plan.json")
    again = plan.remake(open_source(source), limits=Limits(workers=3, tile_values=1000))
    assert again.limits.workers == 3


def test_a_source_that_moved_or_was_touched_is_the_same_source(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = file_of(source, tmp_path / "plan.json")
    os.utime(source / "model-00001-of-00003.safetensors", (1, 1))
    source = source.rename(tmp_path / "elsewhere")
    assert len(plan.remake(open_source(source), limits=ONE).weights) == 14


def other_header(source: Path) -> None:
    path = source / "model-00002-of-00003.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "by": "someone"})


def other_config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace("1e-05", "1e-06"))


@pytest.mark.parametrize(
    ("change", "field"),
    [(other_header, "model-00002-of-00003.safetensors"), (other_config, "config.json")],
)
def test_another_source_is_refused_with_the_differing_field(change: Any, field: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = file_of(source, tmp_path / "plan.json")
    change(source)
    with pytest.raises(
        CheckpointError, match=f"plan.json' was made for another model, .*: '{field}' differs; make the plan"
    ):
        plan.remake(open_source(source), limits=ONE)


@pytest.mark.parametrize(
    ("keys", "value", "field"),
    [
        (("identity", "zeropoint"), "0.0.9", "'zeropoint': it has '0.0.9', now '"),
        (("identity", "unheard of"), "x", "'unheard of': it has 'x', now 'absent'"),
        (("request", "recipe", "text"), "default: w8a8", "'recipe': it has "),
        (("request", "ignore"), ["lm_head"], "'ignore': it has "),
        (("tensors", 0, "scheme"), "mxfp4", "scheme of tensor '.*': it has 'mxfp4', now '"),
        (("tensors", 3, "outputs", 0, "begin"), 7, "outputs of tensor '.*': it has "),
        (("tensors",), [], "the number of tensors: it has '0', now '21'"),
    ],
)
def test_an_edited_plan_is_refused(keys: tuple[Any, ...], value: object, field: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    write_plan(planned(source), tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    node = document
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=f"plan '.*edited.json' differs in {field}"):
        PlanFile.read(tmp_path / "edited.json").remake(open_source(source), limits=ONE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not a plan but a JSON list"),
        ("{}", "is not a plan that is read here: zeropoint_plan is None, not 1"),
        ('{"zeropoint_plan": 2}', "zeropoint_plan is 2, not 1; make it again with zeropoint plan --out"),
        ('{"zeropoint_plan": 1}', r"is a damaged plan \(KeyError: 'request'\); make it again"),
        ('{"zeropoint_plan": 1, "request": {"recipe": 3}}', "is a damaged plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        PlanFile.read(tmp_path / "plan.json")


def test_a_plan_is_written_to_a_new_file_only(tmp_path: Path) -> None:
    plan = planned(synthetic_llama.write(tmp_path / "in"))
    (tmp_path / "there").write_text("mine")
    with pytest.raises(CheckpointError, match="there' exists; name a new file, or move it away"):
        write_plan(plan, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        write_plan(plan, tmp_path / "absent" / "plan.json")
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        PlanFile.read(tmp_path / "absent.json")


def test_a_document_says_where_each_output_will_lie(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = planned(source)
    document = plan_document(plan)
    run(plan, tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        for entry in open_source(path).entries.values():
            found[entry.name] = (path.name, entry.dtype, list(entry.shape), entry.begin, entry.nbytes)
    said = {
        o["name"]: (o["shard"], o["dtype"], o["shape"], o["begin"], o["bytes"])
        for tensor in document["tensors"]
        for o in tensor["outputs"]
    }
    assert said == found
    sizes = {s["name"]: s["bytes"] for s in document["shards"]} | document["files"]
    for name, size in sizes.items():
        assert (tmp_path / "out" / name).stat().st_size == size


def test_shards_of_a_shared_scale_are_listed(tmp_path: Path) -> None:
    document = plan_document(make_plan(open_source(synthetic_llama.write(tmp_path)), "nvfp4a16", limits=ONE))
    across = [s for s in document["shared_scales"] if len(s["shards"]) > 1]
    assert [[m.rpartition(".")[2] for m in s["modules"]] for s in across] == [["k_proj", "q_proj", "v_proj"]]


def test_one_file_of_one_weight_is_planned_too(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 128)})
    plan = make_plan(open_source(folder / "model.safetensors"), "w4a16", limits=ONE)
    write_plan(plan, tmp_path / "plan.json")
    again = PlanFile.read(tmp_path / "plan.json").remake(
        open_source(folder / "model.safetensors"), limits=ONE
    )
    assert again == plan


def test_a_pipe_to_which_nobody_writes_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="JSON"):
        PlanFile.read(tmp_path / "pipe")


def test_the_name_of_a_recipe_cannot_drive_a_terminal() -> None:
    recipe = RecipeText(text="default: no-such", name="\x1b[31mX\u202e")
    assert recipe.name == r"'\x1b[31mX\u202e'"
    with pytest.raises(RecipeError) as caught:
        recipe.parse(DEFAULT)
    assert str(caught.value).isprintable()
