"""Plans of huge checkpoints take time in proportion to their tensors, counted in calls, not in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.counting import calls

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.plan_document import plan_document
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.source import open_source
from zeropoint.report.plans import plan_report

pytestmark = pytest.mark.rotating

ROWS, COLUMNS, EXPERTS = 64, 128, 8
RECIPES = {
    "one scheme": "default: nvfp4a16",
    "mixed": """\
default: mxfp4
rules:
  - {name: "*.layers.1.*", preset: w4a16}
  - {name: "re:.*experts.[0-3].down_proj", shape: "64,*", dtype: bfloat16, keep: why not}
  - {name: "*.up_proj", type: Linear, preset: w8a8}
""",
}


def write(folder: Path, shards: int) -> Path:
    """Write headers for 3 * EXPERTS weights a shard, with holes in place of the data."""
    folder.mkdir()
    weight_map, size = {}, ROWS * COLUMNS * 2
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, object] = {}
        for expert in range(EXPERTS):
            for part in ("down", "gate", "up"):
                name = f"model.layers.{shard}.mlp.experts.{expert}.{part}_proj.weight"
                begin = len(header) * size
                header[name] = {
                    "dtype": "BF16",
                    "shape": [ROWS, COLUMNS],
                    "data_offsets": [begin, begin + size],
                }
                weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + len(header) * size)
    index = {"metadata": {"total_size": len(weight_map) * size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def planned(folder: Path, recipe: str) -> CheckpointPlan:
    return make_plan(open_source(folder), RecipeText(text=RECIPES[recipe]), limits=Limits(workers=2))


def growth(work: Callable[[int], object]) -> float:
    """Return by how much more work grows from 16 to 32 shards than from 8 to 16: 2 if in proportion."""
    work(32)  # what is remembered between calls is remembered now
    small, middle, large = (calls(lambda n=shards: work(n)) for shards in (8, 16, 32))  # type: ignore[misc]
    return (large - middle) / (middle - small)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("sizes")
    return {shards: write(root / str(shards), shards) for shards in (8, 16, 32)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_planning_grows_in_proportion_to_the_tensors(recipe: str, folders: dict[int, Path]) -> None:
    # Sorting and numbers with more digits add less than a twentieth.
    assert growth(lambda shards: planned(folders[shards], recipe)) < 2.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_documents_and_reports_grow_in_proportion_too(recipe: str, folders: dict[int, Path]) -> None:
    plans = {shards: planned(folder, recipe) for shards, folder in folders.items()}
    assert growth(lambda shards: plan_document(plans[shards])) < 2.1
    # The report folds layers into lines, so that its end does not grow at all.
    assert growth(lambda shards: plan_report(plans[shards])) < 2.1


def test_squares_are_distinguished_from_proportions() -> None:
    assert growth(lambda n: [len(str(a)) for a in range(n) for _ in range(n)]) > 3.5


def test_targets_stay_few_however_many_layers_there_are(folders: dict[int, Path]) -> None:
    counts = []
    for folder in folders.values():
        config = json.loads(str(planned(folder, "mixed").texts["config.json"]))["quantization_config"]
        counts.append(sum(len(group["targets"]) for group in config["config_groups"].values()))
    assert len(set(counts)) == 1
