"""The same command once more, on an output that is complete: nothing is written, and nothing is mistaken."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.interrupted import flip_a_byte, plan_of
from tests.checkpoint.written import digests
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.run.loop import run
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("small_units")


def states(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_complete_output_is_not_written_again(source: Path, tmp_path: Path) -> None:
    first = run(plan_of(source), tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("mine")
    before = states(tmp_path / "out")
    again = run(plan_of(source), tmp_path / "out")
    assert again.notes[-1] == (
        f"'{tmp_path / 'out'}' is complete already: it holds what this command writes, so nothing was written"
    )
    assert again.outcomes == first.outcomes
    assert again.resumed == again.units == first.units
    assert states(tmp_path / "out") == before


def cut_the_manifest(out: Path) -> None:
    path = out / "zeropoint_manifest.json"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda out: flip_a_byte(out / "model-00001-of-00003.safetensors"),
        lambda out: flip_a_byte(out / "tokenizer.json"),
        lambda out: flip_a_byte(out / "config.json"),
        lambda out: (out / "empty.txt").unlink(),
        lambda out: (out / "zeropoint_manifest.json").unlink(),
        cut_the_manifest,
    ],
    ids=["weights", "companion", "configuration", "missing", "no-manifest", "manifest"],
)
def test_an_output_that_is_another_in_any_byte_is_refused_as_before(
    change: Callable[[Path], object], source: Path, tmp_path: Path
) -> None:
    run(plan_of(source), tmp_path / "out")
    change(tmp_path / "out")
    before = digests(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds .*; choose an empty directory, or add overwrite=True"):
        run(plan_of(source), tmp_path / "out")
    assert digests(tmp_path / "out") == before


def test_a_model_of_the_same_shapes_with_other_numbers_is_not_taken_for_the_first(
    source: Path, tmp_path: Path
) -> None:
    run(plan_of(source), tmp_path / "out")
    before = digests(tmp_path / "out")
    other = synthetic_llama.write(tmp_path / "other")
    for name in ("tokenizer.json", "empty.txt"):
        (other / name).write_bytes((source / name).read_bytes())
    assert digests(other) == digests(source)
    flip_a_byte(other / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"holds .*; choose an empty directory, or add overwrite=True"):
        run(plan_of(other), tmp_path / "out")
    assert digests(tmp_path / "out") == before
