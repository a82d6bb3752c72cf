"""Names that come from others: refused where they enter, and again where files are made."""

import os
from pathlib import Path

import pytest
from tests.checkpoint.written import LINEAR, ONE, digests, save, weight

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.file_names import require_outputs
from zeropoint.checkpoint.read.object_store import RemotePath
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.directory import OutputDirectory
from zeropoint.checkpoint.run.folder import Folder
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError

BAD = ["../evil", "/evil", "a/../../evil", "a//b", "./a", "a/.", "", "a\0b", "a\\b", "x" * 256]
RESERVED = [".zeropoint.journal", ".config.json.partial", "a/.b.partial/c", ".zeropoint/identity.json"]


@pytest.mark.parametrize("name", [*BAD, *RESERVED])
def test_a_name_that_is_not_that_of_a_file_of_an_output_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the output would have files named"):
        OutputDirectory(tmp_path / "out", tmp_path / "in", {name: 1}, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_the_folder_of_another_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"files named 'config\.json'"):
        require_outputs(["config.json", "config.json/more.txt", "a.txt"])


@pytest.mark.parametrize("name", BAD)
def test_no_file_is_reached_by_such_a_name_even_where_nobody_checked(name: str, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("precious")
    folder = Folder(tmp_path / "out")
    for action in (folder.unlink, folder.state, lambda name: folder.open(name, os.O_RDWR | os.O_CREAT)):
        with pytest.raises(CheckpointError, match="leads out of"):
            action(name)
    with pytest.raises(CheckpointError, match="is not a name below 's3://bucket/model'"):
        RemotePath("s3://bucket/model") / name
    assert digests(tmp_path).keys() == {"evil"}


def test_a_link_on_the_way_to_a_file_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text("{}")
    model = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    with pytest.raises(CheckpointError, match=r"'.*/out/1_Pooling' is not a folder, or is a link to one"):
        run(make_plan(open_source(model), "w8a8", limits=ONE), tmp_path / "out", overwrite=True)
    assert digests(tmp_path / "elsewhere").keys() == {"config.json"}
    assert (tmp_path / "elsewhere" / "config.json").read_text() == "precious"


@pytest.mark.parametrize(
    "name",
    [
        ".config.json.partial",
        ".zeropoint_manifest.json.partial",
        ".zeropoint.journal",
        ".zeropoint.lock",
        ".tokenizer.json.partial",
    ],
)
def test_files_of_an_interrupted_run_in_the_source_are_not_copied(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    (model / "tokenizer.json").write_text("{}")
    (model / name).write_text("theirs")
    plan = make_plan(open_source(model), "w8a8", limits=ONE)
    assert any(name in note and "not copied" in note for note in plan.notes)
    run(plan, tmp_path / "new")
    (tmp_path / "out").mkdir()
    run(plan, tmp_path / "out", overwrite=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "new")
    assert name not in digests(tmp_path / "out")
    assert verify(tmp_path / "out").ok


def test_a_shard_that_would_get_the_name_of_another_file_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    (model / "model.safetensors").rename(model / ".zeropoint.journal")
    index = '{"metadata": {}, "weight_map": {"%s": ".zeropoint.journal"}}' % LINEAR  # noqa: UP031 (braces)
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"which ends in \.safetensors"):
        open_source(model)
