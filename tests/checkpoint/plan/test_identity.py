"""A run that was ended continues only with what it was about, down to the numbers in the source."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.checkpoint.interrupted import TO, plan_of, records, resumed, stop_after
from tests.checkpoint.written import ONE, digests, save, weight

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.identity import identity
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.run.loop import run
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("small_units")


def test_another_value_of_any_field_is_refused_with_both_values(source: Path, stopped: Path) -> None:
    plan, path = plan_of(source), stopped / JOURNAL
    first, *rest = records(stopped)
    fields = identity(plan)
    assert first["identity"] == fields
    assert len(fields) == 8 + 3 + 1
    for field, value in fields.items():
        path.unlink()
        journal = Journal(path)
        journal.append([first | {"identity": fields | {field: "other"}}, *rest])
        journal.close()
        before = digests(stopped)
        with pytest.raises(CheckpointError) as caught:
            run(plan, stopped)
        assert str(caught.value) == (
            f"the interrupted run in '{stopped}' differs in '{field}': it has 'other', now {value!r}; "
            "rerun the original command to resume, or add restart=True to start over"
        )
        assert digests(stopped) == before


def _config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))


def _shard(source: Path) -> None:
    path = source / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + data[8:].replace(b'"format":"pt"', b'"format":"np"', 1))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_config, "config.json"),
        (lambda source: (source / "tokenizer.json").write_text("{}"), "companions"),
        (_shard, "shard model-00002-of-00003.safetensors"),
    ],
    ids=["config", "companion", "header"],
)
def test_another_source_is_refused_with_the_field_that_differs(
    change: Callable[[Path], None], field: str, source: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    stop_after(plan_of(copy), tmp_path / "out", 9)
    change(copy)
    with pytest.raises(CheckpointError, match=f"differs in '{field}': it has "):
        run(plan_of(copy), tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "selection", "field"),
    [
        ("w4a16", {}, "recipe"),
        (TO, {"ignore": ("*o_proj",)}, "ignore"),
        (TO, {"include": ("lm_head",)}, "include"),
    ],
)
def test_another_request_is_refused_until_it_restarts(
    to: str, selection: dict[str, tuple[str, ...]], field: str, source: Path, stopped: Path, tmp_path: Path
) -> None:
    other = plan_of(source, to, **selection)
    with pytest.raises(CheckpointError, match=f"differs in '{field}': it has "):
        run(other, stopped)
    assert run(other, stopped, restart=True).resumed == 0
    run(other, tmp_path / "expected")
    assert digests(stopped) == digests(tmp_path / "expected")


def test_a_restart_removes_the_files_of_a_checkpoint_with_other_names(source: Path, stopped: Path) -> None:
    single = save(source.parent / "single", {"m.weight": weight(8, 32)})
    run(make_plan(open_source(single), "w8a8", limits=ONE), stopped, restart=True)
    assert not [path.name for path in stopped.iterdir() if path.name.startswith(".")]
    assert (stopped / "model.safetensors").exists()
    assert not (stopped / "model-00001-of-00003.safetensors").exists()


def test_a_shard_that_was_touched_is_done_again_and_this_is_said(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    stop_after(plan_of(copy), tmp_path / "out", 40)
    name = "model-00001-of-00003.safetensors"
    os.utime(copy / name, (1, 1))
    result = resumed(plan_of(copy), tmp_path / "out", golden)
    assert 0 < result.resumed < 41
    (note,) = [note for note in result.notes if "interrupted run" in note]
    assert note.startswith(f"'{name}' changed since the interrupted run; ")
    assert note.endswith(" of its units are done again")


def test_other_numbers_under_the_same_header_are_never_mixed_with_those_before(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    stop_after(plan_of(copy), tmp_path / "out", 50)
    path = copy / "model-00001-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    tail = torch.frombuffer(data, dtype=torch.bfloat16, offset=len(data) // 4 * 2)
    tail *= 4  # the extremes of sets with members in other shards change too
    path.write_bytes(data)
    stop_after(plan_of(copy), tmp_path / "out", 5)
    run(plan_of(copy), tmp_path / "expected")
    expected = digests(tmp_path / "expected")
    assert expected != golden
    resumed(plan_of(copy), tmp_path / "out", expected)
