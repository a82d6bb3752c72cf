"""Giving files their names can be ended between any two of them."""

import os
import shutil
from pathlib import Path

import pytest
from tests.checkpoint.interrupted import flip_a_byte, plan_of, resumed
from tests.checkpoint.written import digests
from tests.cli.checkpoints import write_llama

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.rotating]


class _Stops:
    """A function of os that ends the process, as far as a test can, at its n-th call."""

    def __init__(self, name: str, at: int) -> None:
        self.real = getattr(os, name)
        self.left = at

    def __call__(self, *arguments: object, **named: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.real(*arguments, **named)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_stopped_between_any_two_renames_continues(
    overwrite: bool, source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(source)
    assert len(golden) == 9
    for at in range(1, len(golden) + 1):
        out = tmp_path / f"out{at}"
        if overwrite:
            run(plan_of(source, "w8a8"), out)
        with monkeypatch.context() as context:
            context.setattr(os, "rename", _Stops("rename", at))
            with pytest.raises(KeyboardInterrupt):
                run(plan, out, overwrite=overwrite)
        assert not (out / "model.safetensors.index.json").exists()
        visible = {name: d for name, d in digests(out).items() if not Path(name).name.startswith(".")}
        if not overwrite:
            assert len(visible) == at - 1
            assert visible.items() <= golden.items()
        result = run(plan, out, overwrite=overwrite)
        assert result.resumed == result.units
        assert digests(out) == golden
        shutil.rmtree(out)


def test_a_file_without_an_index_gets_its_name_after_companions_and_before_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_source(write_llama(tmp_path / "in")), "q8_0", codec=get_codec("gguf"))
    out = tmp_path / "out"
    with monkeypatch.context() as context:
        context.setattr(os, "rename", _Stops("rename", 2))
        with pytest.raises(KeyboardInterrupt):
            run(plan, out)
    assert not (out / "model.gguf").exists()
    assert any(not path.name.startswith(".") for path in out.iterdir())
    names = []
    rename = os.rename

    def noted(old: str, new: str, **folders: int | None) -> None:
        names.append(Path(new).name)
        rename(old, new, **folders)

    monkeypatch.setattr(os, "rename", noted)
    run(plan, out)
    assert names[-3:] == ["model.gguf", "zeropoint_manifest.json", "config.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("a\0b", "has a NUL character"), ("a" * 256, "has a name of 256 bytes, and file systems take 255")],
)
def test_an_output_that_no_path_leads_to_is_a_sentence(
    source: Path, tmp_path: Path, name: str, message: str
) -> None:
    for out in (tmp_path / name, str(tmp_path / name), tmp_path / name / "b"):
        with pytest.raises(CheckpointError, match=message):
            run(plan_of(source), out)
        with pytest.raises(CheckpointError, match=message):
            open_source(out)


def test_a_run_that_was_stopped_before_its_journal_was_removed_has_nothing_left_to_do(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    unlink = os.unlink

    def stop(path: str, **folder: int | None) -> None:
        if Path(path).name == JOURNAL:
            raise KeyboardInterrupt
        unlink(path, **folder)

    with monkeypatch.context() as context:
        context.setattr(os, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            run(plan, out)
    assert (out / "model.safetensors.index.json").exists()
    renamed = _Stops("rename", 1)
    with monkeypatch.context() as context:
        context.setattr(os, "rename", renamed)
        result = run(plan, out)
    assert renamed.left == 1
    assert result.resumed == result.units
    assert digests(out) == golden


def test_a_published_file_that_changed_is_no_longer_ours_and_is_written_again_when_it_is_gone(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    with monkeypatch.context() as context:
        context.setattr(os, "rename", _Stops("rename", 3))
        with pytest.raises(KeyboardInterrupt):
            run(plan, out)
    changed = out / "model-00001-of-00003.safetensors"
    flip_a_byte(changed)
    with pytest.raises(CheckpointError, match=rf"'{changed}' is not a file of this run; move it away"):
        run(plan, out)
    changed.unlink()
    result = resumed(plan, out, golden)
    assert 0 < result.resumed < result.units
