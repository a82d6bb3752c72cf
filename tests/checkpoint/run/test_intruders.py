"""Files of others in the output: never removed, never written into, whatever a journal says."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.interrupted import plan_of, records, resumed, stop_after
from tests.checkpoint.written import digests

from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.run.lock import LOCK
from zeropoint.checkpoint.run.loop import run
from zeropoint.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.rotating]

OUTPUTS = [
    "config.json",
    "model.safetensors.index.json",
    "zeropoint_manifest.json",
    "model-00001-of-00003.safetensors",
    "tokenizer.json",
]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_file_that_appears_during_a_run_stays_and_so_does_the_work(
    name: str, source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    intruder = out / name

    def progress(done: int, total: int, tensor: str) -> None:
        intruder.write_text("PRECIOUS")

    for rule in (rf"'{intruder}' is not a file of this run; move it away", rf"holds '{name}'"):
        with pytest.raises(CheckpointError, match=rule):
            run(plan, out, on_progress=progress)
        assert intruder.read_text() == "PRECIOUS"
        assert (out / JOURNAL).exists()
    intruder.unlink()
    result = resumed(plan, out, golden)
    assert result.resumed == result.units


def test_an_error_of_the_data_removes_no_file_that_came_in_the_place_of_one_of_the_run(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    intruders = [out / "model-00001-of-00003.safetensors", out / "tokenizer.json"]

    def progress(done: int, total: int, tensor: str) -> None:
        for intruder in intruders:
            intruder.write_text("PRECIOUS")
        raise CheckpointError("the data are wrong")

    with pytest.raises(CheckpointError, match="the data are wrong"):
        run(plan_of(source), out, on_progress=progress)
    assert sorted(out.iterdir()) == intruders
    assert [intruder.read_text() for intruder in intruders] == ["PRECIOUS"] * 2


def stop_between_names(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """End a run between two renames, and return the files that have their names."""
    left = iter(range(4))
    rename = os.rename

    def stop(*names: Any, **folders: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(*names, **folders)

    with monkeypatch.context() as context:
        context.setattr(os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            run(plan_of(source), out)
    return sorted(name for name in digests(out) if not name.startswith("."))


def test_a_file_that_appears_between_two_runs_stays(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    published = stop_between_names(source, out, monkeypatch)
    assert len(published) == 4
    for name in (published[0], "config.json"):
        before = (out / name).read_bytes() if (out / name).exists() else None
        (out / name).unlink(missing_ok=True)
        (out / name).write_text("PRECIOUS")
        with pytest.raises(CheckpointError, match=rf"{name}' is not a file of this run"):
            run(plan_of(source), out)
        assert (out / name).read_text() == "PRECIOUS"
        (out / name).unlink()
        if before is not None:
            (out / name).write_bytes(before)
    resumed(plan_of(source), out, golden)


def test_restarting_removes_what_the_run_named_but_not_what_came_in_its_place(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    published = stop_between_names(source, out, monkeypatch)
    (out / published[0]).unlink()
    (out / published[0]).write_text("PRECIOUS")
    with pytest.raises(CheckpointError, match=rf"holds '{published[0]}'"):
        run(plan_of(source), out, restart=True)
    assert [name for name in digests(out) if not name.startswith(".")] == [published[0]]
    (out / published[0]).unlink()
    run(plan_of(source), out, restart=True)
    assert digests(out) == golden


def write_journal(out: Path, documents: list[Any]) -> None:
    out.mkdir(exist_ok=True)
    (out / JOURNAL).unlink(missing_ok=True)
    journal = Journal(out / JOURNAL)
    journal.append(documents)
    journal.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_restarting_removes_nothing_that_a_forged_journal_names(
    overwrite: bool, source: Path, tmp_path: Path
) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    out.mkdir()
    places = [victim / "precious.txt", victim / ".precious.txt.partial", out / "precious.txt"]
    for place in places:
        place.write_text("PRECIOUS")
    names = ["../victim/precious.txt", str(victim / "precious.txt"), "precious.txt"]
    state = "8 1 1"
    for files in (names, names[2:], [7, None, ["x"]]):
        header = {"identity": {}, "stamps": {}, "files": files}
        for publish in (True, dict.fromkeys(names, state), dict.fromkeys(names[2:], state)):
            write_journal(out, [header, {"publish": publish}])
            if overwrite:
                run(plan_of(source), out, restart=True, overwrite=True)
            else:
                with pytest.raises(CheckpointError, match=r"holds 'precious\.txt'"):
                    run(plan_of(source), out, restart=True)
            assert [place.read_text() for place in places] == ["PRECIOUS"] * 3


@pytest.mark.parametrize("name", [JOURNAL, LOCK])
@pytest.mark.parametrize("plant", [os.link, os.symlink])
def test_a_planted_link_in_the_place_of_journal_or_lock_is_not_written_to(
    name: str, plant: Callable[[Path, Path], None], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("PRECIOUS")
    (tmp_path / "out").mkdir()
    plant(tmp_path / "victim", tmp_path / "out" / name)
    for restart in (False, True):
        with pytest.raises(CheckpointError, match=r"another name too; move it away|symbolic links"):
            run(plan_of(source), tmp_path / "out", restart=restart)
    assert (tmp_path / "victim").read_text() == "PRECIOUS"
    assert (tmp_path / "out" / name).exists()


def test_a_journal_that_is_removed_meanwhile_ends_nothing(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    out = tmp_path / "out"
    run(plan_of(source), out, on_progress=lambda *_: (out / JOURNAL).unlink(missing_ok=True))
    assert digests(out) == golden


def test_a_forged_scan_is_not_believed(source: Path, tmp_path: Path, golden: dict[str, str]) -> None:
    out = tmp_path / "out"
    stop_after(plan_of(source), out, 0)
    header = records(out)[0]
    forged = [{"scan": number, "low": -1e-3, "high": 1e-3} for number in range(60)]
    write_journal(out, [header, *forged])
    with pytest.raises(CheckpointError, match="by another version of zeropoint, or by somebody else"):
        run(plan_of(source), out)
    run(plan_of(source), out, restart=True)
    assert digests(out) == golden


def crafted(good: dict[str, Any]) -> list[Any]:
    """Return records that no run writes."""
    error = good["error"]
    wrong: list[Any] = [
        [], 7, None, "x", {}, {"unit": 0}, {"publish": 7}, {"publish": {"../x": "1"}}, {"publish": {"a": 1}},
        {"stamps": 7}, {"stamps": {"a": 1}}, {**good, "unit": -1}, {**good, "unit": 10**9},
        {**good, "unit": "0"}, {**good, "unit": 0.0}, {**good, "sha256": "x"}, {**good, "sha256": [1, 2]},
        {**good, "sha256": None}, {**good, "error": None}, {**good, "error": []}, {**good, "error": {}},
    ]  # fmt: skip
    if error is not None:
        bad = {
            "values": -1, "squares": [float("nan")], "errors": [1e308] * 9, "largest": -1.0,
            "clipped": 1 << 70, "zero_blocks": None, "lost_blocks": [],
        }  # fmt: skip
        wrong += [{**good, "error": {**error, key: value}} for key, value in bad.items()]
        wrong += [{**good, "error": {**error, "squares": [-1.0]}}, {**good, "error": {**error, "more": 1}}]
    return wrong


def test_no_record_that_a_run_does_not_write_ends_in_anything_but_an_error_or_the_right_bytes(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    out = tmp_path / "out"
    stop_after(plan_of(source), out, 20)
    header, *done = records(out)
    good = next(record for record in done if record["error"] is not None)
    headers = [
        {}, [], None, {"identity": 7, "stamps": {}, "files": []}, {"identity": {}, "stamps": [], "files": []},
        {**header, "files": "x"}, {**header, "files": [7]}, {**header, "files": ["../x"]},
        {**header, "identity": {"a": 1}}, {**header, "stamps": {"a": {}}},
    ]  # fmt: skip
    journals = [[header, record] for record in crafted(good)] + [[wrong] for wrong in headers]
    refused = 0
    for journal in journals:
        write_journal(out, journal)
        try:
            stop_after(plan_of(source), out, 0)
        except CheckpointError as error:
            refused += "restart=True" in str(error)
    assert refused > 25
    run(plan_of(source), out, restart=True)
    assert digests(out) == golden


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ".zeropoint.lock", ".config.json.partial"])
def test_a_record_of_files_that_no_output_has_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_after(plan_of(source), out, 0)
    header = records(out)[0]
    for journal in ([header, {"publish": {name: "1 1 1"}}], [{**header, "files": [name]}]):
        write_journal(out, journal)
        with pytest.raises(CheckpointError, match=r"which is no file of an output; add restart=True"):
            run(plan_of(source), out)


def test_a_deep_record_ends_what_counts(source: Path, stopped: Path, golden: dict[str, str]) -> None:
    header, *_ = records(stopped)
    write_journal(stopped, [header])
    deep = b"[" * 100_000 + b"]" * 100_000
    lines = (stopped / JOURNAL).read_bytes()
    crc = zlib.crc32(deep, int(lines[9:17], 16))
    (stopped / JOURNAL).write_bytes(lines + b"%08x %08x %s\n" % (len(deep), crc, deep))
    assert resumed(plan_of(source), stopped, golden).resumed == 0
